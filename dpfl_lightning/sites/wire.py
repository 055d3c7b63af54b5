"""Messages as bytes: a JSON header with typed fields, then the numbers of all tensors. Nothing in them is code.

`encode` writes, in little endian, the prefix (magic, version, length of the header, length of the numbers), the header
`{"arrays": [[dtype, shape], ...], "message": ...}` and the numbers. In the header a class of `MESSAGES` is an object
with its name as `kind`, a tensor is `{"array": place}`, a mapping `{"map": [[key, value], ...]}`, and a number that is
not finite `{"number": "inf"}`. `decode` checks every field against the type hint of its class.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import struct
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from dpfl_lightning.federated.messages import clients, evaluation, facts, jobs, plan, query, requests, schedule, update
from dpfl_lightning.models import augmentation, learning_rates, optimizers
from dpfl_lightning.models.tasks import Measure
from dpfl_lightning.privacy import mechanism
from dpfl_lightning.privacy.accounting import events, planned
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.privacy.accounting.units import UNITS
from dpfl_lightning.privacy.clipping.inputs import BatchForm
from dpfl_lightning.privacy.ledger.file import Head
from dpfl_lightning.runtime.digests import memory_of
from dpfl_lightning.runtime.strict_json import parsed
from dpfl_lightning.sites import exchange, receipt

T = TypeVar("T")

VERSION = 4
PREFIX = struct.Struct("<4sIQQ")  # magic, version, bytes of the header, bytes of the numbers
_MAGIC = b"DPFL"
_MOST_DIMENSIONS = 16
_DTYPES = {
    str(one).removeprefix("torch."): one
    for one in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
} | {"bool": torch.bool}
_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

#: name -> class of everything that may be in a message
MESSAGES: dict[str, type] = {}


class WireError(ValueError):
    """Bytes that are no message, or a value that no message may contain."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The greatest numbers of bytes that a message may have in its header, and in its tensors."""

    header: int
    numbers: int


def register(*kinds: type[T]) -> type[T]:
    """Let messages contain frozen dataclasses, for example queries of your own, whose fields all have type hints."""
    for kind in kinds:
        if not dataclasses.is_dataclass(kind) or MESSAGES.get(kind.__name__, kind) is not kind:
            raise TypeError(f"messages contain dataclasses of different names, got {kind}")
        MESSAGES[kind.__name__] = kind
    return kinds[0]


register(clients.RunPlan, clients.ClientAccount, facts.ClientSettings, schedule.RunSchedule, Guarantee)
register(plan.RoundPlan, jobs.LocalTraining, jobs.ClassGradients, augmentation.ClassAugmentation)
register(update.ClientUpdates, evaluation.ClientModels, evaluation.Score, evaluation.Evaluation, evaluation.Diagnostics)
register(query.ChargedQuery, query.NoMechanism, query.SelectModel, query.LowestLoss, query.MeanLoss)
register(query.FeatureSums, query.ScoreCounts)
register(*mechanism.MECHANISMS, mechanism.ExponentialMechanism, *events.RELEASES)
register(planned.Planned, planned.ClientSchedule, *UNITS.values())
register(*optimizers.OPTIMIZERS.values(), *learning_rates.SCHEDULES.values())
register(requests.Train, requests.Ask, requests.Evaluate, exchange.ToNode, exchange.Hello)
register(BatchForm, Measure, exchange.Site, exchange.Terms, exchange.Paid, exchange.Welcome)
register(exchange.Released, exchange.Refused, exchange.Signed, receipt.Receipt, Head)


def encode(message: Any) -> bytes:
    """Return a message as bytes. Raises WireError for a value that no message may contain."""
    header, arrays = _header(message)
    numbers = b"".join(bytes(memory_of(one)) for one in arrays)
    return PREFIX.pack(_MAGIC, VERSION, len(header), len(numbers)) + header + numbers


def decode(kind: type[T], content: bytes | bytearray, most: Limits | None = None) -> T:
    """Return the message of a type. Raises WireError if the bytes are another one, or more than `most`.

    Time and memory grow in proportion to the bytes. A hostile header takes up to 3 s and many times its size for each
    MiB, so limit it.
    """
    header, numbers = sizes(content, most or Limits(len(content), len(content)))
    _must(len(content) == PREFIX.size + header + numbers, "of another length")
    end = PREFIX.size + header
    return _decoded(kind, bytes(content[PREFIX.size : end]), memoryview(content)[end:])


