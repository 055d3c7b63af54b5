"""Sums of clipped per-record gradients, to which a mechanism adds its noise.

`LoopClippedSum` is the slow and simple reference, `VmapClippedSum` the same by `vmap`. `fast.py` is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from dpfl_lightning.errors import require
from dpfl_lightning.privacy.clipping.fixed_draws import begin_records
from dpfl_lightning.privacy.clipping.float64_sums import kept, one_hot, row_norms, summing_dtype
from dpfl_lightning.privacy.clipping.inputs import Inputs, take
from dpfl_lightning.privacy.clipping.passes import Batch, Checksums, checksums, passes
from dpfl_lightning.privacy.clipping.restored import is_large, tensors_restored
from dpfl_lightning.privacy.clipping.stateless import Held, call, further_names
from dpfl_lightning.privacy.clipping.watched import OwnDraws, Watch, WatchedCalls, gradients_of

Params = Mapping[str, Tensor]
SampleLoss = Callable[[Params, Inputs, Tensor], Tensor]

_RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)
DEFAULT_SIZE = 32  # records whose gradients are computed at once
CANCELLING = 1e3  # largest assumed ratio of the terms of a sum over positions to the norm used for the sum
#: how far, in units of the clip norm, a clipped sum may be from the exact one; the proof is in docs/proof.md
SUM_ROUNDING = 5e-4


@contextmanager
def evaluating(*nets: nn.Module) -> Iterator[None]:
    """Switch the modules to evaluation mode (no dropout), and restore the mode of each module afterwards.

    A recurrent layer stays in training mode without dropout: cuDNN has no derivative of one in evaluation mode.
    """
    modules, trained = [module for net in nets for module in net.modules()], [net for net in nets if net.training]
    training_modes = [(module, module.training) for module in modules]
    recurrent = [(one, one.dropout) for one in modules if isinstance(one, nn.RNNBase) and type(one) in _RECURRENT]
    for net in trained:
        net.eval()
    for module in modules:
        module.training = False
    for layer, _ in recurrent:
        layer.training, layer.dropout = True, 0.0
    try:
        yield
    finally:
        for net in trained:
            net.train()  # a model may clear here what it keeps for evaluation
        for module, training in training_modes:
            module.training = training
        for layer, dropout in recurrent:
            layer.dropout = dropout


@contextmanager
def scoring(net: nn.Module, sample_loss: SampleLoss) -> Iterator[None]:
    """Evaluate within it: of held-out records, too, nothing may stay for the next pass.

    Tensors of the model are restored. Raises UserError if it keeps anything else.
    """
    watch = Watch(owners_of(net, sample_loss), under_vmap=False)
    watch.begin()
    with evaluating(net), tensors_restored(net):
        yield
    watch.check()
    watch.end()


@dataclass(frozen=True, eq=False)
class ClipRequest:
    """How gradients are clipped in the norm of `order` 2 or 1 (not at all if `clip_norm` is inf), and what is summed.

    `group` `[B]` int64 in [0, num_groups) puts each record into a row of the sums; None puts all into row 0. `only`
    restricts norm, clipping and sum to the parameters with these names. `into` `[G, P]` in `summing_dtype` is
    overwritten by the result and returned, which saves a caller of many large sums the memory of each. `expected` is
    the public number of records that the plan expects (None: very many), which decides the size of passes. Some records
    of a sum that is `released` are computed again.
    """

    clip_norm: float
    order: int = 2
    group: Tensor | None = None
    num_groups: int = 1
    only: Collection[str] | None = None
    into: Tensor | None = None
    expected: float | None = None
    released: bool = False

    def __post_init__(self) -> None:
        require(self.clip_norm > 0, "clip_norm", "be positive", self.clip_norm)

    def chosen(self, params: Params) -> Params:
        """Return the parameters named in `only`, in their order; all if it is None."""
        return params if self.only is None else {name: p for name, p in params.items() if name in self.only}

    def zeros(self, chosen: Params) -> Tensor:
        """Return zeros `[G, P]`, in which the gradients of the `chosen` parameters are summed."""
        like, width = next(iter(chosen.values())), sum(p.numel() for p in chosen.values())
        shape, dtype = (self.num_groups, width), summing_dtype(like)
        if self.into is None:
            return like.new_zeros(shape, dtype=dtype)
        if self.into.shape != shape or self.into.dtype != dtype:
            raise ValueError(f"`into` is {self.into.dtype} {tuple(self.into.shape)}, but the sums are {dtype} {shape}")
        return self.into.zero_()


class ClippedSum(Protocol):
    """`sum_j min(1, clip_norm / |g_j|) g_j` over each group's records j, where `g_j` is the gradient of j's loss.

    A call gets the trainable parameters by name (concatenated in this order `[P]`), records `[B, *X]` (or a tuple or
    dictionary of such), B >= 0, and labels `[B, ...]`. It returns sums `[G, P]` in float64 (on MPS in the dtype of the
    parameters), and the norms `[B]` before clipping; a record whose norm is not finite contributes exactly zero.

    `g_j` is a function of the record and the model alone, bit for bit. No clipped gradient exceeds `clip_norm`, and the
    result is within `SUM_ROUNDING * clip_norm` of the exact sums, so that one record changes it by at most
    `(1 + 2 SUM_ROUNDING) clip_norm`, in one row. Proof: docs/proof.md. Both results are private.
    """

    def __call__(self, params: Params, x: Inputs, y: Tensor, request: ClipRequest) -> tuple[Tensor, Tensor]: ...

    def copy_for(self, net: nn.Module, sample_loss: SampleLoss) -> ClippedSum:
        """Return the same sum for a copy of its model, which a forward pass modifies, so that two threads can work."""

    def enter(self, x: Inputs) -> Inputs:
        """Return `x` `[B, *X]` in the memory format that suits the model best; the values are unchanged."""


def cross_entropy_of(net: nn.Module) -> SampleLoss:
    """Return the default loss of each record: cross entropy of `net`'s logits."""
    further = further_names(net)

    def sample_loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(call(net, params, further, (x,)), y, reduction="none")

    return sample_loss


