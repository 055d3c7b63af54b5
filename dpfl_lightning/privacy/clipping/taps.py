"""Clipped sums of models with code of their own: single records under `vmap`, with the exact rules of operators.

No record can see another one there, whatever the code computes. Where an operator with a rule gets a parameter, it gets
its values alone, and its result is tapped: the rule computes the gradient of this use from the operator's input and the
gradient of its result, mostly without forming it. Every other use of a parameter is differentiated directly, and added.

Code that reads a number of a record, such as `mask.all()`, gets that of a public record (a `Script`), so that a pass is
computed as if all records were like that one. Afterwards the numbers that each record would have given are compared.
Records that differ go on with the script of another public record, and at last alone, in the loop.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FunctionType
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
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.clipping.attention import FUNCTIONS as OF_ATTENTION
from dpfl_lightning.privacy.clipping.attention import attention
from dpfl_lightning.privacy.clipping.fixed_draws import begin_records
from dpfl_lightning.privacy.clipping.float64_sums import summing_dtype
from dpfl_lightning.privacy.clipping.gradient_sums import ChunkGradients, Totals
from dpfl_lightning.privacy.clipping.inputs import Inputs, take
from dpfl_lightning.privacy.clipping.layer_rules import ByName, Dense, Grads, Outer, conv1d_rule, conv2d_rule
from dpfl_lightning.privacy.clipping.operator_rules import argument_names, operator_gradients
from dpfl_lightning.privacy.clipping.passes import Batch, Checksums, checksums, passes
from dpfl_lightning.privacy.clipping.reads import READS, place_of_code
from dpfl_lightning.privacy.clipping.recurrent import FUNCTIONS as OF_RECURRENT
from dpfl_lightning.privacy.clipping.recurrent import STEPS
from dpfl_lightning.privacy.clipping.reference import (
    DEFAULT_SIZE,
    ClipRequest,
    LoopClippedSum,
    Params,
    SampleLoss,
    clip_factors,
    owners_of,
    require_one_loss,
    require_proved,
)
from dpfl_lightning.privacy.clipping.watched import (
    OWN_FUNCTIONS,
    LeftVmap,
    Watch,
    WatchedCalls,
    gradients_of,
    is_batched,
)

OWN_FUNCTIONS += [*OF_RECURRENT, *OF_ATTENTION]


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


class OtherOperators(Exception):
    """A pass calls other operators than the passes whose sizes were checked, because the weights are others."""


class OtherReads(Exception):
    """Code reads other numbers than those of a script, because the weights are others."""


@dataclass(frozen=True)
class PublicRead:
    """What code reads of a public record: which function reads where, what it returns, and the numbers behind it."""

    place: tuple[str, str]
    value: Any
    numbers: Tensor


Script = Sequence[PublicRead]


class TappedCalls(WatchedCalls):
    """The calls of a pass under `vmap`, of which those with a rule for the parameters that they get are tapped.

    What they read of records is that of the `script`; None is a pass of copies of a public record, which makes one.
    """

    def __init__(self) -> None:
        super().__init__(under_vmap=True)
        self.script: Script | None = None
        self.reads: list[PublicRead] = []
        self._read: list[Tensor] = []  # `[B, ...]`, of all records
        self.taps: list[Tap] = []
        self.edges: list[GradientEdge] = []  # of their results
        self.untapped = ""  # an operator that needs derivatives of gradients, of which taps have none
        self.tapping = True
        self.own_constants = False  # whether each record has its own of a new tensor, as code needs that writes into it
        self.forward: tuple[Hashable, ...] = ()  # operators of the forward pass

    def begin_pass(self, records: int) -> None:
        self.taps, self.edges, self.untapped = [], [], ""
        self.reads, self._read, self._records = [], [], records
        self._other_reads = ""
        self.operators, self.forward = [], ()

    def enter_pass(self, params: Params, leaves: Params, anchor: Tensor, level: int, of_record: Tensor) -> None:
        """Let code see the `leaves` of a level of `grad`, whose values are `params`; a tensor is `of_record`."""
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        self._params, self._anchor, self._level, self._of_record = params, anchor, level, of_record

    def _is_of_pass(self) -> bool:
        """Return whether a call is differentiated once, by the pass."""
        return self.tapping and functorch.maybe_current_level() == self._level

    def bare(self, tensor: Tensor) -> Tensor:
        """Return the values of all records, `[B, ...]`, of a tensor of this pass."""
        inner = _unwrap_for_grad(tensor, self._level)
        if not functorch.is_batchedtensor(inner):
            return inner.expand(self._records, *inner.shape)
        return functorch.get_unwrapped(inner).movedim(functorch.maybe_get_bdim(inner), 0)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in READS and any(is_batched(one) for one in tree_leaves((args, kwargs))):
            return self._number(func, args, kwargs)
        if func is F.one_hot and any(map(is_batched, (*args, *kwargs.values()))):
            return self._one_hot(*args, **kwargs)
        if func in _STEPS and len(args) > 2 and isinstance(args[2], list | tuple):  # no packed sequence
            return self._recurrent(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention and self._is_of_pass():
            found = attention(*args, **kwargs)
            return func(*args, **kwargs) if found is None else found
        if func is F.multi_head_attention_forward:  # its calls are seen, too
            with self:
                return _attention(*args, **kwargs)
        if func in _OPERATORS:
            named = {**dict(zip(argument_names(func), args, strict=False)), **kwargs}
            own = {argument: self._names[id(one)] for argument, one in named.items() if id(one) in self._names}
            once = len(set(own.values())) == len(own)  # a tap has one gradient of a parameter
            if own and once and self._is_of_pass() and _fits(func, named, own, self._params):
                return self._tapped(func, args, kwargs, named, own)
        if func in _DIFFERENTIATING:
            self.untapped = func.__name__
        if func is Tensor.__setitem__ and _fills_by_mask(*args):
            return _filled(*args)
        if self.own_constants and func in _CONSTANTS:
            return self._of_each(func, args, kwargs)
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

    def _of_each(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a new tensor as one of each record, which can write its numbers into it."""
        found = func(*args, **kwargs)
        if is_batched(found) or "out" in kwargs:
            return found
        own = self._of_record.new_zeros(found.shape, dtype=found.dtype, device=found.device)
        return own if func in (torch.empty, torch.empty_like, Tensor.new_empty) else own + found

    def _number(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what a function reads: of the public record."""
        if functorch.maybe_current_level() != self._level:
            raise LeftVmap(f"`{func.__name__}` reads a number within another transform")
        self.require_no_error()  # what is read afterwards may follow from another record's error
        numbers, value_of = _behind(func, args, kwargs)
        if numbers is None:
            return False
        of_each, place = self.bare(numbers.detach()), (func.__name__, place_of_code())
        self._read.append(of_each)
        if self.script is None:
            self.reads.append(PublicRead(place, value_of(of_each[0]), of_each[0].clone()))
        elif len(self._read) > len(self.script) or self.script[len(self._read) - 1].place != place:
            self._other_reads = f"`{place[0]}` reads a number ({place[1]})"
            raise OtherReads(self._other_reads)
        else:
            self.reads.append(self.script[len(self._read) - 1])
        return copy.deepcopy(self.reads[-1].value)  # a list is the caller's

    def _one_hot(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        """Do what `F.one_hot` does, which reads the largest of its numbers."""
        classes = num_classes if num_classes > 0 else self._number(Tensor.item, (tensor.max(),), {}) + 1
        if not self._number(Tensor.__bool__, (((tensor >= 0) & (tensor < classes)).all(),), {}):
            raise RuntimeError(f"Class values must be from 0 to {classes - 1}.")
        return (tensor[..., None] == torch.arange(classes, device=tensor.device)).long()

    def _recurrent(
        self,
        func: Any,
        x: Tensor,
        states: Any,
        weights: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        """Do what torch's recurrent layers do, whose kernels have no rules for `vmap`: x is `[N, T, I]`.

        The maps of inputs and of hidden states are operators with a rule. Steps are taken at once or one by one.
        """
        each, last = 4 if has_biases else 2, list[tuple[Tensor, ...]]()
        if len(weights) != each * num_layers * (1 + bidirectional):
            raise LeftVmap("a recurrent layer has a projection")
        x = x if batch_first else x.transpose(0, 1)
        given = states if isinstance(states, list | tuple) else [states]
        for depth in range(num_layers):
            x, outputs = F.dropout(x, dropout, train) if depth and dropout else x, []
            for backwards in range(1 + bidirectional):
                number = len(last)
                w_in, w_hidden, *biases = weights[each * number : each * (number + 1)]
                b_in, b_hidden = biases or (None, None)
                state, steps = tuple(one[number] for one in given), list[Tensor]()
                inputs = self.compute(F.linear, (x.flip(1) if backwards else x, w_in, b_in), {})
                if (found := self._all_steps(func, inputs, state, w_hidden, b_hidden)) is not None:
                    output, state = found
                    output = output.flip(1) if backwards else output
                else:
                    for part in inputs.unbind(1):
                        hidden = self.compute(F.linear, (state[0], w_hidden, b_hidden), {})
                        state = _STEPS[func](part, hidden, *state)
                        steps.append(state[0])
                    output = torch.stack(steps[::-1] if backwards else steps, dim=1)
                outputs.append(output)
                last.append(state)
            x = torch.cat(outputs, dim=2)
        return x if batch_first else x.transpose(0, 1), *(torch.stack(parts) for parts in zip(*last, strict=True))

    def _all_steps(
        self, func: Any, inputs: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return outputs `[N, T, H]` and the last state, with a tap for the hidden part; None for single steps.

        Those are for weights that are no parameters but computed, and where derivatives of derivatives are asked for.
        """
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        own = {argument: self._names[id(one)] for argument, one in given.items() if id(one) in self._names}
        known = len(own) == len(given) and self._is_of_pass()
        named = {"input": state[0], **given}
        if func not in STEPS or not known or not _fits(F.linear, named, own, self._params):
            return None
        values = {argument: self._params[name] for argument, name in own.items()}
        zero = self._anchor.to(inputs).expand(inputs.transpose(0, 1).shape)
        steps = inputs.transpose(0, 1), zero, *state, values["weight"], values.get("bias")
        output, *rest = STEPS[func].apply(*steps)
        last, hiddens = (output[-1], *rest[: len(state) - 1]), self.bare(rest[len(state) - 1])
        uses = {argument: (name, values[argument]) for argument, name in own.items()}
        self.taps.append(Tap(F.linear, hiddens[:, :-1], {}, uses, hiddens._version))
        self.edges.append(get_gradient_edge(zero))
        return output.transpose(0, 1), last

    def require_no_error(self) -> None:
        if self._other_reads:  # code may go on after any error
            raise OtherReads(self._other_reads)
        super().require_no_error()

    def differ(self) -> Tensor:
        """Return which records `[B]` have given others than the public numbers, so far."""
        found = torch.zeros(self._records, dtype=torch.bool)
        for of_each, read in zip(self._read, self.reads, strict=False):
            found |= _different(of_each, read.numbers).to(found.device)
        return found

    def end_pass(self) -> None:
        """Forget the tensors of a pass."""
        self.taps, self.edges, self._names = [], [], {}
        self.__dict__.pop("_anchor", None)
        self.__dict__.pop("_of_record", None)


class TappedSum:
    """A `ClippedSum` by `vmap` over single records, with the rules of operators, in passes of `size` records.

    What user code may see and keep is as for `VmapClippedSum`, and what a rule computes of a pass is as for
    `FastClippedSum`. `padding` `[1, ...]` fills up the last pass (None: a record of the batch, for tests).

    >>> from dpfl_lightning.privacy.clipping.reference import cross_entropy_of
    >>> net = nn.Linear(2, 2, bias=False)
    >>> params, x, y = {"weight": torch.zeros(2, 2)}, torch.tensor([[3.0, 4.0]]), torch.tensor([0])
    >>> TappedSum(net, cross_entropy_of(net))(params, x, y, ClipRequest(float("inf")))[0]
    tensor([[-1.5000, -2.0000,  1.5000,  2.0000]], dtype=torch.float64)
    """

    def __init__(
        self,
        net: nn.Module,
        sample_loss: SampleLoss,
        size: int = DEFAULT_SIZE,
        padding: Batch | None = None,
        scripts: Sequence[Script] = (),
        public: Batch | None = None,
        known: set[tuple[Hashable, ...]] | None = None,
        own_constants: bool = False,
    ) -> None:
        require(size >= 1, "size", "be at least 1 record", size)
        self.size, self.padding, self._sample_loss = size, padding, sample_loss
        self.scripts, self.public = tuple(scripts) or ((),), public or padding
        self.size_of_few = size  # of passes of the records that differ from the first script
        self.known, self._learns = known, False  # sequences of operators for which sizes were checked; None: of all
        self._calls, self._loop = TappedCalls(), LoopClippedSum(net, sample_loss)
        self._calls.own_constants = own_constants
        self.watch = Watch(owners_of(net, sample_loss), under_vmap=True, calls=self._calls)
        self.direct: set[str] = set()  # parameters that were differentiated directly
        self.tapped: set[str] = set()
        self._before = Checksums({})  # of parameters
        self.widest = 1  # numbers of the largest input of a tap, for one record

    @torch.no_grad()
    def __call__(self, params: Params, x: Inputs, y: Tensor, request: ClipRequest) -> tuple[Tensor, Tensor]:
        params = {name: p.detach() for name, p in params.items()}
        with suppress(OtherReads):  # of all records with these weights: the first script is that of the first pass
            return self._clipped(params, x, y, request, self.scripts)
        self._require_nothing_kept()
        return self._clipped(params, x, y, request, self.scripts_of(params, self._public(x, y)))

    def _clipped(
        self, params: Params, x: Inputs, y: Tensor, request: ClipRequest, scripts: Sequence[Script]
    ) -> tuple[Tensor, Tensor]:
        wanted, left = request.chosen(params), torch.arange(len(y))
        totals, norms = Totals(wanted, request.zeros(wanted)), y.new_empty(len(y), dtype=summing_dtype(_first(wanted)))
        self._begin(params)
        for number, script in enumerate(scripts[: None if self.size_of_few > 1 else 1]):
            batch_x, batch_y = (x, y) if number == 0 else take((x, y), left)
            size, others = self.size_of_few if number else self.size, [left[:0]]
            for rows, some_x, some_y in passes(batch_x, batch_y, size, self.padding):
                places, count = left[rows], rows.stop - rows.start
                filled = count if y.device.type == "cpu" else len(some_y)  # a GPU adds by the number of rows
                found = None
                try:
                    found = self._gradients(params, wanted, some_x, some_y, filled, script, number)
                except (OtherReads, OtherOperators):
                    if number == 0:
                        raise
                if found is None:  # only records that differ come here: of the others nothing may follow from it
                    self._require_nothing_kept()
                    others.append(places)
                    continue
                by_name, differ = found
                grads = ChunkGradients(by_name, request.order)
                require_proved(len(y), size, grads.terms)
                of_pass = grads.norms()
                norms[places] = of_pass[:count].to(norms.dtype)
                factors = clip_factors(of_pass, request.clip_norm)
                factors[count:] = 0
                factors[differ[: len(factors)]] = 0
                group = None if request.group is None else F.pad(request.group[places], (0, filled - count))
                totals.add(grads, factors, group)
                others.append(places[differ[:count]])
            left = torch.cat(others)
            self.watch.end()
            if not len(left):
                return totals.result(), norms
        group = None if request.group is None else request.group[left]
        some_x, some_y = take((x, y), left)
        alone, of_each = self._loop(params, some_x, some_y, replace(request, group=group, into=None))
        norms[left] = of_each.to(norms.dtype)
        return totals.result().add_(alone), norms

    @torch.no_grad()
    def scripts_of(self, params: Params, public: Batch) -> list[Script]:
        """Return what code reads of each of these public records."""
        return [self.script_of(params, *take(public, [row])) for row in range(len(public[1]))]

    @torch.no_grad()
    def script_of(self, params: Params, x: Inputs, y: Tensor) -> Script:
        """Return what code reads of a public record, of which there may be copies."""
        self._begin(params)
        self._calls.script = None
        self._of_a_pass(params, params, x, y)
        return self._calls.reads

    @torch.no_grad()
    def decides_by_draws(self, params: Params, x: Inputs, y: Tensor) -> bool:
        """Return whether code reads different numbers of copies of a public record, by random numbers alone."""
        self.script_of(params, x, y)
        return bool(self._calls.differ().any())

    @torch.no_grad()
    def record_gradients(
        self, params: Params, x: Inputs, y: Tensor, count: int, number: int = 0
    ) -> tuple[ByName, Tensor]:
        """Return the gradients of the first `count` records of a pass, and which records differ from this script."""
        self._begin(params)
        return self._gradients(params, params, x, y, count, self.scripts[number], number)

    @torch.no_grad()
    def evidence(self, params: Params, x: Inputs, y: Tensor, count: int) -> list[Tensor]:
        """Return what tells whether bits of a record's gradient differ, `[count]` each, for one pass of each script."""
        filled, norms, found = count if y.device.type == "cpu" else len(y), torch.zeros(count), list[Tensor]()
        self._learns = True
        scripts: Sequence[Script] = self.scripts
        for number in range(len(scripts)):
            self._begin(params)
            try:
                by_name, differ = self._gradients(params, params, x, y, filled, scripts[number], number)
            except OtherReads:
                scripts = self.scripts_of(params, self._public(x, y))
                by_name, differ = self._gradients(params, params, x, y, filled, scripts[number], number)
            grads, same = ChunkGradients(by_name, order=2), ~differ[:count].to(y.device)
            of_pass = grads.norms()[:count]
            norms = torch.where(same, of_pass, norms.to(of_pass))
            sums = [checksums(part)[:count] for form in grads.by_name.values() for part in form.parts]
            found += [same.long(), *(one * same for one in sums)]
        return [norms, *found]

    def copy_for(self, net: nn.Module, sample_loss: SampleLoss) -> TappedSum:
        given = self.size, self.padding, self.scripts, self.public, self.known, self._calls.own_constants
        copied = TappedSum(net, sample_loss, *given)
        copied.size_of_few = self.size_of_few
        return copied

    def enter(self, x: Inputs) -> Inputs:
        return x

    def _require_nothing_kept(self) -> None:
        """Raise UserError if something stays of a pass that has ended with an error."""
        self._calls.end_pass()
        self.watch.check()
        self._calls.forget()

    def _public(self, x: Inputs, y: Tensor) -> Batch:
        return self.public or take((x, y), [0])  # of the batch in tests alone

    def _gradients(
        self, params: Params, wanted: Params, x: Inputs, y: Tensor, count: int, script: Script, number: int
    ) -> tuple[ByName, Tensor]:
        """Return the gradients of the first `count` records of a pass, and which records differ from the script.

        Records that differ take no part if the pass cannot be computed with them, as if each were the public one.
        """
        outside, found = torch.zeros(len(y), dtype=torch.bool), None
        while found is None:
            self._calls.script = script
            try:
                found = self._of_a_pass(params, wanted, x, y)
            except (OtherReads, OtherOperators, UserError):
                raise
            except Exception:  # perhaps of code for records that it would not get
                more = self._calls.differ() & ~outside
                if not more.any():
                    raise
            if found is None:  # the error with its tensors is gone
                self._require_nothing_kept()
                outside |= more
                x, y = tree_map(lambda part: part.clone(), (x, y))
                public = take(self._public(x, y), [number])
                for part, one in zip(tree_leaves((x, y)), tree_leaves(public), strict=True):
                    part[outside] = one
        if not found:
            name, p = next(iter(wanted.items()))
            found = {name: Dense(p.new_zeros(len(y), p.numel()))}
        return {name: form.first(count) for name, form in found.items()}, self._calls.differ() | outside

    def _of_a_pass(self, params: Params, wanted: Params, x: Inputs, y: Tensor) -> ByName:
        """Return the gradients of a pass by parameter, without taps if they need derivatives of gradients.

        Code may change its inputs in place, so that each attempt gets copies.
        """
        for tapping in (True, False):
            self._calls.tapping = tapping
            given = tree_map(lambda part: part.clone(), (x, y))
            try:
                direct, taps = self._differentiated(params, wanted, *given)
            except Exception:  # perhaps of steps of a recurrent layer, which have one derivative
                if not (tapping and self._calls.untapped):
                    raise
                direct, taps = {}, []
            if self._calls.untapped and tapping:
                self._require_nothing_kept()
                continue
            self._calls.require_no_error()
            self.watch.check()
            changed = self._before.changed()
            must = "leave its parameters as they are in a pass"
            require(not changed, "model", must, ", ".join(changed), "Each pass would change those of the next one.")
            if len(self._calls.reads) < len(self._calls.script or ()):
                raise OtherReads("fewer numbers are read")
            if self.known is not None and self._calls.script is not None:
                if self._learns:
                    self.known.add(self._calls.forward)
                elif self._calls.forward not in self.known:
                    raise OtherOperators
            if all(tap.x._version == tap.version for tap, _ in taps):
                break
        return self._joined(direct, taps, wanted)

    def _begin(self, params: Params) -> None:
        """Note before the first pass what no pass may change."""
        self.watch.begin()
        self._before = Checksums(params)

    def _differentiated(
        self, params: Params, wanted: Params, x: Inputs, y: Tensor
    ) -> tuple[dict[str, Tensor], list[tuple[Tap, Tensor]]]:
        """Return the gradients `[B, ...]` of parameters by direct uses, and taps with those of their results."""
        calls, anchor = self._calls, y.new_zeros((), dtype=torch.float32)
        direct, taps = dict[str, Tensor](), list[tuple[Tap, Tensor]]()

        def differentiate(x: Inputs, y: Tensor) -> Tensor:
            one_x, one_y = take(x, None), y[None]
            calls.note(one_x, one_y)
            with grad_increment_nesting() as level, torch.enable_grad():
                one_x, one_y, own_anchor = tree_map(lambda one: _wrap_for_grad(one, level), (one_x, one_y, anchor))
                calls.note(one_x, one_y)
                leaves = {name: _create_differentiable(_wrap_for_grad(p, level), level) for name, p in params.items()}
                calls.enter_pass(params, leaves, _create_differentiable(own_anchor, level), level, one_y)
                with calls:  # until the backward pass is over, too
                    losses = self._sample_loss(leaves, one_x, one_y)
                    require_one_loss(losses)
                    calls.forward = tuple(calls.operators)  # which decide those of the backward pass
                    asked = [*(leaves[name] for name in wanted), *calls.edges]
                    found = () if calls.script is None else gradients_of(losses[0], asked)
                bare = [None if one is None else calls.bare(one) for one in found]
                direct.update({name: dy for name, dy in zip(wanted, bare, strict=False) if dy is not None})
                dys = bare[len(wanted) :]
                taps.extend((tap, dy) for tap, dy in zip(calls.taps, dys, strict=False) if dy is not None)
                calls.end_pass()
            return y.new_zeros(())

        calls.begin_pass(len(y))
        begin_records(len(y))
        vmap(differentiate, randomness="different")(x, y)
        return direct, taps

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
        return {name: functools.reduce(_added, _of_steps(found[name])) for name in wanted if name in found}


def _added(one: Grads, other: Grads) -> Grads:
    """Return the gradients of a parameter that has several uses."""
    return Dense(one.formed() + other.formed())


def _of_steps(grads: list[Grads]) -> list[Grads]:
    """Return the gradients of all uses of a parameter, of which outer products are one, as those of one position."""
    outer = [one for one in grads if isinstance(one, Outer)]
    if len(outer) < 2:
        return grads
    joined = Outer(*(torch.cat([getattr(one, part) for one in outer], dim=1) for part in ("left", "right")))
    return [joined, *(one for one in grads if not isinstance(one, Outer))]


def _first(params: Params) -> Tensor:
    return next(iter(params.values()))


def _behind(func: Any, args: Any, kwargs: Any) -> tuple[Tensor | None, Callable[[Tensor], Any]]:
    """Return the numbers on which depends what a function reads, and the function of them that it returns.

    None are no numbers: tensors of other shapes are not equal.
    """
    if func in (torch.equal, Tensor.equal):
        one, other = args
        return ((one == other).all() if one.shape == other.shape else None), bool
    if func in (torch.allclose, Tensor.allclose):
        return torch.isclose(*args, **kwargs).all(), bool
    if func is Tensor.__contains__:
        return (args[0] == args[1]).any(), bool
    if func is Tensor.tolist:
        return args[0], Tensor.tolist
    (tensor,) = args
    if tensor.numel() != 1:
        raise RuntimeError(f"a tensor of {tensor.numel()} numbers is no number")
    if func in (Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero):
        return tensor.reshape(()) != 0, bool
    return tensor.reshape(()), _NUMBER.get(func, Tensor.item)


_NUMBER: dict[Any, Callable[[Any], Any]] = {
    Tensor.__int__: int,
    Tensor.__index__: operator.index,
    Tensor.__float__: float,
}


def _fills_by_mask(target: Any, index: Any, value: Any) -> bool:
    """Return whether one number, or row, is written where a mask of each record is true, by which no `vmap` indexes."""
    if not (isinstance(index, Tensor) and index.dtype == torch.bool and is_batched(index)):
        return False
    rest = target.dim() - index.dim()
    if rest < 0 or index.shape != target.shape[: index.dim()]:
        return False
    if not isinstance(value, Tensor):
        return isinstance(value, int | float)
    one_row = value.dim() <= rest or (value.dim() == rest + 1 and len(value) == 1)
    return value.dim() == 0 or (one_row and value.dtype == target.dtype)


def _filled(target: Tensor, mask: Tensor, value: Any) -> Tensor:
    """Write one number, or row, where a mask of each record is true."""
    rest = target.dim() - mask.dim()
    mask = mask[(...,) + (None,) * rest]
    if not isinstance(value, Tensor) or value.dim() == 0:
        return target.masked_fill_(mask, value)
    return target.copy_(torch.where(mask, value[0] if value.dim() > rest else value, target))


def _different(of_each: Tensor, numbers: Tensor) -> Tensor:
    """Return which rows of `[B, ...]` differ from `numbers` in any bit."""
    rows, one = (part.reshape(len(part), -1).contiguous().view(torch.uint8) for part in (of_each, numbers[None]))
    return (rows != one).any(dim=1)


def _lstm(inputs: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, ...]:
    i, f, g, o = (inputs + recurrent).chunk(4, dim=-1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(inputs: Tensor, recurrent: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    (r, z, n), (by_r, by_z, by_n) = inputs.chunk(3, dim=-1), recurrent.chunk(3, dim=-1)
    new, z = (n + (r + by_r).sigmoid() * by_n).tanh(), (z + by_z).sigmoid()
    return (new + z * (hidden - new),)


def _rnn(inputs: Tensor, recurrent: Tensor, hidden: Tensor, activation: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    return (activation(inputs + recurrent),)


#: one step of recurrent layers: inputs' and hidden part of the gates, and the state, give the next state
_STEPS: dict[Any, Callable[..., tuple[Tensor, ...]]] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: functools.partial(_rnn, activation=torch.tanh),
    torch.rnn_relu: functools.partial(_rnn, activation=torch.relu),
}


def _seen_within(function: Any) -> Callable[..., Any]:
    """Return a function of torch in Python that does not hand itself over to a mode, which then sees its calls."""
    names = {**function.__globals__, "has_torch_function": lambda *_: False}
    found = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


_attention = _seen_within(F.multi_head_attention_forward)

#: what differentiates within a pass
_DIFFERENTIATING = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward, torch._make_dual})
_CONVOLUTIONS = {torch.conv1d: nn.Conv1d, torch.conv2d: nn.Conv2d, torch.conv3d: nn.Conv3d}
_TRANSPOSED = frozenset({torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d})
_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm})
_NORMS = frozenset({F.layer_norm, F.group_norm, F.rms_norm})
_SUMS = frozenset({torch.addmm, Tensor.addmm})
_LIKE = (torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like)
_NEW = (Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty)
_CONSTANTS = frozenset({torch.zeros, torch.ones, torch.full, torch.empty, torch.tensor, *_LIKE, *_NEW})
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
