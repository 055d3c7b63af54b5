"""Making cells: finished ones are skipped, interrupted ones resumed, and the error of one cell stops no other."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dpfl_lightning.config.load import load
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.fit import fit
from experiments.papers.cells import Cell, finished, path_of, read, required_cells
from experiments.papers.jobs import fitting, make_at_once
from experiments.papers.registry import experiments
from experiments.papers.run import (
    CellContext,
    RunnerOptions,
    command_of,
    make,
    options_of,
    run_folder,
    seconds_of,
    without_data,
)

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
QUIET = ("--tracking=null", "--engine.device=cpu")
CELL = Cell("example.digits", "uniform", "epsilon4", "small", 0)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def work(tmp_path):
    return RunnerOptions(fit, tmp_path / "results", tmp_path / "runs", QUIET)


def cells_of(name: str, **restricted) -> list[Cell]:
    return required_cells(
        experiments()[name].restricted(restricted.get("rows"), restricted.get("columns")), "small", None
    )


def failing(how: Exception, at: str = "uniform"):
    """As `fit`, but one row's runs end in an error."""

    def run(options, resume, watchers):
        if at in options.strategies:
            raise how
        return fit(options, resume, watchers)

    return run


class StopsAfter(Callback):
    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_end(self, view, report):
        if report.round == self.round:
            raise KeyboardInterrupt


def test_a_cell_holds_what_it_came_to_and_how_to_get_there(work):
    assert make([CELL], work) == []
    held = read(path_of(work.results, CELL))
    assert 20 < held["values"]["accuracy"] < 100 and held["epsilon_max"] == pytest.approx(4, abs=1e-3)
    assert held["rounds"] == 2 and held["seconds"] > 0 and "differential privacy" in held["guarantee"]
    assert held["machine"]["cores"] >= 1 and held["machine"]["device"] == "cpu" and held["versions"]["torch"]
    assert (held["experiment"], held["row"], held["column"], held["seed"]) == (
        "example.digits",
        "uniform",
        "epsilon4",
        0,
    )
    assert str(ROOT) not in path_of(work.results, CELL).read_text()  # nothing of this machine


@pytest.mark.parametrize("overrides", [(), (("clients.learning_rate", "0.1"), ("privacy.epsilon", "[1, 2, 3, 4, 5]"))])
def test_its_command_is_the_run(overrides, work):
    cell = CELL._replace(seed=3, overrides=overrides)
    words = shlex.split(command_of(cell))
    assert words[:3] == ["python", "-m", "dpfl_lightning.fit"]
    ours = dataclasses.asdict(options_of(cell, RunnerOptions(fit, work.results, work.runs)))
    typed = dataclasses.asdict(load(words[3:])[0])
    changed = {key for key in ours if ours[key] != typed[key]}
    assert changed == {"tracking"} and typed["seed"] == 3


def test_an_error_is_reported_and_the_others_go_on(work, capsys):
    cells = cells_of("example.digits", columns=["epsilon4"])
    problems = make(cells, RunnerOptions(failing(RuntimeError("a bug")), work.results, work.runs, QUIET))
    assert len(problems) == 1 and "uniform" in problems[0] and "RuntimeError: a bug" in problems[0]
    assert "Traceback" in capsys.readouterr().err
    assert [row for row, _ in finished(work.results, experiments()["example.digits"], "small")] == ["size_weighted"]


def test_an_interrupted_cell_is_gone_on_with(work):
    def interrupted(options, resume, watchers):
        return fit(options, resume, [*watchers, StopsAfter(1)])

    with pytest.raises(KeyboardInterrupt):
        make([CELL], RunnerOptions(interrupted, work.results, work.runs, QUIET))
    assert not path_of(work.results, CELL).exists()
    assert run_folder(CELL, work) == (work.runs / CELL.place, True)
    assert make([CELL], work) == []
    assert not (work.runs / CELL.place).with_name(f"{CELL.place.name}.2").exists()
    lines = (work.runs / CELL.place / "ledger.jsonl").read_text().count('"round": 1,')
    assert read(path_of(work.results, CELL))["rounds"] == 2 and lines == 5  # no client was charged twice


def test_a_finished_run_whose_cell_was_lost_is_read_again(work):
    make([CELL], work)
    before = read(path_of(work.results, CELL))
    path_of(work.results, CELL).unlink()
    make([CELL], work)
    after = read(path_of(work.results, CELL))
    assert after["values"] == before["values"] and after["curve"] == before["curve"]


