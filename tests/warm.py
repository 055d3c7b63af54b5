"""Real processes that start in a moment: forked from a server (of `multiprocessing`) that imported the libraries once.

`Process("-m", "dpfl_lightning.fit", ...)` is what `subprocess.Popen([sys.executable, ...])` would be, in its own
folder and environment; importing torch and Lightning anew takes more than most things that a test wants to see.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path

LIBRARIES = ["lightning", "matplotlib.pyplot", "mlflow", "mlflow.tracking", "numba", "opacus", "optuna", "scipy.stats"]


def _server() -> multiprocessing.context.ForkServerContext:
    """It and all its processes compute with one thread: torch reads that when it is imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    forkserver.ensure_running()
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before
    return context


def _play(words: tuple[str, ...], folder: str, environment: dict[str, str], out: str, err: str) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    try:
        if words[0] == "-m":
            sys.argv = [words[1], *words[2:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


class Process:
    """What tests use of `subprocess.Popen`."""

    def __init__(self, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        self._out, self._err = (tempfile.NamedTemporaryFile() for _ in range(2))  # noqa: SIM115 (until it is gone)
        folder, environment = str(cwd or Path.cwd()), dict(os.environ if env is None else env)
        given = (words, folder, environment, self._out.name, self._err.name)
        self._process = _server().Process(target=_play, args=given)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a warm process", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self._out.read().decode(), self._err.read().decode()
