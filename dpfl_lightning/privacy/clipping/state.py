"""What a model keeps from one pass to the next, which neither clipping nor noise covers."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import logging
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
from io import BytesIO, IOBase, StringIO
from types import (
    BuiltinMethodType,
    CellType,
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
from dpfl_lightning.privacy.clipping.files import file_of, home_of, imports_of, is_library, is_users, names_of

T = TypeVar("T")

_MOST_ENTRIES = 1 << 14  # of a collection in a variable of a file that is compared: longer ones are tables
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
                    if not tensor.is_nested and tensor.shape != value.shape:  # such as a table that grew
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
    if tensor.is_nested:
        return _bytes_of(tensor) == _bytes_of(value)
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
    seen, found = Walk(shared), dict[str, object]()
    for name, part in net.named_modules():
        of_class = {} if type(part) in seen else _of_class(type(part), seen)
        seen.join(type(part))
        for key, value in {**of_class, **part._parameters, **part._buffers, **vars(part)}.items():
            if key not in _OF_TORCH:
                known = f"{name}.{key}".lstrip(".")
                found[known] = seen.root(known, value)
    return found


class Walk:
    """A walk through what a model keeps: the objects that it has seen, and what it has read of them.

    If all of it is as it was (`is_current`), another walk would find the same. That takes a fraction of a walk: objects
    are compared by identity, and of numbers that change in place their content. Of tensors that are `shared` the
    version counts. In variables of a `file` it ends at objects of libraries, which count by their identity.
    """

    def __init__(self, shared: Iterable[Tensor] = ()) -> None:
        self._first = 0  # place of the first object
        self._places: dict[int, tuple[int, str, int]] = {}  # of objects, by id: in the walk, and from a root
        self._root, self._of_root = "", 0
        self.file: str | None = None
        self._waiting: list[object] = []
        self.functions: list[FunctionType] | None = []  # whose variables count
        self.kept: list[object] = []  # so that no other object gets its id
        self._shared: set[int] = set()
        self._tables: dict[int, dict[Any, Any]] = {}
        self._spaces: dict[int, MappingProxyType[str, Any]] = {}  # of classes
        self._functions: dict[int, FunctionType] = {}
        self._names: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}  # of variables of files
        self._parts: dict[object, Callable[[], Iterable[object]]] = {}
        self._numbers: dict[object, tuple[Callable[[], object], object]] = {}
        self._in_place: dict[int, _Version] = {}  # of tensors of which versions are compared
        for one in shared:
            self.share(one)

    def __contains__(self, value: object) -> bool:
        return self._place(value) is not None

    def _place(self, value: object) -> tuple[int, str, int] | None:
        return self._places.get(id(value))

    def join(self, value: object) -> None:
        """Note that the walk has seen an object."""
        if value not in self:
            self._places[id(value)] = self._first + len(self._places), self._root, self._of_root
            self._of_root += 1
            self.kept.append(value)

    def share(self, tensor: Tensor) -> None:
        self.join(tensor)
        self._shared.add(id(tensor))

    def nested(self) -> Walk:
        """Return a walk that has seen what this one has seen by now, and of which this one learns functions alone."""
        return _Nested(self)

    def part(self, value: object) -> object:
        """Return what stands for a part of an object: its text, or its place. What is new waits to be described."""
        if value is None or id(type(value)) in _TEXTUAL_IDS:
            return repr(value)
        if value not in self:
            self.join(value)
            self._waiting.append(value)
        elif isinstance(value, Tensor) and self._is_shared(value):
            return self.version(value), self.place(value)
        return self.place(value)

    def place(self, value: object) -> tuple[str, int] | None:
        """Return the place of an object that the walk has seen: another one in its place is a change."""
        found = self._place(value)
        return found and found[1:]

    def _is_shared(self, value: object) -> bool:
        return id(value) in self._shared

    def parts_of(self, values: Mapping[str, object]) -> tuple[object, ...]:
        return tuple([(name, self.part(one)) for name, one in values.items()])

    def whole(self, value: object) -> object:
        """Return what can be compared of a value: descriptions of all that it leads to and that is new."""
        if value is None or id(type(value)) in _TEXTUAL_IDS or value in self:
            return self.part(value)
        self.join(value)
        return self._with_parts(lambda: _described(value, self))

    def _with_parts(self, describe: Callable[[], object]) -> object:
        outer, self._waiting = self._waiting, []
        found = [describe()]
        while self._waiting:
            found.append(_described(self._waiting.pop(), self))
        self._waiting = outer
        return tuple(found)

    def root(self, name: str, value: object) -> object:
        """Return what can be compared of an attribute or a variable; places are counted from it."""
        return self.described(name, lambda: self.whole(value))

    def described(self, name: str, describe: Callable[[], object]) -> object:
        """Return what `describe` returns of a root, and what can be compared of the parts that it meets."""
        self._root, self._of_root = name, 0
        try:
            return self._with_parts(describe)
        except RecursionError as error:
            raise UserError(
                f"`model` must keep objects that Python can walk through, got `{name}` with too many levels. "
                "Hold its parts in a list."
            ) from error

    def follows(self, kind: Any) -> bool:
        """Return whether a class or function is read: in variables of a file, if it is of a user or of this file."""
        if self.file is None:
            return True
        home, file = home_of(kind)
        return home == self.file or is_users(home, file)

    def table(self, table: dict[Any, Any]) -> None:
        """Note a dictionary, and attributes of a subclass."""
        self._tables[id(table)] = table
        own = getattr(table, "__dict__", None)
        if type(own) is dict:
            self._tables[id(own)] = own

    def space(self, kind: type) -> None:
        self._spaces[id(kind)] = vars(kind)

    def function(self, function: FunctionType) -> None:
        """Note a function, whose variables count if it is read and of no library."""
        self._functions[id(function)] = function
        if self.follows(function) and not is_library(*home_of(function)):
            self.note_variables(function)

    def note_variables(self, function: FunctionType) -> None:
        if self.functions is not None:
            self.functions.append(function)

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
        self.functions = None
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
        self._outer, self._first = outer, outer._first + len(outer._places)
        self._root, self._of_root, self.file = f"{outer._root}...", 0, outer.file

    def _place(self, value: object) -> tuple[int, str, int] | None:
        if id(value) in self._places:
            return self._places[id(value)]
        place = self._outer._place(value)
        return place if place is not None and place[0] < self._first else None

    def _is_shared(self, value: object) -> bool:
        return self._outer._is_shared(value)

    def note_variables(self, function: FunctionType) -> None:
        self._outer.note_variables(function)


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
        self._caches = set[str]()  # names of attributes and variables
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
        return [name for name in {**self._before, **after} if self._before.get(name) != after.get(name)]

    def require_same(self, more: str = "") -> None:
        """Raise UserError if something is kept otherwise than at first, or `more` is."""
        if kept := [*map(self._named, self.changed()), *filter(None, [more])]:
            raise UserError(
                f"`model` must keep nothing of a pass for the next one, got {', '.join(kept)}. Remove attributes, "
                "variables, lists and counters that a pass fills: they would bring a record into the gradients of "
                "others. What fills a cache of no record is called once in __init__. Draw random numbers by torch."
            )

    def _named(self, name: str) -> str:
        variable, _, file = name.partition(_IN_FILE)
        text = f"`{variable}` of {file}" if file else f"`{name}`"
        return f"{text} (a cache)" if name in self._caches else text

    def _now(self, seen: Walk) -> dict[str, object]:
        """Return what is kept now, by the names of attributes, functions and variables of files."""
        found = self._of_owners(seen)
        hooks = {name: one for name, one in vars(nn.modules.module).items() if name.startswith("_global_")}
        found |= {f"torch's {name}": seen.root(name, one) for name, one in hooks.items() if isinstance(one, dict)}
        for name, value, file in _variables(seen):
            seen.file = file
            found[name] = seen.root(name, value)
            if isinstance(value, functools._lru_cache_wrapper):
                self._caches.add(name)
        return found

    def _of_owners(self, seen: Walk) -> dict[str, object]:
        parts = [
            (name, part)
            for owner in self._owners
            for name, part in (owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)])
        ]
        modules = [part for _, part in parts if isinstance(part, nn.Module)]
        for module in modules:
            seen.join(module)
            for one in _large(module):
                seen.share(one)
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
                known = getattr(part, "__name__", type(part).__name__)
                found[known] = seen.root(known, part)
                continue
            prefix = f"{name}." if name else ""
            known, slots = f"{prefix}its slots", functools.partial(_of_slots, part, seen)
            found[known] = seen.described(known, slots)
            found[f"{prefix}its names"] = (*part._parameters, None, *part._buffers, None, *part._modules)
            found[f"{prefix}its modules"] = tuple(one and seen.part(one) for one in part._modules.values())
            for key, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None:
                    known, beside = f"{prefix}{key} as an object", functools.partial(_as_an_object, tensor, seen)
                    found[known] = seen.place(tensor), seen.described(known, beside)
            for key, one in vars(part).items():
                if key.endswith("_hooks"):
                    known = f"{prefix}{key} as an object"
                    found[known] = seen.described(known, functools.partial(_of_subclass, one, seen))
            of_class = {} if type(part) in seen else _of_class(type(part), seen)
            seen.join(type(part))
            self._caches |= {f"{prefix}{key}" for key, one in of_class.items() if isinstance(one, _CACHES)}
            unseen = {*_OF_TORCH, *(_MADE_ANEW if isinstance(part, nn.RNNBase) else ())}
            buffers = {key: one for key, one in part._buffers.items() if one is not None}
            for key, one in {**buffers, **of_class, **vars(part)}.items():
                no_hooks = key.endswith("_hooks") and isinstance(one, dict) and not one
                if key not in unseen and not no_hooks:
                    found[f"{prefix}{key}"] = seen.root(f"{prefix}{key}", one)
        return found


_IN_FILE = " of "  # which no name of an attribute has
_CACHES = (functools._lru_cache_wrapper, functools.cached_property)


def _variables(seen: Walk) -> Iterator[tuple[str, Any, str]]:
    """Yield variables that functions of users, and of installed packages, name in files, once each; and their files.

    Each may lead to more functions. Of modules of Python and NumPy their state is noted.
    """
    named = set[tuple[int, str]]()
    labels: dict[str, int] = {}
    while seen.functions:
        function = seen.functions.pop()
        file, path = home_of(function)
        spaces, names = [function.__globals__], names_of(function.__code__)
        if is_users(file, path):
            spaces += _imported(function, seen)
        for space in spaces:  # files that the function's file imports join
            seen.variables(space, names)
            file = str(space.get("__name__", ""))
            for name in names:
                value = space[name] if name in space else sys.modules.get(name) if name in _OF_MODULES else None
                if isinstance(value, ModuleType):
                    if (state := _OF_MODULES.get(value.__name__)) is not None:
                        yield f"state{_IN_FILE}{value.__name__}", seen.number(value.__name__, state), file
                    elif is_users(*home_of(value)) and not any(vars(value) is one for one in spaces):
                        spaces.append(vars(value))
                elif name in space and (id(space), name) not in named:
                    named.add((id(space), name))
                    label = f"{name}{_IN_FILE}{file_of(space)}"
                    if labels.setdefault(label, id(space)) != id(space):
                        label += f" ({space.get('__file__')})"
                    yield label, value, file


def _imported(function: FunctionType, seen: Walk) -> Iterator[dict[str, Any]]:
    """Yield the variables of users' files that a function itself imports; those may be imported later, too."""
    package = str(function.__globals__.get("__package__") or "")
    for name, level in imports_of(function.__code__):
        parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
        module = ".".join([*parents, name] if name else parents)
        seen.variables(sys.modules, [module])  # type: ignore[arg-type]
        if (value := sys.modules.get(module)) is not None and is_users(*home_of(value)):
            yield vars(value)


