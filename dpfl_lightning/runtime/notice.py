"""What a person is told while a computation goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def slow_notice(what: str, patience_seconds: float = 2.0) -> Callable[[int, int], None]:
    """A callback `(done, all)` that says on stderr how far something is, if and while it takes longer than that."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > patience_seconds:
            last = time.monotonic()
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    return tell