def clip_factors(norms: Tensor, clip_norm: float | Tensor) -> Tensor:
    """Return `min(1, (1 - 2^-26) clip_norm / norm)`, and 0 for a norm that is not finite, in the dtype of the norms.

    The distance to 1 exceeds the rounding error of a norm of 2^27 numbers in float64. `norms` are `[B]` or `[S, B]`;
    `clip_norm` > 0 may be infinite, and one for each client `[S, 1]`.

    >>> clip_factors(torch.tensor([0.0, 1.0, 4.0, float("nan"), float("inf")]), clip_norm=2.0)
    tensor([1.0000, 1.0000, 0.5000, 0.0000, 0.0000])
    """
    # By IEEE division clip / 0 is infinite, which gives 1; clip / inf is 0; inf / inf is NaN, which gives 0.
    return (clip_norm * (1 - 2**-26) / norms).clamp(max=1.0).nan_to_num(nan=0.0)


def require_proved(records: int, size: int, terms: int = 1) -> None:
    """Raise UserError if the rounding of a sum could exceed `SUM_ROUNDING` (docs/proof.md).

    `size` records are summed at once, and of each record's gradient T `terms` with those of other records.
    """
    depth = terms * min(size, records) + math.ceil(records / size) + 8
    rounding = 1.01 * depth * 2**-53 * records * (1 if terms == 1 else CANCELLING)
    must = "have fewer records, so that the sum is exact enough"
    require(rounding <= SUM_ROUNDING, "batch", must, records)


def owners_of(net: nn.Module, sample_loss: SampleLoss) -> list[object]:
    """Return what of a user takes part in a pass, and might keep something of it: the model, and a loss of its own."""
    model = getattr(sample_loss, "__self__", None)
    given = (getattr(model, "given_loss", None), getattr(model, "given_output", None)) if model else (sample_loss,)
    users = (one for one in given if not str(getattr(one, "__module__", "")).startswith("dpfl_lightning."))
    return [net, *(one for one in users if one is not None)]