_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules"})
_MADE_ANEW = frozenset({"_flat_weights", "_flat_weight_refs"})  # of recurrent layers, by `Watch.check` after each pass
_SEQUENCES = (list, tuple, deque, np.ndarray)
_COLLECTIONS = (*_SEQUENCES, set, frozenset, Mapping)
#: modules of Python with classes whose objects hold what a user puts into them
_HOLDERS = frozenset({"argparse", "collections", "contextlib", "functools", "queue", "types", "_thread", "threading"})


def _large(part: nn.Module) -> list[Tensor]:
    parameters = (one for one in part._parameters.values() if one is not None)
    return [*parameters, *(one for one in part._buffers.values() if one is not None and is_large(one))]


def _as_an_object(tensor: Tensor, seen: Walk) -> object:
    """Return what a tensor has beside its numbers."""
    return tensor.requires_grad, seen.part(tensor.grad), id(tensor._backward_hooks), seen.parts_of(vars(tensor))


def _values_of(value: object, names: Sequence[str]) -> list[object]:
    return [getattr(value, name, None) for name in names]


def _attributes(part: nn.Module) -> list[object]:
    """Return the names and attributes of a module, but for what a layer makes anew in each pass."""
    attributes = vars(part)
    names = [name for name in attributes if name not in _MADE_ANEW]
    return [*names, *map(attributes.__getitem__, names)]


