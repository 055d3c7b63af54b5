"""Prepares options for MLflow: without secrets, and as flat text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_LONGEST = 6000  # maximal number of characters of a parameter


def loggable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the passwords of all URIs removed, at any depth.

    >>> loggable({"rounds": 3, "tracking": {"uri": "http://me:secret@host"}})
    {'rounds': 3, 'tracking': {'uri': 'http://host'}}
    """
    return {
        name: loggable(value) if isinstance(value, Mapping) else shown(value) if isinstance(value, str) else value
        for name, value in options.items()
    }


def flattened(options: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return dotted name -> text, shortened to what MLflow accepts; a list is one value.

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
    """Return the URI without user name and password.

    >>> shown("postgresql://me:secret@db.example.org/runs")
    'postgresql://db.example.org/runs'
    """
    return re.sub(r"(?<=://)[^/@]*@", "", uri)
