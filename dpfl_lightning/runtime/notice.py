"""Progress messages of slow computations."""

import sys
import time
from collections.abc import Callable


def slow_notice(what: str, patience_seconds: float = 2.0) -> Callable[[int, int], None]:
    """Return a callback `(done, total)` that prints the progress to stderr, at most once in `patience_seconds`."""
    last = time.monotonic()

    def notify(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > patience_seconds:
            last = time.monotonic()
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    return notify
