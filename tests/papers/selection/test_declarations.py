"""The declared tables and figures: all are there, every command is one that `fit` takes, and each draws what it has."""

from __future__ import annotations

import pytest
from declared_cells import options, some_cells
from matplotlib.figure import Figure
from test_conf import small_fashion  # noqa: F401 (a fixture)

from dpfl_lightning import strategies
from dpfl_lightning.reporting.figures import panels_figure
from experiments.papers.__main__ import main
from experiments.papers.cells import Cell, read, wanted
from experiments.papers.experiment import Training
from experiments.papers.registry import experiments
from experiments.papers.run import how, words_of
from experiments.papers.selection import EXPERIMENTS

pytestmark = pytest.mark.usefixtures("in_the_repository")
FIGURES = ("figure2", "figure3", "figure4", "figure5")


def test_every_table_and_figure_is_there():
    names = {experiment.name for experiment in EXPERIMENTS}
    assert {f"selection.{name}" for name in ("table1", "table3", "figure1", "verification", *FIGURES)} <= names
    assert len(names) == len(EXPERIMENTS)
    assert all(experiments()[f"selection.{name}"].draw is not None for name in FIGURES)


@pytest.mark.parametrize("cell", some_cells(EXPERIMENTS), ids=str)
def test_a_cell_is_a_run(cell):
    own = options(cell)
    strategies.build(own.strategies)
    if cell.experiment == "selection.composed":
        return
    assert own.rounds == (100 if cell.scale == "small" else 200) and own.clients.batch_size is None
    assert own.clients.count == (20 if own.data.name == "diabetes" else 100)
    assert (own.privacy is None) == (cell.row == "fedsgd")
    if own.privacy is not None and "laplace" in cell.column:
        assert own.privacy.mechanism == "laplace" and own.privacy.delta == 0
    assert own.privacy is None or own.privacy.adjacency == "replace_one"


def test_every_cell_of_a_table_is_a_run_of_its_own():
    for experiment in EXPERIMENTS:
        for scale in experiment.scales:
            cells = [cell for cell in wanted(experiment, scale, None) if isinstance(how(cell), Training)]
            runs = {tuple(words_of(cell)) for cell in cells}
            without_noise = [cell for cell in cells if cell.row == "fedsgd"]  # the same beside both kinds of noise
            assert len(runs) >= len(cells) - len(without_noise) / 2, experiment.name


def test_declared_kinds_of_cells_are_used():
    for experiment in EXPERIMENTS:
        used = {experiment.source(row, column)[1] for row in experiment.rows for column in experiment.columns}
        assert set(experiment.cells) <= used, experiment.name


@pytest.mark.parametrize(
    ("name", "row", "column", "scale", "expected"),
    [
        ("methods", "ours", "fashion_mnist_gaussian", "small", {"model": {"name": "cnn_tiny"}}),
        ("methods", "ours", "fashion_mnist_gaussian", "paper", {"model": {"name": "lenet5"}}),
        ("methods", "ours", "fashion_mnist_gaussian", "paper", {"clients.learning_rate": 0.05}),
        ("methods", "ours", "fashion_mnist_gaussian", "small", {"clients.learning_rate": 0.1}),
        ("methods", "ours", "mnist_laplace", "paper", {"privacy.clip_norm": 20.0}),
        ("methods", "uniform", "cifar10_laplace", "paper", {"model": {"name": "resnet20"}}),
        ("methods", "ours", "mnist_gaussian", "paper", {"privacy.epsilon": {"name": "uniform", "low": 0.1, "high": 3}}),
        (
            "methods",
            "pfa",
            "mnist_gaussian",
            "paper",
            {
                "strategies": {
                    "pfa": {"grouping": "top"},
                    "uniform_selection": {"top_fraction": 0.1},
                    "learning_rate_decay": {"half_after": 200},
                }
            },
        ),
        ("figure4", "ours", "fashion_mnist_gaussian_1", "paper", {"privacy.epsilon": {"low": 0.5, "high": 1}}),
        (
            "figure5",
            "ours",
            "mnist_laplace_0.5",
            "paper",
            {"data.partition": {"name": "dirichlet", "alpha": 0.5, "min_records": 10}},
        ),
    ],
)
def test_settings(name, row, column, scale, expected):
    own = options(Cell(f"selection.{name}", row, column, scale, 0))
    for key, value in expected.items():
        found = own
        for part in key.split("."):
            found = getattr(found, part)
        if isinstance(value, dict) and "low" in value:
            found = {name: found[name] for name in value}
        assert found == value, key


