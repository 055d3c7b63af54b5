"""What can be compared of objects of every kind."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import logging
import os
import random
import re
import struct
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from io import BytesIO, IOBase, StringIO
from queue import SimpleQueue
from types import (
    AsyncGeneratorType,
    BuiltinMethodType,
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpfl_lightning.privacy.clipping.files import home_of, is_library, is_users, names_of
from dpfl_lightning.privacy.clipping.restored import MOST_COPIED, bytes_of, is_large
from dpfl_lightning.privacy.clipping.walk import NAMED, TEXTUAL, TEXTUAL_IDS, Walk, text_of

_MOST_ENTRIES = 1 << 14  # of a collection in a variable of a file that is compared: longer ones are tables


MADE_ANEW = frozenset({"_flat_weights", "_flat_weight_refs"})  # of recurrent layers, by `Watch.check` after each pass
_STORED: tuple[Any, ...] = (list, tuple, deque, set, frozenset, dict)
CACHES = (functools._lru_cache_wrapper, functools.cached_property)
#: objects of C that refer to what they hold, and show it by no attribute
_REFERRING: tuple[Any, ...] = (functools._lru_cache_wrapper, type({}.keys()), type({}.values()), type({}.items()))
_WITH_FRAMES = (GeneratorType, CoroutineType)
_PATTERN: Any = re.compile("")
_NEVER_READ: tuple[type, ...] = (AsyncGeneratorType, SimpleQueue, type(_PATTERN.scanner("")))
_TENSORS = (Tensor, nn.Parameter)
#: modules of Python with classes whose objects hold what a user puts into them
_HOLDERS = frozenset(
    {"argparse", "collections", "contextlib", "functools", "queue", "types", "_thread", "threading", "typing"}
)


def as_an_object(tensor: Tensor, seen: Walk) -> object:
    """Return what a tensor has beside its numbers."""
    own = seen.part(type(tensor)) if type(tensor) not in _TENSORS else None
    return tensor.requires_grad, seen.part(tensor.grad), id(tensor._backward_hooks), seen.parts_of(vars(tensor)), own


def _length(value: Any, stored: Any) -> int:
    """Return the number of entries of a collection, else 0."""
    if stored is not None:
        return int(stored.__len__(value))
    return len(value) if isinstance(value, Mapping) else 0


def _of_module(value: ModuleType, seen: Walk) -> object:
    """Return the state of a module of Python or NumPy; the variables of one of a user are noted, all of them."""
    if is_users(*home_of(value)):
        seen.note_variables(value)
    state = MODULE_STATES.get(value.__name__)
    return state and seen.number(value.__name__, state)


def _objects_of(array: np.ndarray[Any, Any]) -> list[object]:
    """Return the objects in an array, in fields, too, as they are stored."""
    plain = np.asarray(array)
    if plain.dtype.names:
        return [one for name in plain.dtype.names for one in _objects_of(plain[name])]
    return [*plain.flat] if plain.dtype.hasobject else []


def _plain_of(array: np.ndarray[Any, Any]) -> object:
    """Return what can be compared of the numbers in an array."""
    plain = np.asarray(array)
    if plain.dtype.hasobject:
        return tuple(_plain_of(plain[name]) for name in plain.dtype.names or ())
    return hash(plain.tobytes())


def _values_of(value: object, names: Sequence[str]) -> list[object]:
    return [getattr(value, name, None) for name in names]


def attributes_of(part: nn.Module) -> list[object]:
    """Return the names and attributes of a module, but for what a layer makes anew in each pass."""
    attributes = vars(part)
    names = [name for name in attributes if name not in MADE_ANEW]
    return [*names, *map(attributes.__getitem__, names)]


def describe(value: Any, seen: Walk) -> object:
    """Return what can be compared of an object that a walk has not seen; its parts wait in the walk."""
    kind = type(value)
    if isinstance(value, Tensor):
        seen.tensors([value])
        large = seen.file is not None and is_large(value)
        numbers = seen.version(value) if large else seen.number(id(value), functools.partial(_numbers, value))
        return numbers, as_an_object(value, seen)
    state, held, hides, stored = _kind(kind)
    if issubclass(kind, _WITH_FRAMES):
        frame = value.gi_frame if isinstance(value, GeneratorType) else value.cr_frame
        if frame is not None:
            seen.code(frame.f_code, frame.f_globals)
    if issubclass(kind, _NEVER_READ):
        raise TypeError(f"an object of {kind.__name__}, which exists to change and cannot be read")
    if state is not None:
        found = seen.number(id(value), functools.partial(_content_of_state, state, value, seen.nested()))
        return found, of_subclass(value, seen), seen.part(value()) if isinstance(value, weakref.ref) else None
    if isinstance(value, np.ndarray):
        number = seen.number(id(value), functools.partial(_of_array, value))
        if value.dtype.hasobject:
            seen.parts(id(value), lambda: _objects_of(value))
        return number, tuple(map(seen.part, _objects_of(value))), of_subclass(value, seen)
    if isinstance(value, bytearray):
        return seen.number(id(value), lambda: bytes(value)), of_subclass(value, seen)
    if isinstance(value, type):
        return Itself(value), seen.parts_of(of_class(value, seen))
    if isinstance(value, ModuleType):
        return Itself(value), seen.part(kind), _of_module(value, seen)
    if isinstance(value, CodeType):
        seen.code(value, seen.globals)
    if isinstance(value, _FINAL):
        return Itself(value), seen.part(getattr(value, "__objclass__", None))
    if (own := next((one for one in _VALUES if issubclass(kind, one)), None)) is not None:
        text: object = text_of(value, own) if own is not np.generic else (value.dtype, value.tobytes())
        return kind, text, of_subclass(value, seen)
    if isinstance(value, _REFERRING):
        seen.parts(id(value), lambda: _referents(value))
        return tuple(map(seen.part, _referents(value)))
    if seen.file is not None and _length(value, stored) > _MOST_ENTRIES:
        return (Itself(value),)
    if isinstance(value, Mapping):
        if isinstance(value, dict):
            seen.table(value)
        if not isinstance(value, dict) or isinstance(value, OrderedDict):
            seen.parts(id(value), lambda: itertools.chain.from_iterable(_items(value)))
        default = None
        if isinstance(value, defaultdict):
            default = value.default_factory
            seen.parts((id(value), "default"), lambda: [value.default_factory])
        entries = [(_key(key, seen), seen.part(one)) for key, one in _items(value)]
        return *entries, of_subclass(value, seen), seen.part(default)
    if stored is set or stored is frozenset:
        seen.parts(id(value), lambda: sorted(stored.__iter__(value), key=id))
        return *sorted(str(seen.whole(one)) for one in stored.__iter__(value)), of_subclass(value, seen)
    if stored is not None:
        if stored is not tuple:
            seen.parts(id(value), lambda: stored.__iter__(value))
        return *map(seen.part, stored.__iter__(value)), of_subclass(value, seen)
    reduce: Any = kind.__reduce__
    if isinstance(value, Iterator) and not isinstance(value, IOBase) and reduce is not object.__reduce__:
        found = seen.number(id(value), functools.partial(_content_of_state, reduce, value, seen.nested()))
        return found, of_subclass(value, seen)
    if isinstance(value, FunctionType):
        seen.function(value)
        cache = getattr(vars(value).get("_clear_cache"), "__self__", None)
        if value.__globals__ is vars(functools) and type(cache) is weakref.WeakKeyDictionary:
            seen.join(cache)  # of singledispatch: functions by types, no numbers
    elif not (hides or _is_holder(kind) or seen.follows(kind)):
        return (Itself(value),)
    elif isinstance(value, nn.RNNBase):
        seen.parts((id(value), "attributes"), functools.partial(attributes_of, value))
        return kind, tuple(seen.part(one) for one in attributes_of(value))
    elif id(kind) not in _UNCHANGED_IDS:
        seen.parts((id(value), "held"), lambda: [kind, *_values_of(value, held)])
    parts: tuple[object, ...] = tuple((name, seen.part(getattr(value, name, None))) for name in held)
    memory: object = None
    if hides and not isinstance(memory := _in_memory(value, seen.nested()), Itself):
        memory = seen.number((id(value), "memory"), functools.partial(_in_memory, value, seen.nested()))
    elif hides and isinstance(value, Iterator) and not isinstance(value, IOBase):
        raise TypeError(f"an object of {kind.__name__}, which exists to change and cannot be read")
    memory = value.__name__ if isinstance(value, BuiltinMethodType) else memory
    if isinstance(value, FunctionType):
        parts = (*parts, id(value.__code__), *(repr(getattr(value, name)) for name in NAMED))
    return memory, parts, seen.part(kind)


def _is_holder(kind: type) -> bool:
    """Return whether objects of a class of Python or torch hold what a user puts into them."""
    return kind.__module__ in _HOLDERS or issubclass(kind, (*_HELD, nn.Module, torch.optim.Optimizer))


def _referents(cache: object) -> list[object]:
    """Return what a cache or a view holds, of which no attribute shows anything, and a cache's function."""
    return sorted(gc.get_referents(cache), key=id)


