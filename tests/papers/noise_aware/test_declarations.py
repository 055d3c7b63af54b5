"""The declared tables and figures: all are there, every command is one that `fit` takes, and each draws what it has."""

from __future__ import annotations

import pytest
from declared_cells import options, some_cells
from matplotlib.figure import Figure
from test_conf import small_fashion  # noqa: F401 (a fixture)

from dpfl_lightning import strategies
from dpfl_lightning.config.published import EPSILONS
from dpfl_lightning.reporting.figures import panels_figure
from experiments.papers.__main__ import main
from experiments.papers.cells import Cell, finished, read, wanted
from experiments.papers.noise_aware import EXPERIMENTS, paper
from experiments.papers.noise_aware.beyond import BEYOND
from experiments.papers.noise_aware.settings import LEARNING_RATES
from experiments.papers.registry import experiments
from experiments.papers.report import report
from experiments.papers.run import command_of

pytestmark = pytest.mark.usefixtures("in_the_repository")
TABLES = (3, 4, *range(12, 23))
FIGURES = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)


def test_every_table_and_figure_is_there():
    names = {experiment.name for experiment in EXPERIMENTS}
    assert {f"noise_aware.table{number}" for number in TABLES} <= names
    assert {f"noise_aware.figure{number}" for number in FIGURES} <= names
    for number in FIGURES:
        assert experiments()[f"noise_aware.figure{number}"].draw is not None
    assert len(names) == len(EXPERIMENTS)


@pytest.mark.parametrize("cell", some_cells(EXPERIMENTS), ids=str)
def test_a_cell_is_a_run(cell):
    own = options(cell)
    if cell.experiment not in {experiment.name for experiment in BEYOND}:
        assert own.rounds == (60 if cell.scale == "small" else 200)
        assert own.privacy is None or (own.privacy.clip_norm, own.privacy.delta) == (3.0, 1e-4)
    assert own.clients.local_epochs == 1 and own.clients.count in (20, 40, 60)
    strategies.build(own.strategies)


def test_every_cell_of_a_table_is_a_run_of_its_own():
    for experiment in EXPERIMENTS:
        commands = [command_of(cell) for cell in wanted(experiment, next(iter(experiment.scales)), None)]
        assert len(set(commands)) == len(commands), experiment.name


def test_declared_kinds_of_cells_are_used():
    for experiment in EXPERIMENTS:
        used = {experiment.source(row, column)[1] for row in experiment.rows for column in experiment.columns}
        assert set(experiment.cells) <= used, experiment.name


@pytest.mark.parametrize(
    ("name", "row", "column", "expected"),
    [
        ("table13", "weiavg", "dist7", {"clients.learning_rate": 5e-4, "privacy.epsilon": {"name": "dist7"}}),
        ("table13", "pfa", "dist6", {"clients.learning_rate": 5e-3, "strategies": {"pfa": {"variant": "hdpfl"}}}),
        ("table13", "ours", "dist1", {"clients.learning_rate": 5e-3, "data.held_out_per_client": 600}),
        ("table12", "min_eps", "dist6", {"clients.learning_rate": 1e-4, "data.name": "mnist"}),
        ("table14", "dpfedavg", "dist8", {"clients.learning_rate": 5e-5, "model": {"name": "resnet18"}}),
        ("table14", "weiavg", "dist1", {"data.records_per_client": 2500, "data.partition": {"name": "stratified"}}),
        ("table15", "weiavg", "dist1", {"privacy.epsilon": {"name": "dist1", "scale": 10}, "data.name": "cifar10"}),
        ("table15", "weiavg", "dist1", {"model": {"name": "resnet34", "norm": "none"}}),
        ("table15", "weiavg_cifar100", "dist1", {"data.name": "cifar100", "clients.learning_rate": 1e-3}),
        (
            "table17",
            "pfa",
            "n40",
            {"clients.count": 40, "data.records_per_client": 1200, "clients.learning_rate": 1e-3},
        ),
        ("table4", "pfa", "dist3", {"clients.batch_size": 128, "data.partition": {"name": "shards", "max_classes": 8}}),
        ("table22", "pfa", "dist3", {"clients.batch_size": {"name": "published"}, "clients.count": 60}),
        ("table18", "weiavg", "dist3", {"clients.batch_size": 32, "data.partition": {"name": "dirichlet", "alpha": 1}}),
        ("table19", "weiavg", "eps2.6", {"privacy.epsilon": 2.6, "clients.batch_size": {"name": "published"}}),
        ("table20", "robust_hdp", "eps0.35", {"privacy.epsilon": 0.35, "clients.learning_rate": 2e-4}),
        ("fedavg", "fedavg", "mnist", {"privacy": None, "data.name": "mnist"}),
        ("table3_measured", "one_round", "dist9", {"privacy.accountant": "paper_ma", "rounds": 200}),
    ],
)
def test_settings_are_the_papers(name, row, column, expected):
    own = options(Cell(f"noise_aware.{name}", row, column, "paper", 0))
    for key, value in expected.items():
        found = own
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value, key


def test_fewer_rounds_take_larger_steps():
    """Noise of T steps has a variance ~ T each: with a learning rate ~ 1 / T the run's noise does not depend on T."""
    small, whole = (options(Cell("noise_aware.table13", "weiavg", "dist1", scale, 0)) for scale in ("small", "paper"))
    path = small.rounds * small.clients.learning_rate, whole.rounds * whole.clients.learning_rate
    assert path[0] == pytest.approx(path[1], rel=1e-3)


