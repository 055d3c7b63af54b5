"""One sentence form for every error a user can cause, and the one place that turns it into an exit status."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

from dpfl_lightning.runtime.launcher import launched
from dpfl_lightning.runtime.stopping import terminable, words_and_status


class UserError(ValueError):
    """A mistake the user can mend: says what must hold, what came, and what to do."""


class UserNotice(UserWarning):
    """Something the user should know, though the program goes on: what came, and what it means."""


def require(ok: bool, key: str, must: str, got: object, advice: str = "") -> None:
    """Raise the one sentence unless `ok`.

    >>> require(False, "sample_rate", "be in (0, 1]", 1.8, "A batch size?")
    Traceback (most recent call last):
    ...
    dpfl_lightning.errors.UserError: `sample_rate` must be in (0, 1], got 1.8. A batch size?
    """
    if not ok:
        raise UserError(f"`{key}` must {must}, got {got!r}. {advice}".rstrip())


def nearest(name: str, choices: Iterable[str]) -> str:
    """The hint for a misspelt name, or nothing.

    >>> nearest("rouns", ["rounds", "seed"])
    'Did you mean `rounds`?'
    """
    close = difflib.get_close_matches(str(name), list(choices), n=1, cutoff=0.5)
    return f"Did you mean `{close[0]}`?" if close else ""


def _show(otherwise: Callable[..., None], message: Warning | str, *where: object, **more: object) -> None:
    """A notice is one line; other warnings look as ever."""
    if launched().local_rank > 0:
        return
    if isinstance(message, UserNotice):
        print(f"warning: {message}", file=sys.stderr)
    else:
        otherwise(message, *where, **more)


def command(main: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Wrap a command: a `UserError` or `UserNotice` is one line on stderr; an error is status 2.

    Ctrl-C is status 130, SIGTERM 143, and 141 where nobody reads on (`| head`). Any other exception is a bug and keeps
    its traceback. Of several ranks on a host, which read the same files, one speaks for all.
    """

    @functools.wraps(main)
    def wrapped(argv: Sequence[str] | None = None) -> int:
        warnings.showwarning = functools.partial(_show, warnings.showwarning)
        silent = launched().local_rank > 0
        words, status = "", 0
        with contextlib.redirect_stdout(io.StringIO()) if silent else contextlib.nullcontext():
            try:
                with terminable(), _told():
                    return main(argv) or 0
            except BrokenPipeError:
                if not _nobody_reads():
                    raise
                return 128 + signal.SIGPIPE
            except UserError as error:
                words, status = f"error: {error}", 2
            except KeyboardInterrupt as error:
                words, status = words_and_status(error)
        if not silent:
            print(words, file=sys.stderr)
        return status

    return wrapped


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What was printed is out when this ends: a reader who is gone is noticed here, and not when Python ends."""
    try:
        yield
    finally:
        sys.stdout.flush()


def _nobody_reads() -> bool:
    """Whether it is standard output that nobody reads; what is left for it is dropped then."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
