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
from experiments.papers.clustered import EXPERIMENTS, paper
from experiments.papers.clustered.accuracy import fairness
from experiments.papers.clustered.settings import COLUMNS, METHODS
from experiments.papers.experiment import Training
from experiments.papers.registry import experiments
from experiments.papers.run import how, words_of

pytestmark = pytest.mark.usefixtures("in_the_repository")
TABLES = range(3, 11)
FIGURES = (
    "figure1",
    "figure2",
    "figure3",
    "figure4",
    "figure5",
    "revised_figure3",
    "revised_figure5",
    "revised_figure8",
)


def test_every_table_and_figure_is_there():
    names = {experiment.name for experiment in EXPERIMENTS}
    assert {f"clustered.table{number}" for number in TABLES} <= names
    assert {f"clustered.{name}" for name in FIGURES} <= names and len(names) == len(EXPERIMENTS)
    assert all(experiments()[f"clustered.{name}"].draw is not None for name in FIGURES)


@pytest.mark.parametrize("cell", some_cells(EXPERIMENTS), ids=str)
def test_a_cell_is_a_run(cell):
    own = options(cell)
    rounds = 30 if "tuning" in cell.experiment else 60 if cell.scale == "small" else 200
    assert own.rounds == rounds and own.clients.local_epochs == 1
    assert own.clients.count == (24 if "composed" in cell.experiment else 21)
    assert own.privacy is None or own.privacy.delta == 1e-4
    assert (own.data.groups is None) == (cell.column == "none")
    strategies.build(own.strategies)


def test_every_cell_of_a_table_is_a_run_of_its_own():
    for experiment in EXPERIMENTS:
        for scale in experiment.scales:
            cells = [cell for cell in wanted(experiment, scale, None) if isinstance(how(cell), Training)]
            assert len({tuple(words_of(cell)) for cell in cells}) == len(cells), experiment.name


def test_declared_kinds_of_cells_are_used():
    for experiment in EXPERIMENTS:
        used = {experiment.source(row, column)[1] for row in experiment.rows for column in experiment.columns}
        assert set(experiment.cells) <= used, experiment.name


@pytest.mark.parametrize(
    ("name", "row", "column", "scale", "expected"),
    [
        ("table5", "dpfedavg", "eps10", "small", {"strategies": {"size_weighted": {}}, "privacy.epsilon": 10.0}),
        ("table5", "ours", "eps2", "small", {"data.records_per_client": 2285, "data.public_records": 12000}),
        ("table3", "ifca", "eps5", "paper", {"data.name": "mnist", "data.partition": {"name": "overlapping"}}),
        ("table3", "ifca", "eps5", "paper", {"data.records_per_client": 8000, "data.test_per_client": 1666}),
        ("table7", "oracle", "eps4", "paper", {"model": {"name": "resnet18"}, "clients.learning_rate": 5e-4}),
        ("table7", "oracle", "eps4", "paper", {"data.records_per_client": 6600, "privacy.clip_norm": 3.0}),
        ("table9", "kmeans", "eps3", "small", {"data.groups": {"name": "label_shift", "sizes": [3, 6, 6, 6]}}),
        ("reference", "reference", "cifar10", "small", {"privacy": None, "strategies": {"oracle_clusters": {}}}),
        ("tuning", "ours_0.2", "eps2", "small", {"clients.learning_rate": 0.2, "data.use_public": True}),
        ("found", "paper_auto", "none", "small", {"data.groups": None}),
        ("found", "ours", "rotation_700", "small", {"data.records_per_client": 700}),
        ("composed", "ours_noise", "dist3", "small", {"strategies": {"noise_aware": {}, "clustered": {}}}),
        ("batch_sizes", "ours", "b128", "small", {"clients.batch_size": 128}),
    ],
)
def test_settings(name, row, column, scale, expected):
    own = options(Cell(f"clustered.{name}", row, column, scale, 0))
    for key, value in expected.items():
        found = own
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value, key


def test_methods_of_a_table_differ_in_nothing_but_their_strategies():
    whole = [vars(options(Cell("clustered.table5", name, "eps5", "small", 0))) for name in METHODS]
    for own in whole:
        assert {key for key in own if own[key] != whole[0][key]} <= {"strategies", "tracking"}


