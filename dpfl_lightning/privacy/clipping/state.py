"""What a model keeps from one pass to the next, which neither clipping nor noise covers."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import os
import random
import struct
import sys
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from io import IOBase
from pathlib import Path
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GenericAlias,
    MappingProxyType,
    MethodType,
    ModuleType,
    UnionType,
)
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dpfl_lightning.errors import UserError, require

T = TypeVar("T")

_MOST_LEVELS = 3
_MOST_ENTRIES = 1 << 14  # of a collection of a user's file that is compared: longer ones are tables
_COPIED = 1 << 16  # numbers of a tensor that is copied, so that it can be restored


@contextmanager
def tensors_restored(net: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Restore what the model keeps in tensors besides its trainable parameters: a pass must leave nothing for the next.

    These are buffers, frozen parameters and attributes. They are restored whether they were changed in place or
    replaced, and new ones are deleted. Yields a function that restores them at once, and returns their names. Of large
    ones there is no copy: RuntimeError if they were changed in place. UserError if trainable parameters were replaced.
    """
    compiled = next((name for name, part in net.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    require(compiled is None, "model", "have no compiled module", compiled, "Give the module before torch.jit.script.")
    spaces = [
        (name, space) for name, part in net.named_modules() for space in (part._buffers, part._parameters, vars(part))
    ]
    before: list[dict[str, tuple[Tensor, Tensor | None, int]]] = [
        {name: (value, _copied(value), value._version) for name, value in space.items() if _fixed(value)}
        for _, space in spaces
    ]
    trained = [{name: value for name, value in space.items() if _trained(value)} for _, space in spaces]
    empty = [{name for name, value in space.items() if value is None} for _, space in spaces]

    @torch.no_grad()
    def restore() -> list[str]:
        changed = []
        for (part, space), tensors, parameters, nothing in zip(spaces, before, trained, empty, strict=True):
            replaced = [f"{part}.{name}".lstrip(".") for name, one in parameters.items() if space.get(name) is not one]
            space.update(parameters)
            advice = "functional_call swaps those of a module with two names twice: call it with tie_weights=False."
            must = "leave the parameters of the model in their places"
            require(not replaced, "sample_loss", must, f"others for {', '.join(replaced)}", advice)
            for name in [name for name, value in space.items() if _fixed(value) and name not in tensors]:
                changed.append(f"{part}.{name}".lstrip("."))
                del space[name]
                space |= {name: None} if name in nothing else {}
            for name, (tensor, value, version) in tensors.items():
                if not _same(tensor, value, version):
                    if value is None:
                        raise RuntimeError(f"the model changes `{f'{part}.{name}'.lstrip('.')}` in a forward pass")
                    if tensor.shape != value.shape:  # such as a table that grew
                        tensor.resize_(value.shape)
                    tensor.copy_(value)
                    changed.append(f"{part}.{name}".lstrip("."))
                elif space.get(name) is not tensor:
                    changed.append(f"{part}.{name}".lstrip("."))
                space[name] = tensor
        return changed

    try:
        yield restore
    finally:
        restore()


def _copied(tensor: Tensor) -> Tensor | None:
    return None if is_large(tensor) else tensor.detach().clone()


def is_large(tensor: Tensor) -> bool:
    """Whether a tensor is so large that a change in place is noticed by its version, without a copy."""
    return tensor.layout is torch.strided and tensor.numel() > _COPIED and tensor.element_size() <= 8


def _same(tensor: Tensor, value: Tensor | None, version: int) -> bool:
    """Whether a tensor still has a value, NaN included; whether a sparse or large one was not changed in place."""
    if value is None or tensor.layout is not torch.strided or tensor.is_meta:
        return tensor._version == version
    return torch.equal(tensor, value) or _bytes_of(tensor) == _bytes_of(value)


def _fixed(value: Any) -> bool:
    return isinstance(value, Tensor) and not _trained(value)


def _trained(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.requires_grad


def large_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model of which checks make no copy, by their first names."""
    return {name: one for name, one in (*net.named_parameters(), *net.named_buffers()) if is_large(one)}


def contents(net: nn.Module, shared: Iterable[Tensor] = ()) -> dict[str, object]:
    """Return what tells whether two copies of a model keep the same: by name, parameters, buffers and attributes.

    Attributes of any depth count: in collections, arrays and objects (with slots, too), in what a function or hook is
    bound to or closes over, and in the classes of users. Variables of Python modules do not count. Of tensors that the
    copies have `shared` the version counts.
    """
    seen = Walk({id(one): one for one in shared})
    return {
        f"{name}.{key}".lstrip("."): _content(value, seen)
        for name, part in net.named_modules()
        for key, value in {**_of_class(type(part), seen), **part._parameters, **part._buffers, **vars(part)}.items()
        if key not in ("_parameters", "_buffers", "_modules")
    }


class Walk(dict[int, Any]):
    """The objects that a walk through a model has seen, by id, and what it has read of them.

    If all of it is as it was (`is_current`), another walk would find the same. That takes a fraction of a walk: objects
    are compared by identity, and of numbers that change in place their content.
    """

    def __init__(self, seen: Mapping[int, Any] | None = None) -> None:
        super().__init__(seen or {})
        self._first = 0  # place of the first object
        self._order = {key: place for place, key in enumerate(self)}
        self.kept: list[object] = []  # so that no other object gets its id
        self._tables: dict[int, dict[Any, Any]] = {}
        self._spaces: dict[int, MappingProxyType[str, Any]] = {}  # of classes
        self._functions: dict[int, FunctionType] = {}
        self._names: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}  # of variables of files
        self._parts: dict[object, Callable[[], Iterable[object]]] = {}
        self._numbers: dict[object, tuple[Callable[[], object], object]] = {}
        self._in_place: dict[int, _Version] = {}  # of tensors of which versions are compared

    def join(self, value: object) -> None:
        """Note that the walk has seen an object."""
        self._order.setdefault(id(value), self._first + len(self._order))
        self[id(value)] = value

    def nested(self) -> Walk:
        """Return a walk that has seen what this one has seen by now, and of which this one learns nothing."""
        return _Nested(self)

    def place(self, key: int) -> int | None:
        """Return the place in the walk of the object with an id; None if it has not seen it."""
        return self._order.get(key)

    def again(self, value: object) -> tuple[str, int]:
        """Return the place in the walk of an object that it has seen: another one in its place is a change."""
        place = self.place(id(value))
        assert place is not None  # for mypy
        return "seen", place

    def table(self, table: dict[Any, Any]) -> None:
        """Note a dictionary, and attributes of a subclass."""
        self._tables[id(table)] = table
        own = getattr(table, "__dict__", None)
        if type(own) is dict:
            self._tables[id(own)] = own

    def space(self, kind: type) -> None:
        self._spaces[id(kind)] = vars(kind)

    def function(self, function: FunctionType, names: Iterable[str]) -> None:
        self._functions[id(function)] = function
        self.variables(function.__globals__, names)

    def variables(self, variables: dict[str, Any], names: Iterable[str]) -> None:
        """Note variables of a file, which may be there or not."""
        self._names.setdefault(id(variables), (variables, {}))[1].update(dict.fromkeys(names))

    def parts(self, key: object, read: Callable[[], Iterable[object]]) -> None:
        """Note what returns the parts of an object, always in the same order."""
        self._parts.setdefault(key, read)

    def tensors(self, tensors: Sequence[Tensor]) -> None:
        """Note what tensors have beside their numbers."""
        for one in tensors:
            self.table(vars(one))
        chained = itertools.chain.from_iterable
        self.parts(("tensors", len(self._parts)), lambda: chained(map(_OF_TENSORS, tensors)))

    def number(self, key: object, read: Callable[[], T]) -> T:
        """Return what `read` returns, which can be compared."""
        if key not in self._numbers:
            self._numbers[key] = read, read()
        return self._numbers[key][1]  # type: ignore[return-value]

    def version(self, tensor: Tensor) -> object:
        """Return what has the version of a tensor, which is compared in place of its numbers."""
        if id(tensor) not in self._in_place:
            self._in_place[id(tensor)] = _Version(tensor)
        return self._in_place[id(tensor)]

    def close(self) -> Walk:
        """Note all objects at the end of a walk."""
        self._filled = [one for one in self._tables.values() if one]  # the size of an empty one tells all
        self._objects = [[*found] for found in self._now()]
        return self

    def _now(self) -> Iterator[Iterable[object]]:
        chained = itertools.chain.from_iterable
        tables, spaces, names = self._tables.values(), self._spaces.values(), self._names.values()
        yield self._sizes(tables, spaces)
        yield chained(map(dict.keys, self._filled))
        yield chained(map(dict.values, self._filled))
        yield chained(spaces)
        yield chained(map(MappingProxyType.values, spaces))
        yield chained(map(_OF_FUNCTIONS, self._functions.values()))
        yield chained(map(variables.get, those) for variables, those in names)
        yield chained(chained(zip(map(operator.call, self._parts.values()), itertools.repeat(_END))))

    @staticmethod
    def _sizes(tables: Iterable[dict[Any, Any]], spaces: Iterable[Any]) -> Iterable[object]:
        """Return the numbers of entries, as objects of which there is one for each number."""
        return map(_NUMBERS.setdefault, sizes := [*map(dict.__len__, tables), *map(len, spaces)], sizes)

    def renewed(self) -> bool:
        """Return whether everything is as it was but for versions, which are noted again."""
        if not self.is_current(versions=False):
            return False
        for one in self._in_place.values():
            one.note()
        return True

    def is_current(self, versions: bool = True) -> bool:
        """Return whether everything that was read is as it was, if asked for the versions of tensors, too."""
        try:
            return (
                not (versions and any(one.has_changed() for one in self._in_place.values()))
                and all(map(_are_same, self._now(), self._objects))
                and all(read() == before for read, before in self._numbers.values())
            )
        except Exception:  # of a user's object; another walk says what is wrong
            return False


class _Version:
    """The version of a tensor when it was last noted; it equals another one of that number."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.note()

    def note(self) -> None:
        self._number = self._tensor._version

    def has_changed(self) -> bool:
        return self._tensor._version != self._number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Version) and other._number == self._number

    def __repr__(self) -> str:
        return f"version {self._number}"


class _Nested(Walk):
    """What `Walk.nested` returns."""

    def __init__(self, outer: Walk) -> None:
        super().__init__()
        self._outer, self._first = outer, outer._first + len(outer._order)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int) and self.place(key) is not None

    def place(self, key: int) -> int | None:
        if key in self._order:
            return self._order[key]
        place = self._outer.place(key)
        return place if place is not None and place < self._first else None


def _are_same(found: Iterable[object], before: Iterable[object]) -> bool:
    return all(map(operator.is_, itertools.chain(found, _END), itertools.chain(before, _END)))


_END = (object(),)  # of some objects, so that others of another number are not the same
_OF_TENSORS = operator.attrgetter("requires_grad", "grad", "_backward_hooks")
_NAMED = ("__name__", "__qualname__", "__doc__", "__module__")
_OF_FUNCTIONS = operator.attrgetter("__code__", "__closure__", "__defaults__", "__kwdefaults__", "__dict__", *_NAMED)
_NUMBERS: dict[int, int] = {}


class Kept:
    """What models, losses and functions keep now, to find out whether a pass changes it.

    Of torch's own layers only attributes and small buffers are compared: their code keeps nothing, and a user's
    code that sets an attribute of theirs is noticed. Parameters, and large buffers, count by their version.
    """

    def __init__(self, owners: Sequence[object]) -> None:
        self._owners = owners
        self._walk = Walk()
        self._before = self._now(self._walk)
        self._walk.close()

    def again(self) -> Kept:
        """Return what is kept now: this, if nothing has changed but the numbers of parameters and large buffers."""
        return self if self._walk.renewed() else Kept(self._owners)

    def changed(self) -> list[str]:
        """Return the names of what is kept otherwise than at first."""
        if self._walk.is_current():
            return []
        after = self._now(Walk())
        return [name for name in {**self._before, **after} if not _alike(self._before.get(name), after.get(name))]

    def require_same(self, more: str = "") -> None:
        """Raise UserError if something is kept otherwise than at first, or `more` is."""
        if kept := [*(f"`{name}`" for name in self.changed()), *filter(None, [more])]:
            raise UserError(
                f"`model` must keep nothing of a pass for the next one, got {', '.join(kept)}. Remove attributes, "
                "caches, lists and counters that a pass fills: they would bring a record into the gradients of others. "
                "Draw random numbers by torch."
            )

    def _now(self, seen: Walk) -> dict[str, object]:
        parts = [
            (name, part)
            for owner in self._owners
            for name, part in (owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)])
        ]
        modules = [part for _, part in parts if isinstance(part, nn.Module)]
        for one in (one for part in modules for one in (part, *_large(part))):
            seen.join(one)
        for module in modules:
            for name, table in vars(module).items():
                if isinstance(table, dict) and (name in _OF_TORCH or name.endswith("_hooks")):
                    seen.table(table)
            if isinstance(module, nn.RNNBase):
                seen.parts((id(module), "attributes"), functools.partial(_attributes, module))
            else:
                seen.table(vars(module))
        found: dict[str, object] = {}
        tensors = [one for part in modules for one in (*part._parameters.values(), *part._buffers.values())]
        seen.tensors([one for one in tensors if one is not None])
        for name, part in parts:
            if not isinstance(part, nn.Module):
                found[getattr(part, "__name__", type(part).__name__)] = _content(part, seen)
                continue
            prefix = f"{name}." if name else ""
            found[f"{prefix}slots"] = _of_slots(part, seen)
            found[f"{prefix}names"] = (*part._parameters, None, *part._buffers, None, *part._modules)
            found[f"{prefix}modules"] = tuple(one and seen.again(one) for one in part._modules.values())
            for key, one in (*part._parameters.items(), *part._buffers.items()):
                if one is not None:
                    found[f"{prefix}{key} as an object"] = _as_an_object(one, seen)
            for key, one in vars(part).items():
                if key.endswith("_hooks"):
                    found[f"{prefix}{key} as an object"] = _of_subclass(one, seen)
            found |= {f"{prefix}{key}": _content(one, seen) for key, one in part._buffers.items() if one is not None}
            if type(part).__module__.startswith("torch.nn.modules."):
                found[f"{prefix}attributes"] = [
                    (key, one if key in _OF_TORCH or isinstance(one, Tensor | nn.Module) else _content(one, seen))
                    for key, one in vars(part).items()
                    if not (isinstance(part, nn.RNNBase) and key in _MADE_ANEW) and not key.endswith("_hooks")
                ]
                hooks = {key: one for key, one in vars(part).items() if key.endswith("_hooks") and one}
                found |= {f"{prefix}{key}": _content(one, seen) for key, one in hooks.items()}
            else:
                of_class = _of_class(type(part), seen)
                attributes = {key: one for key, one in vars(part).items() if key not in _OF_TORCH}
                found |= {f"{prefix}{key}": _content(one, seen) for key, one in {**of_class, **attributes}.items()}
        return found


