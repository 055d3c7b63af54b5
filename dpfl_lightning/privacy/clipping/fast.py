"""Exact clipped sums of per-record gradients, without computing summed weight gradients.

One forward pass runs with weights that require no gradient, and one backward pass to the outputs of the layers with
parameters. Each record's gradients then follow layer by layer (`layer_rules.py`, `convolutions.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from dpfl_lightning.errors import require
from dpfl_lightning.privacy.clipping.convolutions import channels_last, convolutions
from dpfl_lightning.privacy.clipping.fixed_draws import begin_records
from dpfl_lightning.privacy.clipping.gradient_sums import ChunkGradients, Totals
from dpfl_lightning.privacy.clipping.inputs import Block, rows_each, take
from dpfl_lightning.privacy.clipping.inputs import Inputs as Records
from dpfl_lightning.privacy.clipping.layer_rules import (
    ByName,
    Inputs,
    Rule,
    Unsupported,
    conv2d_backward,
    conv2d_forward,
    conv2d_rule,
    has_special_backward,
    rule_of,
    rule_of_units,
)
from dpfl_lightning.privacy.clipping.passes import Batch, checksums, passes
from dpfl_lightning.privacy.clipping.reference import (
    DEFAULT_SIZE,
    ClipRequest,
    Params,
    SampleLoss,
    clip_factors,
    cross_entropy_of,
    require_proved,
)
from dpfl_lightning.privacy.clipping.sequence_layers import tapped_forward
from dpfl_lightning.privacy.clipping.stages import computed_as_one, replaced_forwards, stages_of
from dpfl_lightning.privacy.clipping.stateless import Held, further_names

LayerBackward = Callable[[Tensor, tuple[bool, ...]], tuple[Tensor | None, ...]]  # dy, which inputs need one -> their dx


@dataclass(frozen=True)
class Unit:
    """A module that directly holds trainable parameters, with its submodules; one rule computes its gradients."""

    module: nn.Module
    names: dict[str, str]  # trainable parameters: name in the module -> name in the model

    def in_net(self, by_name: ByName) -> ByName:
        """Return the gradients under the parameters' names in the model."""
        return {self.names[local]: grads for local, grads in by_name.items()}

    def local(self, params: Params) -> Params:
        """Select those of `params` that are the unit's, under their local names."""
        return {local: params[full] for local, full in self.names.items() if full in params}


@dataclass(frozen=True)
class Call:
    """What a rule reads of a unit's forward pass, or of a linear map in it."""

    unit: Unit
    rule: Rule
    inputs: Inputs  # each `[B, ...]`


Calls = dict[str, Call]  # by the name of the unit, or of the linear map in it
Edges = dict[str, GradientEdge]  # of the outputs in the graph, by the same names


def units_of(net: nn.Module) -> Iterator[tuple[str, Unit]]:
    """Yield the modules with trainable parameters that a rule covers, by their first name.

    Those that share a parameter with another module are left out.
    """
    names = {p: name for name, p in net.named_parameters() if p.requires_grad}
    shared = {names[p] for p in (net.get_parameter(name) for name in further_names(net)) if p in names}
    inside: set[nn.Module] = set()
    for name, part in net.named_modules():
        if part in inside or not _has_rule(part):
            continue
        of_part = {local: names[p] for local, p in part.named_parameters() if p in names}
        if of_part and not shared & {*of_part.values()}:
            inside.update(part.modules())
            yield name, Unit(part, of_part)


