"""The tables: every cell is a valid run, and every finished cell is declared."""

import dataclasses
import functools
import shlex
from pathlib import Path

import pytest

from dpfl_lightning import strategies
from dpfl_lightning.config.load import load, split
from dpfl_lightning.config.options import Options
from experiments.papers.__main__ import _parse, _sorted_out
from experiments.papers.cells import RESULTS, Cell, contents, declaration, required_cells
from experiments.papers.experiment import Computation, Experiment, NotYet, Training
from experiments.papers.registry import experiments
from experiments.papers.run import RunnerOptions, declared_options, options_of, spec

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_the_repository")]


@functools.cache
def options(cell: Cell) -> Options:
    return options_of(cell, RunnerOptions(None, Path("results"), Path("runs")))


def trained(experiment: Experiment, scale: str) -> list[Cell]:
    """Without cells that wait for others: tests/papers/test_tuning.py makes them all with simulated ones."""
    cells = [
        cell
        for cell in required_cells(experiment.restricted(None, None, [0]), scale)
        if isinstance(spec(cell), Training)
    ]
    return [cell for cell in cells if not waits(cell)]


def waits(cell: Cell) -> bool:
    try:
        declared_options(cell)
    except NotYet:
        return True
    return False


def test_every_finished_cell_is_declared_and_has_the_options_that_made_it():
    places = {
        cell._replace(seed=None).place
        for experiment in experiments().values()
        for scale in experiment.scales
        for cell in required_cells(experiment.restricted(None, None, [0]), scale)
    }
    made = {place: one for file in RESULTS.glob("*.jsonl") for place, one in contents(RESULTS, file.stem).items()}
    assert len(made) >= 450
    for path, content in made.items():
        names = {name: content[name] for name in ("experiment", "row", "column", "scale", "seed")}
        cell = Cell(**names, overrides=tuple(content["overrides"].items()))
        assert cell._replace(seed=None, overrides=()).place in places, path
        waiting = isinstance(spec(cell), Training) and waits(cell)  # its table shows it if it has the chosen setting
        assert isinstance(spec(cell), Computation) or waiting or content["declared"] == declaration(cell), path
        _, _, program, *words = shlex.split(content["command"])
        if program == "dpfl_lightning.fit":
            made, declared = dataclasses.asdict(load(words)[0]), dataclasses.asdict(options(cell))
            differing = {key for key in made if key != "tracking" and made[key] != declared[key]}
            assert differing <= {"privacy"}, (path, differing)
            assert (made["privacy"] is None) == (declared["privacy"] is None), path
            keys = {key for key in made["privacy"] or () if made["privacy"][key] != declared["privacy"][key]}
            assert keys <= {"noise_key", "accountant"}, path
            if "accountant" in keys:  # these cells were made when rdp was the default, and their tables say so
                assert declared["privacy"]["accountant"] == "rdp" and "by RDP" in content["guarantee"], path
        else:
            overrides, flags = split(words)
            asked = _parse(flags)
            assert asked.names == [cell.experiment] and _sorted_out(overrides)[0] == cell.overrides, path
            experiment = experiments()[cell.experiment]
            rows = [row for row in asked.rows if row in experiment.rows]  # some are no longer shown
            experiment = experiment.restricted(rows, asked.columns, asked.seeds)
            assert cell in required_cells(experiment, cell.scale, cell.overrides), path


def scorer(cell: Cell) -> str:
    """The column of a search, which decides how a candidate is trained, or of an attack, which it names."""
    by_column = ("distillation.nas", "distillation.hpo", "robustness.attacks", "federations.faults")
    return cell.column if cell.experiment in by_column else ""


def test_every_cell_is_a_different_run_and_every_declared_kind_is_used():
    """But for runs without noise, which stand beside both kinds of noise."""
    for name, experiment in experiments().items():
        used = {experiment.source(row, column)[1] for row in experiment.rows for column in experiment.columns}
        assert set(experiment.cells) <= used, name
        for scale in experiment.scales:
            cells = [cell for cell in trained(experiment, scale) if cell.row != "fedsgd"]
            runs = {(repr(declared_options(cell)), spec(cell).study and (cell.row, scorer(cell))) for cell in cells}
            assert len(runs) == len(cells), name


def test_every_cell_is_one_that_fit_takes():
    """Of each row the first and the last column."""
    for experiment in experiments().values():
        ends = [next(iter(experiment.columns)), list(experiment.columns)[-1]]
        for scale in experiment.scales:
            for cell in trained(experiment.restricted(None, ends), scale):
                strategies.build(options(cell).strategies)


def test_the_configuration_of_the_clustered_paper_has_the_settings_of_its_table():
    run, _ = load(["--config", "conf/clustered_paper.yaml"])
    table = options(Cell("clustered.table5", "paper", "eps5", "paper", 0))
    assert run.privacy.clip_norm == table.privacy.clip_norm and run.rounds == table.rounds
    assert run.clients.learning_rate == pytest.approx(table.clients.learning_rate, rel=1e-3)
    assert run.strategies == table.strategies