_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules"})
_MADE_ANEW = frozenset({"_flat_weights", "_flat_weight_refs"})  # of recurrent layers, by `Watch.check` after each pass
_COLLECTIONS = (list, dict, set, deque, bytearray, np.ndarray)
#: modules of Python with classes whose objects hold what a user puts into them
_HOLDERS = frozenset({"argparse", "collections", "types", "_thread", "threading"})


def _large(part: nn.Module) -> list[Tensor]:
    parameters = (one for one in part._parameters.values() if one is not None)
    return [*parameters, *(one for one in part._buffers.values() if one is not None and is_large(one))]


def _as_an_object(tensor: Tensor, seen: Walk) -> object:
    """Return what a tensor has beside its numbers."""
    return tensor.requires_grad, id(tensor.grad), id(tensor._backward_hooks), _content(vars(tensor), seen)


def _alike(before: object, after: object) -> bool:
    """Return whether contents, or attributes with their names, are the same; objects if they are identical."""
    if not isinstance(before, list) or not isinstance(after, list):
        return before == after
    plain = (bool, int, float, str, tuple, type(None))
    return len(before) == len(after) and all(
        name == other and (one is two or (isinstance(one, plain) and type(one) is type(two) and one == two))
        for (name, one), (other, two) in zip(before, after, strict=True)
    )


