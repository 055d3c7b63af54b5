"""Signals end a command as Ctrl-C does, by an exception, so that work can be saved; later ones do not interrupt it."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dpfl_lightning.runtime.launcher import launched

#: Ctrl-C; docker stop, SLURM and systemd; the end of a terminal or a connection; Ctrl-backslash
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM, SIGHUP or SIGQUIT. Code that saves its work on Ctrl-C also saves it then."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number


def words_and_status(error: KeyboardInterrupt) -> tuple[str, int]:
    """Return the reason for the end of a command, and its exit status (128 + the number of the signal).

    >>> words_and_status(KeyboardInterrupt()), words_and_status(Terminated())
    (('stopped by Ctrl-C', 130), ('stopped by SIGTERM', 143))
    """
    if not isinstance(error, Terminated):
        return "stopped by Ctrl-C", 128 + signal.SIGINT
    return f"stopped by {signal.Signals(error.number).name}", 128 + error.number


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` or KeyboardInterrupt in the main thread at the first signal; later ones are ignored.

    A signal that is already handled or ignored stays so. Nothing is changed among ranks: a launcher sends SIGTERM to
    all of them when one dies, rank 0 handles it during a run (`federated.transport.ranks`), and the others end
    immediately.
    """
    came: list[int] = []

    def stop(number: int, frame: object) -> None:
        if not came:
            came.append(number)
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    def lost(unraisable: Any) -> None:
        """Send a signal again if Python dropped its exception, as in a callback of a weak reference."""
        if not isinstance(unraisable.exc_value, KeyboardInterrupt) or not came:
            hook_before(unraisable)
            return
        again = threading.Timer(0.05, os.kill, (os.getpid(), came.pop()))
        again.daemon = True
        again.start()

    hook_before = sys.unraisablehook
    usual = (signal.SIG_DFL, signal.default_int_handler)
    alone = _in_main_thread() and launched().size == 1
    before = {number: signal.getsignal(number) for number in _SIGNALS if alone and signal.getsignal(number) in usual}
    for number in before:
        signal.signal(number, stop)
    if before:
        sys.unraisablehook = lost
    try:
        yield
    finally:
        if sys.unraisablehook is lost:
            sys.unraisablehook = hook_before
        for number, handler in before.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)


def ignore_signals() -> None:
    """Let no signal interrupt the end of the process, whose work is saved."""
    for number in _SIGNALS if _in_main_thread() else ():
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def between_rounds() -> Iterator[Callable[[], None]]:
    """Let the first signal wait for the end of the round; the second one ends the round immediately.

    Yields a function to call between rounds; it raises the exception of the signal, if one has arrived. After an
    exception of a signal, further signals are ignored until the block ends, so that it can save the run.
    """
    signals = _SIGNALS if _in_main_thread() else ()
    before: dict[int, Any] = {number: signal.getsignal(number) for number in signals}
    before = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    came: list[int] = []

    def ignored(number: int, frame: FrameType | None) -> None:
        pass

    def obey(number: int, frame: FrameType | None = None) -> None:
        for one in before:
            signal.signal(one, ignored)
        if not callable(before[number]):  # the default handler of the system would save nothing
            raise Terminated(number)
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
            if signal.getsignal(number) in (note, ignored):  # a handler that was called may have installed another one
                signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def passed_on(helpers: Sequence[subprocess.Popen]) -> Iterator[None]:
    """Pass SIGTERM on to helper processes when this one is ended; Ctrl-C reaches all processes of a terminal anyway."""
    try:
        yield
    except Terminated:
        for helper in helpers:
            helper.terminate()
        raise
