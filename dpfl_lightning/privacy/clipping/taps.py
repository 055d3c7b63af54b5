"""Clipped sums of models with code of their own: single records under `vmap`, with the exact rules of operators.

No record can see another one there, whatever the code computes. Where an operator with a rule gets a parameter, it gets
its values alone, and its result is tapped: the rule computes the gradient of this use from the operator's input and the
gradient of its result, mostly without forming it. Every other use of a parameter is differentiated directly, and added.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch._functorch.eager_transforms import (
    _create_differentiable,
    _unwrap_for_grad,
    _wrap_for_grad,
    grad_increment_nesting,
)
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from dpfl_lightning.errors import require
from dpfl_lightning.privacy.clipping.gradient_sums import ChunkGradients, Totals
from dpfl_lightning.privacy.clipping.inputs import Inputs, take
from dpfl_lightning.privacy.clipping.layer_rules import ByName, Dense, Grads, conv1d_rule, conv2d_rule
from dpfl_lightning.privacy.clipping.operator_rules import argument_names, operator_gradients
from dpfl_lightning.privacy.clipping.parameter_uses import added
from dpfl_lightning.privacy.clipping.passes import Batch, checksums, passes
from dpfl_lightning.privacy.clipping.reference import (
    DEFAULT_SIZE,
    ClipRequest,
    Params,
    SampleLoss,
    clip_factors,
    owners_of,
    require_one_loss,
    require_proved,
)
from dpfl_lightning.privacy.clipping.watched import Watch, WatchedCalls, gradients_of


@dataclass(frozen=True)
class Tap:
    """A use of parameters by an operator with a rule: its input `[B, ...]`, its options, and the parameters in it."""

    func: Callable[..., Any]
    x: Tensor
    options: Mapping[str, Any]
    own: Mapping[str, tuple[str, Tensor]]  # names and values, by argument
    version: int  # of the input

    def gradients(self, dy: Tensor, wanted: Params) -> ByName:
        """Return each record's gradient by the names of the parameters, from that of the result `[B, ...]`."""
        own = {argument: value for argument, (name, value) in self.own.items() if name in wanted}
        if not own:
            return {}
        if (layer := _convolution(self.func, self.x, self.options, own)) is not None:
            rule = conv1d_rule if isinstance(layer, nn.Conv1d) else conv2d_rule
            found = rule(layer, own, (self.x.flatten(0, 1),), dy.flatten(0, 1))
        else:
            found = operator_gradients(self.func, own, {**self.options, **own, "input": self.x}, ["input"], dy)
        if found.keys() != own.keys():  # `_fits` says so before
            raise AssertionError(f"the rule of `{self.func.__name__}` does not cover {', '.join(own)}")
        return {self.own[argument][0]: form for argument, form in found.items()}


class TappedCalls(WatchedCalls):
    """The calls of a pass under `vmap`, of which those with a rule for the parameters that they get are tapped."""

    def __init__(self) -> None:
        super().__init__(under_vmap=True)
        self.taps: list[Tap] = []
        self.edges: list[GradientEdge] = []  # of their results
        self.untapped = ""  # an operator that needs derivatives of gradients, of which taps have none
        self.tapping = True

    def enter_pass(self, params: Params, leaves: Params, anchor: Tensor, level: int, records: int) -> None:
        """Begin a pass in which code sees the `leaves` of a level of `grad`, whose values are `params`."""
        self.taps, self.edges, self.untapped = [], [], ""
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        self._params, self._anchor, self._level, self._records = params, anchor, level, records

    def bare(self, tensor: Tensor) -> Tensor:
        """Return the values of all records, `[B, ...]`, of a tensor of this pass."""
        inner = _unwrap_for_grad(tensor, self._level)
        if not functorch.is_batchedtensor(inner):
            return inner.expand(self._records, *inner.shape)
        return functorch.get_unwrapped(inner).movedim(functorch.maybe_get_bdim(inner), 0)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _OPERATORS and self.tapping:
            named = {**dict(zip(argument_names(func), args, strict=False)), **kwargs}
            own = {argument: self._names[id(one)] for argument, one in named.items() if id(one) in self._names}
            if own and functorch.maybe_current_level() == self._level and _fits(func, named, own, self._params):
                return self._tapped(func, args, kwargs, named, own)
        if func in _DIFFERENTIATING:
            self.untapped = func.__name__
        return super().compute(func, args, kwargs)

    def _tapped(self, func: Any, args: Any, kwargs: Any, named: dict[str, Any], own: dict[str, str]) -> Tensor:
        x, wide = named["input"], func is F.linear and named["input"].dim() > 2  # its result would be a view

        def given(one: Any) -> Any:
            if one is x:
                return x.reshape(-1, x.shape[-1]) if wide else x
            return self._params[self._names[id(one)]] if id(one) in self._names else one

        output = func(*map(given, args), **{name: given(one) for name, one in kwargs.items()})
        if not output.requires_grad or output._is_view():
            output = output - self._anchor
        values, options = self.bare(x), {name: one for name, one in named.items() if not isinstance(one, Tensor)}
        uses = {argument: (name, self._params[name]) for argument, name in own.items()}
        self.taps.append(Tap(func, values, options, uses, values._version))
        self.edges.append(get_gradient_edge(output))
        return output.view(*x.shape[:-1], output.shape[-1]) if wide else output

    def end_pass(self) -> None:
        """Forget the tensors of a pass."""
        self.taps, self.edges, self._names = [], [], {}
        del self._anchor