def _values_of(value: object, names: Sequence[str]) -> list[object]:
    return [getattr(value, name, None) for name in names]


def _attributes(part: nn.Module) -> list[object]:
    """Return the names and attributes of a module, but for what a layer makes anew in each pass."""
    attributes = vars(part)
    names = [name for name in attributes if name not in _MADE_ANEW]
    return [*names, *map(attributes.__getitem__, names)]


def _content(value: Any, seen: Walk) -> object:
    """Return what can be compared of a value; None for an object in `seen`, by its id, which it joins."""
    if value is None or id(type(value)) in _TEXTUAL_IDS:
        return repr(value)
    if isinstance(value, Tensor):
        if id(value) in seen:
            return seen.version(value), seen.again(value)
        seen.kept.append(value)
        seen.tensors([value])
        return seen.number(id(value), functools.partial(_numbers, value)), _as_an_object(value, seen)
    state, held, hides = _kind(type(value))
    if state is not None:
        seen.kept.append(value)
        found = seen.number(id(value), functools.partial(_content_of_state, state, value, seen.nested()))
        if id(value) in seen:
            return found, seen.again(value)
        seen.join(value)
        return found, _of_subclass(value, seen), _content(value(), seen) if isinstance(value, weakref.ref) else None
    if isinstance(value, np.ndarray) and value.dtype != object:
        seen.kept.append(value)
        return seen.number(id(value), functools.partial(_of_array, value)), _of_subclass(value, seen)
    if isinstance(value, bytearray):
        seen.kept.append(value)
        return seen.number(id(value), lambda: bytes(value)), _of_subclass(value, seen)
    if isinstance(value, type):
        return _Itself(value), _content(_of_class(value, seen), seen)
    if isinstance(value, ModuleType):
        return (_Itself(value),)
    if id(value) in seen:
        return seen.again(value)
    seen.join(value)  # kept, so that no other object gets its id
    if (own := next((one for one in _VALUES if issubclass(type(value), one)), None)) is not None:
        number: object = own.__repr__(value) if own is not np.generic else (value.dtype, value.tobytes())  # type: ignore[call-arg]
        return type(value), number, _of_subclass(value, seen)
    if isinstance(value, Mapping):
        if isinstance(value, dict):
            seen.table(value)
        if not isinstance(value, dict) or isinstance(value, OrderedDict):
            seen.parts(id(value), lambda: itertools.chain.from_iterable(_items(value)))
        default = operator.attrgetter("default_factory") if isinstance(value, defaultdict) else _nothing
        seen.parts((id(value), "default"), lambda: [default(value)])
        entries = [(_key(key, seen), _content(one, seen)) for key, one in _items(value)]
        return *entries, _of_subclass(value, seen), _content(default(value), seen)
    if isinstance(value, list | tuple | deque | np.ndarray):
        if not isinstance(value, tuple):
            seen.parts(id(value), lambda: value)
        return *(_content(one, seen) for one in value), _of_subclass(value, seen)
    if isinstance(value, set | frozenset):
        seen.parts(id(value), lambda: sorted(value, key=id))
        return *sorted(str(_content(one, seen)) for one in value), _of_subclass(value, seen)
    if (
        isinstance(value, Iterator)
        and not isinstance(value, IOBase)
        and type(value).__reduce__ is not object.__reduce__
    ):
        reduce = type(value).__reduce__
        return seen.number(id(value), functools.partial(_content_of_state, reduce, value, seen.nested()))
    if isinstance(value, FunctionType):
        seen.function(value, ())
    else:
        seen.parts((id(value), "held"), lambda: [type(value), *_values_of(value, held)])
    parts = {name: _content(getattr(value, name, None), seen) for name in held}
    memory = seen.number((id(value), "memory"), functools.partial(_in_memory, value, seen.nested())) if hides else None
    memory = value.__name__ if isinstance(value, BuiltinMethodType) else memory
    if isinstance(value, FunctionType):
        parts |= {f"its {name}": repr(getattr(value, name)) for name in _NAMED} | _referred(value, seen)
        parts["its code"] = id(value.__code__)
    return type(value), memory, tuple(parts.items()), _content(_of_class(type(value), seen), seen)


