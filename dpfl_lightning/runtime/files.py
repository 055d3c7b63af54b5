"""Files that a crash cannot leave half written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Any, private: bool = False) -> Path:
    """Write a file atomically: `write(partial_path)`, sync, rename. A crash leaves the old file or the new one.

    Args:
        path: path of the file.
        write: writes the content to the path that it is given.
        private: whether only the owner may read the file (mode 0600), from its first byte on.

    Returns:
        `path`.
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
    """Sync the folder, so that the names of new files in it are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