def test_again_is_a_new_run_beside_the_old_one(work):
    make([CELL], work)
    before = read(path_of(work.results, CELL))["values"]
    again = RunnerOptions(fit, work.results, work.runs, QUIET, again=True)
    assert run_folder(CELL, again) == (work.runs / CELL.place.with_name(f"{CELL.place.name}.2"), False)
    make([CELL], again)
    assert (work.runs / CELL.place / "ledger.jsonl").is_file()  # no ledger is deleted
    assert read(path_of(work.results, CELL))["values"] == before, "cells are simulations"


def test_a_run_of_other_options_is_not_gone_on_with(work):
    make([CELL], work)
    beside = work.runs / CELL.place.with_name(f"{CELL.place.name}.2")
    assert run_folder(CELL, work) == (work.runs / CELL.place, True)
    assert run_folder(CELL, RunnerOptions(fit, work.results, work.runs, (*QUIET, "--rounds=3"))) == (beside, False)
    ledger = work.runs / CELL.place / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"rounds": 2', b'"rounds": 4', 1))
    assert run_folder(CELL, work) == (beside, False), "nor with one that was changed"


def test_missing_data_is_one_sentence(work, monkeypatch, tmp_path):
    monkeypatch.setenv("DPFL_DATA", str(tmp_path))
    offline = RunnerOptions(fit, work.results, work.runs, (*QUIET, "--data.download=false"))
    cells = [*cells_of("noise_aware.table12", columns=["dist1"]), CELL]
    there, sentences = without_data(cells, offline)
    assert there == [CELL] and len(sentences) == 1
    assert "6 of 7 cells" in sentences[0] and "mnist" in sentences[0] and "--data.folder" in sentences[0]
    assert "\n" not in sentences[0]


def test_time_is_told_from_finished_cells_of_the_row_else_as_declared(work):
    cells = cells_of("example.digits")
    assert seconds_of(cells, work.results) == pytest.approx(4 * 6)
    make([CELL], work)
    own = read(path_of(work.results, CELL))["seconds"]
    alike = sum(cell.row == CELL.row for cell in cells)
    assert seconds_of(cells, work.results) == pytest.approx(alike * own + (4 - alike) * 6) and alike == 2
    assert seconds_of([], work.results) == 0


def test_several_jobs_take_turns_with_a_run_that_all_need(work, monkeypatch):
    inside, most = [], []

    def run(context, watchers=()):
        inside.append(context.cell)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()

    monkeypatch.setattr(CellContext, "run", run)
    one, other = cells_of("example.digits")[:2]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: CellContext(one, work).run_of(other), range(4)))
    assert most == [1] * 4


def test_several_at_once(work, capfd):
    cells = cells_of("example.digits", columns=["epsilon4"])
    assert make_at_once(cells, work, 2) == []
    assert len(finished(work.results, experiments()["example.digits"], "small")) == 2
    assert "2 cells, 2 at once" in capfd.readouterr().out
    log = (work.runs / CELL.place).with_name(f"{CELL.place.name}.log").read_text()
    assert "round 2/2" in log and "**example.digits**" not in log


def test_an_error_of_a_process_is_reported(work, tmp_path):
    (tmp_path / "file").write_text("")
    broken = RunnerOptions(fit, work.results, work.runs, (*QUIET, f"--data.folder={tmp_path / 'nowhere'}"))
    cells = cells_of("noise_aware.table13", columns=["dist1"], rows=["weiavg"])
    (problem,) = make_at_once(cells, broken, 2)
    assert "weiavg" in problem and "data.folder" in problem and ".log" in problem


def test_no_core_is_left_without_work(work, monkeypatch):
    cells = cells_of("example.digits")  # five clients each
    for cores, jobs in ((2, 1), (9, 1), (10, 2), (64, 4)):
        monkeypatch.setattr("dpfl_lightning.runtime.threads.cores", lambda cores=cores: cores)
        assert fitting(cells, work) == jobs
    assert fitting([], work) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_stopped_process_keeps_what_is_finished(number, status, jobs, tmp_path):
    """A real process, stopped by a real signal in the middle of a cell, leaves nobody behind, and goes on later."""
    flags = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs"), *QUIET]
    command = [sys.executable, "-m", "experiments.papers", "example.digits", "--rounds", "400", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, "--jobs", str(jobs)], start_new_session=True, **pipes)
    while len(list(tmp_path.glob("runs/*/*/*/checkpoint.pt"))) < jobs:
        time.sleep(0.2)
    time.sleep(1)
    if number == signal.SIGINT:  # as a terminal sends it
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status and "the same command goes on" in said
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    done = subprocess.run([*command, "--rows", "uniform", "--columns", "epsilon4"], capture_output=True, text=True)
    assert done.returncode == 0 and "Resuming at round" in done.stdout