@dataclass(frozen=True, eq=False)
class _Itself:
    """An object that equals itself alone; it is kept, so that no other one gets its id."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __repr__(self) -> str:
        return f"{id(self.value)}"


def _in_memory(value: Any, seen: Walk) -> object:
    """Return what can be compared of an object whose memory no attribute shows: what a copy needs, or itself.

    Only classes of Python, NumPy and torch are asked for what a copy needs: others could run a user's code.
    """
    ways = type(value).__reduce_ex__, type(value).__reduce__
    known = {str(getattr(one, "__module__", "")).partition(".")[0] for one in type(value).__mro__} <= _LIBRARIES
    if known and not any(isinstance(one, FunctionType) for one in ways):
        with suppress(Exception):  # it has no copies
            return _content(value.__reduce_ex__(4), seen.nested())
    return (_Itself(value),)


def _hides(kind: type) -> bool:
    """Return whether objects of a class have memory of which neither slots nor a dictionary show anything."""
    words = (
        len({*_slots(kind)} - {"__dict__", "__weakref__"}) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    )
    return kind.__itemsize__ > 0 or kind.__basicsize__ > object.__basicsize__ + words * _WORD


def _nothing(value: object) -> None:
    return None


def _of_array(value: np.ndarray[Any, Any]) -> object:
    mask = np.ma.getmaskarray(value).tobytes() if isinstance(value, np.ma.MaskedArray) else b""
    return value.dtype, value.shape, value.flags.writeable, hash(np.asarray(value).tobytes()), hash(mask)


def _key(key: Any, seen: Walk) -> object:
    """Return what can be compared of a key, which may be an object with state."""
    return repr(key) if id(type(key)) in _TEXTUAL_IDS else (repr(key), _content(key, seen))


def _of_subclass(value: Any, seen: Walk) -> object:
    """Return what an instance of a subclass has beside what its class of Python, or of a library, has."""
    kind = type(value)
    if id(kind) in _BUILT_IN:
        return None
    own = getattr(value, "__dict__", None)
    attributes = _content(own, seen) if type(own) is dict else None
    return attributes, _of_slots(value, seen), _content(_of_class(kind, seen), seen)


def _of_slots(value: object, seen: Walk) -> object:
    """Return the contents of the slots of a class of a user."""
    if not (slots := _slots(type(value))):
        return ()
    read = functools.partial(_values_of, value, slots)
    seen.parts((id(value), "slots"), read)
    return tuple((name, _content(one, seen)) for name, one in zip(slots, read(), strict=True))


_BUILT_IN = frozenset(  # classes whose instances have no attributes of their own
    map(id, (dict, list, tuple, set, frozenset, str, bytes, int, float, complex, bool, deque, np.ndarray))
)
_TEXTUAL = frozenset({str, bytes, int, bool, float, complex})
_TEXTUAL_IDS = frozenset(map(id, _TEXTUAL))  # a metaclass may say that a class equals another
#: classes whose objects never change: another value is another object
_VALUES: tuple[type, ...] = (*_TEXTUAL, np.generic, Decimal, timedelta, range, torch.device)
_WORD = struct.calcsize("P")


def _numbers(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), _bytes_of(tensor)


def _content_of_state(state: Callable[[Any], object], value: Any, seen: Walk) -> object:
    return type(value), _content(state(value), seen.nested())


def _kind(kind: type) -> tuple[Callable[[Any], object] | None, tuple[str, ...], bool]:
    """Return what gives the state of objects of a class, if any, attributes that hold it, and if memory hides it.

    It is known by its id, because a class may say that it equals another.
    """
    if id(kind) not in _KINDS:
        state = next((of for one, of in _STATES.items() if issubclass(kind, one)), None)
        held = next((names for one, names in _HELD.items() if issubclass(kind, one)), ())
        hides = not held and _hides(kind)
        _KINDS[id(kind)] = kind, state, held or ("__dict__", *_slots(kind)), hides
    return _KINDS[id(kind)][1:]


_KINDS: dict[int, tuple[type, Callable[[Any], object] | None, tuple[str, ...], bool]] = {}


@functools.lru_cache(maxsize=4096)
def _names_of(code: CodeType) -> tuple[str, ...]:
    return tuple(names_in(code))


def _referred(function: FunctionType, seen: Walk) -> dict[str, object]:
    """Return the contents of what a user's function refers to in files of users: numbers, functions, classes."""
    if function.__module__.partition(".")[0] in _LIBRARIES:
        return {}
    found: dict[str, object] = {}
    names, spaces = _names_of(function.__code__), [function.__globals__]
    seen.function(function, names)
    for space in spaces:  # files that the function's file imports join
        seen.variables(space, names)
        for name in names:
            value = space[name] if name in space else sys.modules.get(name) if name in _OF_MODULES else None
            if not isinstance(value, ModuleType):
                found[f"{len(spaces)} {name}"] = _of_variable(value, function.__module__, seen)
            elif (state := _OF_MODULES.get(value.__name__)) is not None:
                found[name] = seen.number(value.__name__, state)
            elif _is_users(value.__name__) and not any(vars(value) is one for one in spaces):
                spaces.append(vars(value))
    return found


