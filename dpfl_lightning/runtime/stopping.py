"""SIGTERM (docker stop, SLURM, systemd) ends a command as Ctrl-C does: by an exception, so that work can be saved."""

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
    """Raised by SIGTERM. Code that saves its work on Ctrl-C also saves it on SIGTERM."""


def words_and_status(error: KeyboardInterrupt) -> tuple[str, int]:
    """Return the reason for the end of a command, and its exit status (128 + the number of the signal).

    >>> words_and_status(KeyboardInterrupt()), words_and_status(Terminated())
    (('stopped by Ctrl-C', 130), ('stopped by SIGTERM', 143))
    """
    return ("stopped by SIGTERM", 143) if isinstance(error, Terminated) else ("stopped by Ctrl-C", 130)


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` in the main thread at the first SIGTERM; later ones do not interrupt the saving of a run.

    Nothing is changed if SIGTERM is already handled or ignored, or among ranks: a launcher sends it to all of them when
    one dies, rank 0 handles it during a run (`federated.transport.ranks`), and the others end immediately.
    """

    def terminate(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    if not _in_main_thread() or launched().size > 1 or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def between_rounds() -> Iterator[Callable[[], None]]:
    """Let the first Ctrl-C or SIGTERM wait for the end of the round; the second one ends the round immediately.

    Yields a function to call between rounds; it raises the exception of the signal, if one has arrived.
    """
    signals = (signal.SIGINT, signal.SIGTERM) if _in_main_thread() else ()
    before: dict[int, Any] = {number: signal.getsignal(number) for number in signals}
    before = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    came: list[int] = []

    def obey(number: int, frame: FrameType | None = None) -> None:
        if not callable(before[number]):  # the default handler of the system would save nothing
            raise Terminated
        before[number](number, frame)

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            obey(number, frame)
        else:
            os.write(2, b"The round is finished first, because it has been charged. Another signal ends it now.\n")

    def check() -> None:
        if came:
            obey(came[0])

    for number in before:
        signal.signal(number, note)
    try:
        yield check
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is note:  # a handler that was called may have installed another one
                signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def passed_on(helpers: Sequence[subprocess.Popen]) -> Iterator[None]:
    """Pass SIGTERM on to helper processes; Ctrl-C reaches all processes of a terminal anyway."""
    try:
        yield
    except Terminated:
        for helper in helpers:
            helper.terminate()
        raise
