"""Loops that torch has no operator for, compiled by numba once on each machine and kept for the next process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
from numba.core.caching import FunctionCache

from dpfl_lightning.errors import UserNotice


def compiled(function: Callable[..., None], **options: Any) -> Any:
    """`function` in machine code, without Python's lock; a division by zero is infinite.

    What is compiled lies beside the source (`__pycache__`), or else in the user's folder of caches, or in
    `NUMBA_CACHE_DIR`; where none can be written, every process compiles anew, which takes seconds. It is found again by
    the source file's time and size, by numba's version, by the processor and by the variables of an outer function, but
    not by what the function takes from other files.
    """
    dispatcher = numba.njit(nogil=True, error_model="numpy", **options)(function)
    with suppress(RuntimeError):  # no folder can be written
        dispatcher._cache = _Kept(function)
    return dispatcher


class _Kept(FunctionCache):
    """Numba's cache; but a broken file or a full disk is no reason to end a run that can do without."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # unpickling half a file (a power cut) may raise anything
            words = f"{self.cache_path} holds a broken file of compiled loops ({error!r}): they are compiled anew."
            warnings.warn(UserNotice(words), stacklevel=2)
            self._saved(self.flush)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        self._saved(super().save_overload, sig, data)

    def _saved(self, save: Callable[..., None], *what: Any) -> None:
        try:
            save(*what)
        except OSError as error:
            words = f"compiled loops cannot be kept ({error}): the next run compiles them again, for some seconds."
            warnings.warn(UserNotice(words), stacklevel=4)