def _described(value: Any, seen: Walk) -> object:
    """Return what can be compared of an object that a walk has not seen; its parts wait in the walk."""
    kind = type(value)
    if isinstance(value, Tensor):
        seen.tensors([value])
        large = seen.file is not None and is_large(value)
        numbers = seen.version(value) if large else seen.number(id(value), functools.partial(_numbers, value))
        return numbers, _as_an_object(value, seen)
    state, held, hides = _kind(kind)
    if state is not None:
        found = seen.number(id(value), functools.partial(_content_of_state, state, value, seen.nested()))
        return found, _of_subclass(value, seen), seen.part(value()) if isinstance(value, weakref.ref) else None
    if isinstance(value, np.ndarray) and value.dtype != object:
        return seen.number(id(value), functools.partial(_of_array, value)), _of_subclass(value, seen)
    if isinstance(value, bytearray):
        return seen.number(id(value), lambda: bytes(value)), _of_subclass(value, seen)
    if isinstance(value, type):
        return _Itself(value), seen.parts_of(_of_class(value, seen))
    if isinstance(value, ModuleType):
        return (_Itself(value),)
    if (own := next((one for one in _VALUES if issubclass(kind, one)), None)) is not None:
        number: object = own.__repr__(value) if own is not np.generic else (value.dtype, value.tobytes())  # type: ignore[call-arg]
        return kind, number, _of_subclass(value, seen)
    if isinstance(value, functools._lru_cache_wrapper):
        seen.parts(id(value), lambda: _referents(value))
        return tuple(map(seen.part, _referents(value)))
    if seen.file is not None and isinstance(value, _COLLECTIONS) and len(value) > _MOST_ENTRIES:
        return (_Itself(value),)
    if isinstance(value, Mapping):
        if isinstance(value, dict):
            seen.table(value)
        if not isinstance(value, dict) or isinstance(value, OrderedDict):
            seen.parts(id(value), lambda: itertools.chain.from_iterable(_items(value)))
        default = operator.attrgetter("default_factory") if isinstance(value, defaultdict) else _nothing
        seen.parts((id(value), "default"), lambda: [default(value)])
        entries = [(_key(key, seen), seen.part(one)) for key, one in _items(value)]
        return *entries, _of_subclass(value, seen), seen.part(default(value))
    if isinstance(value, _SEQUENCES):
        if not isinstance(value, tuple):
            seen.parts(id(value), lambda: value)
        return *map(seen.part, value), _of_subclass(value, seen)
    if isinstance(value, set | frozenset):
        seen.parts(id(value), lambda: sorted(value, key=id))
        return *sorted(str(seen.whole(one)) for one in value), _of_subclass(value, seen)
    reduce: Any = kind.__reduce__
    if isinstance(value, Iterator) and not isinstance(value, IOBase) and reduce is not object.__reduce__:
        return seen.number(id(value), functools.partial(_content_of_state, reduce, value, seen.nested()))
    if isinstance(value, FunctionType):
        seen.function(value)
        cache = getattr(vars(value).get("_clear_cache"), "__self__", None)
        if value.__globals__ is vars(functools) and type(cache) is weakref.WeakKeyDictionary:
            seen.join(cache)  # of singledispatch: functions by types, no numbers
    elif not (hides or _is_holder(kind) or seen.follows(kind)):
        return (_Itself(value),)
    elif isinstance(value, nn.RNNBase):
        seen.parts((id(value), "attributes"), functools.partial(_attributes, value))
        return kind, tuple(seen.part(one) for one in _attributes(value))
    else:
        seen.parts((id(value), "held"), lambda: [kind, *_values_of(value, held)])
    parts: tuple[object, ...] = tuple((name, seen.part(getattr(value, name, None))) for name in held)
    memory = seen.number((id(value), "memory"), functools.partial(_in_memory, value, seen.nested())) if hides else None
    memory = value.__name__ if isinstance(value, BuiltinMethodType) else memory
    if isinstance(value, FunctionType):
        parts = (*parts, id(value.__code__), *(repr(getattr(value, name)) for name in _NAMED))
    return memory, parts, seen.part(kind)