def test_a_sweep_shows_the_usual_cell_where_it_passes_it():
    for name, column in (("figure4", "fashion_mnist_gaussian_4"), ("figure5", "mnist_laplace_3")):
        source = experiments()[f"selection.{name}"].source("ours", column)
        assert source == ("selection.methods", "ours", column.rpartition("_")[0])


def test_the_papers_constants_contradict_each_other():
    """8 L / mu is not gamma, and L and mu depend on the noise."""
    table = experiments()["selection.table3"]
    numbers = {key: dict(zip(table.columns, own, strict=True)) for key, own in table.paper.items()}
    assert numbers["decides"]["mnist_gaussian"] == pytest.approx(364.4, abs=0.1)
    assert numbers["decides"]["fashion_mnist_laplace"] == pytest.approx(25_589.3, abs=0.1)
    assert max(numbers["least_skew"].values()) > 1
    assert all(
        abs(numbers["offset"][column] / numbers["gamma"][column] - 1) > 0.1
        for column in numbers["gamma"]
        if not column.startswith("fashion_mnist_gaussian")
    )


# ---- figures


def a_cell(seed: int) -> dict:
    return {
        "values": {"test_accuracy": 50.0 + seed},
        "test_curve": {"10": 30.0, "100": 50.0 + seed},
        "clients": {"unlikeness": [0.5, 0.7], "quota": [3, 9]},
    }


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_draws_what_is_made(name):
    experiment = experiments()[f"selection.{name}"]
    found = {
        (row, column): [a_cell(seed) for seed in (0, 1)] for row in experiment.rows for column in experiment.columns
    }
    panels = experiment.draw(found)
    assert panels and all(panel.series and all(panel.series.values()) for panel in panels)
    assert isinstance(panels_figure(experiment.title, panels), Figure)
    assert not [panel for panel in experiment.draw({}) if panel.series]
    first = next(iter(found))
    assert isinstance(experiment.draw({first: found[first]}), list)


# ---- through the command, on a small data set


@pytest.mark.filterwarnings("ignore")
def test_a_run_holds_what_tables_and_figures_read(small_fashion, tmp_path, capsys):  # noqa: F811
    rows = "uniform,ours,two_stage,privatefl"
    argv = ["selection.methods", "--rows", rows, "--columns", "fashion_mnist_gaussian", "--rounds", "12"]
    argv += ["--clients.count", "20", "--model.name", "logistic", "--evaluation.every", "6"]
    argv += ["--data.partition.min_records", "2", "--data.folder", str(small_fashion), "--tracking", "null"]
    places = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs"), "--jobs", "1"]
    assert main([*argv, "--engine.device", "cpu", *places]) == 0
    cells = {cell["row"]: cell for cell in map(read, tmp_path.glob("results/*/*/*.json"))}
    assert set(cells) == {"uniform", "ours", "two_stage", "privatefl"}
    for cell in cells.values():
        assert set(cell["test_curve"]) == {"6", "12"} and 0 <= cell["values"]["test_accuracy"] <= 100
        counts = cell["clients"]["participations"]
        assert sum(counts) == 12 * 4 and 0 < cell["values"]["equality"] <= 1
        assert cell["values"]["never"] == 5 * sum(not count for count in counts)
    assert cells["uniform"]["values"]["equality"] > max(
        cells[row]["values"]["equality"] for row in ("ours", "two_stage")
    )
    assert len(cells["two_stage"]["clients"]["unlikeness"]) == 20
    assert min(cells["two_stage"]["values"][name] for name in ("decides", "fitted_smoothness")) > 0


@pytest.mark.filterwarnings("ignore")
def test_a_regression_is_read_by_its_test_loss(tmp_path):
    argv = ["selection.regression", "--rows", "ours", "--seeds", "0", "--rounds", "5", "--tracking", "null"]
    places = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs"), "--jobs", "1"]
    assert main([*argv, "--evaluation.every", "5", "--engine.device", "cpu", *places]) == 0
    cells = [read(path) for path in tmp_path.glob("results/*/*/*.json")]
    assert len(cells) == 2
    for cell in cells:
        assert (
            cell["values"]["test_loss"] == pytest.approx(cell["test_curve"]["5"]) and "accuracy" not in cell["values"]
        )
