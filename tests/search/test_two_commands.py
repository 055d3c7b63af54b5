"""Two commands share one search, on SQLite and on a PostgreSQL server: one is killed in a trial, and none is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import yaml
from optuna.trial import TrialState
from test_conf import small_fashion  # noqa: F401 (a fixture)
from test_sweep import SWEEPS, shrunken

pytestmark = pytest.mark.e2e

FILE = SWEEPS / "nas_fmnist_public.yaml"
TRIALS = 5


class Command:
    """`sweep` on the file, shrunken, as a process: its results are in `folder`, its output in a file beside that."""

    def __init__(self, url: str, folder: Path, data: Path) -> None:
        self.folder, self._output = folder, folder.with_suffix(".txt")
        # a trial takes seconds, so that a command can be killed in one
        words = f"--sweep.trials {TRIALS} --sweep.heartbeat_seconds 1 --sweep.training.epochs 40".split()
        words += ["--sweep.storage", url, "--output_dir", str(folder)]
        line = [sys.executable, "-m", "dpfl_lightning", "sweep", *shrunken(FILE, data), *words]
        environment = {**os.environ, "PYTHONPATH": str(SWEEPS.parent), "OMP_NUM_THREADS": "1"}
        with self._output.open("w") as out:
            self.process = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, env=environment)

    def check_runs(self) -> None:
        assert self.process.poll() is None, self.text

    @property
    def text(self) -> str:
        return self._output.read_text()

    def end(self) -> list[dict]:
        """Its trials, when it is done."""
        assert self.process.wait(timeout=300) == 0, self.text
        return json.loads((self.folder / "result.json").read_text())["trials"]


def trials_under_way(url: str) -> list[int]:
    """Trials that have drawn their values and are being made; none before there is a study."""
    try:
        trials = optuna.load_study(study_name=FILE.stem, storage=url).get_trials(deepcopy=False)
    except KeyError:
        return []
    return [trial.number for trial in trials if trial.state == TrialState.RUNNING and "host" in trial.user_attrs]


def kill_within_a_trial(command: Command, url: str) -> None:
    """Stopped first, so that it is certain: with both commands at a trial, each has one."""
    deadline = time.monotonic() + 120
    while True:
        command.check_runs()
        assert time.monotonic() < deadline, command.text
        if len(trials_under_way(url)) < 2:
            time.sleep(0.1)
            continue
        command.process.send_signal(signal.SIGSTOP)
        if len(trials_under_way(url)) == 2:
            command.process.kill()  # a stopped process dies, too
            command.process.wait()
            return
        command.process.send_signal(signal.SIGCONT)


@pytest.mark.slow  # two processes that import torch, and trials of seconds
@pytest.mark.filterwarnings("ignore:.*experimental")
def test_a_command_that_is_killed_in_a_trial_loses_nothing(url, small_fashion, tmp_path):  # noqa: F811
    first = Command(url, tmp_path / "one", small_fashion)
    while not trials_under_way(url):  # then the second one joins in
        first.check_runs()
        time.sleep(0.2)
    second = Command(url, tmp_path / "two", small_fashion)
    try:
        kill_within_a_trial(second, url)
        trials = first.end()
    finally:
        for command in (first, second):
            command.process.kill()
    complete = [trial["params"] for trial in trials if trial["state"] == "complete"]
    (lost,) = [trial for trial in trials if trial["made_again"]]
    assert len(complete) == TRIALS == len(trials) - 1, first.text
    assert lost["reason"] == "its worker died" and lost["params"] in complete
    assert len({tuple(params.values()) for params in complete}) == TRIALS, "each point of the grid once"
    assert "its worker died; it will be repeated" in first.text and "Pareto front" in first.text
    assert yaml.safe_load((first.folder / "best.yaml").read_text())["model"]["name"] == "convnet"
    third = Command(url, tmp_path / "three", small_fashion)
    assert third.end() == trials and f"{TRIALS} complete" in third.text, "everything is done"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*experimental")
def test_two_commands_share_the_trials(url, small_fashion, tmp_path):  # noqa: F811
    both = [Command(url, tmp_path / name, small_fashion) for name in ("one", "two")]
    trials, same = [command.end() for command in both]
    assert trials == same and all(trial["state"] == "complete" for trial in trials)
    made = [len(re.findall(r"^trial +\d+ \(", command.text, re.MULTILINE)) for command in both]
    assert sum(made) == len(trials) in (TRIALS, TRIALS + 1) and min(made) >= 1