class _Seam(torch.autograd.Function):
    """The identity on a layer's output, where a new graph begins; behind it lies a special backward pass of the layer.

    It makes no copy; the output may change in place, but is no view, of whose gradient autograd would make copies.
    `anchor` requires a gradient, so that every seam is reached.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, backward: LayerBackward | None, *inputs: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        ctx.layer_backward = backward
        return output

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = ctx.layer_backward(dy[0], ctx.needs_input_grad[3:]) if ctx.layer_backward else ()
        return None, None, None, *dx


class FastClippedSum:
    """The same `ClippedSum` as `VmapClippedSum`, by one exact rule for each layer, for models whose code is known.

    Use it through `clipped_sum_for`, which checks it for the model. Each parameter has to be used only in the module
    that holds it, and each such module once in a forward pass; raises Unsupported for other models. A pass has `size`
    records, at its end `padding` `[1, ...]` (None: a record of the batch, for tests). `channels_last` is the memory
    format of images on a CPU, if the model gains from it. `sparse` names convolutions whose output gradients are mostly
    zeros on random data.

    Reference: Goodfellow (2015), https://arxiv.org/abs/1510.01799; Li et al. (2022), https://arxiv.org/abs/2110.05679.
    """

    def __init__(
        self,
        net: nn.Module,
        sample_loss: SampleLoss | None = None,
        size: int = DEFAULT_SIZE,
        channels_last: bool = True,
        sparse: Collection[str] = (),
        padding: Batch | None = None,
    ) -> None:
        require(size >= 1, "size", "be at least 1 record", size)
        self.size, self.padding = size, padding
        self._sample_loss, self.net, self._held = sample_loss or cross_entropy_of(net), net, Held(net)
        self.units_of = dict(units_of(net))
        covered = {full for unit in self.units_of.values() for full in unit.names.values()}
        self._known = {name for name, p in net.named_parameters() if p.requires_grad}
        if without := [name for name, p in net.named_parameters() if p.requires_grad and name not in covered]:
            holder = without[0].rpartition(".")[0]
            kind = type(net.get_submodule(holder)).__name__
            raise Unsupported(f"`{holder or 'net'}` ({kind}) has no rule for all of its parameters")
        self._pools = [m for m in net.modules() if isinstance(m, nn.MaxPool2d)] if channels_last else []
        self.channels_last, self.sparse = channels_last and _suits_channels_last(net), frozenset(sparse)
        self._names = {unit.module: name for name, unit in self.units_of.items()}
        sequences = [m for m in net.modules() if type(m) is nn.Sequential]
        self._stages = [(m, begins) for m in sequences if (begins := stages_of(m, self._names))]

    @torch.no_grad()  # except for the forward pass in `_gradients`
    def __call__(self, params: Params, x: Records, y: Tensor, request: ClipRequest) -> tuple[Tensor, Tensor]:
        params = {name: p.detach() for name, p in params.items()}
        if not params.keys() <= self._known:
            raise Unsupported(f"`{min(params.keys() - self._known)}` is not a trainable parameter of the model")
        wanted, group = request.chosen(params), request.group
        totals, norms = Totals(wanted, request.zeros(wanted)), list[Tensor]()
        with self._watched(wanted) as watch:
            for rows, some_x, some_y in passes(x, y, self.size, self.padding, self.enter):
                count = rows.stop - rows.start
                filled = count if y.device.type == "cpu" else len(some_y)  # a GPU adds by the number of rows
                grads = ChunkGradients(self._gradients(watch, params, some_x, some_y, filled), request.order)
                require_proved(len(y), self.size, grads.terms)
                of_pass = grads.norms()
                norms.append(of_pass[:count])
                factors = clip_factors(of_pass, request.clip_norm)
                if filled > count:
                    factors[count:] = 0
                totals.add(grads, factors, None if group is None else F.pad(group[rows], (0, filled - count)))
        return totals.result(), torch.cat(norms or [torch.empty(0, device=y.device)])

    @torch.no_grad()
    def record_gradients(self, params: Params, x: Records, y: Tensor, count: int) -> ByName:
        """Return the gradients of the first `count` records of one pass, which may change the records."""
        with self._watched(params) as watch:
            return self._gradients(watch, params, self.enter(x), y, count)

    @torch.no_grad()
    def evidence(self, params: Params, x: Records, y: Tensor, count: int) -> list[Tensor]:
        """Return what tells whether bits of a record's gradient differ, `[count]` each, for one pass."""
        filled = count if y.device.type == "cpu" else len(y)
        grads = ChunkGradients(self.record_gradients(params, x, y, filled), order=2)
        found = [grads.norms(), *(checksums(part) for form in grads.by_name.values() for part in form.parts)]
        return [one[:count] for one in found]

    def copy_for(self, net: nn.Module, sample_loss: SampleLoss) -> FastClippedSum:
        return FastClippedSum(net, sample_loss, self.size, self.channels_last, self.sparse, self.padding)

    def enter(self, x: Records) -> Records:
        if isinstance(x, Block):
            return x._replace(x=tree_map(lambda part: part.unflatten(0, x.weights.shape), self.enter(x.rows)))
        if not self.channels_last or not isinstance(x, Tensor) or x.device.type != "cpu" or x.dim() != 4:
            return x
        return channels_last(x)

    def sparse_layers(self, params: Params, x: Records, y: Tensor) -> list[str]:
        """Return the convolutions whose output gradients are mostly zeros on these records, which must be public."""
        special = [name for name, unit in self.units_of.items() if has_special_backward(unit.module)]
        if not special:
            return []
        with torch.no_grad(), self._watched({}) as watch:
            some_x, some_y = take((x, y), [*range(len(y))])  # copies: the model may change them
            self._pass(watch, params, some_x, some_y, len(y))
            dys = {name: watch.dys[name] for name in special if name in watch.dys}
        return [name for name, dy in dys.items() if convolutions().is_sparse(dy)]

    def widest_input(self, params: Params, x: Records, y: Tensor) -> int:
        """Return the largest number of values that enter a unit for one record, at least 1."""
        with torch.enable_grad(), self._watched({}) as watch:
            watch.begin(rows_each(x))
            self._sample_loss(params, *take((x, y), [0]))
            return max(1, *(a.numel() for call in watch.calls.values() for a in call.inputs))

    def _gradients(self, watch: _Watch, params: Params, x: Records, y: Tensor, count: int) -> ByName:
        """Return the gradients of the first `count` records, or other units, by the names in `watch.wanted`.

        Those of parameters that no loss depends on are left out.
        """
        self._pass(watch, params, x, y, count)
        rows = rows_each(x)
        grads = watch.grads if rows == 1 else {name: form.summed(rows) for name, form in watch.grads.items()}
        for name, call in watch.calls.items():
            if (dy := watch.dys.get(name)) is not None and (params_of_unit := call.unit.local(watch.wanted)):
                by_name = rule_of_units(call.rule, rows)(call.unit.module, params_of_unit, call.inputs, dy)
                grads |= call.unit.in_net({local: form.first(count) for local, form in by_name.items()})
        if not grads:
            raise Unsupported(f"no loss depends on {', '.join(f'`{name}`' for name in watch.wanted)}")
        return grads

    def _pass(self, watch: _Watch, params: Params, x: Records, y: Tensor, count: int) -> None:
        """Run one forward and backward pass, in which `watch` collects the units' inputs and output gradients.

        Where a convolution on a CPU computes the gradients of wanted parameters itself, these are collected instead.
        """
        rows = len(y) * rows_each(x)
        watch.begin(count * rows_each(x))

        def gradients() -> Sequence[Tensor | None]:
            begin_records(len(y))
            with torch.enable_grad():
                losses = self._sample_loss(params, x, y)
            if losses.shape != (len(y),):
                raise Unsupported(f"sample_loss returns shape {tuple(losses.shape)} for {len(y)} records")
            outputs: list[Any] = [*watch.edges.values(), *watch.anchors] or [watch.anchor]
            return torch.autograd.grad(losses, outputs, torch.ones_like(losses), allow_unused=True)

        grads = self._held.run(params, gradients)
        watch.dys.update({name: dy for name, dy in zip(watch.edges, grads, strict=False) if dy is not None})
        for name, call in watch.calls.items():
            dy = [watch.dys[name]] if name in watch.dys else []
            if any(a.shape[:1] != (rows,) for a in (*call.inputs, *dy)):
                raise Unsupported(f"the inputs and outputs of `{name}` do not have one row for each record")

    @contextmanager
    def _watched(self, wanted: Params) -> Iterator[_Watch]:
        """Let a `_Watch` take part in the forward passes of the model.

        A layer with a tapped forward pass computes that. A convolution on a CPU gets a special backward pass, and a
        stage that it begins is computed as one layer.
        """
        watch = _Watch(self.units_of, self.sparse, wanted)
        with contextlib.ExitStack() as stack:
            stack.callback(watch.begin, 0)  # its edges and the graph refer to each other
            if self.channels_last:  # before there are hooks
                stage = functools.partial(watch.stage, self._names)
                stack.enter_context(computed_as_one(self._stages, stage))
            stack.enter_context(
                replaced_forwards({unit.module: watch.forward_of(name) for name, unit in self.units_of.items()})
            )
            for pool in self._pools:
                stack.callback(pool.register_forward_hook(_keep_format).remove)
            yield watch


