"""Test batches that show whether one record of a batch influences another."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from dpfl_lightning.privacy.clipping.inputs import Inputs, take
from dpfl_lightning.privacy.clipping.passes import FAILURES, SIZES

Answer = TypeVar("Answer")

CROWD = SIZES[-1]  # records in a large batch: no pass has more
SMALL_CROWD = 16
#: multiples of the watched records that the other records are: similar, far larger, or zero
LIVELY = (1.0, -1.0, 0.0, 1e-3, 10.0, 100.0, 1e4)
HOSTILE = (math.nan, math.inf, 1e30)
PAIRS = ((-1.0, 1e4), (math.inf, 1e30), (0.0, math.nan))  # of a large model, in batches of their own
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


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func.overloadpacket):
            self.operations += count(*args, **(kwargs or {}), out_val=result)
        return result


def in_companies(
    look: Callable[[Inputs, Tensor, Tensor], Answer], x: Inputs, y: Tensor, most: int = CROWD
) -> list[Answer]:
    """Return the results of `look` for watched records in a large ordinary batch and in a small batch with NaN and inf.

    If `most` is below `SMALL_CROWD`, the batches have so many records, and one pair of multiples each.

    `look` gets records `[N, *X]`, N <= `most`, labels `[N]` and the positions `[W]` of the watched records in them. If
    a model or a loss raises an error for the other records, first their labels are those of the watched records, and
    then they are copies of these.
    """
    companies: Sequence[tuple[Sequence[float], int]] = ((LIVELY, CROWD), (HOSTILE, SMALL_CROWD))
    if most < SMALL_CROWD:  # multiples of whole numbers are all the same
        floating = any(part.is_floating_point() for part in (*tree_leaves(x), y))
        companies = [(pair, most) for pair in (PAIRS if floating else PAIRS[:1])]
    return [beside(look, x, y, multiples, max(len(y), min(most, crowd))) for multiples, crowd in companies]


def beside(
    look: Callable[[Inputs, Tensor, Tensor], Answer], x: Inputs, y: Tensor, multiples: Sequence[float], records: int
) -> Answer:
    """Return the result of `look`, as `in_companies`, for one company: the first for which no error is raised."""
    try:
        return look(*in_company(x, y, multiples, records))
    except FAILURES:
        try:
            return look(*in_company(x, y, multiples, records, (1.0,)))
        except FAILURES:
            return look(*in_company(x, y, (1.0,), records))


def of_copies(x: Inputs, y: Tensor, records: int) -> tuple[Inputs, Tensor]:
    """Return the batch in which the other records are copies of the watched ones, which are at the same positions."""
    index = torch.arange(records, device=y.device) % len(y)
    index[torch.linspace(0, records - 1, len(y), device=y.device).long()] = index[: len(y)].clone()
    return take(x, index), y[index]


def in_company(
    x: Inputs, y: Tensor, multiples: Sequence[float], records: int, of_labels: Sequence[float] | None = None
) -> tuple[Inputs, Tensor, Tensor]:
    """Return N `records`, their labels, and the positions of the W >= 1 watched `x`, evenly from the first to the last.

    The other records are `multiples` of the watched records, and constants. Integer records, which may be rows of a
    table, are rolled within the record. Labels are permuted, and multiplied by `of_labels` (None is `multiples`) if
    they are floating.

    >>> x, y, places = in_company(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), (1.0, 10.0), records=6)
    >>> places.tolist(), x[:, 0].tolist(), y.tolist()
    ([0, 5], [1.0, 2.0, 10.0, 20.0, 1.0, 2.0], [0, 1, 1, 0, 0, 1])
    """
    index = torch.arange(records, device=y.device)
    source, repeat = index % len(y), index // len(y)
    places = torch.linspace(0, records - 1, len(y), device=y.device).long()

    def crowded(x: Tensor, source: Tensor, multiples: Sequence[float]) -> Tensor:
        batch = x[source]
        if x.is_floating_point():
            factors = torch.tensor(multiples, dtype=x.dtype, device=x.device)
            shape = (-1, *[1] * (x.dim() - 1))
            constant = (repeat % (len(multiples) + 1) == len(multiples)).view(shape)
            batch = torch.where(constant, 1.0, batch * factors[repeat % len(multiples)].view(shape))
        elif x.dim() > 1:
            batch = batch.roll(1, dims=1)
        batch[places] = x
        return batch

    labels = crowded(y, (source + repeat) % len(y), multiples if of_labels is None else of_labels)
    return tree_map(lambda part: crowded(part, source, multiples), x), labels, places
