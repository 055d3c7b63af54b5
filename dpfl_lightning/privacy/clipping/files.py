"""Whose file code is in, and what it names there: files of users are read, those of libraries are not."""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

_LIBRARIES = {*sys.stdlib_module_names, "dpfl_lightning", "lightning", "numpy", "torch", "torchmetrics"} - {"__main__"}


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of variables that code refers to, and functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> tuple[str, ...]:
    return tuple(names_in(code))


_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "IMPORT_FROM"})
_ASIDE = frozenset({"CACHE", "COPY", "EXTENDED_ARG", "NOP", "POP_TOP", "PRECALL", "PUSH_NULL", "SWAP"})


@functools.lru_cache(maxsize=4096)
def handed_on(code: CodeType) -> frozenset[str]:
    """Return the names that code, and functions within it, use for more than attributes of what they name."""
    found, imported = set[str](), dict[str, str]()
    steps = [one for one in dis.get_instructions(code) if one.opname not in _ASIDE]
    for one, after in pairwise([*steps, *steps[-1:]]):
        if one.opname.startswith("IMPORT_") and after.opname.startswith("STORE_"):
            imported[after.argval] = one.argval
        elif one.opname.startswith("LOAD_") and one.opname != "LOAD_CONST":
            names = one.argval if isinstance(one.argval, tuple) else (one.argval,)  # one of two reads both
            found |= {*(names[:-1] if after.opname in _READS else names)}
    found |= {part for name in found & imported.keys() for part in imported[name].split(".")}
    return frozenset(found).union(*(handed_on(one) for one in code.co_consts if isinstance(one, CodeType)))


@functools.lru_cache(maxsize=4096)
def imports_of(code: CodeType) -> tuple[tuple[str, int], ...]:
    """Return the names and levels of modules that code imports, and functions within it."""
    found, before = list[tuple[str, int]](), [*dis.get_instructions(code)]
    for place, one in enumerate(before):
        if one.opname == "IMPORT_NAME":
            found.append((one.argval, before[place - 2].argval))
        if isinstance(one.argval, CodeType):
            found += imports_of(one.argval)
    return tuple(found)


def file_of(space: Mapping[str, Any]) -> str:
    """Return the name of a file, as a user knows it, by its variables."""
    return Path(str(space.get("__file__") or space.get("__name__", "a text"))).name


def home_of(value: Any) -> tuple[str, str]:
    """Return the name and the path of the file of a function, a class or a module, as far as they are known."""
    if isinstance(value, FunctionType):
        space = value.__globals__
    elif isinstance(value, ModuleType):
        space = vars(value)
    else:
        name = value.__module__
        module = sys.modules.get(name) if isinstance(name, str) else None
        return str(name), str(getattr(module, "__file__", None) or "")
    return str(space.get("__name__", "")), str(space.get("__file__") or "")


@functools.lru_cache(maxsize=4096)
def is_library(module: str, path: str) -> bool:
    """Return whether a module is of Python, of this package or of those on which it stands: a path tells, if any."""
    top = module.partition(".")[0]
    if top not in _LIBRARIES:
        return False
    of_python = top in sys.stdlib_module_names
    folder = os.path.dirname(str(os.__file__ if of_python else getattr(sys.modules.get(top), "__file__", "")))
    return not path or (path.startswith(folder + os.sep) and not (of_python and _lies_in_site(path)))


def _lies_in_site(path: str) -> bool:
    return bool({"site-packages", "dist-packages"} & {*Path(path).parts})


@functools.lru_cache(maxsize=4096)
def is_users(module: str, path: str) -> bool:
    """Return whether a module is a file of a user, not of Python, of this package or installed."""
    return not (is_library(module, path) or _lies_in_site(path) or _is_installed(module.partition(".")[0]))


@functools.cache
def _is_installed(top: str) -> bool:
    """Return whether a package lies where pip has installed it, in a folder of any name."""
    file = getattr(sys.modules.get(top), "__file__", None)
    folder = Path(file).parent.parent if file and Path(file).stem == "__init__" else None
    return folder is not None and next(folder.glob("*.dist-info"), None) is not None
