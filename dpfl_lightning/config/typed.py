"""Types and ranges of options: pydantic checks the values that users write, and messages say them in words."""

import copy
import dataclasses
import functools
import math
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from annotated_types import Interval, Predicate

from dpfl_lightning.errors import nearest, require

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_WORDS: dict[Any, str] = {
    **{int: "a whole number", float: "a number", str: "text", bool: "true or false"},
    **{types.NoneType: "null", dict: "a mapping"},
}


T = TypeVar("T")
# One value for all clients, one value per client, or a mapping from names or with a distribution; see `per_client`.
PerClient: TypeAlias = T | tuple[T, ...] | dict


@dataclass(frozen=True)
class That(Predicate):
    """A condition on an option, as in `Annotated[dict, That(lambda value: "name" in value, "with a name")]`."""

    words: str = ""


def valid(key: str, value: Any, hint: Any, advice: str = "") -> Any:
    """Return a copy of the value of the option `key` as the type `hint`, or raise UserError.

    Lists from YAML become tuples where the type says so, and whole numbers become floats.

    >>> valid("strategies.fedprox.pull", -1, Annotated[float, Interval(ge=0, lt=math.inf)])
    Traceback (most recent call last):
    ...
    dpfl_lightning.errors.UserError: `strategies.fedprox.pull` must be a number >= 0 and finite, got -1.
    """
    from pydantic import ValidationError  # imported here, so that `--help` stays fast

    given = copy.deepcopy(dict(value)) if isinstance(value, Mapping) else _without_numpy(value)
    for one in (given, tuple(given)) if isinstance(given, list) else (given,):
        try:
            return _adapter(hint).validate_python(one, strict=True)
        except ValidationError:
            pass
    item = next((get_args(one)[0] for one in alternatives(hint) if get_origin(one) in (tuple, Sequence)), None)
    if item is not None and isinstance(given, list | tuple):
        for number, one in enumerate(given):
            valid(key, one, item, f"It is value {number + 1} of the list.")
    names = [name for one in alternatives(hint) if get_origin(one) is Literal for name in get_args(one)]
    require(False, key, f"be {in_words(hint)}", value, nearest(str(value), names) or advice)


@functools.cache
def _adapter(hint: Any) -> "TypeAdapter[Any]":
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))


def _without_numpy(value: Any) -> Any:
    """Return a value, or a list of values, with Python's numbers in place of numpy's."""
    if isinstance(value, list | tuple):
        return type(value)(map(_without_numpy, value))
    return value.item() if isinstance(value, np.generic) else value


def options_of(kind: type) -> dict[str, Any]:
    """Return the options of a dataclass: name -> annotation of each field that its constructor accepts."""
    hints = get_type_hints(kind, include_extras=True)
    return {one.name: hints[one.name] for one in dataclasses.fields(kind) if one.init}


def of_one_client(hint: Any) -> Any:
    """Return the type of the value of one client in a `PerClient`; None for another type."""
    kinds = [get_origin(one) or one for one in get_args(hint)]
    return get_args(hint)[0] if {tuple, dict} <= {*kinds} else None


def alternatives(hint: Any) -> list[Any]:
    """Return the types of a union, or the one type, without their conditions."""
    union = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    return [get_args(one)[0] if get_origin(one) is Annotated else one for one in union]


def in_words(hint: Any) -> str:
    """Describe a type with its conditions.

    >>> in_words(int | None), in_words(Annotated[float, Interval(ge=0, lt=1)] | Literal["auto"])
    ('a whole number or null', 'a number in [0, 1) or auto')
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return " ".join([in_words(inner[0]), *map(_condition, hint.__metadata__)])
    if kind in _WORDS:
        return _WORDS[kind]
    if kind in (types.UnionType, Union):
        one = of_one_client(hint)
        first = [] if one is None else [f"{in_words(one)} (also one for each client)"]
        return " or ".join([*first, *map(in_words, inner[3 * len(first) :])])
    if kind is Literal:
        return f"one of {', '.join(inner)}" if len(inner) > 1 else inner[0]
    if kind in (tuple, Sequence):
        if get_origin(inner[0]) is Literal:
            return f"a list of names ({', '.join(get_args(inner[0]))})"
        return re.sub(r"^(a )?(whole )?(\w+)", r"a list of \2\3s", in_words(inner[0])).replace("a mapping", "mappings")
    return "any value"


def _condition(one: Any) -> str:
    """Describe a condition of an annotation; an upper end that is infinite asks for a finite number."""
    if not isinstance(one, Interval):
        return str(getattr(one, "words", ""))
    low, high = one.gt if one.ge is None else one.ge, one.lt if one.le is None else one.le
    least, most = (re.sub(r"e([+-])0*", r"e\1", f"{end or 0:g}").replace("e+", "e") for end in (low, high))
    if low is None:
        return f"{'<' if one.le is None else '<='} {most}"
    if high is None or high == math.inf:
        return f"{'>' if one.ge is None else '>='} {least}" + " and finite" * (high is not None)
    return f"in {'(' if one.ge is None else '['}{least}, {most}{')' if one.le is None else ']'}"