@dataclass(frozen=True, eq=False)
class Itself:
    """An object that equals itself alone; it is kept, so that no other one gets its id."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.value is self.value

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
    return Itself(value)


def _hides(kind: type) -> bool:
    """Return whether objects of a class have memory of which neither slots nor a dictionary show anything."""
    words = (
        len({*_slots(kind)} - {"__dict__", "__weakref__"}) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    )
    return kind.__itemsize__ > 0 or kind.__basicsize__ > object.__basicsize__ + words * _WORD


def _of_array(value: np.ndarray[Any, Any]) -> object:
    mask = np.ma.getmaskarray(value).tobytes() if isinstance(value, np.ma.MaskedArray) else b""
    return _of_dtype(value.dtype), value.shape, value.flags.writeable, _plain_of(value), hash(mask)


def _of_dtype(dtype: np.dtype[Any]) -> object:
    """Return what can be compared of a dtype, whose fields may get other names."""
    return repr(dtype) if dtype.names else dtype


def _key(key: Any, seen: Walk) -> object:
    """Return what can be compared of a key, which may be an object with state."""
    return text_of(key) if id(type(key)) in TEXTUAL_IDS else ("key", seen.part(key))


def of_subclass(value: Any, seen: Walk) -> object:
    """Return what an instance of a subclass has beside what its class of Python, or of a library, has."""
    kind = type(value)
    if id(kind) in _BUILT_IN or not seen.follows(kind):
        return None
    own = getattr(value, "__dict__", None)
    attributes = seen.part(own) if type(own) is dict else None
    return attributes, of_slots(value, seen), seen.part(kind)


def of_slots(value: object, seen: Walk) -> object:
    """Return the contents of the slots of a class of a user."""
    if not (slots := _slots(type(value))):
        return ()
    read = functools.partial(_values_of, value, slots)
    seen.parts((id(value), "slots"), read)
    return tuple(map(seen.part, read()))


_BUILT_IN = frozenset(  # classes whose instances have no attributes of their own, or whose state has them
    map(id, (dict, list, tuple, set, frozenset, str, bytes, int, float, complex, bool, deque, np.ndarray))
) | {id(logging.Logger), id(logging.RootLogger)}
#: classes whose objects never change: another value is another object
_VALUES: tuple[type, ...] = (*TEXTUAL, np.generic, Decimal, timedelta, range, torch.device)
#: classes whose objects nobody can change, and which lead to code and a class alone
_FINAL = (
    CodeType,
    MemberDescriptorType,
    GetSetDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
    ClassMethodDescriptorType,
    torch.dtype,
)
#: ids of classes whose objects always lead to the same ones
_UNCHANGED_IDS = frozenset(map(id, (GenericAlias, UnionType, MethodType, BuiltinMethodType)))
_WORD = struct.calcsize("P")


def _numbers(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, None if tensor.is_nested else tuple(tensor.shape), bytes_of(tensor)


def _content_of_state(state: Callable[[Any], object], value: Any, seen: Walk) -> object:
    return type(value), seen.nested().whole(state(value))


def _kind(kind: type) -> tuple[Callable[[Any], object] | None, tuple[str, ...], bool, Any]:
    """Return what gives the state of objects of a class, attributes that hold it, if memory hides it, and what stores.

    It is known by its id, because a class may say that it equals another.
    """
    if id(kind) not in _KINDS:
        state = next((of for one, of in _STATES.items() if issubclass(kind, one)), None)
        held = next((names for one, names in _HELD.items() if issubclass(kind, one)), ())
        if issubclass(kind, BaseException):
            held += _fields_of_exceptions(kind)
        hides = not held and _hides(kind)
        stored = next((one for one in _STORED if issubclass(kind, one)), None)
        _KINDS[id(kind)] = kind, state, held or ("__dict__", *_slots(kind)), hides, stored
    return _KINDS[id(kind)][1:]


_KINDS: dict[int, tuple[type, Callable[[Any], object] | None, tuple[str, ...], bool, Any]] = {}


def _fields_of_exceptions(kind: type[BaseException]) -> tuple[str, ...]:
    """Return the fields of an exception that Python stores, but for its frames."""
    stored = MemberDescriptorType, GetSetDescriptorType
    names = (name for one in kind.__mro__ for name, field in vars(one).items() if isinstance(field, stored))
    return tuple(name for name in dict.fromkeys(names) if name not in {"__dict__", "__weakref__", "__traceback__"})


def _items(value: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Return the entries as they are stored: a dictionary of another class may make new ones whenever it is asked."""
    if isinstance(value, OrderedDict):  # which knows another order than the dictionary that it is
        return OrderedDict.items(value)
    return dict.items(value) if isinstance(value, dict) else value.items()


