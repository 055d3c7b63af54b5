"""Options as MLflow keeps them: without secrets, and as flat text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_LONGEST = 6000  # characters of a parameter


def loggable(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, at any depth, without the password of a URI.

    >>> loggable({"rounds": 3, "tracking": {"uri": "http://me:secret@host"}})
    {'rounds': 3, 'tracking': {'uri': 'http://host'}}
    """
    return {
        name: loggable(value) if isinstance(value, Mapping) else shown(value) if isinstance(value, str) else value
        for name, value in options.items()
    }


def flattened(options: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted name -> text, cut to what MLflow takes; lists are one value.

    >>> flattened({"seed": 0, "model": {"name": "cnn"}, "strategies": {"uniform": {}}, "budgets": [1.5, 2]})
    {'seed': '0', 'model.name': 'cnn', 'strategies.uniform': '{}', 'budgets': '[1.5, 2]'}
    """
    flat: dict[str, str] = {}
    for name, value in options.items():
        key = prefix + re.sub(r"[^\w\-. :/]", "_", str(name))
        if isinstance(value, Mapping) and value:
            flat.update(flattened(value, f"{key}."))
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            flat[key] = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return flat


def shown(uri: str) -> str:
    """The URI without a user's name and password.

    >>> shown("postgresql://me:secret@db.example.org/runs")
    'postgresql://db.example.org/runs'
    """
    return re.sub(r"(?<=://)[^/@]*@", "", uri)
