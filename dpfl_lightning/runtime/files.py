"""Files that a crash cannot leave half written."""

import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Any, private: bool = False) -> Path:
    """Write a file by `write(partial_path)`, sync and rename, and return `path`.

    A crash leaves the old file or the new one. A `private` file has mode 0600 from its first byte on.
    """
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600 if private else 0o666)
    write(partial)
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)
    return path


def sync_folder(folder: Path) -> None:
    """Bring the names of new files in the folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
