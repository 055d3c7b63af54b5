"""Errors that a user can cause, their common form, and their conversion to an exit status."""

import contextlib
import difflib
import errno
import functools
import inspect
import io
import os
import shutil
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from pathlib import Path

from dpfl_lightning.runtime.launcher import launched
from dpfl_lightning.runtime.stopping import ignore_signals, terminable, words_and_status

#: the way out of a damaged run, for the end of an error's sentence
NEW_RUN = "The ledger in the same folder records what was spent. Start a new run in another --output_dir."
#: names that other tools use -> our names
_ELSEWHERE = {
    **dict.fromkeys(("auc", "roc_auc"), "auroc"),
    **dict.fromkeys(("auprc", "pr_auc"), "average_precision"),
    "lr": "learning_rate",
    **dict.fromkeys(("fedavg", "dpfedavg"), "size_weighted"),
    "train": "fit",
    "test": "evaluate",
    "gpu": "cuda",
}
_LONGEST = 200  # characters of a value in a message

#: errors of disks, permissions and limits of the machine, which are no bugs
_OF_THE_MACHINE = frozenset(
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "EIO", "ESTALE", "EMFILE", "ENFILE", "ENOMEM"),
        *("ENAMETOOLONG", "ELOOP", "ENOTDIR", "EISDIR"),
    )
)


class UserError(ValueError):
    """An error that the user can correct. The message states the requirement, the value and the correction."""


class UserNotice(UserWarning):
    """A warning for the user: what was found, and what it means. The program continues."""


def require(ok: bool, key: str, must: str, got: object, advice: str = "") -> None:
    """Raise UserError unless `ok`: "`key` must `must`, got `got`. `advice`".

    >>> require(False, "sample_rate", "be in (0, 1]", 1.8, "A batch size?")
    Traceback (most recent call last):
    ...
    dpfl_lightning.errors.UserError: `sample_rate` must be in (0, 1], got 1.8. A batch size?
    """
    if not ok:
        raise UserError(f"`{shortened(key)}` must {must}, got {shortened(repr(got))}. {advice}".rstrip())


def require_whole(key: str, value: object, least: int) -> None:
    """Raise UserError unless the value is a whole number of at least `least`.

    >>> require_whole("images", 2.5, 1)
    Traceback (most recent call last):
    ...
    dpfl_lightning.errors.UserError: `images` must be a whole number >= 1, got 2.5.
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    require(whole and value >= least, key, f"be a whole number >= {least}", value)  # type: ignore[operator]


def shortened(text: str, most: int = _LONGEST) -> str:
    """Return at most so many characters of a text.

    >>> shortened("rounds"), len(shortened("x" * 1500))
    ('rounds', 200)
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


