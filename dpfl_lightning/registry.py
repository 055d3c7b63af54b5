"""Call what a configuration names: the name and every option checked against the function that takes them."""

from __future__ import annotations

import inspect
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
    """`known[name](*args, **options)`, for a name and options that a user wrote.

    Args:
        key: dotted name of the option that holds the name, such as `model`; messages name it.
        known: registry name -> function; its parameters after `args` are the options.
        name: which of them.
        args: what the program passes.
        options: what the user passes; int, float, str and Sequence[int] are checked against the annotations.

    Returns:
        What the function returns.

    Raises:
        UserError: an unknown name or option (with the nearest known one), a missing option, a value of the
            wrong type.

    >>> call("model", {"scale": lambda x, by=2: x * by}, "scale", 3, bye=4)
    Traceback (most recent call last):
    ...
    dpfl_lightning.errors.UserError: `model.bye` must be an option of scale (by), got 4. Did you mean `by`?
    """
    require(name in known, f"{key}.name", f"be one of {', '.join(known)}", name, nearest(name, known))
    allowed = dict(list(inspect.signature(known[name]).parameters.items())[len(args) :])
    kinds = typing.get_type_hints(known[name].__init__ if isinstance(known[name], type) else known[name])
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
