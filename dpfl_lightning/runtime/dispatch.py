"""Modes that see each operator of torch."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DispatchMode(TorchDispatchMode):
    """A mode whose first operator does not import torch's compiler, which takes more than a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Rounding(DispatchMode):
    """Notes the largest rounding error of a result within it, relative: of bfloat16 0.8 %, as under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        found = [torch.finfo(one.dtype).eps for one in tree_leaves(results) if _is_floating(one)]
        self.largest = max(self.largest, *found, 0.0)
        return results


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
