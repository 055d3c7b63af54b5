"""Files that a crash cannot leave half written, and the folder of data that can be downloaded or computed again."""

import json
import os
from collections.abc import Mapping
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
    return write_atomically(path, lambda partial: partial.write_text(whole), private)


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
