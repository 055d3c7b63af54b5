"""Weighted sums whose bits do not depend on the order of their terms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 16  # numbers that are added at once, so that intermediate results stay in the cache


class WeightedSum:
    """Computes `weights [K, C] @ deltas [C, ...]` client by client. The order of clients does not change the result.

    Every entry is a pair of float64 numbers (Knuth's two-sum), so that the effect of the order lies far below the last
    bit of the float32 to which the sum is rounded once. The memory is that of 2 K models in float64. All weights are
    >= 0; a client with weight 0 in row k does not change model k.

    >>> total = WeightedSum(torch.tensor([[0.25, 0.75]]))
    >>> total.add(1, torch.tensor([4.0]))
    >>> total.add(0, torch.tensor([2.0]))
    >>> total.rounded()
    tensor([[3.5000]])
    """

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights.to("cpu", torch.float64)
        self.pair: Tensor | None = None  # [2, K, ...]: high and low parts
        self.dtype = torch.float32

    def add(self, column: int, delta: Tensor) -> None:
        """Add the update of the client at `column`, with its weight in each model."""
        self.dtype = delta.dtype
        delta = delta.to("cpu") if delta.device.type == "mps" else delta  # MPS has no float64
        if self.pair is None:
            self.pair = delta.new_zeros(2, len(self.weights), *delta.shape, dtype=torch.float64)
        for row in self.weights[:, column].nonzero().flatten().tolist():
            self._add(row, delta, float(self.weights[row, column]))

    def merge(self, other: WeightedSum, rows: Sequence[int] | None = None) -> None:
        """Add a sum over other clients, for all models or for those at `rows`."""
        if other.pair is None:
            return
        if self.pair is None:
            self.pair = other.pair.new_zeros(2, len(self.weights), *other.pair.shape[2:])
            self.dtype = other.dtype
        models = range(len(self.weights)) if rows is None else rows
        for row, parts in zip(models, other.pair.to(self.pair.device).unbind(dim=1), strict=True):
            for part in parts:
                self._add(row, part)

    def rounded(self, divisor: Tensor | None = None) -> Tensor:
        """The sums `[K, ...]` in the dtype of the updates, each divided by its `divisor` `[K]` unless that is 0."""
        assert self.pair is not None, "a sum of no updates has no shape"
        total = self.pair.sum(dim=0)
        if divisor is not None:
            by = torch.where(divisor > 0, divisor, 1.0).to(total.device, torch.float64)
            total /= by.view(-1, *[1] * (total.dim() - 1))
        return total.to(self.dtype)

    def _add(self, row: int, value: Tensor, weight: float = 1.0) -> None:
        assert self.pair is not None
        blocks = [one.reshape(-1).split(_BLOCK) for one in (self.pair[0, row], self.pair[1, row], value)]
        for high, low, part in zip(*blocks, strict=True):
            part = part.double() * weight
            total = high + part
            rest = total - high
            low += (high - (total - rest)).add_(part - rest)
            high.copy_(total)
