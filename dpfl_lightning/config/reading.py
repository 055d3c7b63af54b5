"""Reads files of any origin: every failure is one `UserError`, and no file needs more memory than its limit."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfl_lightning.errors import UserError, in_one_line, require, shortened
from dpfl_lightning.runtime.files import ABOUT

if TYPE_CHECKING:
    from torch import Tensor

_RESTORE = "Restore it, or leave it out."
_LARGEST = 1 << 30  # bytes of a file that is read as a whole, also after decompression


def read_bytes(path: Path, key: str = "", most: int = _LARGEST, advice: str = _RESTORE) -> bytes:
    """Return the content of a file, decompressed if it ends in `.gz`.

    Raises UserError, about the option `key` or else about the file, if it cannot be read or has more than `most` bytes.
    """
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rb") as file:
            content = file.read(most + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        must = "be a complete gzip file"
        raise UserError(f"`{shortened(key or str(path))}` must {must}, got one with: {error}. {advice}") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise _unreadable(path, key, getattr(error, "strerror", None) or str(error), advice) from None
    require(len(content) <= most, key or str(path), f"have at most {most:,} bytes", "more", advice)
    return content


def read_text(path: Path, key: str = "", most: int = _LARGEST, advice: str = _RESTORE) -> str:
    """Return the content of a text file in UTF-8; raises UserError as `read_bytes` does."""
    content = read_bytes(path, key, most, advice)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise _unreadable(path, key, "not UTF-8 text", advice) from None


def read_json(path: Path, advice: str = _RESTORE, format: int | None = None) -> dict[str, Any]:
    """Return the JSON object in a file; raises UserError if there is none, or as `read_bytes` and `check_format` do.

    With a `format`, the object must state this number, which is left out of what is returned.
    """
    text = read_text(path, advice=advice)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, "", str(error), advice) from None
    require(isinstance(content, dict), str(path), "hold a JSON object", type(content).__name__, advice)
    if format is not None:
        check_format(path, content.pop("format", None), format)
    return dict(content)


@contextmanager
def expecting(path: Path, must: str, advice: str = _RESTORE) -> Iterator[None]:
    """Turn errors that a file's content causes within the block into one UserError; one that is raised there stays."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        got = f"a file without {error}" if isinstance(error, KeyError) else "others"
        raise UserError(f"`{path}` must {must}, got {got}. {advice}") from None


def read_key(path: Path, advice: str) -> bytes:
    """Return the key of 32 bytes in a file of 64 hexadecimal digits. Raises UserError if it is missing or damaged."""
    with expecting(path, "hold 64 hexadecimal digits", advice):
        key = bytes.fromhex(read_bytes(path, advice=advice).decode())
        if len(key) != 32:
            raise ValueError("another length")
        return key


def check_format(path: Path, stated: object, number: int) -> None:
    """Raise UserError unless the number of the format that a file states is the one that is read here."""
    advice = "Read it with the version of this package that wrote it."
    require(stated == number, str(path), f"have format {number}", stated, advice)


def read_safetensors(path: Path, advice: str = _RESTORE) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors that `write_safetensors` wrote, and what the file says about them; nothing is executed.

    Raises UserError for any other file.
    """
    from safetensors import safe_open  # imports torch, so that `--help` stays fast

    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(ABOUT, "{}"))
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if not isinstance(about, dict):
            raise ValueError("no description")
    except Exception as error:  # safetensors raises different types for damaged files
        got = f"a file that cannot be read ({in_one_line(error)})"
        raise UserError(f"`{path}` must be a file of safetensors, got {got}. {advice}") from None
    return tensors, about


def _unreadable(path: Path, key: str, reason: str, advice: str) -> UserError:
    name, got = shortened(key or str(path)), shortened(repr(str(path)))
    return UserError(f"`{name}` must be a file that can be read, got {got}: {shortened(reason)}. {advice}".rstrip())
