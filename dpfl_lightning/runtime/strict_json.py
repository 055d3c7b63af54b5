"""JSON from somebody who may be hostile: whatever is ambiguous or too large is an error."""

import json
import math
from typing import Any


def parsed(content: bytes) -> Any:
    """Return the value of JSON text in UTF-8.

    Raises ValueError also for a repeated key, an integer of more than 64 bits, a number that is not finite, deep
    nesting, and half a character.
    """
    try:
        value = _JSON.decode(content.decode())
        if b"\\u" in content:
            json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key is repeated")
    return fields


def _integer(text: str) -> int:
    if not -(2**63) <= (value := int(text)) < 2**63:
        raise ValueError("an integer has more than 64 bits")
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not finite")
    return value


_JSON = json.JSONDecoder(object_pairs_hook=_distinct, parse_int=_integer, parse_float=_finite, parse_constant=_finite)