def sizes(prefix: bytes | bytearray, most: Limits) -> tuple[int, int]:
    """Return how many bytes of header and numbers a message has by its prefix. WireError if it is none, or too long."""
    _must(len(prefix) >= PREFIX.size, "too short")
    magic, version, header, numbers = PREFIX.unpack_from(prefix)
    _must(magic == _MAGIC, "no message of this package")
    _must(version == VERSION, f"of format {version}, not of {VERSION}")
    _must(header <= most.header and numbers <= most.numbers, "too long")
    return header, numbers


def text_field(start: bytes | bytearray, name: str) -> str:
    """Return a field of a message from its prefix and header alone. Raises WireError if it has no text there.

    Nothing else is checked, so that this is quick; `decode` does it.
    """
    try:
        value = parsed(bytes(start[PREFIX.size :]))["message"][name]
    except (ValueError, TypeError, KeyError):
        value = None
    _must(type(value) is str, f"without {name}")
    return str(value)


def digest(message: Any) -> str:
    """Return the hash of what a message says, 64 hexadecimal digits (SHA-256 of a header and the numbers).

    Forms of one number, such as 1 and 1.0 or 0.0 and -0.0, have one hash, except in tensors.
    """
    header, arrays = _header(message, _by_value)
    found = hashlib.sha256(header)
    for one in arrays:
        found.update(memory_of(one))
    return found.hexdigest()


def different_fields(one: Any, other: Any) -> str:
    """Return the names of the fields in which two messages of one class differ, with commas between them."""
    names = [field.name for field in dataclasses.fields(one)]
    return ", ".join(name for name in names if encode(getattr(one, name)) != encode(getattr(other, name)))


def to_text(message: Any) -> str:
    """Return a message whose tensors are empty as JSON text for a file."""
    header, arrays = _header(message)
    _must(not any(one.numel() for one in arrays), "not a text, as it holds numbers")
    return json.dumps(json.loads(header), indent=1) + "\n"


def from_text(kind: type[T], text: bytes) -> T:
    """Return the message that `to_text` wrote. Raises WireError."""
    return _decoded(kind, text, memoryview(b""))


def _must(ok: bool, problem: str) -> None:
    if not ok:
        raise WireError(f"the message is {problem}")


def _header(message: Any, form: Callable[[Any], Any] = lambda node: node) -> tuple[bytes, list[Tensor]]:
    _must(sys.byteorder == "little", "for machines that store the lowest byte first")
    arrays: list[Tensor] = []
    content = form(_plain(message, arrays))
    table = [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in arrays]
    return json.dumps({"dpfl": VERSION, "arrays": table, "message": content}).encode(), arrays


def _plain(value: Any, arrays: list[Tensor]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"number": str(float(value))}
    if isinstance(value, Tensor):
        _must(str(value.dtype).removeprefix("torch.") in _DTYPES, f"not of tensors of {value.dtype}")
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, list | tuple):
        return [_plain(one, arrays) for one in value]
    if isinstance(value, Mapping):
        return {"map": [[_plain(key, arrays), _plain(one, arrays)] for key, one in value.items()]}
    name = type(value).__name__
    _must(MESSAGES.get(name) is type(value), f"not of objects of {name}: `wire.register` it")
    return {"kind": name, **{key: _plain(getattr(value, key), arrays) for key in _hints(type(value))}}  # type: ignore[arg-type]


def _by_value(node: Any) -> Any:
    """Write each number of a header that is whole as an integer."""
    if isinstance(node, list):
        return [_by_value(one) for one in node]
    if isinstance(node, dict):
        return {key: _by_value(one) for key, one in node.items()}
    return int(node) if isinstance(node, float) and node.is_integer() else node


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _decoded(kind: type[T], header: bytes, numbers: memoryview) -> T:
    try:
        fields = parsed(header)
        _must(type(fields) is dict and type(fields.get("dpfl")) is int, "not a header")
        _must(fields["dpfl"] == VERSION, f"of format {fields['dpfl']}, not of {VERSION}")
        _must(fields.keys() == {"dpfl", "arrays", "message"} and type(fields["arrays"]) is list, "not a header")
        return _typed(kind, fields["message"], _tensors(fields["arrays"], numbers))
    except WireError:
        raise
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # of a constructor, for example
        raise WireError(f"the message is of values that do not fit ({type(error).__name__})") from None


