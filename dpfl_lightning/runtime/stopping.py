"""SIGTERM (docker stop, SLURM, systemd) ends a command as Ctrl-C does: by an exception that lets it save its work."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from dpfl_lightning.runtime.launcher import launched


class Terminated(KeyboardInterrupt):
    """SIGTERM came: whatever saves its work on Ctrl-C saves it now, too."""


def words_and_status(error: KeyboardInterrupt) -> tuple[str, int]:
    """What ended a command, for people and for shells (128 + the signal's number).

    >>> words_and_status(KeyboardInterrupt()), words_and_status(Terminated())
    (('stopped by Ctrl-C', 130), ('stopped by SIGTERM', 143))
    """
    return ("stopped by SIGTERM", 143) if isinstance(error, Terminated) else ("stopped by Ctrl-C", 130)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` in the main thread, once: what is then done to save a run is not interrupted again.

    Not where somebody handles or ignores it already. Nor among ranks, to which a launcher sends it when one of them
    dies: rank 0 handles it while a run goes on (`federated.ranks`), and the others end at once.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or launched().size > 1 or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def between_rounds() -> Iterator[Callable[[], None]]:
    """A first Ctrl-C or SIGTERM waits for the end of the round, a second one ends it at once.

    A round that is broken off is paid for, and lost. Yields a function to call between rounds: it raises what the
    signal asked for, if one came.
    """
    main = threading.current_thread() is threading.main_thread()
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if main and handler not in (None, signal.SIG_IGN)}
    came: list[int] = []

    def obey(number: int, frame: FrameType | None = None) -> None:
        if not callable(before[number]):  # the system's own way to end a process saves nothing
            raise Terminated
        before[number](number, frame)

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            obey(number, frame)
        else:
            os.write(2, b"The round is finished first, for it is paid; another Ctrl-C or SIGTERM ends it at once.\n")

    def check() -> None:
        if came:
            obey(came[0])

    for number in before:
        signal.signal(number, note)
    try:
        yield check
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is note:  # a handler that was obeyed may have put another one in its place
                signal.signal(number, handler)


def _raise(number: int, frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


@contextmanager
def passed_on(helpers: Sequence[subprocess.Popen]) -> Iterator[None]:
    """SIGTERM comes to this process alone, where Ctrl-C reaches all of a terminal: its helpers get it from here."""
    try:
        yield
    except Terminated:
        for helper in helpers:
            helper.terminate()
        raise
