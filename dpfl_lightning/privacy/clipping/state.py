"""What a model keeps from one pass to the next, which neither clipping nor noise covers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.clipping.descriptions import (
    CACHES,
    MADE_ANEW,
    MODULE_STATES,
    Itself,
    as_an_object,
    attributes_of,
    describe,
    of_class,
    of_slots,
    of_subclass,
)
from dpfl_lightning.privacy.clipping.files import file_of, handed_on, home_of, imports_of, is_users, names_of
from dpfl_lightning.privacy.clipping.restored import is_large
from dpfl_lightning.privacy.clipping.walk import CLASS, LIBRARY, Found, Key, Walk


def contents(net: nn.Module, shared: Iterable[Tensor] = ()) -> Mapping[Key, object]:
    """Return what tells whether two copies of a model keep the same: parameters, buffers and attributes.

    Attributes count with all that they lead to: entries of collections and arrays, attributes of objects (in slots,
    too), what a function or hook is bound to or closes over, and users' classes. Variables of Python modules do not
    count, nor what `docs/proof.md` lists as unseen. Of tensors that the copies have `shared` the version counts.
    """
    seen, found = Walk(describe, shared), Found()
    for name, part in net.named_modules():
        prefix = f"{name}." if name else ""
        for key, value in _attributes_of(part, 0, prefix, seen):
            found[key] = seen.root(key, value)
        for key, one in part._parameters.items():
            known = Key(0, "parameter", f"{prefix}{key}")
            found[known] = seen.root(known, one)
    return found


def names_of_changes(before: Mapping[Key, object], after: Mapping[Key, object]) -> list[str]:
    """Return the names of what differs, what is of users first."""
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [*dict.fromkeys(str(key) for key in sorted(keys, key=lambda one: one.kind == LIBRARY))]


def _attributes_of(part: nn.Module, owner: int, prefix: str, seen: Walk) -> Iterator[tuple[Key, Any]]:
    """Yield what a module keeps in attributes, buffers and classes of users, which no other one has had."""
    attributes = {} if type(part) in seen else of_class(type(part), seen)
    seen.join(type(part))
    unseen = {*_OF_TORCH, *(MADE_ANEW if isinstance(part, nn.RNNBase) else ())}
    for key, one in part._buffers.items():
        yield Key(owner, "buffer", f"{prefix}{key}"), one
    for (place, key), one in attributes.items():
        yield Key(owner, f"{CLASS} {place}", f"{prefix}{key}"), one
    for key, one in vars(part).items():
        if key not in unseen and not (key.endswith("_hooks") and isinstance(one, dict) and not one):
            yield Key(owner, "attribute", f"{prefix}{key}"), one


class Kept:
    """What models, losses and functions keep now, to find out whether a pass changes it.

    Of torch's own layers only attributes and small buffers are compared: their code keeps nothing, and a user's
    code that sets an attribute of theirs is noticed. Parameters, and large buffers, count by their version.
    """

    def __init__(self, owners: Sequence[object]) -> None:
        self._owners = owners
        self._caches = set[str]()  # names of attributes and variables
        self._walk = Walk(describe)
        self._before = self._now(self._walk)
        self._walk.close()

    def again(self) -> Kept:
        """Return what is kept now: this, if nothing has changed but the numbers of parameters and large buffers."""
        return self if self._walk.renewed() else Kept(self._owners)

    def changed(self) -> list[str]:
        """Return the names of what is kept otherwise than at first."""
        if self._walk.is_current():
            return []
        walk = Walk(describe, later=True)
        found = names_of_changes(self._before, self._now(walk))
        return found or [_UNNAMED] * self._walk.contradicts(walk)

    def require_same(self, more: str = "") -> None:
        """Raise UserError if something is kept otherwise than at first, or `more` is."""
        if kept := [*map(self._named, self.changed()), *filter(None, [more])]:
            others = f" and {len(kept) - _MOST_NAMED} more" if len(kept) > _MOST_NAMED else ""
            raise UserError(
                f"`model` must keep nothing of a pass for the next one, got {', '.join(kept[:_MOST_NAMED])}{others}. "
                "Remove attributes, variables, lists and counters that a pass fills: they would bring a record into "
                "the gradients of others. What fills a cache of no record is called once in __init__. Draw random "
                "numbers by torch."
            )

    def _named(self, name: str) -> str:
        if name == _UNNAMED:
            return name
        variable, _, file = name.partition(_IN_FILE)
        text = f"`{variable}` of {file}" if file else f"`{name}`"
        return f"{text} (a cache)" if name in self._caches else text

    def _now(self, seen: Walk) -> Found:
        """Return what is kept now of attributes, functions and variables of files."""
        found = Found()
        for owner in self._owners:
            self._add_tables(owner, seen)
        for number, owner in enumerate(self._owners):
            self._add_owner(number, owner, seen, found)
        for name, one in vars(nn.modules.module).items():
            if name.startswith("_global_") and isinstance(one, dict):
                key = Key(0, LIBRARY, f"torch's {name}")
                found[key] = seen.root(key, one)
        for key, value, space in _variables(seen):
            seen.file, seen.globals = str(space.get("__name__", "")), space
            found[key] = seen.root(key, value)
            if isinstance(value, functools._lru_cache_wrapper):
                self._caches.add(str(key))
        return found

    def _add_tables(self, owner: object, seen: Walk) -> None:
        """Note the tables and tensors of a model."""
        modules = [*owner.modules()] if isinstance(owner, nn.Module) else []
        for module in modules:
            seen.join(module)
            for one in _large(module):
                seen.share(one)
        for module in modules:
            for name, table in vars(module).items():
                if isinstance(table, dict) and (name in _OF_TORCH or name.endswith("_hooks")):
                    seen.table(table)
            if isinstance(module, nn.RNNBase):
                seen.parts((id(module), "attributes"), functools.partial(attributes_of, module))
            else:
                seen.table(vars(module))
        tensors = [one for part in modules for one in (*part._parameters.values(), *part._buffers.values())]
        seen.tensors([one for one in tensors if one is not None])

    def _add_owner(self, number: int, owner: object, seen: Walk, found: Found) -> None:
        """Add what a model, a loss or a function keeps."""
        seen.globals = _globals_of(owner)
        if not isinstance(owner, nn.Module):
            known = Key(number, "function", getattr(owner, "__name__", type(owner).__name__))
            found[known] = seen.root(known, owner)
            return
        for name, part in owner.named_modules():
            seen.globals, prefix = _globals_of(part), f"{name}." if name else ""
            known, slots = Key(number, "slots", f"{prefix}its slots"), functools.partial(of_slots, part, seen)
            found[known] = seen.described(known, slots)
            found[Key(number, CLASS, f"{prefix}its class")] = Itself(type(part))
            names = (*part._parameters, None, *part._buffers, None, *part._modules)
            found[Key(number, "names", f"{prefix}its names")] = names
            modules = tuple(one and seen.part(one) for one in part._modules.values())
            found[Key(number, "modules", f"{prefix}its modules")] = modules
            for key, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None:
                    known = Key(number, "tensor", f"{prefix}{key}")
                    beside = functools.partial(as_an_object, tensor, seen)
                    version = (
                        seen.version(tensor)
                        if key in part._parameters and tensor.requires_grad and not is_large(tensor)
                        else None
                    )
                    found[known] = seen.place(tensor), version, seen.described(known, beside)
            for key, one in vars(part).items():
                if key.endswith("_hooks"):
                    known = Key(number, "hooks", f"{prefix}{key}")
                    found[known] = seen.described(known, functools.partial(of_subclass, one, seen))
            for known, one in _attributes_of(part, number, prefix, seen):
                if known.kind.startswith(CLASS) and isinstance(one, CACHES):
                    self._caches.add(str(known))
                found[known] = seen.root(known, one)


def _globals_of(owner: object) -> dict[str, Any]:
    """Return the variables of the file that a function, or the class of an object, is in."""
    if isinstance(owner, FunctionType):
        return owner.__globals__
    return vars(sys.modules.get(type(owner).__module__, sys.modules[__name__]))


_UNNAMED = "something that no name shows"
_MOST_NAMED = 3
_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules"})
_IN_FILE = " of "  # which no name of an attribute has


def _variables(seen: Walk) -> Iterator[tuple[Key, Any, dict[str, Any]]]:
    """Yield variables that functions of users, and of installed packages, name in files, once each; and their files.

    Each may lead to more functions. All variables of a user's module count where code handles it as a value, or where
    it makes its attributes itself. Of modules of Python and NumPy their state is noted.
    """
    named = set[tuple[int, str]]()
    while seen.functions:
        function = seen.functions.pop()
        spaces, names, code = _scope_of(function, seen)
        for space in spaces:  # files that the function's file imports join
            seen.variables(space, names)
            file = str(space.get("__name__", "")), str(space.get("__file__") or "")
            kind = "variable" if is_users(*file) else LIBRARY
            for name in names:
                value = space[name] if name in space else sys.modules.get(name) if name in MODULE_STATES else None
                if isinstance(value, ModuleType) and (state := MODULE_STATES.get(value.__name__)) is not None:
                    key, value = Key(0, "state", f"state{_IN_FILE}{value.__name__}"), seen.number(value.__name__, state)
                elif name not in space:
                    continue
                else:
                    key = Key(id(space), kind, f"{name}{_IN_FILE}{file_of(space)}")
                if isinstance(value, ModuleType) and is_users(*home_of(value)):
                    handed = code is None or name in handed_on(code)
                    if handed or type(value) is not ModuleType or "__getattr__" in vars(value):
                        seen.note_variables(value)
                    elif not any(vars(value) is one for one in spaces):
                        spaces.append(vars(value))
                    value = value.__name__
                if (key.owner, key.name) not in named:
                    named.add((key.owner, key.name))
                    yield key, value, space


def _scope_of(
    function: FunctionType | ModuleType, seen: Walk
) -> tuple[list[dict[str, Any]], Sequence[str], CodeType | None]:
    """Return the variables of files and the names that count, and the code that names them: of a module all count."""
    if isinstance(function, ModuleType):
        if function in seen.modules:
            return [], (), None
        seen.modules.add(function)
        names = functools.partial(_names_of_variables, function)
        seen.parts((id(function), "names"), names)
        return [vars(function)], names(), None
    code, spaces = function.__code__, [function.__globals__]
    if is_users(*home_of(function)):
        for module in _imported(function, seen):
            spaces.append(vars(module))
            if module.__name__.rpartition(".")[2] in handed_on(code):
                seen.note_variables(module)
    return spaces, names_of(code), code


def _names_of_variables(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if name not in _OF_ALL_MODULES]


#: what Python keeps in each module, or fills when it warns
_OF_ALL_MODULES = frozenset({"__builtins__", "__loader__", "__spec__", "__warningregistry__"})


def _imported(function: FunctionType, seen: Walk) -> Iterator[ModuleType]:
    """Yield users' files that a function itself imports; those may be imported later, too."""
    package = str(function.__globals__.get("__package__") or "")
    for name, level in imports_of(function.__code__):
        parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
        module = ".".join([*parents, name] if name else parents)
        seen.variables(sys.modules, [module])  # type: ignore[arg-type]
        if (value := sys.modules.get(module)) is not None and is_users(*home_of(value)):
            yield value


def _large(part: nn.Module) -> list[Tensor]:
    parameters = (one for one in part._parameters.values() if one is not None)
    return [*parameters, *(one for one in part._buffers.values() if one is not None and is_large(one))]