def _of_frame(frame: FrameType | None) -> tuple[object, ...]:
    return () if frame is None else (frame.f_lasti, dict(frame.f_locals))


def _of_bits(bits: Any) -> object:
    return bits.state, getattr(getattr(bits, "seed_seq", None), "n_children_spawned", None)


def _of_numpy() -> int:
    found = np.random.get_state(legacy=False)
    state: Any = found["state"]  # type: ignore[call-overload]
    return hash((state["key"].tobytes(), state["pos"], found["has_gauss"], found["gauss"]))  # type: ignore[call-overload]


#: what modules keep that code refers to; threads that change it meanwhile are rare, and end a run
MODULE_STATES: Mapping[str, Callable[[], int]] = {
    "random": lambda: hash(random.getstate()),
    "numpy": _of_numpy,
    "numpy.random": _of_numpy,
    "os": lambda: hash(frozenset(os.environ._data.items())),  # type: ignore[attr-defined]  # without decoding
}
#: what a logger has beside settings of its own: others, and a cache of levels
_OF_LOGGERS = ("_cache", "manager", "parent", "handlers")
#: generators and the like, which hold their state elsewhere
_STATES: dict[type, Callable[[Any], object]] = {
    torch.Generator: torch.Generator.get_state,
    np.random.Generator: lambda one: _of_bits(one.bit_generator),
    np.random.BitGenerator: lambda one: _of_bits(one),
    np.random.RandomState: lambda one: one.get_state(legacy=False),
    random.Random: random.Random.getstate,
    itertools.count: repr,
    array: array.tobytes,
    memoryview: memoryview.tobytes,
    GeneratorType: lambda one: (*_of_frame(one.gi_frame), one.gi_yieldfrom),
    CoroutineType: lambda one: (*_of_frame(one.cr_frame), one.cr_await),
    np.random.SeedSequence: lambda one: one.state,
    weakref.ref: lambda one: id(one()),
    Context: lambda one: (*one.items(),),
    ContextVar: lambda one: one.get(None),
    logging.Logger: lambda one: {name: value for name, value in vars(one).items() if name not in _OF_LOGGERS},
    BytesIO: lambda one: (one.getvalue(), one.tell()),
    StringIO: lambda one: (one.getvalue(), one.tell()),
    np.void: lambda one: (_of_dtype(one.dtype), one.item() if one.dtype.hasobject else one.tobytes()),
    torch.UntypedStorage: lambda one: hash(bytes(one)) if len(one) <= MOST_COPIED else len(one),
}
#: what holds the state of objects without a dictionary of attributes
_HELD: dict[type, tuple[str, ...]] = {
    FunctionType: ("__closure__", "__defaults__", "__kwdefaults__", "__annotations__", "__dict__"),
    CellType: ("cell_contents",),
    MethodType: ("__self__", "__func__"),
    BuiltinMethodType: ("__self__",),
    functools.partial: ("func", "args", "keywords", "__dict__"),
    staticmethod: ("__func__", "__dict__"),
    classmethod: ("__func__", "__dict__"),
    property: ("fget", "fset", "fdel", "__doc__"),
    GenericAlias: ("__origin__", "__args__"),  # its other attributes are those of the class
    UnionType: ("__args__",),
    BaseException: ("__dict__",),
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


def of_class(kind: type, seen: Walk) -> dict[tuple[int, str], Any]:
    """Attributes of a class and of its bases, unless they belong to Python or a library of this package.

    The keys are places of these classes and names: a base's attribute counts where a class has another of its name.
    """
    if not seen.follows(kind):
        return {}
    line = [*reversed(inspect.getmro(type(kind))), *reversed(kind.__mro__)]
    users = [one for one in line if not is_library(*home_of(one))]
    for one in users:
        with suppress(Exception):  # of a metaclass; Python makes those of a class when they are first asked for
            getattr(one, "__annotations__", None)
        seen.space(one)
        seen.number((id(one), "names"), functools.partial(_names_of_class, one))
    found = {
        (place, name): value
        for place, one in enumerate(users)
        for name, value in vars(one).items()
        if name not in _OF_ALL_CLASSES
    }
    if users:
        found[-1, "its bases"] = kind.__mro__
        found[-1, "its names"] = tuple(map(_names_of_class, users))
    if any("__subclasses__" in names_of(code) for code in map(_code_of, found.values()) if code):
        seen.parts((id(kind), "subclasses"), lambda: _below(kind))
        found |= {(-2 - place, below.__name__): below for place, below in enumerate(_below(kind))}
    return found


def _below(kind: type) -> list[type]:
    return type.__subclasses__(kind)


def _code_of(value: Any) -> CodeType | None:
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    return function.__code__ if isinstance(function, FunctionType) else None


def _names_of_class(kind: type) -> tuple[str, str]:
    return _NAME(kind), _QUALNAME(kind)


_NAME, _QUALNAME = (
    type.__dict__["__name__"].__get__,
    type.__dict__["__qualname__"].__get__,
)  # of a metaclass of any kind
_OF_ALL_CLASSES = frozenset({"__dict__", "__weakref__"})  # which lead to the attributes of an object
