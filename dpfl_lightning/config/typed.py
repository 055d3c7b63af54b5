"""Types of options: conversion of the values that users write, and names of types in messages."""

import copy
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin

_SIMPLE: dict[Any, tuple[str, type]] = {
    int: ("a whole number", Integral),
    float: ("a number", Real),
    str: ("text", str),
    bool: ("true or false", bool),
    types.NoneType: ("null", types.NoneType),
}


def converted(hint: Any, value: Any) -> Any:
    """Return a value from YAML as the type `hint`, or raise TypeError. Lists become tuples, and whole numbers floats.

    >>> converted(tuple[float, ...] | None, [1, 2.5])
    (1.0, 2.5)
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (types.UnionType, Union):
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

    >>> in_words(int | None)
    'a whole number or null'
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in _SIMPLE:
        return _SIMPLE[kind][0]
    if kind in (types.UnionType, Union):
        return " or ".join(map(in_words, inner))
    if kind is Literal:
        return f"one of {', '.join(inner)}"
    if kind is dict:
        return "a mapping"
    if kind in (tuple, Sequence):
        if get_origin(inner[0]) is Literal:
            return f"a list of names ({', '.join(get_args(inner[0]))})"
        return f"a list of {in_words(inner[0]).removeprefix('a ')}s"
    return "any value"