def record_gradients(
    sample_loss: SampleLoss, watch: WatchedCalls | None = None
) -> Callable[[Params, Inputs, Tensor], dict[str, Tensor]]:
    """Return a function for every record's gradient by parameter name, `[B, *shape]`: `vmap(grad(sample_loss))`.

    The function raises LeftVmap if the model calls what may see all records of a pass.
    """
    watch = watch or WatchedCalls(under_vmap=True)

    def one_loss(params: Params, x: Inputs, y: Tensor) -> Tensor:
        losses = sample_loss(params, x, y)
        require_one_loss(losses)
        return losses[0]

    def one_gradient(params: Params, x: Inputs, y: Tensor) -> dict[str, Tensor]:
        one_x, one_y = take(x, None), y[None]
        watch.note(one_x, one_y)
        with watch:  # until the backward pass is over, too
            return grad(one_loss)(params, one_x, one_y)  # type: ignore[no-any-return]

    def gradients(params: Params, x: Inputs, y: Tensor) -> dict[str, Tensor]:
        begin_records(len(y))
        return vmap(one_gradient, in_dims=(None, 0, 0), randomness="different")(params, x, y)  # type: ignore[no-any-return]

    return gradients


class VmapClippedSum:
    """A `ClippedSum` by `vmap(grad(sample_loss))`, for models that no fast rule covers, in passes of `size` records.

    Under `vmap` the model sees batches of one record, so no record can influence another record's gradient, whatever it
    computes; LeftVmap is raised for what may see more, and UserError if something of `owners` keeps anything of a pass.
    What user code raises depends on the weights and on the records.
    `padding` `[1, ...]` fills up the last pass (None: a record of the batch, for tests).

    >>> net = nn.Linear(2, 2, bias=False)
    >>> params, x, y = {"weight": torch.zeros(2, 2)}, torch.tensor([[3.0, 4.0]]), torch.tensor([0])
    >>> VmapClippedSum(cross_entropy_of(net))(params, x, y, ClipRequest(math.inf))[0]
    tensor([[-1.5000, -2.0000,  1.5000,  2.0000]], dtype=torch.float64)
    """

    def __init__(
        self,
        sample_loss: SampleLoss,
        size: int = DEFAULT_SIZE,
        padding: Batch | None = None,
        owners: Sequence[object] = (),
    ) -> None:
        require(size >= 1, "size", "be at least 1 record", size)
        self.size, self.padding = size, padding
        self.watch = Watch(owners, under_vmap=True)
        self._grads = record_gradients(sample_loss, self.watch.calls)

    def __call__(self, params: Params, x: Inputs, y: Tensor, request: ClipRequest) -> tuple[Tensor, Tensor]:
        require_proved(len(y), self.size)
        params = {name: p.detach() for name, p in params.items()}
        wanted, norms = request.chosen(params), [torch.empty(0, device=y.device)]
        total = request.zeros(wanted)
        self.watch.begin()
        for rows, some_x, some_y in passes(x, y, self.size, self.padding):
            whole = self._measured(params, wanted, some_x, some_y, request.order)
            grads, norm = (part[: rows.stop - rows.start] for part in whole)
            norms.append(norm)
            factors = clip_factors(norms[-1], request.clip_norm)
            groups = torch.zeros_like(factors, dtype=torch.long) if request.group is None else request.group[rows]
            total += one_hot(factors, groups, request.num_groups) @ kept(grads, factors)
        self.watch.end()
        return total, torch.cat(norms)

    def _measured(self, params: Params, wanted: Params, x: Inputs, y: Tensor, order: int = 2) -> tuple[Tensor, Tensor]:
        """Return gradients `[size, P]` and norms `[size]` of a whole pass: a GPU adds by the number of rows."""
        by_name = self._grads(params, x, y)
        self.watch.calls.require_no_error()
        self.watch.check()
        grads = torch.cat([by_name[name].reshape(len(y), -1) for name in wanted], dim=1)
        grads = grads.to(summing_dtype(grads))
        return grads, row_norms(grads, order)

    def evidence(self, params: Params, x: Inputs, y: Tensor, count: int) -> list[Tensor]:
        """Return what tells whether bits of a record's gradient differ, `[count]` each, for one pass."""
        self.watch.begin()
        grads, norms = self._measured(params, params, x, y)
        return [norms[:count], checksums(grads[:count])]

    def copy_for(self, net: nn.Module, sample_loss: SampleLoss) -> VmapClippedSum:
        return VmapClippedSum(sample_loss, self.size, self.padding, owners_of(net, sample_loss))

    def enter(self, x: Inputs) -> Inputs:
        return x


