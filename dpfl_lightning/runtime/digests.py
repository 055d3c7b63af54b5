"""Digests of objects and of the source code that defines them."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def object_digest(value: object) -> str:
    """Return the digest of a strategy before its first round: its class, its settings and the source code of both."""
    return digest_with_sources([described(vars(value))], type(value).__mro__)


def memory_of(value: Tensor) -> memoryview:
    """Return a tensor's bytes, copied to the CPU if necessary."""
    if value.numel() == 0:  # torch refuses to view some empty tensors
        return memoryview(b"")
    return value.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data


def hex_digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digest_with_sources(words: list[Any], classes: Iterable[type]) -> str:
    classes = list(classes)
    # of a script only the classes are compared, because it may change elsewhere
    scripts = [_code_of(one) for one in classes if one.__module__ == "__main__"]
    digest = hashlib.blake2b(json.dumps([words, scripts]).encode(), digest_size=16)
    for name, source in _sources({one.__module__ for one in classes} - {"__main__"}):
        digest.update(json.dumps([name, len(source)]).encode())
        digest.update(source)
    return digest.hexdigest()


def _code_of(kind: type) -> str | None:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # defined in an interactive interpreter
        return None


def described(value: object, seen: dict[int, int] | None = None) -> Any:
    """Return a description of a setting that is serialisable as JSON and contains no memory addresses.

    Args:
        value: the setting.
        seen: id -> number of the objects that were described already; each object is described once. Tuples are
            excluded, because Python may or may not share equal tuples.
    """
    seen = {} if seen is None else seen
    if isinstance(value, Tensor | np.ndarray | np.generic):
        tensor = torch.as_tensor(value)
        return [str(tensor.dtype), list(tensor.shape), hex_digest(bytes(memory_of(tensor)))]
    if value is None or isinstance(value, str | int | float | complex | bytes):
        return repr(value)
    if isinstance(value, functools.partial):
        return ["partial", *(described(one, seen) for one in (value.func, value.args, value.keywords))]
    if isinstance(value, type) or inspect.isroutine(value):
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        return [f"{value.__module__}.{value.__qualname__}", described(cells, seen) if cells else None]
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, tuple):
        return [name, [described(one, seen) for one in value]]
    if id(value) in seen:
        return [name, seen[id(value)]]
    seen[id(value)] = len(seen)
    if isinstance(value, Mapping):
        return [name, [[described(key, seen), described(one, seen)] for key, one in value.items()]]
    if isinstance(value, set | frozenset):
        return [name, sorted(json.dumps(described(one, seen)) for one in value)]
    if isinstance(value, list):
        return [name, [described(one, seen) for one in value]]
    if hasattr(value, "__dict__"):
        return [name, described(vars(value), seen)]
    text = repr(value)
    return [name, None if " at 0x" in text else text]


def _sources(names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Return the sorted source files of Python modules and of the modules that they refer to, as (name, bytes).

    Installed packages are excluded. A module without a file (an interactive interpreter) is excluded, too: its code
    cannot be compared.
    """
    source_of: dict[str, bytes] = {}
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        python = sys.modules.get(name)
        file = getattr(python, "__file__", None)
        if name in source_of or python is None or not file or _installed(name, file):
            continue
        source_of[name] = Path(file).read_bytes()
        waiting |= set(_neighbours(python))
    return ((name, source_of[name]) for name in sorted(source_of))


def _installed(name: str, file: str) -> bool:
    packages = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return name.split(".")[0] in ("dpfl_lightning", "__main__") or file.startswith(_INSTALLED) or bool(packages)


def _neighbours(python: ModuleType) -> Iterator[str]:
    """Yield the names of the modules whose names, classes and functions this module has imported."""
    for value in vars(python).values():
        other = value if isinstance(value, ModuleType) else _home(value)
        if other is not None:
            yield other.__name__


def _home(value: object) -> ModuleType | None:
    return inspect.getmodule(value) if inspect.isclass(value) or inspect.isfunction(value) else None
