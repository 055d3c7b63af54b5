"""How much work a pass is, by which the sizes of passes and of batches of a check are chosen."""

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import flop_registry

from dpfl_lightning.privacy.clipping.passes import SIZES
from dpfl_lightning.runtime.dispatch import DispatchMode

CROWD = SIZES[-1]  # records in a large batch: no pass has more
SMALL_CROWD = 16
_MOST_WORK = 1 << 32  # operations of the forward passes of a batch of a check: more take seconds
_WORK_OF_A_PARAMETER = 16  # operations that take as long as a pass reads and writes a parameter and its gradient


def operations_of(compute: Callable[[], object]) -> int:
    """Return the number of operations of the products and convolutions of a computation."""
    with _Operations() as seen:
        compute()
    return seen.operations


def crowd_of(operations: int, parameters: int = 0) -> int:
    """Return how many records a batch may have, 4 to `CROWD`, by the operations of a forward pass of one of them.

    Of a model for which it is below `SMALL_CROWD` checks compare few records, in its own dtype.
    """
    return max(4, min(CROWD, _MOST_WORK // max(1, operations, _WORK_OF_A_PARAMETER * parameters)))


class _Operations(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func.overloadpacket):
            self.operations += count(*args, **(kwargs or {}), out_val=result)
        return result