class LoopClippedSum:
    """The reference `ClippedSum`: plain autograd, one record at a time, each a copy.

    It computes what neither rules nor `vmap` can, such as packed sequences, and what decides by the content of a batch.
    What `net` keeps in tensors is restored after every record. Raises UserError if it changes its parameters, or keeps
    anything else of a record. Parameters are in their places until the backward pass is over.
    """

    def __init__(self, net: nn.Module, sample_loss: SampleLoss) -> None:
        self._net, self._sample_loss, self._held = net, sample_loss, Held(net)
        self._watch = Watch(owners_of(net, sample_loss), under_vmap=False)
        self.restored: list[str] = []  # what the last pass changed

    @torch.no_grad()  # except for the losses
    def __call__(self, params: Params, x: Inputs, y: Tensor, request: ClipRequest) -> tuple[Tensor, Tensor]:
        require_proved(len(y), 1)
        wanted = request.chosen(params)
        total = request.zeros(wanted)
        norms, sizes = total.new_empty(len(y)), [p.numel() for p in wanted.values()]
        for row, grads in enumerate(self.each(params, x, y, request)):
            parts = torch.stack([row_norms(one[None], request.order) for one in grads], dim=1)
            norms[row] = row_norms(parts, request.order)
            factor = float(clip_factors(norms[row], request.clip_norm))
            group = 0 if request.group is None else int(request.group[row])
            for sums, one in zip(total[group].split(sizes), grads, strict=True):
                if factor:
                    sums.add_(one, alpha=factor)
        return total, norms

    @torch.no_grad()
    def each(self, params: Params, x: Inputs, y: Tensor, request: ClipRequest) -> Iterator[list[Tensor]]:
        """Yield the gradients `[p]` of each record, without clipping, by the parameters that are asked for."""
        advice = "Counters and averages would tell how many records there were."
        must = "leave its parameters as they are in a pass"
        watch = self._watch
        watch.begin()
        with tensors_restored(self._net) as restore, OwnDraws(y.device) as draws:
            for _, x_one, y_one in passes(x, y, 1):
                copies = {name: p if is_large(p) else p.clone() for name, p in params.items()}
                leaves = {name: p.detach().requires_grad_() for name, p in copies.items()}
                before = Checksums(leaves)
                draws.next()
                grads = self._gradients(leaves, request.chosen(leaves), x_one, y_one, watch)
                draws.end()
                self.restored = restore()
                changed = before.changed()
                require(not changed, "model", must, ", ".join(changed), advice)
                watch.check()
                yield grads
        watch.end()

    @torch.enable_grad()
    def _gradients(self, leaves: Params, wanted: Params, x: Inputs, y: Tensor, watch: Watch) -> list[Tensor]:
        """Return the gradient of the loss of one record, `[p]` for each parameter."""
        x, y = take((x, y), slice(None))  # tensors that only the model holds
        watch.enter(x, y)

        def gradients() -> Sequence[Tensor | None]:
            with watch.calls:
                losses = self._sample_loss(leaves, x, y)
                require_one_loss(losses)
                return gradients_of(losses[0], [*wanted.values()])

        found = self._held.run(leaves, gradients)
        grads = (torch.zeros_like(p) if one is None else one for p, one in zip(wanted.values(), found, strict=True))
        return [one.to_dense().reshape(-1).clone() for one in grads]  # so that only the model can keep theirs

    def copy_for(self, net: nn.Module, sample_loss: SampleLoss) -> LoopClippedSum:
        return LoopClippedSum(net, sample_loss)

    def enter(self, x: Inputs) -> Inputs:
        return x


def require_one_loss(losses: Tensor) -> None:
    require(losses.shape == (1,), "sample_loss", "return one loss for each record, shape (B,)", tuple(losses.shape))
