"""Database servers for tests."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """The URL of a server in a temporary folder, reached through a socket there."""
    on_path = shutil.which("initdb")
    places = [Path(on_path)] if on_path else sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not places:
        pytest.skip("PostgreSQL is not installed (on Debian: apt-get install postgresql)")
    folder, programs = Path(tempfile.mkdtemp(prefix="pg")), places[-1].resolve().parent
    normal = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
    if normal:
        shutil.chown(folder, "nobody", "nogroup")
    quiet = {"check": True, "cwd": folder, "capture_output": True, **normal}
    data = folder / "data"
    try:
        subprocess.run([programs / "initdb", "-D", data, "-U", "dpfl", "-A", "trust", "--no-sync"], **quiet)
        flags = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
        start = [programs / "pg_ctl", "-D", data, "-w", "-l", folder / "log", "-o", flags, "start"]
        subprocess.run(start, **{**quiet, "capture_output": False, "stdout": subprocess.DEVNULL})
        try:
            yield f"postgresql+psycopg://dpfl@/postgres?host={folder}"
        finally:
            subprocess.run([programs / "pg_ctl", "-D", data, "-m", "immediate", "stop"], **quiet)
    finally:
        shutil.rmtree(folder)
