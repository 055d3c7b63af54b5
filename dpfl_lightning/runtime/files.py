"""Files that a crash cannot leave half written, and the folder of data that can be downloaded or computed again."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PARTIAL = ".partial"  # end of the name of a file that is being written
SUFFIX = ".safetensors"
ABOUT = "dpfl_lightning"  # key of what a file of safetensors says about its tensors


def write_atomically(
    path: Path, write: Callable[[Path], object], private: bool = False, before: Path | None = None
) -> Path:
    """Write a file by `write(partial_path)`, sync and rename, and return `path`.

    A crash leaves the old file or the new one, and a failure removes what was written. A `private` file has mode 0600
    from its first byte on. The old file is kept as `before`, unless this is None.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.unlink(missing_ok=True)
        partial.touch(mode=0o600 if private else 0o666)
        write(partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        if before is not None and path.exists():
            os.replace(path, before)
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # a full disk does not say which file it was
        raise
    return path


def write_text(path: Path, text: str, private: bool = False) -> Path:
    """Write a text file in UTF-8 by `write_atomically`."""
    return write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"), private)


def save_tensors(content: object, path: Path) -> None:
    """Write what `torch.load(weights_only=True)` can read; raises OSError if the disk is full, as other writes do."""
    import torch  # imported here, so that `--help` stays fast

    try:
        with path.open("r+b") as file:
            torch.save(content, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # which torch has replaced
            raise error.__context__ from None
        raise


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Write tensors, and what they are about as JSON, by `write_atomically`, for `read_safetensors`."""
    from safetensors.torch import save  # imports torch, so that `--help` stays fast

    apart = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    content = save(apart, {ABOUT: json.dumps(about)})
    return write_atomically(path, lambda partial: partial.write_bytes(content))


def write_json(path: Path, content: Mapping[str, Any], private: bool = False) -> Path:
    """Write a JSON object: each entry begins a line, and so does each row of a list of objects.

    With many rows this is several times faster and smaller than the indentation of `json.dumps`.
    """

    def text(value: Any) -> str:
        if isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value):
            return "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
        return json.dumps(value)

    lines = (f"  {json.dumps(key)}: {text(value)}" for key, value in content.items())
    whole = "{\n" + ",\n".join(lines) + "\n}\n"
    return write_text(path, whole, private)


def write_all(file: FileIO, parts: Sequence[bytes]) -> None:
    """Write all of the parts to an unbuffered file, whose single writes may be incomplete."""
    rest = memoryview(b"".join(parts))
    while rest:
        rest = rest[file.write(rest) :]


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock on a file, as a run does on its ledger; a missing file is not locked."""
    if not path.is_file():
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, for which other processes that want it wait."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Bring the names of new files in the folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder(name: str) -> Path:
    """Return the folder `name` under `DPFL_DATA`, or under the user's cache; it may not exist yet."""
    import pooch  # imported here, so that `--help` stays fast

    return Path(os.environ.get("DPFL_DATA") or pooch.os_cache("dpfl_lightning")).expanduser() / name