def _tensors(table: list[Any], numbers: memoryview) -> list[Tensor]:
    tensors, start = [], 0
    for row in table:
        _must(type(row) is list and len(row) == 2 and row[0] in _DTYPES and type(row[1]) is list, "not a table")
        dtype, shape = _DTYPES[row[0]], row[1]
        _must(len(shape) <= _MOST_DIMENSIONS, "of too many dimensions")
        _must(all(type(size) is int and 0 <= size < 2**48 for size in shape), "not of shapes")
        size = math.prod(shape) * dtype.itemsize
        _must(start + size <= len(numbers), "of too few numbers")
        part = numbers[start : start + size]
        if dtype is torch.bool:
            _must(not bytes(part).strip(b"\0\1"), "of truth values that are neither 0 nor 1")
        empty = torch.empty(shape, dtype=dtype)
        tensors.append(torch.frombuffer(bytearray(part), dtype=dtype).view(shape) if size else empty)
        start += size
    _must(start == len(numbers), "of too many numbers")
    return tensors


def _typed(hint: Any, node: Any, tensors: list[Tensor]) -> Any:
    """Return a part of a message, which must have the type `hint`."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (types.UnionType, Union):
        return _one_of(inner, node, tensors)
    if kind is Any:
        return _anything(node)
    if kind is float and type(node) is dict:
        _must(node.keys() == {"number"} and node["number"] in _NUMBERS, "not a number")
        return _NUMBERS[node["number"]]
    if kind in (float, int, str, bool, types.NoneType):
        fits = node is None if kind is types.NoneType else type(node) is kind or (kind is float and type(node) is int)
        _must(fits, f"not of {getattr(kind, '__name__', kind)}")
        return node
    if kind in (tuple, list, Sequence):
        _must(type(node) is list, "not of a list")
        each = inner if kind is tuple and inner[-1] is not ... else (inner[0],) * len(node)
        _must(len(each) == len(node), "of a list of another length")
        items = [_typed(one, part, tensors) for one, part in zip(each, node, strict=True)]
        return items if kind is list else tuple(items)
    _must(type(node) is dict, "not of an object")
    if kind is Tensor:
        place = node.get("array")
        _must(node.keys() == {"array"} and type(place) is int and 0 <= place < len(tensors), "not of a tensor")
        return tensors[place]
    if kind in (dict, Mapping):
        _must(node.keys() == {"map"} and type(node["map"]) is list, "not of a mapping")
        pairs = [_typed(tuple[inner], pair, tensors) for pair in node["map"]]  # type: ignore[valid-type]
        _must(len(found := dict(pairs)) == len(pairs), "of a mapping with a key twice")
        return found
    return _object(kind, node, tensors)


def _one_of(hints: Sequence[Any], node: Any, tensors: list[Tensor]) -> Any:
    for hint in hints:
        try:
            return _typed(hint, node, tensors)
        except WireError:
            continue
    raise WireError("the message is of another kind of value")


def _object(kind: Any, node: dict[str, Any], tensors: list[Tensor]) -> Any:
    name = node.get("kind")
    found = MESSAGES.get(name) if type(name) is str else None
    _must(found is not None and isinstance(kind, type) and issubclass(found, kind), f"not of {kind}")
    assert found is not None  # for mypy
    hints = _hints(found)
    _must(node.keys() == {"kind", *hints}, "of other fields")
    return found(**{key: _typed(hint, node[key], tensors) for key, hint in hints.items()})


def _anything(node: Any) -> Any:
    """Return plain values of any type: none of the classes, and no tensors."""
    if type(node) is list:
        return [_anything(one) for one in node]
    if type(node) is dict and node.keys() == {"map"}:
        return _typed(Mapping[str, Any], node, [])
    if type(node) is dict:
        return _typed(float, node, [])
    return node