def _of_variable(value: Any, file: str, seen: Walk) -> object:
    """Return what can be compared of a variable to which a function of a file refers."""
    home = str(getattr(value if isinstance(value, FunctionType | type) else type(value), "__module__", ""))
    of_users = home == file or _is_users(home)
    if isinstance(value, FunctionType | type):
        content = value if isinstance(value, FunctionType) else _of_class(value, seen) if of_users else None
        return (_content(content, seen), _Itself(value)) if of_users else None
    if isinstance(value, nn.Module):
        return _of_model(value, seen)
    if value is None or type(value) in _TEXTUAL:
        return repr(value)  # another one would be another object
    if isinstance(value, Iterator) or _kind(type(value))[0] is not None:
        return _content(value, seen)
    own = getattr(value, "__dict__", None)
    for one in (value, own) if of_users else (value,):
        _note_collections(one, seen)
    methods = _content(_of_class(type(value), seen), seen) if of_users else None
    return _numbers_in(value), _numbers_in(own) if of_users else None, methods, *_functions_of(value, seen)


def _of_model(model: nn.Module, seen: Walk) -> object:
    """Return what tells whether a model that is no part of the trained one changes: tensors count by their versions."""
    found: list[object] = []
    for part in (one for one in model.modules() if id(one) not in seen):
        seen.join(part)
        attributes = {name: one for name, one in vars(part).items() if name not in (*_OF_TORCH, *_MADE_ANEW)}
        for table in (vars(part), part._parameters, part._buffers, part._modules):
            seen.table(table)
        for one in (*part._parameters.values(), *part._buffers.values()):
            found.append(one if one is None else (seen.version(one), id(one)))
        _note_collections(attributes, seen)
        found += [_numbers_in(attributes), _content(_of_class(type(part), seen), seen)]
    return found


