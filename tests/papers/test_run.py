"""Making cells: finished ones are skipped, interrupted ones resumed, and the error of one cell stops no other."""

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpfl_lightning.commands.fit import fit
from dpfl_lightning.config.load import load
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from experiments.papers.cells import Cell, file_of, finished, kept, read, required_cells
from experiments.papers.registry import experiments
from experiments.papers.run import (
    RunnerOptions,
    command_of,
    make,
    options_of,
    run_folder,
)

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_the_repository")]

ROOT = Path(__file__).parents[2]
QUIET = ("--tracking=null", "--engine.device=cpu")
CELL = Cell("example.digits", "uniform", "epsilon4", "small", 0)


@pytest.fixture
def work(tmp_path):
    return RunnerOptions(fit, tmp_path / "results", tmp_path / "runs", QUIET)


def beside(work: RunnerOptions) -> Path:
    return work.runs / CELL.place.with_name(f"{CELL.place.name}.2")


def cells_of(name: str, rows=None, columns=None) -> list[Cell]:
    return required_cells(experiments()[name].restricted(rows, columns), "small")


def test_a_cell_holds_its_results_and_how_to_get_there(work):
    assert make([CELL], work) == []
    cell = kept(work.results, CELL)
    assert 20 < cell["values"]["accuracy"] < 100 and cell["epsilon_max"] == pytest.approx(4, abs=1e-3)
    assert cell["rounds"] == 2 and cell["seconds"] > 0 and "differential privacy" in cell["guarantee"]
    assert cell["machine"]["cores"] >= 1 and cell["machine"]["device"] == "cpu" and cell["versions"]["torch"]
    names = [cell[name] for name in ("experiment", "row", "column", "seed")]
    assert names == ["example.digits", "uniform", "epsilon4", 0]
    assert str(ROOT) not in file_of(work.results, CELL.experiment).read_text()  # nothing of this machine


def test_its_command_is_the_run(work):
    for overrides in ((), (("clients.learning_rate", "0.1"), ("privacy.epsilon", "[1, 2, 3, 4, 5]"))):
        cell = CELL._replace(seed=3, overrides=overrides)
        words = shlex.split(command_of(cell))
        assert words[:3] == ["python", "-m", "dpfl_lightning.fit"]
        ours = dataclasses.asdict(options_of(cell, RunnerOptions(fit, work.results, work.runs)))
        typed = dataclasses.asdict(load(words[3:])[0])
        assert {key for key in ours if ours[key] != typed[key]} == {"tracking"} and typed["seed"] == 3


def test_an_error_is_reported_and_the_others_are_made(work, capsys):
    def failing(options, resume, watchers):
        if "uniform" in options.strategies:
            raise RuntimeError("a bug")
        return fit(options, resume, watchers)

    (problem,) = make(cells_of("example.digits", columns=["epsilon4"]), dataclasses.replace(work, fit=failing))
    assert "uniform" in problem and "RuntimeError: a bug" in problem
    assert "Traceback" in capsys.readouterr().err
    assert [row for row, _ in finished(work.results, experiments()["example.digits"], "small")] == ["size_weighted"]


def test_an_interrupted_cell_is_resumed_and_no_client_is_charged_twice(work):
    class StopsAfterOne(Callback):
        def on_round_end(self, view, report):
            if report.round == 1:
                raise KeyboardInterrupt

    def interrupted(options, resume, watchers):
        return fit(options, resume, [*watchers, StopsAfterOne()])

    with pytest.raises(KeyboardInterrupt):
        make([CELL], dataclasses.replace(work, fit=interrupted))
    assert read(work.results, CELL) is None
    assert run_folder(CELL, work) == (work.runs / CELL.place, True)
    assert make([CELL], work) == []
    assert not beside(work).exists()
    paid = [charge.client for charge in read_ledger(work.runs / CELL.place / "ledger.jsonl") if charge.round == 1]
    assert kept(work.results, CELL)["rounds"] == 2 and sorted(paid) == [*range(5)]


def test_a_finished_run_is_read_again_and_one_of_other_options_or_again_is_another(work):
    make([CELL], work)
    before = kept(work.results, CELL)
    file_of(work.results, CELL.experiment).unlink()
    make([CELL], work)
    after = kept(work.results, CELL)
    assert after["values"] == before["values"]
    assert run_folder(CELL, work) == (beside(work), False), "the file was made with another declaration"
    file_of(work.results, CELL.experiment).unlink()
    assert run_folder(CELL, work) == (work.runs / CELL.place, True)
    code = work.runs / f"{CELL.place}.code"
    digest = code.read_text()
    for other in ("of older code", None):
        code.unlink() if other is None else code.write_text(other)
        assert run_folder(CELL, work) == (beside(work), False), "a run of other code is no cell of this one"
    code.write_text(digest)
    other_rounds = dataclasses.replace(work, free=(*QUIET, "--rounds=3"))
    assert run_folder(CELL, other_rounds) == (beside(work), False)
    again = dataclasses.replace(work, again=True)
    assert run_folder(CELL, again) == (beside(work), False)
    make([CELL], again)
    ledger = work.runs / CELL.place / "ledger.jsonl"
    assert ledger.is_file(), "no ledger is deleted"
    assert kept(work.results, CELL)["values"] == before["values"], "cells are simulations"
    ledger.write_bytes(ledger.read_bytes().replace(b'"rounds": 2', b'"rounds": 4', 1))
    assert run_folder(CELL, work)[0] != work.runs / CELL.place, "a changed ledger is not resumed"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_process_keeps_what_is_finished(number, status, tmp_path):
    """A real process, stopped by a real signal in the middle of a cell, leaves nobody behind, and goes on later."""
    flags = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs"), *QUIET]
    command = [sys.executable, "-m", "experiments.papers", "example.digits", "--rounds", "400", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    while not list(tmp_path.glob("runs/*/*/*/checkpoint.pt")):
        time.sleep(0.2)
    time.sleep(1)
    if number == signal.SIGINT:  # as a terminal sends it
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == status and "the same command goes on" in printed
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    done = subprocess.run([*command, "--rows", "uniform", "--columns", "epsilon4"], capture_output=True, text=True)
    assert done.returncode == 0 and "Resuming at round" in done.stdout
