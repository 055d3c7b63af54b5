"""Files that a crash cannot leave half written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Any, private: bool = False) -> Path:
    """`write(partial_path)`, sync, rename: the file is the old one or the new one, whatever happens.

    Args:
        private: only the owner may read it (mode 0600), from its first byte on.
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
    """The names of new files in it, on disk when it returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