def in_one_line(error: BaseException) -> str:
    """Return the type and the first line of an error, without a full stop; of a UserError the line alone.

    >>> in_one_line(ValueError("singular.\\nb")), in_one_line(UserError("`a` must be b."))
    ('ValueError: singular', '`a` must be b.')
    """
    line = (str(error).strip().splitlines() or [""])[0][:300]
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line.rstrip('.')}"


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a hint with the nearest of the `choices` for a misspelt name, or an empty string.

    >>> nearest("rouns", ["rounds", "seed"]), nearest("FedAvg", ["fedyogi", "size_weighted"])
    ('Did you mean `rounds`?', 'Did you mean `size_weighted`?')
    """
    by_lower = {str(choice).lower(): choice for choice in choices}
    section, dot, last = str(name).lower().rpartition(".")
    if (ours := f"{section}{dot}{_ELSEWHERE.get(last)}") in by_lower:
        return f"Did you mean `{by_lower[ours]}`?"
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6)
    return f"Did you mean `{by_lower[close[0]]}`?" if close else ""


def require_one_of(choices: Iterable[str], key: str, name: object) -> None:
    """Raise UserError with the nearest choice unless `name` is one of the choices."""
    known = list(choices)
    require(name in known, key, f"be one of {', '.join(known)}", name, nearest(str(name), known))


def warn_user(message: str) -> None:
    """Show a `UserNotice`, as from the line outside this package that led here."""
    package, level, frame = os.path.dirname(__file__), 2, inspect.currentframe()
    while frame is not None and (frame := frame.f_back) is not None and frame.f_code.co_filename.startswith(package):
        level += 1
    warnings.warn(message, UserNotice, stacklevel=level)


def _show(
    shown: set[str], otherwise: Callable[..., None], message: Warning | str, *where: object, **more: object
) -> None:
    """Show a `UserNotice` once as one line, and other warnings by `otherwise`; nothing on local ranks other than 0."""
    if launched().local_rank > 0:
        return
    if isinstance(message, UserNotice):
        if str(message) not in shown:  # the runs of a search or of several seeds warn of the same
            print(f"warning: {message}", file=sys.stderr)
        shown.add(str(message))
    else:
        otherwise(message, *where, **more)


#: third-party package -> the extra of this package that brings it
_EXTRAS = {
    **dict.fromkeys(("matplotlib", "mlflow"), "tracking"),
    **dict.fromkeys(("optuna", "sqlalchemy"), "search"),
    **dict.fromkeys(("pooch", "shtab"), "all"),
    "flwr": "flower",
    "psycopg": "postgresql",
}
_WITHOUT = {"mlflow": " Or run without MLflow: --tracking null."}


def _without_extra(module: str, extra: str) -> str:
    name = module.partition(".")[0]
    return f"{name} is not installed. Run pip install 'dpfl_lightning[{extra}]'.{_WITHOUT.get(name, '')}"


def _words_and_status(error: BaseException) -> tuple[str, int]:
    """Return what is told of an error that ends a command, and its exit status; raise it again if it is a bug."""
    if isinstance(error, KeyboardInterrupt):
        return words_and_status(error)
    if isinstance(error, UserError):
        return f"error: {error}", 2
    if isinstance(error, BrokenPipeError) and _stdout_is_closed():
        return "", 128 + signal.SIGPIPE
    if isinstance(error, ModuleNotFoundError) and (extra := _EXTRAS.get(str(error.name).partition(".")[0])):
        return f"error: {_without_extra(str(error.name), extra)}", 2
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        file, notes = error.filename or "the files of the command", " ".join(getattr(error, "__notes__", ()))
        return f"error: `{file}` must be accessible, got: {error.strerror}. {notes}".rstrip(), 2
    raise error


def command(main: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Wrap a command: a `UserError` or `UserNotice` is one line on stderr, and an error is exit status 2.

    So are an `OSError` of the machine, such as a full disk, and a package of an extra that is not installed. Ctrl-C is
    status 130, SIGTERM 143, and a closed standard output (`| head`) is 141. Other exceptions are bugs and keep their
    traceback. Of several ranks on a host, only local rank 0 prints.
    """

    @functools.wraps(main)
    def wrapped(argv: Sequence[str] | None = None) -> int:
        warnings.showwarning = functools.partial(_show, set(), warnings.showwarning)
        silent = launched().local_rank > 0
        words, status = "", 0
        try:
            with contextlib.redirect_stdout(io.StringIO()) if silent else contextlib.nullcontext(), terminable():
                try:
                    try:
                        return main(argv) or 0
                    finally:
                        sys.stdout.flush()  # so that a closed pipe is noticed here and not when Python exits
                except (UserError, ModuleNotFoundError, OSError, KeyboardInterrupt) as error:
                    words, status = _words_and_status(error)
                if _is_the_process():
                    ignore_signals()
        except KeyboardInterrupt as error:  # while the command ended: what ended it first is told
            words, status = (words, status) if words else _words_and_status(error)
        if words and not silent:
            print(_wrapped(words), file=sys.stderr)
        return status

    return wrapped


def _is_the_process() -> bool:
    """Return whether this process was started to run a command, and not a user's program that calls it."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return (spec is not None and spec.name.startswith("dpfl_lightning")) or Path(sys.argv[0]).stem == "dpfl"


def _wrapped(text: str) -> str:
    """Wrap a message between words on a terminal, in at most 80 columns. A log gets it on one line."""
    width = min(80, shutil.get_terminal_size().columns)
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text) if sys.stderr.isatty() else text


def _stdout_is_closed() -> bool:
    """Return whether standard output is closed; if so, the rest of the output is discarded."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
