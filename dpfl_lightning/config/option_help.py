"""`--strategies.help` lists what that key may name, `--strategies.help NAME` shows one with its options. So of others.

Imports nothing of them before it is asked, for many of them need torch.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from dpfl_lightning.config.options import REGISTRIES, all_keys
from dpfl_lightning.config.registry import listed, options_of
from dpfl_lightning.errors import nearest, require

FLAGS = {f"--{key}.help": key for key in REGISTRIES}


def help_text(key: str, name: str | None) -> str:
    """What `--KEY.help [NAME]` prints.

    Raises:
        UserError: the key knows no such name.
    """
    registry = REGISTRIES[key]
    module = importlib.import_module(f"dpfl_lightning.{registry.module}")
    found: Any = getattr(module, registry.functions or registry.attribute)
    known: Mapping[str, Callable[..., Any]] = found if isinstance(found, Mapping) else found()
    if name is None:
        more = textwrap.fill(f"--{key}.help NAME shows one's options. {key}: {all_keys()[key].help}", 120)
        return f"{listed(known)}\n\n{more}"
    require(name in known, f"--{key}.help", f"be followed by one of {', '.join(known)}", name, nearest(name, known))
    prefix = f"--{key}.{name}" if key == "strategies" else f"--{key}"
    return f"{key} {name}\n\n{options_of(known[name], registry.given, prefix)}"
