"""Gradients of parameters that no rule of a layer covers: record by record for each operator that uses them.

What the code of a model computes of such parameters alone is followed by autograd. The first operator that brings it
together with records is a use: its vector-Jacobian product runs under `vmap`. A parameter may have several uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dpfl_lightning.privacy.clipping.layer_rules import Unsupported
from dpfl_lightning.privacy.clipping.reads import memory

_FEW, _MORE = 2, 3  # records of the passes that show what counts records
_PRODUCTS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}


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
Plan = Sequence[tuple[Sequence[Form], Sequence[Form]]]  # of the arguments and results of each call with parameters


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

    def pulled_back(self, dys: Sequence[Tensor]) -> list[Tensor]:
        """Return each record's gradient of the own arguments, `[B, ...]`, from those of the results, `[B, ...]`."""
        own, inputs = [self.leaves[i].detach() for i in self.own], self.inputs
        if len(own) == 1 and len(inputs) == 1 and len(self.leaves) == 2 and self.func in _PRODUCTS | _SUMS:
            terms = dys[0] if self.func in _SUMS else dys[0] * inputs[0]
            return [_summed_to(terms, own[0].shape)]

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

        return list(vmap(pull_back)(tuple(dys), *inputs))


def _of_one(leaf: Any, form: Form) -> Any:
    """Return an argument as it is for one record."""
    if form is None or isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, torch.Size):
        return torch.Size(form.each if dim == form.dim else size for dim, size in enumerate(leaf))
    return form.each


def _summed_to(terms: Tensor, shape: torch.Size) -> Tensor:
    """Sum `[B, ...]` over the dimensions that were broadcast from `shape`."""
    terms = terms.flatten(1, terms.dim() - 1 - len(shape)).sum(1) if terms.dim() - 1 > len(shape) else terms
    repeated = [1 + i for i, size in enumerate(shape) if size == 1 and terms.shape[1 + i] > 1]
    return terms.sum(repeated, keepdim=True) if repeated else terms


class Uses(TorchFunctionMode):
    """Finds the uses of `parameters`, which require gradients, in a forward pass that has the calls of the `plan`.

    `entered(name, result)` gets each result of a use, and returns what takes its place.
    """

    def __init__(self, parameters: Mapping[str, Tensor], plan: Plan, entered: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__()
        self._parameters, self._entered, self._calls = parameters, entered, iter(plan)
        self._own = {id(one): one for one in parameters.values()}
        self.uses: dict[str, Use] = {}
        self._zeros: dict[str, Tensor] = {}  # gradients of results that no loss depends on

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        own = [i for i, leaf in enumerate(leaves) if id(leaf) in self._own]
        if not own:
            return func(*args, **(kwargs or {}))
        forms, results = ((), ()) if _asks(func) else self._next(func, leaves)
        if not _is_use(results):
            found = func(*args, **(kwargs or {}))
            self._own.update({id(one): one for one in tree_flatten(found)[0] if isinstance(one, Tensor)})
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

    def gradients(self, dys: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return each record's gradients `[B, ...]` of the `wanted` parameters, from the gradients of results."""
        total: dict[str, Tensor] = {}
        names = [name for name in self._parameters if name in wanted]
        for name, use in self.uses.items():
            counted = [(number, form) for number, form in enumerate(use.results) if isinstance(form, Counting)]
            keys = [(f"{name}.{number}", form) for number, form in counted]
            if not any(key in dys for key, _ in keys):
                continue
            by_record = [form.by_record(dys[key] if key in dys else self._zeros[key]) for key, form in keys]
            for index, grad in zip(use.own, use.pulled_back(by_record), strict=True):
                for parameter, one in self._of_parameters(use.leaves[index], grad, names):
                    total[parameter] = total[parameter] + one if parameter in total else one
        return total

    def _of_parameters(self, own: Tensor, grad: Tensor, names: Sequence[str]) -> list[tuple[str, Tensor]]:
        """Return gradients `[B, ...]` of parameters from those of what is computed of them."""
        direct = [name for name in names if self._parameters[name] is own]
        if direct or not own.requires_grad:
            return [(name, grad) for name in direct]
        leaves = [self._parameters[name] for name in names]
        found = torch.autograd.grad(own, leaves, grad, retain_graph=True, allow_unused=True, is_grads_batched=True)
        return [(name, one) for name, one in zip(names, found, strict=True) if one is not None]


def _changes(func: Any) -> bool:
    name = func.__name__
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


class _Calls(TorchFunctionMode):
    """Notes the arguments and results of all calls that compute something, and what is asked of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[list[Any], list[Any], bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, found = tree_flatten((args, kwargs or {}))[0], func(*args, **(kwargs or {}))
        self.calls.append((leaves, tree_flatten(found)[0], _asks(func)))
        return found


def plan_of(forward: Callable[[int], Any], parameters: Sequence[Tensor]) -> Plan:
    """Return the calls with `parameters`, or with what is computed of them alone, in a pass of a number of records.

    What counts records is what passes of two and of three records have different sizes of.
    """
    noted = []
    for records in (_FEW, _MORE):
        with _Calls() as calls:
            forward(records)
        noted.append(calls.calls)
    own, plan = {id(one) for one in parameters}, list[tuple[Sequence[Form], Sequence[Form]]]()
    more = ((leaves, results) for leaves, results, asks in noted[1] if not asks)
    for leaves, results, asks in noted[0]:
        more_leaves, more_results = (leaves, results) if asks else next(more, ((), ()))
        if any(id(leaf) in own for leaf in leaves):
            forms = [_form(*pair) for pair in zip(results, more_results, strict=True)]
            if not asks:
                plan.append(([_form(*pair) for pair in zip(leaves, more_leaves, strict=True)], forms))
            if not _is_use(forms):
                own |= {id(one) for one in results if isinstance(one, Tensor)}
    return plan


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