def _is_holder(kind: type) -> bool:
    """Return whether objects of a class of Python or torch hold what a user puts into them."""
    return kind.__module__ in _HOLDERS or issubclass(kind, (*_HELD, nn.Module, torch.optim.Optimizer))


def _referents(cache: functools._lru_cache_wrapper[Any]) -> list[object]:
    """Return keys and results in a cache, of which no attribute shows anything, and its function."""
    return sorted(gc.get_referents(cache), key=id)


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
    known = all(is_library(*home_of(one)) for one in type(value).__mro__)
    if known and not any(isinstance(one, FunctionType) for one in ways):
        with suppress(Exception):  # it has no copies
            return seen.nested().whole(value.__reduce_ex__(4))
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
    return repr(key) if id(type(key)) in _TEXTUAL_IDS else (repr(key), seen.part(key))


def _of_subclass(value: Any, seen: Walk) -> object:
    """Return what an instance of a subclass has beside what its class of Python, or of a library, has."""
    kind = type(value)
    if id(kind) in _BUILT_IN or not seen.follows(kind):
        return None
    own = getattr(value, "__dict__", None)
    attributes = seen.part(own) if type(own) is dict else None
    return attributes, _of_slots(value, seen), seen.part(kind)


def _of_slots(value: object, seen: Walk) -> object:
    """Return the contents of the slots of a class of a user."""
    if not (slots := _slots(type(value))):
        return ()
    read = functools.partial(_values_of, value, slots)
    seen.parts((id(value), "slots"), read)
    return tuple(map(seen.part, read()))


