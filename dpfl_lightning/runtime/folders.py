"""Folders for data that the program can download or compute again."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the folder `name` under `DPFL_DATA`, or under the user's cache; it may not exist yet."""
    import pooch  # imported here, so that `--help` stays fast

    return Path(os.environ.get("DPFL_DATA") or pooch.os_cache("dpfl_lightning")).expanduser() / name
