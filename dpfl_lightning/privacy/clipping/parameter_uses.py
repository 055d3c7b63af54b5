"""Gradients of parameters that no rule of a layer covers: record by record for each operator that uses them.

What the code of a model computes of such parameters alone is followed by autograd. The first operator that brings it
together with records is a use: it has a rule (`operator_rules.py`), or its vector-Jacobian product runs under `vmap`.
A parameter may have several uses.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dpfl_lightning.privacy.clipping.layer_rules import (
    ByName,
    Dense,
    Grads,
    Lookup,
    Outer,
    Unsupported,
)
from dpfl_lightning.privacy.clipping.operator_rules import argument_names, operator_gradients
from dpfl_lightning.privacy.clipping.reads import memory
from dpfl_lightning.privacy.clipping.stages import replaced_forwards

_PLAIN_LOOKUP = [None, None, 2.0, False, False]  # options of an embedding, in the order of `F.embedding`
_FEW, _MORE = 2, 3  # records of the passes that show what counts records


@dataclass(frozen=True)
class Counting:
    """Which dimension of a tensor counts records, each of which has `each` numbers in it; None: it is a number."""

    each: int
    dim: int | None = None

    def by_record(self, tensor: Tensor) -> Tensor:
        """Return a tensor as its records see it, `[B, ...]`."""
        assert self.dim is not None
        return tensor.unflatten(self.dim, (-1, self.each)).movedim(self.dim, 0)


Form = Counting | None  # of an argument or a result


class Plan(NamedTuple):
    """The arguments and results of each call with parameters, and the modules in whose forward passes these are."""

    calls: Sequence[tuple[Sequence[Form], Sequence[Form]]]
    modules: frozenset[str]  # the whole model is ""


@dataclass(frozen=True)
class Use:
    """A call of a function with parameters and records: its arguments are `leaves` in the form of `structure`."""

    func: Callable[..., Any]
    leaves: Sequence[Any]
    structure: TreeSpec
    forms: Sequence[Form]
    results: Sequence[Form]
    own: Sequence[int]  # arguments that are computed of parameters alone

    @property
    def inputs(self) -> list[Tensor]:
        """The arguments that hold records, `[B, ...]`."""
        return [self.forms[i].by_record(self.leaves[i]) for i in self._of_records]  # type: ignore[union-attr]

    @property
    def _of_records(self) -> list[int]:
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and self.forms[i] is not None]

    def by_rule(self, dy: Tensor) -> list[Grads]:
        """Return each record's gradient of the own arguments, from that of the result `[B, ...]`; [] without a rule."""
        leaves = list(self.leaves)
        for i, records in zip(self._of_records, self.inputs, strict=True):
            leaves[i] = records
        args, kwargs = tree_unflatten(leaves, self.structure)
        named = {**dict(zip(argument_names(self.func), args, strict=False)), **kwargs}
        name_of = {id(value): name for name, value in named.items() if isinstance(value, Tensor)}
        own, held = ([name_of.get(id(leaves[i]), "") for i in some] for some in (self.own, self._of_records))
        if "" in (*own, *held):
            return []
        found = operator_gradients(self.func, {name: named[name].detach() for name in own}, named, held, dy)
        return [found[name] for name in own if found]

    def by_vmap(self, dys: Sequence[Tensor]) -> list[Grads]:
        """Return each record's gradient of the own arguments, from those of the results, `[B, ...]`."""
        own, inputs = [self.leaves[i].detach() for i in self.own], self.inputs
        if self.func is F.multi_head_attention_forward and tree_unflatten(self.leaves, self.structure)[0][10] > 0:
            raise Unsupported("attention draws a mask of dropout, which a second pass does not repeat")

        def pull_back(dys: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
            leaves = [_of_one(leaf, form) for leaf, form in zip(self.leaves, self.forms, strict=True)]
            for i, one in zip(self._of_records, inputs, strict=True):
                leaves[i] = one.clone()  # it may change in place

            def results(*own: Tensor) -> tuple[Tensor, ...]:
                for i, one in zip(self.own, own, strict=True):
                    leaves[i] = one
                args, kwargs = tree_unflatten(leaves, self.structure)
                found = tree_flatten(self.func(*args, **kwargs))[0]
                return tuple(one for one, form in zip(found, self.results, strict=True) if form is not None)

            return vjp(results, *own)[1](dys)

        return [Dense(one.reshape(len(one), -1)) for one in vmap(pull_back)(tuple(dys), *inputs)]


def _of_one(leaf: Any, form: Form) -> Any:
    """Return an argument as it is for one record."""
    if form is None or isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, torch.Size):
        return torch.Size(form.each if dim == form.dim else size for dim, size in enumerate(leaf))
    return form.each


def added(one: Grads, other: Grads) -> Grads:
    """Return the gradients of a parameter that has several uses."""
    if isinstance(one, Outer) and isinstance(other, Outer):
        return Outer(torch.cat([one.left, other.left], dim=1), torch.cat([one.right, other.right], dim=1))
    return Dense(one.formed() + other.formed())


