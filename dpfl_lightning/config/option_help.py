"""Help for keys that accept names: `--strategies.help` lists the names, `--strategies.help NAME` shows one's options.

The registries are imported only on request, because many of them import torch.
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
    """Return the text that `--KEY.help [NAME]` prints.

    Raises:
        UserError: `name` is not registered for the key.
    """
    registry = REGISTRIES[key]
    module = importlib.import_module(f"dpfl_lightning.{registry.module}")
    registered: Any = getattr(module, registry.functions or registry.attribute)
    known: Mapping[str, Callable[..., Any]] = registered if isinstance(registered, Mapping) else registered()
    if name is None:
        more = textwrap.fill(f"--{key}.help NAME shows the options of NAME. {key}: {all_keys()[key].help}", 120)
        return f"{listed(known)}\n\n{more}"
    require(name in known, f"--{key}.help", f"be followed by one of {', '.join(known)}", name, nearest(name, known))
    prefix = f"--{key}.{name}" if key == "strategies" else f"--{key}"
    return f"{key} {name}\n\n{options_of(known[name], registry.given, prefix)}"