class _Watch:
    """What forward and backward passes of a model show: the units' inputs, and the edges of their outputs in the graph.

    What is a record here is a row of the model's input: another unit has several.

    The graph begins behind `anchor`, one of the `anchors` if special backward passes have to be reached. `dys` are
    the gradients of outputs, `grads` those of `wanted` parameters that a convolution has computed itself.
    """

    def __init__(self, units: Mapping[str, Unit], sparse: Collection[str], wanted: Params) -> None:
        self.units, self.sparse, self.wanted = units, sparse, wanted
        self.anchor = torch.zeros((), requires_grad=True)
        self.begin(0)

    def begin(self, count: int) -> None:
        """Forget the last pass; the next one has `count` records, and then padding."""
        self.count = count
        self.calls: Calls = {}
        self.edges: Edges = {}
        self.dys: dict[str, Tensor] = {}
        self.grads: ByName = {}
        self.anchors: list[Tensor] = []

    def forward_of(self, name: str) -> Callable[..., Any]:
        """Return the forward pass of a unit that takes notes."""
        module = self.units[name].module
        if forward := tapped_forward(module):
            return functools.partial(forward, module, functools.partial(self.tap, name))
        plain = functools.partial(self.convolve, module) if has_special_backward(module) else module.forward
        return functools.partial(self.noted, name, module, plain)

    def tap(self, unit_name: str, part: str, rule: Rule, inputs: Inputs, output: Tensor) -> Tensor:
        name = f"{unit_name}.{part}" if unit_name else part
        self._note(name, self.units[unit_name], rule, inputs)
        return self.entered(name, output)

    def convolve(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        return conv2d_forward(conv, x, self.count)

    def stage(self, names: Mapping[nn.Module, str], conv: nn.Conv2d, x: Tensor) -> Tensor:
        name = names[conv]
        self._note(name, self.units[name], conv2d_rule, (x,))
        with torch.no_grad():
            pooled, winners = convolutions().max_relu(conv2d_forward(conv, x, self.count), self.count)
        return self._behind_seam(name, conv, (x,), pooled, winners)

    def noted(self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        return self.behind(name, module, args, kwargs, forward(*args, **kwargs))

    def behind(self, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
            raise Unsupported(f"`{name}` gets more than its input")
        rule, inputs = rule_of(module), (args[0],)
        assert rule is not None  # there are no other units
        self._note(name, self.units[name], rule, inputs)
        if output.device.type == "cpu" and has_special_backward(module):
            return self._behind_seam(name, module, inputs, output)
        return self.entered(name, output)

    def _note(self, name: str, unit: Unit, rule: Rule, inputs: Inputs) -> None:
        if name in self.calls:
            raise Unsupported(f"`{name}` is used twice in one forward pass")
        # the graph would cause a reference cycle
        self.calls[name] = Call(unit, rule, tuple(a.detach() for a in inputs))

    def entered(self, name: str, output: Tensor) -> Tensor:
        entered = output if output.requires_grad else _Seam.apply(output.detach(), self.anchor, None)
        self.edges[name] = get_gradient_edge(entered)
        return entered

    def _behind_seam(self, name: str, conv: nn.Conv2d, inputs: Inputs, output: Tensor, winners: Any = None) -> Tensor:
        unit, x, count = self.units[name], self.calls[name].inputs[0], self.count
        self.anchors = [self.anchor]
        weight = conv.weight.detach()  # the weight of this call: `functional_call` may swap it out again

        def special_backward(dy: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None]:
            if not self.wanted:
                self.dys[name] = dy
            local, sparse = unit.local(self.wanted), name in self.sparse
            by_name, dx = conv2d_backward(conv, local, weight, x, dy, needs[0], sparse, winners, count)
            self.grads.update(unit.in_net({local: form.first(count) for local, form in by_name.items()}))
            return (dx,)

        return _Seam.apply(output.detach(), self.anchor, special_backward, *inputs)


def _suits_channels_last(net: nn.Module) -> bool:
    """Return whether the model is faster with channels last on a CPU. Norms of single channels are slower."""
    modules = list(net.modules())
    if any(isinstance(m, nn.MaxPool2d) for m in modules):
        return True
    single = any(isinstance(m, nn.GroupNorm) and m.num_groups == m.num_channels for m in modules)
    return not single and any(map(convolutions().gains_from_channels_last, modules))


def _has_rule(module: nn.Module) -> bool:
    return "forward" not in vars(module) and (rule_of(module) is not None or tapped_forward(module) is not None)


def _keep_format(pool: nn.Module, inputs: tuple, output: Tensor) -> None:
    """Give max-pool's backward pass its gradient in channels-last, like its input: 5 times faster than mixed."""
    form = torch.channels_last
    if isinstance(output, Tensor) and output.requires_grad and output.is_contiguous(memory_format=form):
        output.register_hook(lambda grad: grad.contiguous(memory_format=form))
