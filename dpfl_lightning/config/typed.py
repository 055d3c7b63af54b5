"""Types and bounds of options: conversion and checks of the values that users write, and their names in messages."""

import copy
import dataclasses
import math
import re
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from dpfl_lightning.errors import nearest, require

_SIMPLE: dict[Any, tuple[str, type]] = {
    int: ("a whole number", Integral),
    float: ("a number", Real),
    str: ("text", str),
    bool: ("true or false", bool),
    types.NoneType: ("null", types.NoneType),
}


@dataclass(frozen=True)
class Interval:
    """The numbers that an option may be, as in `Annotated[float, Interval(ge=0, lt=1)]`; `lt=math.inf`: finite ones.

    >>> [str(one) for one in (Interval(ge=0, lt=1), Interval(gt=0, lt=math.inf), Interval(ge=1e-6, le=1e6))]
    ['in [0, 1)', '> 0 and finite', 'in [1e-6, 1e6]']
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __contains__(self, value: float) -> bool:
        return not (
            (self.ge is not None and not value >= self.ge)
            or (self.gt is not None and not value > self.gt)
            or (self.le is not None and not value <= self.le)
            or (self.lt is not None and not value < self.lt)
        )

    def __str__(self) -> str:
        low, high = self.gt if self.ge is None else self.ge, self.lt if self.le is None else self.le
        least, most = (re.sub(r"e([+-])0*", r"e\1", f"{end:g}").replace("e+", "e") for end in (low or 0, high or 0))
        if low is None:
            return f"{'<' if self.le is None else '<='} {most}"
        if high is None or high == math.inf:
            return f"{'>' if self.ge is None else '>='} {least}" + " and finite" * (high is not None)
        return f"in {'(' if self.ge is None else '['}{least}, {most}{')' if self.le is None else ']'}"


def intervals_of(hint: Any) -> list[Interval]:
    """Return the bounds of an annotation `Annotated[type, Interval(...)]`; none of others."""
    return [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Interval)]


def valid(key: str, value: Any, hint: Any) -> Any:
    """Return the value of the option `key` as the type `hint`, or raise UserError. See `converted`.

    >>> valid("strategies.fedprox.pull", -1, Annotated[float, Interval(ge=0, lt=math.inf)])
    Traceback (most recent call last):
    ...
    dpfl_lightning.errors.UserError: `strategies.fedprox.pull` must be a number >= 0 and finite, got -1.
    """
    try:
        return converted(hint, value)
    except OverflowError:
        require(False, key, "be a number below 1e308", value)
    except TypeError:
        literals = [one for one in (hint, *get_args(hint)) if get_origin(one) is Literal]
        names = [name for one in literals for name in get_args(one)]
        require(False, key, f"be {in_words(hint)}", value, nearest(str(value), names))


def options_of(kind: type) -> dict[str, Any]:
    """Return the options of a dataclass: name -> annotation of each field that its constructor accepts."""
    hints = get_type_hints(kind, include_extras=True)
    return {one.name: hints[one.name] for one in dataclasses.fields(kind) if one.init}


def converted(hint: Any, value: Any) -> Any:
    """Return a value from YAML as the type `hint`, or raise TypeError. Lists become tuples, and whole numbers floats.

    A number outside of an `Interval` of the type is a TypeError, too.

    >>> converted(tuple[float, ...] | None, [1, 2.5])
    (1.0, 2.5)
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        value = converted(inner[0], value)
        if all(value in one for one in intervals_of(hint)):
            return value
    elif kind in (types.UnionType, Union):
        for one in inner:
            with suppress(TypeError):
                return converted(one, value)
    elif kind in _SIMPLE:
        if isinstance(value, _SIMPLE[kind][1]) and (kind is bool or not isinstance(value, bool)):
            return float(value) if isinstance(value, Real) and kind is float else value
    elif kind is Literal:
        if value in inner:
            return value
    elif kind is dict:
        if isinstance(value, Mapping):
            options = {name: converted(inner[1] if inner else Any, one) for name, one in value.items()}
            return copy.deepcopy(options)
    elif kind in (tuple, Sequence):
        if isinstance(value, list | tuple):
            return tuple(converted(inner[0], one) for one in value)
    else:
        return value
    raise TypeError(f"{value!r} is not {in_words(hint)}")


def in_words(hint: Any) -> str:
    """Describe a type.

    >>> in_words(int | None), in_words(Annotated[float, Interval(ge=0, lt=1)] | Literal["auto"])
    ('a whole number or null', 'a number in [0, 1) or auto')
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return " ".join([in_words(inner[0]), *map(str, intervals_of(hint))])
    if kind in _SIMPLE:
        return _SIMPLE[kind][0]
    if kind in (types.UnionType, Union):
        return " or ".join(map(in_words, inner))
    if kind is Literal:
        return f"one of {', '.join(inner)}" if len(inner) > 1 else inner[0]
    if kind is dict:
        return "a mapping"
    if kind in (tuple, Sequence):
        if get_origin(inner[0]) is Literal:
            return f"a list of names ({', '.join(get_args(inner[0]))})"
        return f"a list of {in_words(inner[0]).removeprefix('a ')}s"
    return "any value"