def test_learning_rates_are_of_the_papers_grids():
    fine = {1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2}
    grids = {"mnist": fine, "fashion_mnist": fine, "cifar10": fine | {5e-5}}  # the one that is not in its grid
    grids["cifar100"] = {1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3}
    for data, rows in LEARNING_RATES.items():
        assert set(rows) == {"weiavg", "pfa", "dpfedavg", "min_eps", "robust_hdp"}
        assert all(len(rates) == 9 and set(rates) <= grids[data] for rates in rows.values())


@pytest.mark.parametrize(
    ("numbers", "row", "mean"),
    [
        (paper.TABLE12, "weiavg", 85.24),
        (paper.TABLE12, "robust_hdp", 86.51),
        (paper.TABLE13, "pfa", 71.36),
        (paper.TABLE13, "min_eps", 60.80),
        (paper.TABLE14, "dpfedavg", 20.62),
        (paper.TABLE15, "robust_hdp", 32.04),
        (paper.TABLE4, "dpfedavg", 74.78),
        (paper.TABLE18, "pfa", 24.49),
        (paper.TABLE22, "robust_hdp", 76.85),
        (paper.TABLE19, "weiavg", 28.29),
        (paper.TABLE20, "dpfedavg", 29.10),
    ],
)
def test_the_papers_numbers_have_their_mean(numbers, row, mean):
    assert sum(numbers[row]) / len(numbers[row]) == pytest.approx(mean, abs=0.006)


def test_where_the_paper_sees_robust_hdp_ahead():
    """In so many columns it is the best or as good."""
    for numbers, count in ((paper.TABLE12, 7), (paper.TABLE13, 5), (paper.TABLE14, 8), (paper.TABLE4, 5)):
        columns = list(zip(*numbers.values(), strict=True))
        assert sum(one[-1] == max(one) for one in columns) == count


# ---- figures


def a_cell(row: str, column: str, seed: int) -> dict:
    lists = {"epsilon": [2.0, 1.0], "truth": [1.0, 3.0], "oracle_weights": [0.75, 0.25]}
    for name in ("rpca", "rpca_2000", "rpca_20000", "rpca_200000", "rpca_2000000"):
        lists |= {f"{name}_weights": [0.7, 0.3], f"{name}_variance": [1.0, 2.9]}
    values = {"accuracy": 50.0 + seed, "oracle_weights": [0.2, 0.8], "weiavg_weights": [0.4, 0.6]}
    return {
        "values": values if row == "client59" else {"accuracy": 50.0 + seed},
        "curve": {"5": 40.0, "10": 50.0 + seed},
        "first_round": {**lists, "singular_values": [[3.0, 1.0], [1.0, 0.0]]},
    }


@pytest.mark.parametrize("number", [3, 4, 5, 6, 7, 9, 10, 12, 13])
def test_a_figure_draws_what_is_made(number):
    experiment = experiments()[f"noise_aware.figure{number}"]
    found = {
        (row, column): [a_cell(row, column, seed) for seed in (0, 1)]
        for row in experiment.rows
        for column in experiment.columns
    }
    panels = experiment.draw(found)
    assert all(panel.series and all(panel.series.values()) for panel in panels)
    assert isinstance(panels_figure(experiment.title, panels), Figure)
    without = [panel for panel in experiment.draw({}) if panel.series]
    assert len(without) == (1 if number == 5 else 0)  # the one that a formula draws
    first = next(iter(found))
    assert isinstance(experiment.draw({first: found[first]}), list)


# ---- through the command, on a small data set


def test_one_round_says_how_near_each_estimate_is(small_fashion, tmp_path, capsys):  # noqa: F811
    """20 clients of 140 records with random images: noise outweighs what they share, so every estimate is good."""
    argv = ["noise_aware.table3_measured", "--columns", "dist1", "--tracking", "null", "--engine.device", "cpu"]
    small = ["--data.folder", str(small_fashion), "--data.records_per_client", "140", "--data.held_out_per_client", "5"]
    assert main([*argv, *small, "--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]) == 0
    assert "one round is all that is looked at" in capsys.readouterr().out
    (path,) = tmp_path.glob("results/*/*/*.json")
    held = read(path)
    values, lists = held["values"], held["first_round"]
    assert held["rounds"] == 1 and "experiments.papers noise_aware.table3_measured" in held["command"]
    for name in ("rpca", "hetero_pca", "raw_norm"):
        assert 1 <= values[f"{name}_excess"] < 1.02, name
        assert sum(lists[f"{name}_weights"]) == pytest.approx(1) and len(lists[f"{name}_variance"]) == 20
    assert values["mean_residual_excess"] > values["raw_norm_excess"]
    assert lists["epsilon"] == list(EPSILONS["dist1"][20])
    assert values["oracle_noise"] == pytest.approx(1 / sum(1 / one for one in lists["truth"]), rel=1e-6)


def test_a_row_of_table_13(small_fashion, tmp_path, capsys):  # noqa: F811
    argv = ["noise_aware.table13", "--rows", "weiavg,dpfedavg", "--columns", "dist7", "--tracking", "null"]
    small = ["--data.folder", str(small_fashion), "--data.records_per_client", "140", "--data.held_out_per_client", "5"]
    places = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    assert main([*argv, *small, *places, "--rounds", "1", "--engine.device", "cpu"]) == 0
    text = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["the paper's", "66.80"] in lines and ["the paper's", "64.15"] in lines
    departures = (("data.held_out_per_client", "5"), ("data.records_per_client", "140"), ("rounds", "1"))
    experiment = experiments()["noise_aware.table13"].restricted(["weiavg", "dpfedavg"], ["dist7"])
    found = finished(tmp_path / "results", experiment, "small", departures)
    assert {row for row, _ in found} == {"weiavg", "dpfedavg"}
    assert "with rounds 1" in report(experiment, "small", tmp_path / "results", departures)