class TappedSum:
    """A `ClippedSum` by `vmap` over single records, with the rules of operators, in passes of `size` records.

    What user code may see and keep is as for `VmapClippedSum`, and what a rule computes of a pass is as for
    `FastClippedSum`. `padding` `[1, ...]` fills up the last pass (None: a record of the batch, for tests).

    >>> net = nn.Linear(2, 2, bias=False)
    >>> params, x, y = {"weight": torch.zeros(2, 2)}, torch.tensor([[3.0, 4.0]]), torch.tensor([0])
    >>> TappedSum(net, cross_entropy_of(net))(params, x, y, ClipRequest(math.inf))[0]
    tensor([[-1.5000, -2.0000,  1.5000,  2.0000]], dtype=torch.float64)
    """

    def __init__(
        self, net: nn.Module, sample_loss: SampleLoss, size: int = DEFAULT_SIZE, padding: Batch | None = None
    ) -> None:
        require(size >= 1, "size", "be at least 1 record", size)
        self.size, self.padding, self._sample_loss = size, padding, sample_loss
        self._calls = TappedCalls()
        self._watch = Watch(owners_of(net, sample_loss), under_vmap=True, calls=self._calls)
        self.direct: set[str] = set()  # parameters that were differentiated directly
        self.tapped: set[str] = set()
        self.widest = 1  # numbers of the largest input of a tap, for one record

    @torch.no_grad()
    def __call__(self, params: Params, x: Inputs, y: Tensor, request: ClipRequest) -> tuple[Tensor, Tensor]:
        params = {name: p.detach() for name, p in params.items()}
        wanted, group = request.chosen(params), request.group
        totals, norms = Totals(wanted, request.zeros(wanted)), [torch.empty(0, device=y.device)]
        self._watch.begin()
        for rows, some_x, some_y in passes(x, y, self.size, self.padding):
            count = rows.stop - rows.start
            filled = count if y.device.type == "cpu" else len(some_y)  # a GPU adds by the number of rows
            grads = ChunkGradients(self._gradients(params, wanted, some_x, some_y, filled), request.order)
            require_proved(len(y), self.size, grads.terms)
            of_pass = grads.norms()
            norms.append(of_pass[:count])
            factors = clip_factors(of_pass, request.clip_norm)
            factors[count:] = 0
            totals.add(grads, factors, None if group is None else F.pad(group[rows], (0, filled - count)))
        return totals.result(), torch.cat(norms)

    @torch.no_grad()
    def record_gradients(self, params: Params, x: Inputs, y: Tensor, count: int) -> ByName:
        """Return the gradients of the first `count` records of one pass."""
        self._watch.begin()
        return self._gradients(params, params, x, y, count)

    @torch.no_grad()
    def evidence(self, params: Params, x: Inputs, y: Tensor, count: int) -> list[Tensor]:
        """Return what tells whether bits of a record's gradient differ, `[count]` each, for one pass."""
        filled = count if y.device.type == "cpu" else len(y)
        grads = ChunkGradients(self.record_gradients(params, x, y, filled), order=2)
        found = [grads.norms(), *(checksums(part) for form in grads.by_name.values() for part in form.parts)]
        return [one[:count] for one in found]

    def copy_for(self, net: nn.Module, sample_loss: SampleLoss) -> TappedSum:
        return TappedSum(net, sample_loss, self.size, self.padding)

    def enter(self, x: Inputs) -> Inputs:
        return x

    def _gradients(self, params: Params, wanted: Params, x: Inputs, y: Tensor, count: int) -> ByName:
        """Return the gradients of the first `count` records of a pass; zeros if no loss depends on a parameter."""
        self._calls.tapping = True
        found = self._of_a_pass(params, wanted, x, y)
        if found is None:
            self._calls.tapping = False
            found = self._of_a_pass(params, wanted, x, y)
            assert found is not None
        if not found:
            name, p = next(iter(wanted.items()))
            found = {name: Dense(p.new_zeros(len(y), p.numel()))}
        return {name: form.first(count) for name, form in found.items()}

    def _of_a_pass(self, params: Params, wanted: Params, x: Inputs, y: Tensor) -> ByName | None:
        """Return the gradients of a pass by parameter; None if they need a pass without taps."""
        direct, taps = dict[str, Tensor](), list[tuple[Tap, Tensor]]()
        calls, anchor = self._calls, y.new_zeros((), dtype=torch.float32)

        def differentiate(x: Inputs, y: Tensor) -> Tensor:
            one_x, one_y = take(x, None), y[None]
            calls.note(one_x, one_y)
            with grad_increment_nesting() as level, torch.enable_grad():
                one_x, one_y, own_anchor = tree_map(lambda one: _wrap_for_grad(one, level), (one_x, one_y, anchor))
                calls.note(one_x, one_y)
                leaves = {name: _create_differentiable(_wrap_for_grad(p, level), level) for name, p in params.items()}
                calls.enter_pass(params, leaves, _create_differentiable(own_anchor, level), level, records)
                with calls:  # until the backward pass is over, too
                    losses = self._sample_loss(leaves, one_x, one_y)
                    require_one_loss(losses)
                    asked = [*(leaves[name] for name in wanted), *calls.edges]
                    found = gradients_of(losses[0], asked)
                bare = [None if one is None else calls.bare(one) for one in found]
                direct.update({name: dy for name, dy in zip(wanted, bare, strict=False) if dy is not None})
                dys = bare[len(wanted) :]
                taps.extend((tap, dy) for tap, dy in zip(calls.taps, dys, strict=True) if dy is not None)
                calls.end_pass()
            return y.new_zeros(())

        records = len(y)
        vmap(differentiate, randomness="different")(x, y)
        self._calls.require_no_error()
        self._watch.check()
        if calls.tapping and (calls.untapped or any(tap.x._version != tap.version for tap, _ in taps)):
            return None
        return self._joined(direct, taps, wanted)

    def _joined(self, direct: Mapping[str, Tensor], taps: Sequence[tuple[Tap, Tensor]], wanted: Params) -> ByName:
        """Return the gradients of all uses of each parameter."""
        found = defaultdict[str, list[Grads]](list)
        for tap, dy in taps:
            for name, form in tap.gradients(dy, wanted).items():
                found[name].append(form)
        self.tapped.update(found)
        self.widest = max(self.widest, *(tap.x[0].numel() for tap, _ in taps), 1)
        self.direct.update(direct)
        for name, grads in direct.items():
            found[name].append(Dense(grads.reshape(len(grads), -1)))
        return {name: functools.reduce(added, found[name]) for name in wanted if name in found}


