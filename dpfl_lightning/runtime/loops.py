"""What compiled loops share, without numba, whose import takes half a second."""

from collections.abc import Iterable

import torch
from torch import Tensor

LANES = 16  # float32 numbers in a vector: one register of AVX-512, two of AVX2


def check_loops(what: str, pairs: Iterable[tuple[Tensor, Tensor]], tolerance: float) -> None:
    """Raise RuntimeError if compiled loops give something else than torch on this processor: (actual, expected)."""
    if not all(torch.allclose(*pair, rtol=tolerance, atol=tolerance) for pair in pairs):
        raise RuntimeError(f"compiled loops for {what} give wrong numbers on this processor: please report it")
