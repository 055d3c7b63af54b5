"""Walks through what code of users keeps, and whether all that they have read is as it was."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.clipping.files import home_of, is_library, is_users
from dpfl_lightning.privacy.clipping.restored import Unread, bits_of, bytes_of, is_large, version_of

T = TypeVar("T")
Describe = Callable[[Any, "Walk"], object]

TEXTUAL = frozenset({str, bytes, int, bool, float, complex})
TEXTUAL_IDS = frozenset(map(id, TEXTUAL))  # a metaclass may say that a class equals another
NAMED = ("__name__", "__qualname__", "__doc__", "__module__")

_HEAP = 1 << 9  # of classes whose objects may be given another class
CLASS = "class"  # kind of what classes have
LIBRARY = "library"  # kind of what files of libraries have


class Key(NamedTuple):
    """What tells things that are compared apart: their owner, the kind of thing, and the name that a user knows."""

    owner: int  # number of a model, a loss or a function, or the id of the variables of a file
    kind: str
    name: str

    def __str__(self) -> str:
        return self.name


def text_of(value: Any, kind: Any = None) -> str:
    """Return the text of a value of a class of Python: numbers of many digits have none but in hexadecimal."""
    kind = kind or type(value)
    return hex(value) if kind is int else str(kind.__repr__(value))


class Found(dict[Key, object]):
    """What was found of all things: each has a key of its own, so that none is compared in place of another."""

    def __setitem__(self, key: Key, value: object) -> None:
        if key in self:
            raise RuntimeError(f"two things that a model keeps have one key, {tuple(key)}")
        super().__setitem__(key, value)


class Walk:
    """A walk through what a model keeps: the objects that it has seen, and what it has read of them.

    If all of it is as it was (`is_current`), another walk would find the same. That takes a fraction of a walk: objects
    are compared by identity, and of numbers that change in place their content. `describe(value, walk)` returns what
    can be compared of an object that is new. Of tensors that are `shared` the version counts. In variables of a `file`
    it ends at objects of libraries, which count by their identity.
    """

    def __init__(self, describe: Describe, shared: Iterable[Tensor] = (), later: bool = False) -> None:
        self._describe = describe
        self._later = later  # than a first one, which could read all
        self._first = 0  # place of the first object
        self._places: dict[int, tuple[int, object, int]] = {}  # of objects, by id: in the walk, and from a root
        self._root: object = ""
        self._of_root = 0
        self.file: str | None = None
        self.modules = set[ModuleType]()  # all of whose variables count
        self.globals: dict[str, Any] = {}  # of the file that holds a root
        self._waiting: list[object] = []
        self.functions: list[FunctionType | ModuleType] | None = []  # whose variables count
        self.kept: list[object] = []  # so that no other object gets its id
        self._shared: set[int] = set()
        self._tables: dict[int, dict[Any, Any]] = {}
        self._spaces: dict[int, MappingProxyType[str, Any]] = {}  # of classes
        self._classes: dict[int, type] = {}
        self._functions: dict[int, FunctionType] = {}
        self._typed: list[object] = []  # objects that may get another class
        self._names: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}  # of variables of files
        self._parts: dict[object, Callable[[], Iterable[object]]] = {}
        self._numbers: dict[object, tuple[Callable[[], object], object]] = {}
        self._in_place: dict[int, _Version] = {}  # of tensors of which versions are compared
        for one in shared:
            self.share(one)

    def __contains__(self, value: object) -> bool:
        return self._place(value) is not None

    def _place(self, value: object) -> tuple[int, object, int] | None:
        return self._places.get(id(value))

    def join(self, value: object) -> None:
        """Note that the walk has seen an object."""
        if value not in self:
            self._places[id(value)] = self._first + len(self._places), self._root, self._of_root
            self._of_root += 1
            self.kept.append(value)
            if type(value).__flags__ & _HEAP:
                self._typed.append(value)

    def share(self, tensor: Tensor) -> None:
        self.join(tensor)
        self._shared.add(id(tensor))

    def nested(self) -> Walk:
        """Return a walk that has seen what this one has seen by now, and of which this one learns functions alone."""
        return _Nested(self)

    def part(self, value: object) -> object:
        """Return what stands for a part of an object: its text, or its place. What is new waits to be described."""
        if value is None or id(type(value)) in TEXTUAL_IDS:
            return text_of(value)
        if value not in self:
            self.join(value)
            self._waiting.append(value)
        elif isinstance(value, Tensor) and self._is_shared(value):
            return self.version(value), self.place(value)
        return self.place(value)

    def place(self, value: object) -> tuple[object, int] | None:
        """Return the place of an object that the walk has seen: another one in its place is a change."""
        found = self._place(value)
        return found and found[1:]

    def _is_shared(self, value: object) -> bool:
        return id(value) in self._shared

    def parts_of(self, values: Mapping[Any, object]) -> tuple[object, ...]:
        return tuple([(name, self.part(one)) for name, one in values.items()])

    def whole(self, value: object) -> object:
        """Return what can be compared of a value: descriptions of all that it leads to and that is new."""
        if value is None or id(type(value)) in TEXTUAL_IDS or value in self:
            return self.part(value)
        self.join(value)
        return self._with_parts(lambda: self._describe(value, self))

    def _with_parts(self, describe_first: Callable[[], object]) -> object:
        outer, self._waiting = self._waiting, []
        found = [describe_first()]
        while self._waiting:
            found.append(self._describe(self._waiting.pop(), self))
        self._waiting = outer
        return tuple(found)

    def root(self, name: Key, value: object) -> object:
        """Return what can be compared of an attribute or a variable; places are counted from it."""
        return self.described(name, lambda: self.whole(value))

    def described(self, name: Key, describe_root: Callable[[], object]) -> object:
        """Return what `describe_root` returns of a root, and what can be compared of the parts that it meets."""
        self._root, self._of_root = name, 0
        try:
            return self._with_parts(describe_root)
        except RecursionError as error:
            raise UserError(
                f"`model` must keep objects that Python can walk through, got `{name}` with too many levels. "
                "Hold its parts in a list."
            ) from error
        except UserError:
            raise
        except Exception as error:  # of a user's object, or of one that cannot be read
            if self._later:
                return Unread()
            raise UserError(
                f"`model` must keep what can be compared before and after a pass, got `{name}` with "
                f"{error or type(error).__name__}. Make it anew in each pass, or hold its numbers in a list."
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
        self._classes[id(kind)] = kind

    def function(self, function: FunctionType) -> None:
        """Note a function, whose variables count if it is read and of no library."""
        self._functions[id(function)] = function
        if self.follows(function) and not is_library(*home_of(function)):
            self.note_variables(function)

    def code(self, code: CodeType, variables: dict[str, Any]) -> None:
        """Note code that runs with the variables of a file, as that of a function."""
        function = FunctionType(code, variables, closure=tuple(CellType() for _ in code.co_freevars))
        if not is_library(*home_of(function)):
            self.note_variables(function)

    def note_variables(self, function: FunctionType | ModuleType) -> None:
        """Note a function, or a module of a user, whose variables count."""
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
        """Return what has the version of a tensor, which is compared in place of its numbers unless they are few."""
        if id(tensor) not in self._in_place:
            small = tensor.requires_grad and tensor.is_leaf and not is_lazy(tensor) and not is_large(tensor)
            self._in_place[id(tensor)] = _Numbers(tensor) if small else _Version(tensor)
        return self._in_place[id(tensor)]

    def close(self) -> Walk:
        """Note all objects at the end of a walk."""
        self.functions = None
        self._filled = [one for one in self._tables.values() if one]  # the size of an empty one tells all
        self._objects = [[*found] for found in self._now()]
        self._lengths = self._sizes()
        return self

    def _now(self) -> Iterator[Iterable[object]]:
        chained = itertools.chain.from_iterable
        spaces, names = self._spaces.values(), self._names.values()
        yield chained(map(dict.keys, self._filled))
        yield chained(map(dict.values, self._filled))
        yield chained(spaces)
        yield chained(map(MappingProxyType.values, spaces))
        yield map(type, self._typed)
        yield map(_BASES, self._classes.values())
        yield chained(map(_OF_FUNCTIONS, self._functions.values()))
        yield chained(map(variables.get, those) for variables, those in names)
        yield chained(chained(zip(map(operator.call, self._parts.values()), itertools.repeat(_END))))

    def contradicts(self, later: Walk) -> bool:
        """Return whether an object of both walks has another number or size in the later one."""
        mine, others = self._numbers, later._numbers
        sizes = zip(self._tables, self._lengths, strict=False)
        return any(others[key][1] != mine[key][1] for key in mine.keys() & others.keys()) or any(
            len(later._tables[key]) != size for key, size in sizes if key in later._tables
        )

    def _sizes(self) -> list[int]:
        return [*map(dict.__len__, self._tables.values()), *map(len, self._spaces.values())]

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
                and self._sizes() == self._lengths
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
        self._number: object = version_of(self._tensor)

    def has_changed(self) -> bool:
        return version_of(self._tensor) != self._number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Version) and other._number == self._number

    def __repr__(self) -> str:
        return f"version {self._number}"


class _Numbers(_Version):
    """The numbers of a small parameter, which stand for a version: a change by `.data` has none."""

    def note(self) -> None:
        self._where, self._bits = self._place(), bits_of(self._tensor)
        self._number = bytes_of(self._tensor) if self._bits is None else 0
        self._copy = None if self._bits is None else self._bits.clone()

    def has_changed(self) -> bool:
        if self._bits is None or self._copy is None:
            return bytes_of(self._tensor) != self._number
        return self._place() != self._where or not torch.equal(self._bits, self._copy)

    def _place(self) -> object:
        return self._tensor.data_ptr(), self._tensor.shape, self._tensor.is_contiguous()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Numbers) or other._where != self._where or other._number != self._number:
            return False
        return other._copy is self._copy or (
            other._copy is not None and self._copy is not None and torch.equal(other._copy, self._copy)
        )

    def __repr__(self) -> str:
        return "numbers"


class _Nested(Walk):
    """What `Walk.nested` returns."""

    def __init__(self, outer: Walk) -> None:
        super().__init__(outer._describe)
        self._outer, self._first = outer, outer._first + len(outer._places)
        self._root, self._of_root, self.file = (outer._root, "..."), 0, outer.file
        self.globals = outer.globals

    def _place(self, value: object) -> tuple[int, object, int] | None:
        if id(value) in self._places:
            return self._places[id(value)]
        place = self._outer._place(value)
        return place if place is not None and place[0] < self._first else None

    def _is_shared(self, value: object) -> bool:
        return self._outer._is_shared(value)

    def note_variables(self, function: FunctionType | ModuleType) -> None:
        self._outer.note_variables(function)


def _are_same(found: Iterable[object], before: Iterable[object]) -> bool:
    return all(map(operator.is_, itertools.chain(found, _END), itertools.chain(before, _END)))


_END = (object(),)  # of some objects, so that others of another number are not the same
_BASES = type.__dict__["__mro__"].__get__  # of a metaclass of any kind
_OF_TENSORS = operator.attrgetter("requires_grad", "grad", "_backward_hooks")
_OF_FUNCTIONS = operator.attrgetter(
    *("__code__", "__closure__", "__defaults__", "__kwdefaults__", "__annotations__", "__dict__", *NAMED)
)