class Uses(TorchFunctionMode):
    """Finds the uses of `parameters`, which require gradients, in a forward pass that has the calls of the `plan`.

    `entered(name, result)` gets each result of a use, and returns what takes its place.
    """

    def __init__(self, parameters: Mapping[str, Tensor], plan: Plan, entered: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__()
        self._parameters, self._entered, self._calls = parameters, entered, iter(plan.calls)
        self._modules, self._active = plan.modules, False
        self._own = {id(one): one for one in parameters.values()}
        self.uses: dict[str, Use] = {}
        self._zeros: dict[str, Tensor] = {}  # gradients of results that no loss depends on
        self._lookups: dict[int, tuple[Tensor, Tensor]] = {}  # parameters and public rows of them, by the result
        self.under_vmap: set[str] = set()  # parameters

    @contextmanager
    def watching(self, net: nn.Module) -> Iterator[None]:
        """Watch those forward passes of modules that the plan names: elsewhere each call would take longer."""
        modules = [net.get_submodule(name) for name in self._modules]
        everywhere = net in modules or any("forward" in vars(module) for module in modules)
        forwards = {module: functools.partial(self._watched, module.forward) for module in modules}
        with self if everywhere else replaced_forwards(forwards):
            yield
        if next(self._calls, None) is not None:
            raise Unsupported("parameters are used in some passes only")

    def _watched(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._active else self:
            return forward(*args, **kwargs)

    def __enter__(self) -> Uses:
        self._active = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._active = False
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _contains(self._own, args) and not (kwargs and _contains(self._own, kwargs.values())):
            return func(*args, **(kwargs or {}))
        leaves, structure = tree_flatten((args, kwargs or {}))
        own = [i for i, leaf in enumerate(leaves) if id(leaf) in self._own]
        forms, results = ((), ()) if _asks(func) else self._next(func, leaves)
        if not _is_use(results):
            found = func(*args, **(kwargs or {}))
            self._own.update({id(one): one for one in tree_flatten(found)[0] if isinstance(one, Tensor)})
            if func is F.embedding and isinstance(leaves[0], Tensor) and leaves[2:] == _PLAIN_LOOKUP:
                self._lookups[id(found)] = leaves[1], leaves[0]
            return found
        given = [leaf.detach() if i in own else leaf for i, leaf in enumerate(leaves)]
        kept = [leaf.detach() if isinstance(leaf, Tensor) and i not in own else leaf for i, leaf in enumerate(leaves)]
        if _changes(func) and 0 not in own:
            kept[0] = kept[0].clone()
        name = f"use {len(self.uses)}"
        self.uses[name] = Use(func, kept, structure, forms, results, own)
        new_args, new_kwargs = tree_unflatten(given, structure)
        found, form = tree_flatten(func(*new_args, **new_kwargs))
        for number, (one, result) in enumerate(zip(found, results, strict=True)):
            if result is not None:
                key = f"{name}.{number}"
                one = (
                    one.clone() if any(memory(one)[0] == memory(leaves[i])[0] for i in own) else one
                )  # it may change in place
                self._zeros[key] = one.new_zeros(()).expand(one.shape)
                # a result of which another one is computed would have that one's gradient, too
                found[number] = self._entered(key, one if len(found) == 1 else one.view_as(one))
        return tree_unflatten(found, form)

    def _next(self, func: Any, leaves: Sequence[Any]) -> tuple[Sequence[Form], Sequence[Form]]:
        call = next(self._calls, None)
        if call is None or len(call[0]) != len(leaves):
            raise Unsupported(f"`{func.__name__}` gets parameters in some passes only")
        return call

    def by_record(self, name: str, dy: Tensor) -> Tensor:
        """Return the gradient of a result as its records see it, `[B, ...]`; that of another output as it is."""
        use, _, number = name.rpartition(".")
        form = self.uses[use].results[int(number)] if use in self.uses else None
        return dy if form is None else form.by_record(dy)

    def gradients(self, dys: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> ByName:
        """Return each record's gradients of the `wanted` parameters, from the gradients of results."""
        found, computed = defaultdict[str, list[Grads]](list), list[tuple[Tensor, Tensor]]()
        for name, use in self.uses.items():
            counted = [(number, form) for number, form in enumerate(use.results) if isinstance(form, Counting)]
            keys = [(f"{name}.{number}", form) for number, form in counted]
            if not any(key in dys for key, _ in keys):
                continue
            by_record = [form.by_record(dys[key] if key in dys else self._zeros[key]) for key, form in keys]
            grads = use.by_rule(by_record[0]) if len(by_record) == 1 else []
            for index, grad in zip(use.own, grads or use.by_vmap(by_record), strict=True):
                own = use.leaves[index]
                used, rows = self._lookups.get(id(own), (own, None))
                if parameter := next((name for name, one in self._parameters.items() if one is used), None):
                    self.under_vmap.update([] if grads else [parameter])
                    found[parameter].append(grad if rows is None else _looked_up(grad, rows, used.shape))
                elif own.requires_grad:
                    computed.append((own, grad.formed().view(-1, *own.shape)))
        if computed:
            leaves, further = [*self._parameters.values()], {"retain_graph": True, "allow_unused": True}
            outputs, dys_of_outputs = zip(*computed, strict=True)
            grads_of = torch.autograd.grad(outputs, leaves, dys_of_outputs, is_grads_batched=True, **further)
            for name, one in zip(self._parameters, grads_of, strict=True):
                if one is not None:
                    self.under_vmap.add(name)
                    found[name].append(Dense(one.reshape(len(one), -1)))
        return {name: functools.reduce(added, parts) for name, parts in found.items() if name in wanted}


def _looked_up(grad: Grads, rows: Tensor, shape: torch.Size) -> Lookup:
    """Return the gradients of a table of this shape from those of some of its rows, which are public."""
    dy = grad.formed().view(-1, rows.numel(), shape[1])
    ids, apart = rows.reshape(1, -1).expand(dy.shape[:2]), len(rows.unique()) == rows.numel()
    return Lookup(ids, dy, shape[0]) if apart else Lookup.merged(ids, dy, shape[0])


def _contains(own: Mapping[int, Tensor], values: Iterable[Any]) -> bool:
    """Return whether some of an operator's arguments are among these: most calls have none, and flattening is slow."""
    for one in values:
        if id(one) in own or (
            type(one) in (list, tuple, dict) and _contains(own, one.values() if type(one) is dict else one)
        ):
            return True
    return False


def _changes(func: Any) -> bool:
    name = func.__name__
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


class _Calls(TorchFunctionMode):
    """Notes the arguments and results of all calls that compute something, and what is asked of tensors."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.calls: list[tuple[list[Any], list[Any], bool, str]] = []
        self._net, self._inside = net, [""]

    def __enter__(self) -> _Calls:
        self._handles: list[Any] = []
        for name, module in self._net.named_modules():
            enter = module.register_forward_pre_hook(functools.partial(self._enter, name))
            self._handles += [enter, module.register_forward_hook(self._leave)]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str, *_: Any) -> None:
        self._inside.append(name)

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, found = tree_flatten((args, kwargs or {}))[0], func(*args, **(kwargs or {}))
        self.calls.append((leaves, tree_flatten(found)[0], _asks(func), self._inside[-1]))
        return found


def plan_of(net: nn.Module, forward: Callable[[int], Any], parameters: Sequence[Tensor]) -> Plan:
    """Return the calls with `parameters`, or with what is computed of them alone, in a pass of a number of records.

    What counts records is what passes of two and of three records have different sizes of.
    """
    noted = []
    for records in (_FEW, _MORE):
        with _Calls(net) as calls:
            forward(records)
        noted.append(calls.calls)
    own, plan, modules = {id(one) for one in parameters}, list[tuple[Sequence[Form], Sequence[Form]]](), set[str]()
    more = ((leaves, results) for leaves, results, asks, _ in noted[1] if not asks)
    for leaves, results, asks, module in noted[0]:
        more_leaves, more_results = (leaves, results) if asks else next(more, ((), ()))
        if any(id(leaf) in own for leaf in leaves):
            forms = [_form(*pair) for pair in zip(results, more_results, strict=True)]
            if not asks:
                plan.append(([_form(*pair) for pair in zip(leaves, more_leaves, strict=True)], forms))
            if not _is_use(forms):
                own |= {id(one) for one in results if isinstance(one, Tensor)}
            if not asks or any(isinstance(one, Tensor) for one in results):
                modules.add(module)
    return Plan(plan, frozenset(modules))


def _asks(func: Any) -> bool:
    """Return whether a function computes nothing, but asks for an attribute or a number."""
    return func.__name__ in _QUESTIONS or func.__name__.startswith("is_")


_QUESTIONS = frozenset(
    {"__get__", "__len__", "__bool__", "__float__", "__int__", "data_ptr", "dim", "element_size", "get_device", "item"}
    | {"ndimension", "nelement", "numel", "size", "storage_offset", "stride", "tolist", "untyped_storage"}
)


def _is_use(results: Sequence[Form]) -> bool:
    return any(form is not None and form.dim is not None for form in results)


def _form(few: Any, more: Any) -> Form:
    few, more = (leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in (few, more))
    if isinstance(few, torch.Size) and isinstance(more, torch.Size):
        counting = [dim for dim, (first, second) in enumerate(zip(few, more, strict=True)) if first != second]
        if len(counting) > 1:
            raise Unsupported(f"several dimensions of {tuple(more)} count records")
        return Counting(_each(few[counting[0]], more[counting[0]]), counting[0]) if counting else None
    if type(few) is int and type(more) is int and few != more:
        return Counting(_each(few, more))
    return None


def _each(few: int, more: int) -> int:
    if few * _MORE != more * _FEW:
        raise Unsupported(f"{few} and {more} do not count whole records")
    return math.gcd(few, more)
