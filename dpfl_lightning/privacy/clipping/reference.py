"""Sums of clipped per-record gradients: what a mechanism adds its noise to.

`VmapClippedSum` is the reference: slow and obviously right. `fast_clipping.py` computes the same sums sooner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from dpfl_lightning.errors import require
from dpfl_lightning.kernels.float64_sums import kept, one_hot, summing_dtype

Params = Mapping[str, Tensor]
SampleLoss = Callable[[Params, Tensor, Tensor], Tensor]

DEFAULT_CHUNK = 32  # records whose gradients the reference holds at once
CANCELLING = 1e3  # by which the terms of a sum over positions may exceed the norm that is taken for the sum
#: how far, in units of the clip norm, a clipped sum may be from the exact one; see `ClippedSum`
SUM_ROUNDING = 5e-4


@contextmanager
def evaluating(*nets: nn.Module) -> Iterator[None]:
    """Layers such as dropout as they are when a net is used; each is back in its own mode afterwards."""
    modes = [(part, part.training) for net in nets for part in net.modules()]
    for net in nets:
        net.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


class ClippedSum(Protocol):
    """`sum_j min(1, clip_norm / |g_j|) g_j` over each group's records j, where `g_j` is the gradient of j's loss.

    The norm |.| is L2, which suits Gaussian noise, or L1, which suits Laplace noise.

    Args (of a call):
        params: name -> tensor, the trainable parameters; concatenated in this order: the vector `[P]`.
        x: records `[B, *X]`, B >= 0.
        y: labels `[B, ...]`.
        clip_norm: bound on the norm of one record's gradient, > 0; `math.inf` does not clip.
        group: each record's group, `[B]` int64 in [0, num_groups); None puts all records into group 0.
        num_groups: number of rows G, >= 1.
        norms: if given, the norms of the records' gradients before clipping are appended, chunk by chunk `[b]` in
            their order, infinite or NaN where they are not finite.
        order: of the norm, 2 or 1.
        only: names of the parameters whose gradients count: norm, clipping and sum are of these alone, in the order of
            `params`; None is all of them.

    Returns:
        `[G, P]` in float64 (on MPS in the dtype of the parameters). A group without records has zeros.

    Guarantees:
        `g_j` is the gradient as it was computed, for the most part in float32. Its norm is computed in float64, where
        squares and products of float32 numbers neither under- nor overflow, and the factor is `(1 - 2^-26)` of the
        exact one at most: the clipped gradient `f_j g_j` never exceeds `clip_norm`. A record whose gradient, or the
        norm of it, is not finite contributes exactly zero.

        The whole result `[G, P]` is off the exact sums of the `f_j g_j` by at most `SUM_ROUNDING * clip_norm`, in the
        norm of the given order. Proof: a sum of float64 products in which no number takes part in more than D additions
        is off by at most `D 2^-53` (and terms of second order) times the sum of the absolute values. That sum is at
        most `B A clip_norm`, with A = 1 if every record adds single terms. If a record's gradient is a sum over T
        positions that is never formed, its terms may cancel; its norm is then taken to be at least 1 / 1000 of what the
        terms would amount to if they did not, so that A = 1000. D is at most `T chunk + B / chunk` and a few. What
        would exceed the bound is refused; shapes alone decide that.

        So one record changes the result by at most `(1 + 2 SUM_ROUNDING) clip_norm`, and one row only.

        Not proved: that a kernel of torch's rounds one record's gradient alike in batches of different sizes; that a
        net does not mix records (`check_fits` tests it); parameters in float64 whose gradients leave [1e-150, 1e150];
        anything on MPS, which has no float64.

    Raises:
        UserError: `clip_norm` is not positive, or the batch has too many records for the bound on the sum.

    Privacy:
        Sum and norms are private: they must pass a mechanism before anyone else reads them.
    """

    def __call__(
        self,
        params: Params,
        x: Tensor,
        y: Tensor,
        clip_norm: float,
        group: Tensor | None = None,
        num_groups: int = 1,
        norms: list[Tensor] | None = None,
        order: int = 2,
        only: Collection[str] | None = None,
    ) -> Tensor: ...

    def copy_for(self, net: nn.Module, sample_loss: SampleLoss) -> ClippedSum:
        """The same sum for a copy of its net, so that two threads can work: a forward touches the net."""
        ...

    def enter(self, x: Tensor) -> Tensor:
        """`x` `[B, *X]` as it best enters the net: the same values, perhaps in another memory format."""
        ...


def cross_entropy_of(net: nn.Module) -> SampleLoss:
    """The default loss of each record: cross entropy of `net`'s logits, `(params, x [B, *X], y [B]) -> [B]`.

    >>> net = nn.Linear(2, 3)
    >>> params = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    >>> cross_entropy_of(net)(params, torch.ones(2, 2), torch.tensor([0, 1]))
    tensor([1.0986, 1.0986])
    """

    def sample_loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, dict(params), (x,)), y, reduction="none")

    return sample_loss


def clip_factors(norms: Tensor, clip_norm: float | Tensor) -> Tensor:
    """`min(1, (1 - 2^-26) clip_norm / norm)`, and 0 for a norm that is not finite.

    The distance to 1 is more than what rounding takes from a norm of 2^27 numbers in float64.

    Args:
        norms: of gradients, `[B]` or `[S, B]`, >= 0, infinite or NaN.
        clip_norm: > 0, may be infinite; one value, or for `[S, B]` one a client, `[S, 1]`.

    Returns:
        Factors in [0, 1], in the shape and dtype of `norms`.

    >>> clip_factors(torch.tensor([0.0, 1.0, 4.0, float("nan"), float("inf")]), clip_norm=2.0)
    tensor([1.0000, 1.0000, 0.5000, 0.0000, 0.0000])
    """
    # IEEE division does the rest: clip / 0 is infinite, so 1; clip / inf is 0; inf / inf is NaN, so 0.
    return (clip_norm * (1 - 2**-26) / norms).clamp(max=1.0).nan_to_num(nan=0.0)


def require_proved(records: int, chunk: int, terms: int = 1) -> None:
    """Refuse a sum whose rounding might exceed `SUM_ROUNDING`; the proof is in `ClippedSum`.

    Args:
        records: of the batch, B.
        chunk: of them that are summed at once.
        terms: of one record's gradient that are summed with those of the others, T.
    """
    depth = terms * min(chunk, records) + math.ceil(records / chunk) + 8
    rounding = 1.01 * depth * 2**-53 * records * (1 if terms == 1 else CANCELLING)
    require(rounding <= SUM_ROUNDING, "batch", "have fewer records, for the sum to be exact enough", records)


def chunks_of(num_records: int, chunk: int) -> Iterator[slice]:
    """The fewest slices of at most `chunk` records that cover `num_records`, as even as they can be.

    >>> [(piece.start, piece.stop) for piece in chunks_of(33, 32)]
    [(0, 17), (17, 33)]
    """
    pieces = math.ceil(num_records / chunk)
    size, longer = divmod(num_records, max(pieces, 1))
    start = 0
    for i in range(pieces):
        stop = start + size + (i < longer)
        yield slice(start, stop)
        start = stop


def wanted_of(params: Params, only: Collection[str] | None) -> Params:
    """Those of `params` whose gradients count, in their order."""
    return params if only is None else {name: p for name, p in params.items() if name in only}


def record_gradients(sample_loss: SampleLoss) -> Callable[[Params, Tensor, Tensor], dict[str, Tensor]]:
    """Every record's gradient by parameter name, `[B, *shape]`: `vmap(grad(sample_loss))`, one record at a time."""

    def one_loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        losses = sample_loss(params, x[None], y[None])
        require(
            losses.shape == (1,),
            "sample_loss",
            "return one loss a record, shape (B,)",
            tuple(losses.shape),
        )
        return losses[0]

    return vmap(grad(one_loss), in_dims=(None, 0, 0), randomness="different")


