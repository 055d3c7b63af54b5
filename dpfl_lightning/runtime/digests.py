"""Digests of objects and of the source code that defines them."""

import functools
import hashlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def object_digest(value: object) -> str:
    """Return the digest of an object's settings, and of the source code of its class and of all that this uses."""
    return digest_with_sources([described(vars(value))], type(value).__mro__)


def memory_of(value: Tensor) -> memoryview:
    """Return a tensor's bytes, copied to the CPU if necessary."""
    if value.numel() == 0:  # torch refuses to view some empty tensors
        return memoryview(b"")
    return value.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data


def hex_digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digest_with_sources(words: list[Any], classes: Sequence[type]) -> str:
    # of a script only the classes are compared, because it may change elsewhere
    scripts = [_code_of(kind) for kind in classes if kind.__module__ == "__main__"]
    digest = hashlib.blake2b(json.dumps([words, scripts]).encode(), digest_size=16)
    for name, source in sorted(_sources({kind.__module__ for kind in classes} - {"__main__"}).items()):
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

    `seen` maps the id of each described object to its number; tuples are excluded, because Python may share equal ones.
    """
    seen = {} if seen is None else seen
    if isinstance(value, Tensor | np.ndarray | np.generic):
        tensor = torch.as_tensor(value)
        if tensor.requires_grad:  # what a run trains is no setting
            return [str(tensor.dtype), list(tensor.shape)]
        return [str(tensor.dtype), list(tensor.shape), hex_digest(bytes(memory_of(tensor)))]
    if value is None or isinstance(value, str | int | float | complex | bytes):
        return repr(value)
    if isinstance(value, functools.partial):
        return ["partial", *(described(one, seen) for one in (value.func, value.args, value.keywords))]
    if isinstance(value, ModuleType):
        return ["module", value.__name__]
    if isinstance(value, type) or inspect.isroutine(value):
        kept = None if isinstance(value, type) else _kept_by(value, seen)
        return [f"{getattr(value, '__module__', None)}.{value.__qualname__}", kept]  # a method of C has no module
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


def _kept_by(function: Any, seen: dict[int, int]) -> Any:
    """A description of what a function closes over, and of its defaults."""
    kept = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    kept += [getattr(function, name, None) for name in ("__defaults__", "__kwdefaults__")]
    if not any(one is not None for one in kept) or id(function) in seen:
        return None
    seen[id(function)] = len(seen)  # it may close over itself
    return [described(one, seen) for one in kept]


def _sources(names: Iterable[str]) -> dict[str, bytes]:
    """Return the source files of modules and of the modules that they refer to, except installed ones and consoles."""
    source_of: dict[str, bytes] = {}
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if name in source_of or not file or _installed(name, file):
            continue
        source_of[name] = Path(file).read_bytes()
        for value in vars(module).values():
            origin = inspect.getmodule(value) if inspect.isclass(value) or inspect.isfunction(value) else value
            if isinstance(origin, ModuleType):
                waiting.add(origin.__name__)
    return source_of


def _installed(name: str, file: str) -> bool:
    packages = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return name.split(".")[0] in ("dpfl_lightning", "__main__") or file.startswith(_INSTALLED) or bool(packages)
