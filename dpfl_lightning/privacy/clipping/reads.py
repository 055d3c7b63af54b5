"""What the code of a model reads of the records' numbers, such as `mask.all()`, and may decide by."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

#: functions that return numbers of a tensor to Python
READS = {
    getattr(Tensor, name)
    for name in ("__bool__", "__contains__", "__float__", "__index__", "__int__", "equal", "item", "tolist")
} | {torch.equal, torch.allclose, Tensor.allclose, torch.is_nonzero, Tensor.is_nonzero}
_OURS = ("torch", "dpfl_lightning")


def place_of_code() -> str:
    """Return file and line of the code that reads, outside of torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