@functools.lru_cache(maxsize=4096)
def _is_users(module: str) -> bool:
    """Return whether a module is a file of a user, not of Python, of this package or installed."""
    top = module.partition(".")[0]
    file = str(getattr(sys.modules.get(module), "__file__", ""))
    installed = bool({"site-packages", "dist-packages"} & {*Path(file).parts}) or _is_installed(top)
    return top not in _LIBRARIES and not installed


@functools.cache
def _is_installed(top: str) -> bool:
    """Return whether a package lies where pip has installed it, in a folder of any name."""
    file = getattr(sys.modules.get(top), "__file__", None)
    folder = Path(file).parent.parent if file and Path(file).stem == "__init__" else None
    return folder is not None and next(folder.glob("*.dist-info"), None) is not None


def _held_by(value: Any) -> Any:
    """Return what an object holds that stands for it, of a user's class or of Python's own holders of attributes."""
    kind = type(value)
    if kind is functools.partial:
        return (value.func, value.args, value.keywords)
    if isinstance(value, (*_COLLECTIONS, frozenset, tuple, Mapping, Tensor, nn.Module, type, FunctionType, ModuleType)):
        return value
    if kind.__module__ in _HOLDERS or _is_users(kind.__module__):
        return {
            **(getattr(value, "__dict__", None) or {}),
            **{name: getattr(value, name, None) for name in _slots(kind)},
        }
    return value