def test_learning_rates_shrink_as_steps_grow():
    """30 rounds of 72 steps have 0.2, until public records are asked for each method."""
    small, whole = (options(Cell("clustered.table5", "ours", "eps5", scale, 0)) for scale in ("small", "paper"))
    assert small.clients.learning_rate == pytest.approx(0.2 / 2)
    assert whole.clients.learning_rate == pytest.approx(0.2 * 30 * 72 / (200 * 250), rel=1e-3)
    batches = [options(Cell("clustered.batch_sizes", "ours", f"b{size}", "small", 0)) for size in (16, 32, 128)]
    assert [own.clients.learning_rate for own in batches] == [0.05, 0.1, 0.4]


# ---- the papers' numbers


def of(number: int, row: str) -> tuple:
    return getattr(paper, f"TABLE{number}")[row]


def test_all_are_the_mean_of_majority_and_minority_but_for_two_methods():
    def farthest(number: int, methods: list[str]) -> float:
        rows = [[of(number, f"{name}_{key}") for key in ("all", "majority", "minority")] for name in methods]
        return max(abs(a - (18 * b + 3 * c) / 21) for row in rows for a, b, c in zip(*row, strict=True))

    methods = ["dpfedavg", "ifca", "kmeans", "paper", "oracle"]
    assert farthest(9, methods) < 0.4
    assert max(farthest(number, ["ifca", "kmeans"]) for number in (3, 5)) == pytest.approx(4.51, abs=0.01)


def test_where_the_paper_has_the_smallest_gap_between_majority_and_minority():
    """In so many of the five columns, its oracle left aside."""
    for number, count in ((3, 5), (5, 2), (7, 5), (9, 2)):
        gaps = {
            name: [
                abs(a - b) for a, b in zip(of(number, f"{name}_majority"), of(number, f"{name}_minority"), strict=True)
            ]
            for name in ("dpfedavg", "ifca", "kmeans", "paper")
        }
        smallest = [min(gaps, key=lambda name, i=i: gaps[name][i]) for i in range(5)]
        assert smallest.count("paper") == count, number


def test_the_papers_tables_are_whole():
    for number in TABLES:
        rows = getattr(paper, f"TABLE{number}")
        assert len(rows) == (15 if number % 2 else 20) and all(len(numbers) == 5 for numbers in rows.values())
        assert set(rows) <= set(experiments()[f"clustered.table{number}"].rows)
    assert of(8, "paper_f_loss")[-1] == 0.68, "as printed"


# ---- fairness and figures


def test_fairness_is_what_clients_lose_unequally():
    own = {"clients": {"accuracy": [0.80, 0.60, 0.70], "loss": [0.5, 1.5, 0.9]}}
    reference = {"clients": {"accuracy": [0.90, 0.90, 0.80], "loss": [0.3, 0.4, 0.7]}}
    assert fairness(own, reference) == pytest.approx({"fairness_gap_accuracy": 20.0, "fairness_gap_test_loss": 0.9})


def a_cell(seed: int) -> dict:
    values = {name: 50.0 + seed for name in ("accuracy", "accuracy_majority", "accuracy_minority", "accuracy_gap")}
    values |= {f"accuracy_{group}": 60.0 for group in range(4)}
    values |= {
        "fairness_gap_accuracy": 3.0,
        "fairness_gap_test_loss": 0.2,
        "adjusted_rand_index": 0.9,
        "separation": 9.0,
    }
    return {
        "values": values,
        "curves": {"clustering_accuracy": {"1": 30.0, "2": 90.0 + seed}, "0": {"2": 50.0}},
        "points": [[0.0, 1.0], [0.5, 0.0]],
        "clients": {"true_group": [0, 1]},
    }


@pytest.mark.parametrize("name", ["figure1", "figure2", "figure3", "figure4", "revised_figure5", "separation"])
def test_a_figure_draws_what_is_made(name):
    experiment = experiments()[f"clustered.{name}"]
    found = {
        (row, column): [a_cell(seed) for seed in (0, 1)] for row in experiment.rows for column in experiment.columns
    }
    panels = experiment.draw(found)
    assert panels and all(panel.series and all(panel.series.values()) for panel in panels)
    assert isinstance(panels_figure(experiment.title, panels), Figure)
    assert not [panel for panel in experiment.draw({}) if panel.series]
    first = next(iter(found))
    assert isinstance(experiment.draw({first: found[first]}), list)


