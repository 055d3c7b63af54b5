"""`--strategies.help` lists what that key may name, `--strategies.help NAME` shows one with its options. So of others.

Imports nothing of them before it is asked, for many of them need torch.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dpfl_lightning.config.options import all_keys
from dpfl_lightning.config.registry import listed, options_of
from dpfl_lightning.errors import nearest, require


class _Home(NamedTuple):
    """Where a key's names are found: a mapping of names to functions, or what makes it."""

    module: str
    attribute: str
    given: int  # leading arguments that the program passes: no options


_HOMES = {
    "strategies": _Home("dpfl_lightning.strategies", "classes", 0),
    "model": _Home("dpfl_lightning.models", "MODELS", 2),
    "data.partition": _Home("dpfl_lightning.data.partition", "PARTITIONS", 3),
    "data.groups": _Home("dpfl_lightning.data.groups", "GROUPS", 3),
    "data.mislabelled": _Home("dpfl_lightning.data.label_noise", "UNITS", 2),
}
FLAGS = {f"--{key}.help": key for key in _HOMES}


def help_text(key: str, name: str | None) -> str:
    """What `--KEY.help [NAME]` prints.

    Raises:
        UserError: the key knows no such name.
    """
    home = _HOMES[key]
    found: Any = getattr(importlib.import_module(home.module), home.attribute)
    known: Mapping[str, Callable[..., Any]] = found if isinstance(found, Mapping) else found()
    if name is None:
        more = textwrap.fill(f"--{key}.help NAME shows one's options. {key}: {all_keys()[key].help}", 120)
        return f"{listed(known)}\n\n{more}"
    require(name in known, f"--{key}.help", f"be followed by one of {', '.join(known)}", name, nearest(name, known))
    prefix = f"--{key}.{name}" if key == "strategies" else f"--{key}"
    return f"{key} {name}\n\n{options_of(known[name], home.given, prefix)}"
