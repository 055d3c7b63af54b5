"""Norms and weighted sums of per-record gradients in float64: what clipping rests on.

A square or a product of float32 numbers is exact in float64, and neither under- nor overflows there. On a CPU compiled
loops read float32 rows and compute in float64 without a copy, as fast as torch does in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

COLUMNS = 512  # of a sum at a time: 4 KiB in float64 stay in the nearest cache


def summing_dtype(like: Tensor) -> torch.dtype:
    """The dtype of norms, factors and sums: float64, but on MPS, which has none, that of `like`."""
    return like.dtype if like.device.type == "mps" else torch.float64


def row_norms(rows: Tensor, order: int = 2) -> Tensor:
    """The norms of the rows of `[B, n]`: `[B]` in `summing_dtype`, infinite or NaN where a row is not finite.

    >>> row_norms(torch.tensor([[3.0, 4.0], [0.0, 2.0**100]])).tolist() == [5.0, 2.0**100]
    True
    >>> row_norms(torch.tensor([[3.0, 4.0]]), order=1)
    tensor([7.], dtype=torch.float64)
    """
    if not _compilable(rows):
        return torch.linalg.vector_norm(rows, ord=order, dim=1, dtype=summing_dtype(rows))
    norms = torch.empty(len(rows), dtype=torch.float64)
    _loops()[0](rows.detach().contiguous().numpy(), order, norms.numpy())
    return norms.sqrt_() if order == 2 else norms


def add_weighted_rows(total: Tensor, rows: Tensor, factors: Tensor, group: Tensor | None) -> None:
    """Add `factors[j] rows[j]` to row `group[j]` of `total`, for all j; a row whose factor is 0 is not read.

    Args:
        total: `[G, n]`, contiguous, in `summing_dtype`.
        rows: `[B, n]`, rows with factor 0 may hold anything.
        factors: `[B]` in the dtype of `total`.
        group: `[B]` int64; None adds all rows to row 0.
    """
    if _compilable(rows):
        groups = np.zeros(0, np.int64) if group is None else group.contiguous().numpy()
        zeros = np.zeros(COLUMNS, np.float32)
        _loops()[1](rows.detach().contiguous().numpy(), factors.numpy(), groups, zeros, total.numpy())
    else:
        total += one_hot(factors, group, len(total)) @ kept(rows, factors)


def one_hot(factors: Tensor, group: Tensor | None, num_groups: int) -> Tensor:
    """The matrix `[G, B]` that sums B rows into their groups with `factors` `[B]`."""
    if group is None:
        return factors[None]
    return factors * (group == torch.arange(num_groups, device=group.device)[:, None])


def kept(values: Tensor, factors: Tensor) -> Tensor:
    """`values` `[B, ...]` in the dtype of `factors`, with zeros where a factor is 0, for 0 times NaN is NaN."""
    return values.to(factors.dtype).masked_fill((factors == 0).view(-1, *[1] * (values.dim() - 1)), 0.0)


def _compilable(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype == torch.float32


@functools.cache
def _loops() -> tuple[Callable[..., None], Callable[..., None]]:
    from dpfl_lightning.compiled import compiled  # numba: half a second, for those who need it

    return compiled(_norms, fastmath={"reassoc", "contract"}), compiled(_add, fastmath={"contract"})


def _norms(rows: Any, order: int, norms: Any) -> None:
    """Fill `norms` `[B]` with sums of squares, or of absolute values for `order` 1."""
    for j in range(rows.shape[0]):
        row, total = rows[j], 0.0
        if order == 1:
            for i in range(len(row)):
                total += abs(np.float64(row[i]))
        else:
            for i in range(len(row)):
                total += np.float64(row[i]) * np.float64(row[i])
        norms[j] = total


def _add(rows: Any, factors: Any, groups: Any, zeros: Any, total: Any) -> None:
    """`add_weighted_rows`: four rows at a time if there are no groups. A row with factor 0 is taken for `zeros`."""
    records, n = rows.shape
    fours = 0 if len(groups) else records // 4 * 4
    for begin in range(0, n, len(zeros)):
        width = min(len(zeros), n - begin)
        out = total[0, begin : begin + width]
        for j in range(0, fours, 4):
            f0, f1, f2, f3 = factors[j], factors[j + 1], factors[j + 2], factors[j + 3]
            r0 = rows[j, begin : begin + width] if f0 else zeros[:width]
            r1 = rows[j + 1, begin : begin + width] if f1 else zeros[:width]
            r2 = rows[j + 2, begin : begin + width] if f2 else zeros[:width]
            r3 = rows[j + 3, begin : begin + width] if f3 else zeros[:width]
            for i in range(width):
                out[i] += (f0 * r0[i] + f1 * r1[i]) + (f2 * r2[i] + f3 * r3[i])
        for j in range(fours, records):
            factor = factors[j]
            row = rows[j, begin : begin + width] if factor else zeros[:width]
            if len(groups):
                out = total[groups[j], begin : begin + width]
            for i in range(width):
                out[i] += factor * row[i]