_BUILT_IN = frozenset(  # classes whose instances have no attributes of their own, or whose state has them
    map(id, (dict, list, tuple, set, frozenset, str, bytes, int, float, complex, bool, deque, np.ndarray))
) | {id(logging.Logger), id(logging.RootLogger)}
_TEXTUAL = frozenset({str, bytes, int, bool, float, complex})
_TEXTUAL_IDS = frozenset(map(id, _TEXTUAL))  # a metaclass may say that a class equals another
#: classes whose objects never change: another value is another object
_VALUES: tuple[type, ...] = (*_TEXTUAL, np.generic, Decimal, timedelta, range, torch.device)
_WORD = struct.calcsize("P")


def _numbers(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, None if tensor.is_nested else tuple(tensor.shape), _bytes_of(tensor)


def _content_of_state(state: Callable[[Any], object], value: Any, seen: Walk) -> object:
    return type(value), seen.nested().whole(state(value))


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


def _items(value: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Return the entries as they are stored: a dictionary of another class may make new ones whenever it is asked."""
    if isinstance(value, OrderedDict):  # which knows another order than the dictionary that it is
        return OrderedDict.items(value)
    return dict.items(value) if isinstance(value, dict) else value.items()


def _of_frame(frame: FrameType | None) -> tuple[object, ...]:
    return () if frame is None else (frame.f_lasti, dict(frame.f_locals))


#: what a logger has beside settings of its own: others, and a cache of levels
_OF_LOGGERS = ("_cache", "manager", "parent", "handlers")
#: generators and the like, which hold their state elsewhere
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
    logging.Logger: lambda one: {name: value for name, value in vars(one).items() if name not in _OF_LOGGERS},
    BytesIO: lambda one: (one.getvalue(), one.tell()),
    StringIO: lambda one: (one.getvalue(), one.tell()),
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
    if not seen.follows(kind):
        return {}
    line = [*reversed(inspect.getmro(type(kind))), *reversed(kind.__mro__)]
    users = [one for one in line if not is_library(*home_of(one))]
    for one in users:
        seen.space(one)
    special = vars(_Plain).keys() - {"__doc__"}
    return {
        name: id(value) if name.startswith("__") and not isinstance(value, _CODE) else value
        for one in users
        for name, value in vars(one).items()
        if name not in special
    }


#: what of special attributes is code, or a text
_CODE = (*_TEXTUAL, FunctionType, MethodType, staticmethod, classmethod, functools.partial, *_CACHES)


class _Plain:
    """A class whose special attributes all classes have."""

    __slots__ = ("__dict__", "__weakref__")
    __annotations__: dict[str, Any] = {}
    __abstractmethods__ = __orig_bases__ = __parameters__ = __firstlineno__ = __static_attributes__ = ()


def _bytes_of(tensor: Tensor) -> object:
    if tensor.is_meta:  # without numbers
        return None
    if tensor.is_nested:
        return tuple((tuple(one.shape), _bytes_of(one)) for one in tensor.detach().unbind())
    if tensor.is_quantized:
        return _bytes_of(tensor.int_repr()), tensor.qscheme()
    try:
        flat = tensor.detach().to_dense().cpu().resolve_conj().reshape(-1).view(torch.uint8)
        return hash(flat.clone().numpy().tobytes())  # a copy: what numpy holds cannot be resized by the model
    except (RuntimeError, TypeError, NotImplementedError):  # what a transform leaves behind, or has no plain memory
        return object()  # equals nothing