class VmapClippedSum:
    """The reference `ClippedSum`: `vmap(grad(sample_loss))`, one record at a time.

    When to use it: as the truth in tests, and for models that no fast rule covers. Under `vmap` the net sees batches of
    one record, so no record can reach another one's gradient, whatever the net computes.

    Args:
        sample_loss: `(params, x [B, *X], y [B]) -> [B]`, one loss a record; it is called with B = 1.
        chunk: records whose gradients are held at once, >= 1.

    Raises:
        UserError: `chunk` or `clip_norm` is not positive; `sample_loss` does not return one loss a record.

    >>> net = nn.Linear(2, 2, bias=False)
    >>> clipped_sum = VmapClippedSum(cross_entropy_of(net))
    >>> params = {"weight": torch.zeros(2, 2)}
    >>> clipped_sum(params, torch.tensor([[3.0, 4.0]]), torch.tensor([0]), clip_norm=math.inf)
    tensor([[-1.5000, -2.0000,  1.5000,  2.0000]], dtype=torch.float64)
    >>> round(float(clipped_sum(params, torch.tensor([[3.0, 4.0]]), torch.tensor([0]), clip_norm=1.0).norm()), 5)
    1.0
    """

    def __init__(self, sample_loss: SampleLoss, chunk: int = DEFAULT_CHUNK) -> None:
        require(chunk >= 1, "chunk", "be at least 1 record", chunk)
        self.chunk = chunk
        self._grads = record_gradients(sample_loss)

    def __call__(
        self,
        params: Params,
        x: Tensor,
        y: Tensor,
        clip_norm: float,
        group: Tensor | None = None,
        num_groups: int = 1,
        norms: list[Tensor] | None = None,
        order: int = 2,
        only: Collection[str] | None = None,
    ) -> Tensor:
        require(clip_norm > 0, "clip_norm", "be positive", clip_norm)
        require_proved(len(x), self.chunk)
        params = {name: p.detach() for name, p in params.items()}
        wanted = wanted_of(params, only)
        like, width = next(iter(wanted.values())), sum(p.numel() for p in wanted.values())
        total = like.new_zeros(num_groups, width, dtype=summing_dtype(like))
        for rows in chunks_of(len(x), self.chunk):
            by_name = self._grads(params, x[rows], y[rows])
            grads = torch.cat([by_name[name].flatten(1) for name in wanted], dim=1).to(total.dtype)
            sizes = torch.linalg.vector_norm(grads, ord=order, dim=1)
            if norms is not None:
                norms.append(sizes)
            factors = clip_factors(sizes, clip_norm)
            groups = torch.zeros_like(factors, dtype=torch.long) if group is None else group[rows]
            total += one_hot(factors, groups, num_groups) @ kept(grads, factors)
        return total

    def copy_for(self, net: nn.Module, sample_loss: SampleLoss) -> VmapClippedSum:
        return VmapClippedSum(sample_loss, self.chunk)

    def enter(self, x: Tensor) -> Tensor:
        return x
