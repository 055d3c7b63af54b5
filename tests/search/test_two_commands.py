"""Two commands share one search, on SQLite and on a PostgreSQL server: one is killed in a trial, and none is lost."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
import yaml
from optuna.trial import TrialState
from test_conf import small_fashion  # noqa: F401 (a fixture)
from test_sweep import SWEEPS, shrunken

pytestmark = pytest.mark.e2e

FILE = SWEEPS / "nas_fmnist.yaml"
TRIALS = 5


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """The URL of a server of its own in a temporary folder, reached through a socket there."""
    found = shutil.which("initdb") or next(
        map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))[::-1]), None
    )
    if found is None:
        pytest.skip("PostgreSQL is not installed (on Debian: apt-get install postgresql)")
    folder, programs = Path(tempfile.mkdtemp(prefix="pg")), Path(found).resolve().parent
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


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/study.db"
        return
    with postgresql() as server:
        yield server


class Command:
    """`sweep` on the file, shrunken, as a process: its report goes to `folder`, its words to a file beside that."""

    def __init__(self, url: str, folder: Path, data: Path) -> None:
        self.folder, self.words = folder, folder.with_suffix(".txt")
        own = ["--sweep.trials", str(TRIALS), "--sweep.storage", url, "--sweep.heartbeat_seconds", "1"]
        # a trial takes seconds, so that a command can be killed in one
        own += ["--sweep.training.epochs", "10", "--output_dir", str(folder)]
        line = [sys.executable, "-m", "dpfl_lightning.sweep", *shrunken(FILE, data), *own]
        threads = {**os.environ, "PYTHONPATH": str(SWEEPS.parent), "OMP_NUM_THREADS": "1"}
        with self.words.open("w") as out:
            self.process = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, env=threads)

    def end(self) -> str:
        """What it said, when it is done."""
        assert self.process.wait(timeout=300) == 0, self.words.read_text()
        return self.words.read_text()


def running(url: str) -> list[int]:
    """Trials that have drawn their values and are being made; none before there is a study."""
    try:
        trials = optuna.load_study(study_name=FILE.stem, storage=url).get_trials(deepcopy=False)
    except KeyError:
        return []
    return [one.number for one in trials if one.state == TrialState.RUNNING and "host" in one.user_attrs]


def kill_within_a_trial(one: Command, url: str) -> None:
    """Stopped first, so that it is certain: with both commands at a trial, each has one."""
    deadline = time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline, one.words.read_text()
        assert one.process.poll() is None, one.words.read_text()
        if len(running(url)) < 2:
            time.sleep(0.1)
            continue
        one.process.send_signal(signal.SIGSTOP)
        if len(running(url)) == 2:
            one.process.kill()  # a stopped process dies, too
            one.process.wait()
            return
        one.process.send_signal(signal.SIGCONT)


@pytest.mark.slow  # two processes that import torch, and trials of seconds
@pytest.mark.filterwarnings("ignore:.*experimental")
def test_a_command_that_is_killed_in_a_trial_loses_nothing(url, small_fashion, tmp_path):  # noqa: F811
    first = Command(url, tmp_path / "one", small_fashion)
    while not running(url):  # the second one joins in
        assert first.process.poll() is None, first.words.read_text()
        time.sleep(0.2)
    second = Command(url, tmp_path / "two", small_fashion)
    try:
        kill_within_a_trial(second, url)
        said = first.end()
    finally:
        for one in (first, second):
            one.process.kill()
    result = json.loads((first.folder / "result.json").read_text())
    states = Counter("made again" if one["made_again"] else one["state"] for one in result["trials"])
    assert states == {"made again": 1, "complete": TRIALS}, said
    (lost,) = (one for one in result["trials"] if one["made_again"])
    complete = [one["params"] for one in result["trials"] if one["state"] == "complete"]
    assert lost["reason"] == "its worker died" and lost["params"] in complete
    assert len({tuple(one.values()) for one in complete}) == TRIALS, "each point of the grid once"
    assert "its worker died; it will be repeated" in said and said.count("Pareto front") >= 1
    assert yaml.safe_load((first.folder / "best.yaml").read_text())["model"]["name"] == "convnet"
    # the command again finds everything done
    third = Command(url, tmp_path / "three", small_fashion)
    assert f"{TRIALS} complete" in third.end()
    assert json.loads((third.folder / "result.json").read_text())["trials"] == result["trials"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*experimental")
def test_two_commands_share_the_trials(url, small_fashion, tmp_path):  # noqa: F811
    both = [Command(url, tmp_path / name, small_fashion) for name in ("one", "two")]
    said = [one.end() for one in both]
    results = [json.loads((one.folder / "result.json").read_text()) for one in both]
    assert results[0] == results[1]
    assert all(one["state"] == "complete" for one in results[0]["trials"])
    made = [len(re.findall(r"^trial +\d+ \(", words, re.MULTILINE)) for words in said]
    assert sum(made) == len(results[0]["trials"]) in (TRIALS, TRIALS + 1) and min(made) >= 1
