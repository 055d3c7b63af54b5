"""Compilation of loops by numba, cached on disk for later processes."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
from numba.core.caching import FunctionCache

from dpfl_lightning.errors import warn_user


def compiled(function: Callable[..., None], **options: Any) -> Any:
    """Compile `function` to machine code that releases Python's lock; a division by zero is infinite.

    Compiled code is cached beside the source, in the user's cache folder or in `NUMBA_CACHE_DIR`; if none is writable,
    every process compiles for seconds. A cache entry depends on the source file's time and size, numba's version, the
    processor and the variables of an outer function, but not on what the function imports from other files.
    """
    dispatcher = numba.njit(nogil=True, error_model="numpy", **options)(function)
    with suppress(RuntimeError):  # no folder is writable
        dispatcher._cache = _Kept(function)
    return dispatcher


class _Kept(FunctionCache):
    """Numba's cache, which only warns about a broken file or a full disk."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # unpickling an incomplete file (after a power cut) may raise anything
            warn_user(f"{self.cache_path} holds a broken file of compiled loops ({error!r}): they are compiled again.")
            self._saved(self.flush)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        self._saved(super().save_overload, sig, data)

    def _saved(self, save: Callable[..., None], *what: Any) -> None:
        try:
            save(*what)
        except OSError as error:
            warn_user(f"compiled loops cannot be cached ({error}): the next run compiles them again for some seconds.")