def _functions_of(value: Any, seen: Walk) -> Iterator[object]:
    """Yield the contents of functions in a collection of a file."""
    if isinstance(value, functools.partial):
        yield _content(value.func, seen)
    if isinstance(value, dict | list | tuple | set | frozenset) and len(value) <= _MOST_ENTRIES:
        for one in value.values() if isinstance(value, dict) else value:
            if type(one) is FunctionType:
                yield _content(one, seen)


def _note_collections(value: Any, seen: Walk, depth: int = 0) -> None:
    """Note what `_numbers_in` reads: the entries of collections by identity, and numbers that change in place."""
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.hasobject is False):
        seen.kept.append(value)
        seen.number((id(value), "numbers"), functools.partial(_numbers_in, value))
    held = _held_by(value)
    if depth > _MOST_LEVELS or not isinstance(held, (*_COLLECTIONS, tuple, Mapping)) or len(held) > _MOST_ENTRIES:
        return
    seen.kept.append(value)

    def entries() -> Iterable[Any]:
        held = _held_by(value)
        if isinstance(held, Mapping):
            return itertools.chain.from_iterable(_items(held))
        return sorted(held, key=id) if isinstance(held, set | frozenset) else held

    seen.parts((id(value), "entries"), entries)
    for one in entries():
        if type(one) not in _TEXTUAL:
            _note_collections(one, seen, depth + 1)


def _used(cache_info: Callable[[], Any]) -> tuple[int, int]:
    return cache_info().currsize, cache_info().misses


def _of_numpy() -> int:
    state = np.random.get_state(legacy=False)["state"]  # type: ignore[call-overload]
    return hash((state["key"].tobytes(), state["pos"]))


#: what modules keep that code refers to; threads that change it meanwhile are rare, and end a run
_OF_MODULES: Mapping[str, Callable[[], int]] = {
    "random": lambda: hash(random.getstate()),
    "numpy": _of_numpy,
    "numpy.random": _of_numpy,
    "os": lambda: hash(frozenset(os.environ._data.items())),  # type: ignore[attr-defined]  # without decoding
}


