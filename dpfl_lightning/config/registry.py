"""Calls the function that a configuration names, after checking the name and every option against its signature."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from dpfl_lightning.errors import nearest, require

T = TypeVar("T")

_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("a word", lambda value: isinstance(value, str)),
    float | None: ("a number or null", lambda value: value is None or _KINDS[float][1](value)),
    int | None: ("a whole number or null", lambda value: value is None or _KINDS[int][1](value)),
    Sequence[int]: (
        "a list of whole numbers",
        lambda value: isinstance(value, Sequence) and all(map(_KINDS[int][1], value)),
    ),
    Sequence[int] | None: (
        "a list of whole numbers or null",
        lambda value: value is None or _KINDS[Sequence[int]][1](value),
    ),
}


def call(key: str, known: Mapping[str, Callable[..., T]], name: str, /, *args: Any, **options: Any) -> T:
    """Return `known[name](*args, **options)`, for a name and options that a user wrote.

    Args:
        key: dotted name of the option that holds the name, such as `model`; used in messages.
        known: registered name -> function; the parameters after `args` are the options.
        name: the name that the user chose.
        args: arguments that the program passes.
        options: options that the user passes; int, float, str and Sequence[int] are checked against the annotations.

    Returns:
        The result of the function.

    Raises:
        UserError: an unknown name or option (with the nearest known one), a missing option, or a value of the wrong
            type.

    >>> call("model", {"scale": lambda x, by=2: x * by}, "scale", 3, bye=4)
    Traceback (most recent call last):
    ...
    dpfl_lightning.errors.UserError: `model.bye` must be an option of scale (by), got 4. Did you mean `by`?
    """
    require(name in known, f"{key}.name", f"be one of {', '.join(known)}", name, nearest(name, known))
    allowed = dict(list(inspect.signature(known[name]).parameters.items())[len(args) :])
    kinds = _kinds_of(known[name])
    takes = ", ".join(allowed) or "it has none"
    for option, value in options.items():
        must, advice = f"be an option of {name} ({takes})", nearest(option, allowed)
        require(option in allowed, f"{key}.{option}", must, value, advice)
        words, holds = _KINDS.get(kinds.get(option), ("", lambda value: True))
        require(holds(value), f"{key}.{option}", f"be {words}", value)
    for option, parameter in allowed.items():
        given = option in options or parameter.default is not parameter.empty
        require(given, f"{key}.{option}", f"be given for {name}", None)
    return known[name](*args, **options)


def _kinds_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return parameter -> annotation; for a class, those of its constructor."""
    return typing.get_type_hints(getattr(function, "__init__") if isinstance(function, type) else function)  # noqa: B009


# ---- help texts


def listed(known: Mapping[str, Callable[..., Any]]) -> str:
    """Return every name with the first line of its docstring.

    >>> print(listed({"len": len, "maximum": max}))
    len      Return the number of items in a container.
    maximum  max(iterable, *[, default=obj, key=func]) -> value
    """
    width = max(map(len, known))
    return "\n".join(f"{name.ljust(width)}  {_text(one).splitlines()[0]}" for name, one in known.items())


def options_of(function: Callable[..., Any], given: int, prefix: str) -> str:
    """Return the docstring of a registered function, and how to set each option, with its type and default.

    Args:
        function: a function from a registry.
        given: number of leading arguments that the program passes.
        prefix: text before the name of an option, such as `--model`.

    >>> def scale(x: float, by: int, unit: str | None = None):
    ...     "Scaled."
    >>> print(options_of(scale, 1, "--thing"))
    Scaled.
    <BLANKLINE>
    --thing.by    a whole number, must be given
    --thing.unit  a word or null (null)
    """
    parameters = list(inspect.signature(function).parameters.values())[given:]
    kinds = _kinds_of(function)
    width = max((len(one.name) for one in parameters), default=0)
    lines = [f"{prefix}.{one.name.ljust(width)}  {_in_words(kinds.get(one.name))}{_default(one)}" for one in parameters]
    return "\n".join([_text(function), "", *(lines or ["It has no options."])])


def _text(function: Callable[..., Any]) -> str:
    return inspect.getdoc(function) or "(no docstring)"


def _default(option: inspect.Parameter) -> str:
    if option.default is option.empty:
        return ", must be given"
    words = {None: "null", True: "true", False: "false"}
    value = option.default
    return f" ({words[value] if value is None or isinstance(value, bool) else value})"


def _in_words(kind: Any) -> str:
    if kind in _KINDS:
        return _KINDS[kind][0]
    if kind is types.NoneType:
        return "null"
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(kind)))}"
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return " or ".join(map(_in_words, typing.get_args(kind)))
    return getattr(kind, "__name__", "anything")
