"""Sums of clipped per-record gradients: what a mechanism adds its noise to.

`VmapClippedSum` is the reference: slow and obviously right. `fast_clipping.py` computes the same sums sooner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from dpfl_lightning.errors import require

Params = Mapping[str, Tensor]
SampleLoss = Callable[[Params, Tensor, Tensor], Tensor]

DEFAULT_CHUNK = 32  # records whose gradients the reference holds at once
SUM_ROUNDING = 5e-4  # how far a computed sum is from the exact one, at most, relative to the clip norm


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
    """`sum_j min(1, clip_norm / |g_j|) g_j` over each group's records j, `g_j` the gradient of j's loss.

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
        `[G, P]` in the dtype of the parameters; chunks are added in float64 and rounded once. A group without
        records has zeros.

    Guarantees:
        One record changes one row only, by at most `clip_norm` in that norm (up to rounding in the dtype). A record
        whose gradient, or the norm of it, is not finite contributes exactly zero.

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
    """`min(1, clip_norm / norm)`, and 0 for a norm that is not finite.

    Args:
        norms: of gradients, `[B]` or `[S, B]`, >= 0, infinite or NaN.
        clip_norm: > 0, may be infinite; one value, or for `[S, B]` one a client, `[S, 1]`.

    Returns:
        Factors in [0, 1], in the shape of `norms`.

    >>> clip_factors(torch.tensor([0.0, 1.0, 4.0, float("nan"), float("inf")]), clip_norm=2.0)
    tensor([1.0000, 1.0000, 0.5000, 0.0000, 0.0000])
    """
    # IEEE division does the rest: clip / 0 is infinite, so 1; clip / inf is 0; inf / inf is NaN, so 0.
    return (clip_norm / norms).clamp(max=1.0).nan_to_num(nan=0.0)


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


def summing_dtype(like: Tensor) -> torch.dtype:
    """What chunks are added in: float64 but on MPS, which has none."""
    return like.dtype if like.device.type == "mps" else torch.float64


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


class GroupTotals:
    """The rows `[G, P]` of a clipped sum as its chunks come in: added in float64, rounded once at the end."""

    def __init__(self, params: Params, num_groups: int) -> None:
        like = next(iter(params.values()))
        self._dtype = like.dtype
        self._wide = summing_dtype(like)
        self._num_groups = num_groups
        self._total = like.new_zeros(num_groups, sum(p.numel() for p in params.values()))
        self._empty = True

    def add(self, factors: Tensor, group: Tensor | None, weighted: Callable[[Tensor], Tensor]) -> None:
        """Add a chunk: `weighted` turns factors `[g, B]` into sums `[g, P]` for the g groups in the chunk."""
        if self._num_groups == 1:
            part = weighted(factors[None])
            self._total = part if self._empty else self._total.to(self._wide).add_(part)
        else:
            group = torch.zeros_like(factors, dtype=torch.long) if group is None else group
            present, row = group.unique(return_inverse=True)
            by_group = factors * (row == torch.arange(len(present), device=row.device)[:, None])
            self._total = self._total.to(self._wide).index_add_(0, present, weighted(by_group).to(self._wide))
        self._empty = False

    def rounded(self) -> Tensor:
        """The rows in the dtype of the parameters."""
        return self._total.to(self._dtype)


class VmapClippedSum:
    """The reference `ClippedSum`: `vmap(grad(sample_loss))`, one record at a time.

    When to use it: as the truth in tests, and for models that no fast rule covers.

    Args:
        sample_loss: `(params, x [B, *X], y [B]) -> [B]`, one loss a record; it is called with B = 1.
        chunk: records whose gradients are held at once, >= 1.

    Raises:
        UserError: `chunk` or `clip_norm` is not positive; `sample_loss` does not return one loss a record.

    >>> net = nn.Linear(2, 2, bias=False)
    >>> clipped_sum = VmapClippedSum(cross_entropy_of(net))
    >>> params = {"weight": torch.zeros(2, 2)}
    >>> clipped_sum(params, torch.tensor([[3.0, 4.0]]), torch.tensor([0]), clip_norm=math.inf)
    tensor([[-1.5000, -2.0000,  1.5000,  2.0000]])
    >>> float(clipped_sum(params, torch.tensor([[3.0, 4.0]]), torch.tensor([0]), clip_norm=1.0).norm())
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
        params = {name: p.detach() for name, p in params.items()}
        wanted = wanted_of(params, only)
        totals = GroupTotals(wanted, num_groups)
        for rows in chunks_of(len(x), self.chunk):
            by_name = self._grads(params, x[rows], y[rows])
            grads = torch.cat([by_name[name].flatten(1) for name in wanted], dim=1)
            sizes = torch.linalg.vector_norm(grads, ord=order, dim=1)
            if norms is not None:
                norms.append(sizes)
            grads = torch.where(torch.isfinite(sizes)[:, None], grads, 0.0)
            groups = None if group is None else group[rows]
            totals.add(clip_factors(sizes, clip_norm), groups, partial(_times, grads))
        return totals.rounded()

    def copy_for(self, net: nn.Module, sample_loss: SampleLoss) -> VmapClippedSum:
        return VmapClippedSum(sample_loss, self.chunk)

    def enter(self, x: Tensor) -> Tensor:
        return x


def _times(grads: Tensor, factors: Tensor) -> Tensor:
    return factors @ grads