def _numbers_in(value: Any, depth: int = 0) -> object:
    """Return the numbers and texts in collections of a few levels, to be compared; of other objects their identity."""
    if isinstance(value, Tensor):
        return value._version if is_large(value) else _bytes_of(value)
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        return repr(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.shape, hash(value.tobytes())
    value = _held_by(value)
    if depth > _MOST_LEVELS or not isinstance(value, (*_COLLECTIONS, tuple, Mapping)) or len(value) > _MOST_ENTRIES:
        return id(value)
    if isinstance(value, Mapping):
        value = [*itertools.chain.from_iterable(_items(value))]  # entries are new tuples each time
    return tuple(_numbers_in(one, depth + 1) for one in value)


def _items(value: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Return the entries as they are stored: a dictionary of another class may make new ones whenever it is asked."""
    if isinstance(value, OrderedDict):  # which knows another order than the dictionary that it is
        return OrderedDict.items(value)
    return dict.items(value) if isinstance(value, dict) else value.items()


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of variables that code refers to, and functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def _of_frame(frame: FrameType | None) -> tuple[object, ...]:
    return () if frame is None else (frame.f_lasti, dict(frame.f_locals))


#: generators, which hold their state elsewhere
_STATES: dict[type, Callable[[Any], object]] = {
    torch.Generator: torch.Generator.get_state,
    np.random.Generator: lambda one: one.bit_generator.state,
    np.random.BitGenerator: lambda one: one.state,
    np.random.RandomState: lambda one: one.get_state(legacy=False),
    random.Random: random.Random.getstate,
    itertools.count: repr,
    array: array.tobytes,
    memoryview: memoryview.tobytes,
    GeneratorType: lambda one: (*_of_frame(one.gi_frame), one.gi_yieldfrom),
    CoroutineType: lambda one: (*_of_frame(one.cr_frame), one.cr_await),
    np.random.SeedSequence: lambda one: one.state,
    weakref.ref: lambda one: id(one()),
    ContextVar: lambda one: one.get(None),
    functools._lru_cache_wrapper: lambda one: _used(one.cache_info),
    np.void: lambda one: (one.dtype, one.item() if one.dtype.hasobject else one.tobytes()),
    torch.UntypedStorage: lambda one: hash(bytes(one)) if len(one) <= _COPIED else len(one),
}
#: what holds the state of objects without a dictionary of attributes
_HELD: dict[type, tuple[str, ...]] = {
    FunctionType: ("__closure__", "__defaults__", "__kwdefaults__", "__annotations__", "__dict__"),
    CellType: ("cell_contents",),
    MethodType: ("__self__", "__func__"),
    BuiltinMethodType: ("__self__",),
    functools.partial: ("func", "args", "keywords", "__dict__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    GenericAlias: ("__origin__", "__args__"),  # its other attributes are those of the class
    UnionType: ("__args__",),
    BaseException: ("args", "__cause__", "__context__", "__dict__"),
}


def _slots(kind: type) -> list[str]:
    """Names of the slots of a class and of its bases."""
    found: list[str] = []
    for one in kind.__mro__:
        names = vars(one).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{one.__name__.lstrip('_')}{name}" if private else name)
    return found


def _of_class(kind: type, seen: Walk) -> dict[str, Any]:
    """Attributes of a class and of its bases, unless they belong to Python or a library of this package."""
    if id(kind) in seen:
        return {}
    seen.join(kind)
    line = [*reversed(inspect.getmro(type(kind))), *reversed(kind.__mro__)]
    users = [one for one in line if str(one.__module__).partition(".")[0] not in _LIBRARIES]
    for one in users:
        seen.space(one)
    special = vars(_Plain).keys() - {"__doc__"}
    return {
        name: id(value) if name.startswith("__") and type(value) not in _TEXTUAL else value
        for one in users
        for name, value in vars(one).items()
        if name not in special
    }


class _Plain:
    """A class whose special attributes all classes have."""

    __slots__ = ("__dict__", "__weakref__")
    __annotations__: dict[str, Any] = {}
    __abstractmethods__ = __orig_bases__ = __parameters__ = __firstlineno__ = __static_attributes__ = ()


_LIBRARIES = {*sys.stdlib_module_names, "dpfl_lightning", "lightning", "numpy", "torch", "torchmetrics"} - {"__main__"}


def _bytes_of(tensor: Tensor) -> object:
    if tensor.is_meta:  # without numbers
        return None
    if tensor.is_quantized:
        return _bytes_of(tensor.int_repr()), tensor.qscheme()
    try:
        flat = tensor.detach().to_dense().cpu().resolve_conj().reshape(-1).view(torch.uint8)
        return hash(flat.clone().numpy().tobytes())  # a copy: what numpy holds cannot be resized by the model
    except (RuntimeError, TypeError, NotImplementedError):  # what a transform leaves behind, or has no plain memory
        return object()  # equals nothing
