"""Signals end a command as Ctrl-C does, by an exception, so that work can be saved; later ones do not interrupt it.

So does the end of the process that started this one as a part of its own work.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    @property
    def cause(self) -> str:
        return signal.Signals(self.number).name


class Orphaned(Terminated):
    """Raised in a part of another process's work, before its next charge or trial, when that process has ended."""

    cause = "the end of the process that started it"


_starter: int | None = None  # see `part_of`


def part_of(starter: int) -> None:
    """Make this process a part of the work of its parent, the process `starter`: see `check_starter`."""
    global _starter
    _starter = starter


def check_starter() -> None:
    """Raise `Orphaned` if the process of which this one is a part has ended: nobody waits for more of its work.

    A killed process cannot tell its children, but they then have another parent, on every system.
    """
    if _starter not in (None, os.getppid()):
        raise Orphaned


def words_and_status(error: KeyboardInterrupt) -> tuple[str, int]:
    """Return the reason for the end of a command, and its exit status (128 + the number of the signal).

    >>> words_and_status(KeyboardInterrupt()), words_and_status(Terminated())
    (('stopped by Ctrl-C', 130), ('stopped by SIGTERM', 143))
    """
    if not isinstance(error, Terminated):
        return "stopped by Ctrl-C", 128 + signal.SIGINT
    return f"stopped by {error.cause}", 128 + error.number


def handlers() -> dict[int, Any]:
    """The handlers of the signals that may be handled otherwise, which only the main thread may do."""
    main = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in _SIGNALS if main}
    return {number: handler for number, handler in found.items() if handler not in (None, signal.SIG_IGN)}


@contextmanager
def handled(handler: Any, before: Mapping[int, Any]) -> Iterator[None]:
    """Handle the signals of `before` by `handler`; then by those of `before`, unless others were installed."""
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, handler_before)


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` or KeyboardInterrupt in the main thread at the first signal; later ones are ignored.

    A signal that is already handled or ignored stays so.
    """
    came: list[int] = []

    def lost(unraisable: Any) -> None:
        """Send a signal again if Python dropped its exception, as in a callback of a weak reference."""
        if not isinstance(unraisable.exc_value, KeyboardInterrupt) or not came:
            hook_before(unraisable)
            return
        for turn in _turns:
            turn[:] = [True]
        again = threading.Timer(0.05, os.kill, (os.getpid(), came[0]))
        again.daemon = True
        again.start()

    hook_before = sys.unraisablehook
    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: handler for number, handler in handlers().items() if handler in usual}
    with _raised(came, before, waiting=0):
        sys.unraisablehook = lost
        try:
            yield
        finally:
            sys.unraisablehook = hook_before


_turns: list[list[bool]] = []  # of each block: one element until a signal takes it, which is the one that is raised


@contextmanager
def _raised(came: list[int], before: Mapping[int, Any], waiting: int) -> Iterator[Callable[[], None]]:
    """Note signals; after so many that wait raise the next one by its handler before, and ignore later ones.

    A signal may arrive at any line of the handler of another one. Yields a function that raises a waiting one.
    """
    turn = [True]

    def note(number: int, frame: FrameType | None = None) -> None:
        came.append(number)
        if len(came) <= waiting:
            if launched().rank == 0:
                os.write(2, b"The round is finished first, because it has been charged. Another signal ends it now.\n")
            return
        try:
            turn.pop()
        except IndexError:  # another one has been raised
            return
        if not callable(before[number]):  # the default handler of the system would save nothing
            raise Terminated(number)
        before[number](number, frame)

    def check() -> None:
        if came:
            note(came[0])

    _turns.append(turn)
    try:
        with handled(note, before):
            yield check
    finally:
        _turns.remove(turn)


@contextmanager
def between_rounds() -> Iterator[Callable[[], None]]:
    """Let the first signal wait for the end of the round; the second one ends the round immediately.

    Yields a function to call between rounds; it raises the exception of the signal, if one has arrived. After an
    exception of a signal, further signals are ignored until the block ends, so that it can save the run.
    """
    with _raised([], handlers(), waiting=1) as check:
        yield check


def ignore_signals() -> None:
    """Let no signal interrupt the end of the process, whose work is saved."""
    for number in handlers():
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def passed_on(helpers: Sequence[subprocess.Popen]) -> Iterator[None]:
    """Pass SIGTERM on to helper processes when this one is ended; Ctrl-C reaches all processes of a terminal anyway."""
    try:
        yield
    except Terminated:
        for helper in helpers:
            helper.terminate()
        raise
