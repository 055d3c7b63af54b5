"""Norms and weighted sums of per-record gradients in float64: what clipping rests on.

A square or a product of float32 numbers is exact in float64, and neither under- nor overflows there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def summing_dtype(like: Tensor) -> torch.dtype:
    """The dtype of norms, factors and sums: float64, but on MPS, which has none, that of `like`."""
    return like.dtype if like.device.type == "mps" else torch.float64


def row_norms(rows: Tensor, order: int = 2) -> Tensor:
    """The norms of the rows of `[B, n]`: `[B]` in `summing_dtype`, infinite or NaN where a row is not finite.

    >>> row_norms(torch.tensor([[3.0, 4.0], [0.0, 2.0**100]])).tolist() == [5.0, 2.0**100]
    True
    """
    return torch.linalg.vector_norm(rows, ord=order, dim=1, dtype=summing_dtype(rows))


def one_hot(factors: Tensor, group: Tensor | None, num_groups: int) -> Tensor:
    """The matrix `[G, B]` that sums B rows into their groups with `factors` `[B]`."""
    if group is None:
        return factors[None]
    return factors * (group == torch.arange(num_groups, device=group.device)[:, None])


def kept(values: Tensor, factors: Tensor) -> Tensor:
    """`values` `[B, ...]` in the dtype of `factors`, with zeros where a factor is 0, for 0 times NaN is NaN."""
    return values.to(factors.dtype).masked_fill((factors == 0).view(-1, *[1] * (values.dim() - 1)), 0.0)


class Products:
    """Gradients `left[j]^T right[j]` of B records for K parameters, by compiled loops: one call for all parameters.

    The loops read float32 and compute in float64 without a copy. They get addresses, for to hand over K tensors takes
    longer than what they do with small ones.

    Args:
        pairs: length K; left `[B, p]` and right `[B, d]`, float32 on a CPU.

    >>> products = Products([(torch.ones(1, 1), torch.tensor([[3.0, 4.0]]))])
    >>> products.powers(order=2), products.powers(order=1)
    (tensor([25.], dtype=torch.float64), tensor([7.], dtype=torch.float64))
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pairs = [(left.contiguous(), right.contiguous()) for left, right in pairs]  # kept as long as addresses
        table = [(left.data_ptr(), left.shape[1], right.data_ptr(), right.shape[1]) for left, right in self._pairs]
        self._table = np.array(table, np.int64)

    def powers(self, order: int) -> Tensor:
        """`|g_j|_2^2`, or `|g_j|_1` for `order` 1, of all parameters together: `[B]` float64, infinite or NaN."""
        from dpfl_lightning.privacy.product_loops import add_powers  # numba: half a second, for those who need it

        powers = torch.zeros(len(self._pairs[0][0]), dtype=torch.float64)
        add_powers(self._table, order, powers.numpy())
        return powers

    def add(self, totals: Sequence[Tensor], factors: Tensor, group: Tensor | None) -> None:
        """Add `factors[j] left[j]^T right[j]` to row `group[j]` of the parameter's total, for all j and parameters.

        Args:
            totals: length K, `[G, p * d]` float64; each row is contiguous.
            factors: `[B]` float64; a record whose factor is 0 is not read.
            group: `[B]` int64 in [0, G); None adds all records to row 0.
        """
        from dpfl_lightning.privacy.product_loops import add_products

        for (left, right), total in zip(self._pairs, totals, strict=True):
            assert total.shape[1] == left.shape[1] * right.shape[1] and total.stride(1) == 1
        rows = np.array([(total.data_ptr(), total.stride(0)) for total in totals], np.int64)
        groups = np.zeros(0, np.int64) if group is None else group.contiguous().numpy()
        add_products(self._table, rows, factors.contiguous().numpy(), groups)
