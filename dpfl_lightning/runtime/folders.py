"""Where this program keeps what it can find or compute again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The folder `name` under `DPFL_DATA`, or under the user's cache; it need not exist."""
    import pooch  # here, because `--help` needs no folder and should be quick

    return Path(os.environ.get("DPFL_DATA") or pooch.os_cache("dpfl_lightning")).expanduser() / name