@pytest.mark.parametrize("name", ["figure5", "revised_figure3", "revised_figure8", "simulation"])
def test_a_figure_of_formulas_draws(name):
    experiment = experiments()[f"clustered.{name}"]
    found = {
        (row, column): [{"values": dict.fromkeys((line.value for line in experiment.rows.values()), 1.0)}]
        for row in experiment.rows
        for column in experiment.columns
    }
    panels = experiment.draw(found)
    assert all(panel.series for panel in panels) and isinstance(panels_figure(experiment.title, panels), Figure)


# ---- through the command, on a small data set

SMALL = [
    "--model.name",
    "logistic",
    "--data.records_per_client",
    "100",
    "--data.test_per_client",
    "50",
    "--data.public_records",
    "100",
]


def made(names, small_fashion, tmp_path, *more) -> list[dict]:  # noqa: F811
    places = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    argv = [
        *names,
        *SMALL,
        "--data.folder",
        str(small_fashion),
        "--tracking",
        "null",
        "--engine.device",
        "cpu",
        "--jobs",
        "1",
    ]
    assert main([*argv, *more, *places]) == 0
    return [read(path) for path in sorted(tmp_path.glob("results/*/*/*.json"))]


@pytest.mark.filterwarnings("ignore")
def test_a_run_holds_all_metrics_and_is_read_beside_its_reference(small_fashion, tmp_path, capsys):  # noqa: F811
    some = ["clustered.table6", "--rows", "dpfedavg_f_acc,dpfedavg_gap,oracle_f_acc", "--columns", "eps5"]
    cells = made(some, small_fashion, tmp_path, "--rounds", "2")
    assert {(cell["experiment"], cell["row"]) for cell in cells} == {
        ("clustered.table5", "dpfedavg"),
        ("clustered.table5", "oracle"),
        ("clustered.reference", "reference"),
    }
    oracle = next(cell for cell in cells if cell["row"] == "oracle")
    values = oracle["values"]
    assert values["clustering_accuracy"] == 100 and values["clusters_perfect"] == 1 == values["adjusted_rand_index"]
    assert values["minority_recall"] == 100 and values["models_down"] == values["models_up"] == 2
    means = [values[f"accuracy_{group}"] for group in range(4)]
    assert values["accuracy_minority"] == means[0] and values["accuracy_majority"] == pytest.approx(sum(means[1:]) / 3)
    assert values["accuracy"] == pytest.approx((3 * means[0] + 6 * sum(means[1:])) / 21)
    assert oracle["clients"]["true_group"] == [0] * 3 + [1] * 6 + [2] * 6 + [3] * 6
    assert len(set(oracle["clients"]["model"])) == 4 and all(loss > 0 for loss in oracle["clients"]["loss"])
    assert oracle["curves"]["clustering_accuracy"] == {"1": 100, "2": 100}
    plain = next(cell for cell in cells if cell["row"] == "dpfedavg")
    reference = next(cell for cell in cells if cell["row"] == "reference")
    assert "clustering_accuracy" not in plain["values"] and reference["epsilon_max"] is None
    shown = f"{fairness(plain, reference)['fairness_gap_accuracy']:.2f}"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["DPFedAvg: F_acc", shown] in rows and [
        "DPFedAvg: best - worst",
        f"{plain['values']['accuracy_gap']:.2f}",
    ] in rows


@pytest.mark.filterwarnings("ignore")
def test_groups_are_looked_for_after_one_round(small_fashion, tmp_path):  # noqa: F811
    """Random images: nothing can be found, and the run ends after a round all the same."""
    (cell,) = made(
        ["clustered.found", "--rows", "ours_num_clusters", "--columns", "rotation", "--seeds", "0"],
        small_fashion,
        tmp_path,
    )
    values = cell["values"]
    assert cell["rounds"] == 1 and values["num_clusters"] >= 1 and values["confident"] in (0, 1)
    assert set(values) >= {"clusters_perfect", "adjusted_rand_index", "separation", "silhouette"}
    assert len(cell["points"]) == 21 and max(x * x + y * y for x, y in cell["points"]) == pytest.approx(1)


def test_what_is_not_here_is_said_in_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DPFL_DATA", str(tmp_path))
    places = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs"), "--data.download", "false"]
    argv = ["clustered.table7", "--columns", "eps5", "--rows", "dpfedavg_all"]
    assert main([*argv, *places, "--tracking", "null"]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "cifar10" in said.err and "Traceback" not in said.err
    assert set(COLUMNS) == {"eps10", "eps5", "eps4", "eps3", "eps2"}
