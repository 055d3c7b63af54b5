"""Faster ways of the room `kernels`, found by name: nothing outside it imports them, and without it all is slower."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

_ROOM = "dpfl_lightning.kernels"


@functools.cache
def kernel(name: str) -> ModuleType | None:
    """Return a module of the room; None if it is not installed."""
    return importlib.import_module(f"{_ROOM}.{name}") if importlib.util.find_spec(_ROOM) else None