#: what differentiates within a pass
_DIFFERENTIATING = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward, torch._make_dual})
_CONVOLUTIONS = {torch.conv1d: nn.Conv1d, torch.conv2d: nn.Conv2d, torch.conv3d: nn.Conv3d}
_TRANSPOSED = frozenset({torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d})
_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm})
_NORMS = frozenset({F.layer_norm, F.group_norm, F.rms_norm})
_SUMS = frozenset({torch.addmm, Tensor.addmm})
#: operators whose rules cover what `_fits` tells
_OPERATORS = frozenset({F.linear, F.embedding, *_CONVOLUTIONS, *_TRANSPOSED, *_PRODUCTS, *_NORMS, *_SUMS})


def _fits(func: Any, named: Mapping[str, Any], own: Mapping[str, str], params: Params) -> bool:
    """Return whether the rule of an operator covers this use of `own` parameters, by shapes and dtypes alone."""
    x, weight = named.get("input"), params[own["weight"]] if "weight" in own else None
    if not isinstance(x, Tensor) or "input" in own or not torch.is_grad_enabled():
        return False
    if func is F.embedding:
        further = any(named.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse"))
        return weight is not None and weight.dim() == 2 and not further and not x.is_floating_point()
    if any(params[name].dtype != x.dtype for name in own.values()) or torch.is_autocast_enabled(x.device.type):
        return False
    if func in _PRODUCTS:
        return own.keys() == {"other"} and params[own["other"]].dim() == 2 and x.dim() >= 2
    if func in _SUMS:
        plain = all(named.get(name, 1) == 1 for name in ("alpha", "beta"))
        bias = params[own["bias"]].dim() == 1 if "bias" in own else True
        return plain and own.keys() <= {"bias", "other"} and bias and x.dim() == 2
    if func in _NORMS:
        return own.keys() <= {"weight", "bias"} and x.dim() >= 2
    if func is F.linear:
        return weight is not None and weight.dim() == 2
    fits = weight is not None and x.dim() == weight.dim() and not isinstance(named.get("padding"), str)
    return fits and own.keys() <= {"weight", "bias"}


def _convolution(func: Any, x: Tensor, options: Mapping[str, Any], own: Params) -> nn.Module | None:
    """Return a layer whose rule is quicker than that of an operator on inputs `[B, 1, ...]`, or None."""
    kind = _CONVOLUTIONS.get(func)
    plain = kind is nn.Conv2d or (kind is nn.Conv1d and options.get("groups", 1) == 1)
    if not plain or x.shape[1] != 1 or "weight" not in own:
        return None
    given = (options.get(name, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)))
    form = (one if isinstance(one, int) else tuple(one) for one in given)
    return _layer(kind, own["weight"].shape, *form, options.get("groups", 1))


@functools.lru_cache(maxsize=1024)
def _layer(kind: Any, shape: torch.Size, stride: Any, padding: Any, dilation: Any, groups: int) -> nn.Module:
    """Return a convolution without numbers."""
    form = (tuple(shape[2:]), stride, padding, dilation, groups)
    layer: nn.Module = kind(shape[1] * groups, shape[0], *form, bias=False, device="meta")
    return layer
