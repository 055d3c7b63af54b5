"""The declarations: every table is there, every cell is a valid run, and every finished cell is declared."""

import dataclasses
import functools
import random
import shlex
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from dpfl_lightning import strategies
from dpfl_lightning.config.load import load, split
from dpfl_lightning.config.options import Options
from experiments.papers.__main__ import _parse, _sorted_out
from experiments.papers.cells import RESULTS, Cell, contents, declaration, required_cells
from experiments.papers.drawing import panels_figure
from experiments.papers.experiment import Computation, Experiment, NotYet, Training
from experiments.papers.registry import experiments
from experiments.papers.run import RunnerOptions, declared_options, options_of, spec

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_the_repository")]


@functools.cache
def options(cell: Cell) -> Options:
    return options_of(cell, RunnerOptions(None, Path("results"), Path("runs")))


def trained(experiment: Experiment, scale: str) -> list[Cell]:
    """Without cells that wait for others: tests/papers/leaderboard makes them all with simulated ones."""
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


def test_every_table_and_figure_is_there():
    shown = {
        "noise_aware": ([3, 4, *range(12, 23)], range(2, 14)),
        "clustered": (range(3, 11), range(1, 6)),
        "selection": ([1, 3], range(1, 6)),
        "distillation": ([1], [*range(2, 8), 9, 10]),  # 8 is distillation.sizes
    }
    for paper, (tables, figures) in shown.items():
        assert {f"{paper}.table{n}" for n in tables} | {f"{paper}.figure{n}" for n in figures} <= set(experiments())
    assert {f"clustered.revised_figure{n}" for n in (3, 5, 8)} <= set(experiments())
    drawn = {name for name, experiment in experiments().items() if experiment.draw}
    assert {name for name in experiments() if "figure" in name} - drawn == {"selection.figure1"}  # in numbers


def scorer(cell: Cell) -> str:
    """The column of a search, which decides how a candidate is trained, or of an attack, which it names."""
    by_column = ("distillation.nas", "distillation.hpo", "robustness.attacks")
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


# ---- the papers' numbers


MEANS = """
12 weiavg 85.24, 12 robust_hdp 86.51, 13 pfa 71.36, 13 min_eps 60.80, 14 dpfedavg 20.62, 15 robust_hdp 32.04,
4 dpfedavg 74.78, 18 pfa 24.49, 22 robust_hdp 76.85, 19 weiavg 28.29, 20 dpfedavg 29.10
"""


def test_the_noise_aware_papers_numbers_have_their_mean_and_its_method_leads_where_it_says_so():
    for number, row, mean in (case.split() for case in MEANS.split(",")):
        row_of_table = experiments()[f"noise_aware.table{number}"].paper[row]
        assert sum(row_of_table) / len(row_of_table) == pytest.approx(float(mean), abs=0.006), (number, row)
    for number, count in ((12, 7), (13, 5), (14, 8), (4, 5)):  # best or as good in so many columns
        columns = list(zip(*experiments()[f"noise_aware.table{number}"].paper.values(), strict=True))
        assert sum(one[-1] == max(one) for one in columns) == count, number


# ---- figures


class Numbers(dict):
    """Any value of a cell, but for the lists of formulas."""

    def __missing__(self, key: str) -> float:
        return random.Random(key).uniform(1, 90)

    def __contains__(self, key: object) -> bool:
        return key != "oracle_weights"


def a_cell(number: int, seed: int) -> dict:
    """A finished cell with everything that figures read."""
    lists = {"epsilon": [2.0, 1.0], "truth": [1.0, 3.0], "oracle_weights": [0.75, 0.25]}
    for name in ("rpca", "rpca_2000", "rpca_20000", "rpca_200000", "rpca_2000000"):
        lists |= {f"{name}_weights": [0.7, 0.3], f"{name}_variance": [1.0, 2.9]}
    return {
        "values": Numbers(clients=[(1.0, 2.0), (0.5, 3.0)], test_accuracy=50.0 + number + seed),
        "curve": {"5": 40.0, "10": 50.0 + seed},
        "test_curve": {"10": 30.0, "100": 50.0 + seed},
        "curves": {"clustering_accuracy": {"1": 30.0, "2": 90.0 + seed}, "0": {"2": 50.0}},
        "points": [[0.0, 1.0], [0.5, 0.0]],
        "clients": {"true_group": [0, 1], "unlikeness": [0.5, 0.7], "quota": [3, 9]},
        "epsilon_max": 8.0,
        "first_round": {**lists, "singular_values": [[3.0, 1.0], [1.0, 0.0]]},
    }


def test_every_figure_draws_what_is_made():
    drawn = [experiment for experiment in experiments().values() if experiment.draw]
    assert len(drawn) > 30
    for experiment in drawn:
        cells = {
            (row, column): [a_cell(number, seed) for seed in (0, 1)]
            for number, row in enumerate(experiment.rows)
            for column in experiment.columns
        }
        panels = experiment.panels(cells)
        assert panels and all(panel.series and all(panel.series.values()) for panel in panels), experiment.name
        assert isinstance(panels_figure(experiment.title, panels), Figure)
        by_formula = experiment.name == "noise_aware.figure5"
        assert len(experiment.panels({})) == by_formula, experiment.name
        first = next(iter(cells))
        assert isinstance(experiment.panels({first: cells[first]}), list)
