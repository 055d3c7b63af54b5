"""Loops that torch has no operator for, compiled by numba and checked against torch's operators.

A loop is here because some training step took at least 1.2 times as long without it, on two cores of an AMD EPYC with
AVX-512; each file says how long.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

LOSER = 4  # the number of a place in a 2 x 2 window that passes no gradient on
LANES = 16  # float32 numbers in a vector: one register of AVX-512, two of AVX2


def check_loops(what: str, pairs: Iterable[tuple[Tensor, Tensor]], tolerance: float) -> None:
    """Raise RuntimeError if compiled loops give something else than torch on this processor: (actual, expected)."""
    if not all(torch.allclose(*pair, rtol=tolerance, atol=tolerance) for pair in pairs):
        raise RuntimeError(f"compiled loops for {what} give wrong numbers on this processor: please report it")
