"""The declared table and figures: all are there, every command is one that `fit` takes, and each draws what it has."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from declared_cells import options
from matplotlib.figure import Figure
from scipy.stats import kendalltau, spearmanr

from dpfl_lightning import models, strategies
from dpfl_lightning.federated.server.traffic import BYTES
from dpfl_lightning.reporting.figures import panels_figure
from dpfl_lightning.strategies.distillation.costs import break_even, traffic
from experiments.papers.cells import Cell, finished, wanted
from experiments.papers.distillation import EXPERIMENTS, paper
from experiments.papers.distillation.searches import HPO, NAS, NETS, RATES, SCORERS, SPACE, UNTUNED, judged
from experiments.papers.experiment import Training
from experiments.papers.registry import experiments
from experiments.papers.run import words_of

pytestmark = pytest.mark.usefixtures("in_the_repository")
FIGURES = range(2, 11)
SEARCHES = ("distillation.nas", "distillation.hpo", "distillation.search_set")


def every_cell() -> list[Cell]:
    cells = {cell: None for one in EXPERIMENTS for scale in one.scales for cell in wanted(one, scale, None)}
    return list(cells)


def own(cell: Cell) -> dict:
    """Options of the strategy."""
    return options(cell).strategies["distillation"]


def test_the_table_and_every_figure_is_there():
    names = {experiment.name for experiment in EXPERIMENTS}
    assert {"distillation.table1", *(f"distillation.figure{number}" for number in FIGURES)} <= names
    assert len(names) == len(EXPERIMENTS)
    assert all(experiments()[f"distillation.figure{number}"].draw is not None for number in FIGURES)


def test_every_cell_is_one_that_fit_takes():
    """Sizes of the whole: rounds, net, and what clients send without noise where privacy is not asked for."""
    for cell in every_cell():
        found = options(cell)
        strategies.build(found.strategies)
        private = cell.experiment == "distillation.private" or cell.row in ("sum", "paper_mean", "records10_private")
        assert (found.privacy is None) == (not private), cell
        if cell.experiment == "distillation.inversion":
            assert found.rounds == found.clients.count == 1 and found.data.partition["name"] == "stratified"
            continue
        assert found.data.partition["name"] == "dirichlet" and found.model["name"] == "convnet"
        if "distillation" in found.strategies:
            images = found.strategies["distillation"]["images_per_class"]
            special = {
                "distillation.private": 20 if cell.row == "tuned" else 50,
                "distillation.tuning": 40,
                "distillation.published": 40 if cell.row == "tuned" else 1000 * images,
            }
            assert found.rounds == special.get(cell.experiment, 100 if cell.scale == "small" else 500), cell
        if cell.experiment not in SEARCHES:
            assert found.model["width"] == (32 if cell.scale == "small" else 128)


def test_every_cell_of_a_table_is_a_run_of_its_own():
    for experiment in EXPERIMENTS:
        for scale in experiment.scales:
            cells = wanted(experiment, scale, None)
            made = {(tuple(words_of(cell)), *_study(cell)) for cell in cells}
            assert len(made) == len(cells), experiment.name


def _study(cell: Cell) -> tuple:
    """What makes it: the search of a net takes it from the column."""
    return cell.row, cell.column if cell.experiment in SEARCHES else ""


def test_declared_kinds_of_cells_are_used():
    for experiment in EXPERIMENTS:
        used = {experiment.source(row, column)[1] for row in experiment.rows for column in experiment.columns}
        assert set(experiment.cells) <= used, experiment.name
        assert all(isinstance(made, Training) for made in experiment.cells.values())


@pytest.mark.parametrize(
    ("name", "row", "column", "scale", "expected"),
    [
        ("baselines", "one_step", "alpha1", "small", {"clients.count": 10, "privacy": None, "rounds": 100}),
        ("baselines", "one_step", "alpha0.1", "small", {"data.partition.alpha": 0.1, "data.name": "fashion_mnist"}),
        ("baselines", "one_step", "alpha1", "small", {"own.images_per_class": 10, "own.records_per_class": 64}),
        ("baselines", "one_step", "alpha1", "small", {"own.participation_fraction": 0.5, "own.image_steps": None}),
        ("baselines", "ten_steps", "alpha1", "small", {"own.image_steps": 10, "own.mode": None}),
        ("baselines", "literal", "alpha1", "small", {"own.mode": "paper_literal"}),
        ("baselines", "one_step", "alpha1", "small", {"own.image_learning_rate": 0.1}),
        ("baselines", "ten_steps_dsa", "alpha1", "small", {"own.augmentation": "dsa", "own.image_steps": 10}),
        ("baselines", "centralised", "alpha1", "small", {"clients.count": 1, "own.image_steps": 10}),
        ("baselines", "random", "alpha1", "small", {"clients.count": 10, "own.images_per_class": 10}),
        ("tuning", "lr1_steps30", "public", "small", {"data.use_public": True, "data.public_records": 12_000}),
        ("baselines", "tuned", "alpha1", "small", {"data.public_records": 12_000, "data.use_public": False}),
        ("private", "tuned", "eps8", "small", {"data.public_records": 12_000, "own.image_learning_rate": 3.0}),
        ("tuning", "lr1_steps30", "public", "small", {"own.image_learning_rate": 1.0, "own.image_steps": 30}),
        ("sizes", "tuned", "ipc50", "small", {"own.images_per_class": 50, "own.image_steps": 30, "rounds": 100}),
        ("private", "noise_aware", "eps8", "small", {"privacy.epsilon": 8.0, "privacy.delta": 1e-5, "rounds": 50}),
        ("private", "noise_aware", "eps8", "small", {"own.image_steps": 10, "own.participation_fraction": 1.0}),
        ("private", "dpfedavg", "eps8", "small", {"privacy.epsilon": 8.0, "strategies": {"size_weighted": {}}}),
        ("table1", "distdd_50", "mnist_0.5", "paper", {"clients.count": 50, "rounds": 500, "own.images_per_class": 50}),
        ("table1", "distdd_100", "cifar10_0.1", "paper", {"data.name": "cifar10", "data.partition.alpha": 0.1}),
        ("table1", "distdd_10", "cifar10_1", "paper", {"own.records_per_class": 256, "model.width": 128}),
        ("table1", "fedprox", "mnist_1", "paper", {"strategies.fedprox.pull": 0.01, "rounds": 500}),
        ("table1_centralised", "gm", "mnist", "small", {"clients.count": 1, "own.images_per_class": 100}),
        ("default", "distdd", "default", "paper", {"clients.count": 20, "evaluation.every": 50, "rounds": 500}),
        ("default", "median", "default", "small", {"own.aggregation": "median", "own.participation_fraction": 0.5}),
        ("default", "full", "default", "small", {"own.participation_fraction": 1.0}),
        ("figure2", "median", "clients_0.4", "small", {"data.mislabelled": {"name": "clients", "share": 0.4}}),
        ("figure2", "fedavg", "records_1", "small", {"data.mislabelled": {"name": "records", "share": 1.0}}),
        ("figure3", "distdd", "dir0.3", "small", {"data.partition.alpha": 0.3, "clients.count": 20}),
        ("figure6", "sum", "sigma0.1", "small", {"privacy.noise_multiplier": 0.1, "own.noise_scale": "sum"}),
        ("figure6", "paper_mean", "sigma100", "paper", {"own.noise_scale": "paper_mean", "own.sampling": "full"}),
        ("figure7", "full", "n100", "small", {"clients.count": 100, "own.participation_fraction": 1.0}),
        ("figure8", "gm", "ipc30", "small", {"clients.count": 1, "own.images_per_class": 30}),
        ("figure10", "distdd", "share10", "small", {"own.participation_fraction": 0.1, "own.min_participants": 1}),
        ("nas", "net00", "federated", "small", {"rounds": 10, "data.records_per_client": 1200, "clients.count": 10}),
        ("nas", "net00", "early", "small", {"rounds": 1, "data.public_records": 12_000, "model.width": 32}),
        ("hpo", "rate19", "distilled", "small", {"clients.learning_rate": 0.3, "clients.batch_size": 64}),
        (
            "search_set",
            "distdd",
            "set",
            "small",
            {"own.image_learning_rate": 3.0, "data.public_records": 12_000, "rounds": 100},
        ),
    ],
)
def test_settings(name, row, column, scale, expected):
    cell = Cell(f"distillation.{name}", row, column, scale, 0)
    for key, value in expected.items():
        found = options(cell)
        parts = key.split(".")
        if parts[0] == "own":
            parts, found = parts[1:], own(cell)
        for part in parts:
            found = found.get(part) if isinstance(found, dict) else getattr(found, part)
        assert found == value, key


def test_methods_of_a_column_differ_in_nothing_but_their_strategy():
    for name, rows, column in (
        ("baselines", ("literal", "one_step", "ten_steps", "ten_steps_dsa", "local", "random"), "alpha1"),
        ("figure2", ("local", "distdd", "median"), "clients_0.4"),
        ("private", ("noise_aware", "equal", "one_step"), "eps8"),
    ):
        whole = [vars(options(Cell(f"distillation.{name}", row, column, "small", 0))) for row in rows]
        for one in whole:
            assert {key for key in one if one[key] != whole[0][key]} <= {"strategies", "tracking"}


def test_figures_share_the_cells_of_their_common_setting():
    shared = {
        name: {row for row, column, *_ in _sources(f"distillation.{name}") if column == "default"}
        for name in ("figure2", "figure3", "figure6", "figure7", "figure9", "figure10")
    }
    assert shared["figure2"] == {"fedavg", "local", "distdd", "median"} and shared["figure9"] == {"full", "distdd"}
    assert shared["figure3"] == {"gm", "distdd", "local", "fedavg"} and shared["figure6"] == {"distdd"}
    assert shared["figure7"] == {"local", "full", "distdd"} and shared["figure10"] == {"distdd", "local", "gm"}


def _sources(name: str) -> list[tuple[str, str]]:
    return [(cell.row, cell.column) for cell in wanted(experiments()[name], "small", None)]


# ---- the paper's numbers


def test_the_papers_differences_are_those_between_its_rows():
    """DistDD with 100 images - FedAvg and FedProx, and the gaps to what is centralised, as worked out from Table 1."""
    rows = paper.TABLE1
    assert _apart(rows["distdd_100"], rows["fedavg"]) == [-1.9, -1.1, -8.5, -2.4, -2.0, -1.8, -8.1, -6.1, -8.6]
    assert _apart(rows["distdd_100"], rows["fedprox"]) == [-2.2, -2.5, -9.8, -2.5, -6.4, -13.7, -8.3, -10.9, -14.8]
    whole, gm = ([value for value in paper.TABLE1_CENTRALISED[name] for _ in range(3)] for name in ("whole", "gm"))
    assert _apart(rows["fedavg"], whole) == [-0.5, -5.0, -6.8, -1.1, -7.3, -19.3, -0.9, -11.9, -21.3]
    assert _apart(rows["distdd_100"], gm) == [-0.3, -4.0, -13.2, -1.0, -6.8, -18.6, -2.5, -11.5, -23.4]


def _apart(ours, theirs) -> list[float]:
    return [round(a - b, 1) for a, b in zip(ours, theirs, strict=True)]


def test_in_the_paper_more_images_are_better():
    ten, fifty, hundred = (paper.TABLE1[f"distdd_{images}"] for images in (10, 50, 100))
    assert all(a < b < c for a, b, c in zip(ten, fifty, hundred, strict=True))
    columns = list(experiments()["distillation.table1"].columns)
    assert columns[:4] == ["mnist_1", "mnist_0.5", "mnist_0.1", "fashion_mnist_1"]
    assert experiments()["distillation.table1"].reference("distdd_10", "cifar10_0.1") == 41.5


# ---- searches


def test_the_searched_nets_are_drawn_once():
    assert len(SPACE) == 36 and len(NETS) == len(set(NETS.values())) == 21 and NETS["net00"] == UNTUNED
    assert set(NETS.values()) <= set(SPACE) and len(RATES) == len(set(RATES.values())) == 20
    # the draw itself: whoever changes it changes what finished cells mean
    assert str(NETS["net01"]) == "64 wide, 2 deep, norm none, avg pooling"
    assert all(
        options(Cell(NAS.name, row, "federated", "small", 0)).model["norm"] in ("none", "instance", "group")
        for row in NETS
    )


def test_the_set_and_the_searches_have_the_same_clients():
    of_set = options(Cell("distillation.search_set", "distdd", "set", "small", 0))
    for experiment in (NAS, HPO):
        for cell in wanted(experiment, "small", None):
            assert (options(cell).data, options(cell).clients.count) == (of_set.data, of_set.clients.count)


def made_up(rows) -> dict:
    """Accuracies of every scorer: public and test ones disagree, so that a choice by the wrong one shows."""
    draw = random.Random(0)
    return {
        (row, scorer): [
            {
                "values": {
                    "holdout_accuracy": draw.uniform(60, 90),
                    "test_accuracy": draw.uniform(60, 90),
                    "trial_seconds": 10.0,
                    "set_run_seconds": 100.0,
                    "set_gigabytes": 1.0,
                    "gigabytes": 0.5,
                }
            }
        ]
        for row in rows
        for scorer in SCORERS
    }


def values(found, rows, scorer, name) -> list[float]:
    return [found[row, scorer][0]["values"][name] for row in rows]


@pytest.mark.parametrize("scorer", SCORERS)
def test_rank_correlations_are_scipys(scorer):
    rows = list(NETS)
    found = made_up(rows)
    judgement = judged(found, rows, scorer)
    score, true = values(found, rows, scorer, "holdout_accuracy"), values(found, rows, "federated", "test_accuracy")
    assert judgement.spearman == pytest.approx(spearmanr(score, true).statistic)
    assert judgement.kendall == pytest.approx(kendalltau(score, true).statistic)
    top = sorted(range(len(rows)), key=lambda row: -true[row])[:5]
    among = spearmanr([score[row] for row in top], [true[row] for row in top]).statistic
    assert judgement.spearman_top5 == pytest.approx(among)
    assert judgement.candidates == 21 and judgement.seconds == 10.0


def test_no_test_record_chooses():
    """The winner is the best on public records, whatever the test set says of it; its regret is told."""
    rows = list(NETS)
    found = made_up(rows)
    for scorer in SCORERS:
        held_out = values(found, rows, scorer, "holdout_accuracy")
        chosen = rows[held_out.index(max(held_out))]
        true = values(found, rows, "federated", "test_accuracy")
        judgement = judged(found, rows, scorer)
        assert judgement.winner == found[chosen, "federated"][0]["values"]["test_accuracy"]
        assert judgement.regret == pytest.approx(max(true) - judgement.winner)
    changed = {key: [{"values": dict(cell[0]["values"])}] for key, cell in found.items()}
    for row in rows:  # other test accuracies of the proxy change nothing
        changed[row, "distilled"][0]["values"]["test_accuracy"] = 0.0
    assert judged(changed, rows, "distilled") == judged(found, rows, "distilled")


def test_candidates_that_are_not_made_are_left_out():
    rows = list(NETS)
    found = made_up(rows[:7])
    del found[rows[0], "distilled"], found[rows[1], "federated"]
    assert judged(found, rows, "distilled").candidates == 5 and judged(found, rows, "early").candidates == 6
    assert judged({}, rows, "distilled") is None and NAS.summary({}) == ""
    assert NAS.summary(found).count("\n") == 5  # a head, its line, and four scorers


# ---- figures


def a_cell(accuracy: float) -> dict:
    return {
        "values": {"test_accuracy": accuracy, **made_up(["net00"])["net00", "distilled"][0]["values"]},
        "curve": {"10": accuracy - 5, "20": accuracy},
        "epsilon_max": 8.0,
    }


def _gigabytes(floats: int) -> float:
    return BYTES * floats / 1e9


def test_traffic_of_tunings_crosses_where_the_formula_says():
    """Figure 5 from its finished cells, of the net that the set was made with: a set of 100 rounds of five clients, who
    send two counts for each class, too; ten rounds of all ten clients for a training."""
    found = finished(Path("experiments/results"), experiments()["distillation.figure5"], "small", ())
    own = {key: cells for key, cells in found.items() if key[0] == "net00"}
    net = models.build("convnet", (1, 28, 28), 10, **UNTUNED._asdict())
    params = sum(p.numel() for p in net.parameters())
    matched = sum(p.numel() for p in net.parameters() if p.dim() >= 2)
    of_set, of_training = traffic(100 * 5, params, 10 * (matched + 2)), traffic(10 * 10, params, params)
    assert values(own, ["net00"], "distilled", "set_gigabytes") == [pytest.approx(_gigabytes(of_set.total), rel=1e-5)]
    assert values(own, ["net00"], "federated", "gigabytes") == [pytest.approx(_gigabytes(of_training.total), rel=1e-5)]
    (drawn,) = [panel for panel in experiments()["distillation.figure5"].draw(own) if panel.title == "Traffic"]
    on_set, each = (dict(points) for points in drawn.series.values())
    for n in on_set:
        assert (n > break_even(of_set, of_training)) == (on_set[n] < each[n])
        assert on_set[n] == pytest.approx(_gigabytes(of_set.total + of_training.total), rel=1e-5)
        assert each[n] == pytest.approx(_gigabytes(n * of_training.total), rel=1e-5)


def test_figure_6_shows_the_papers_epsilon_beside_those_of_runs():
    """The largest of all seeds; nothing where no cell is made, and a dash for a form that has none."""
    cells = {("sum", "sigma10"): (12.0, 12.30001), ("sum", "sigma1"): (500.0,), ("paper_mean", "sigma10"): (0.2,)}
    found = {key: [a_cell(50.0) | {"epsilon_max": own} for own in epsilons] for key, epsilons in cells.items()}
    figure = experiments()["distillation.figure6"]
    lines = [[word.strip() for word in line.split("|")[1:-1]] for line in figure.summary(found).splitlines()]
    assert lines[0][0] == "sigma" and lines[0][1].startswith("eq. 41")
    assert lines[2:] == [["1", "9.6897", "500.0000", "-"], ["10", "0.9690", "12.3001", "0.2000"]]
    assert figure.summary({("distdd", "sigma1"): [a_cell(50.0)]}) == figure.summary({}) == ""


@pytest.mark.parametrize("experiment", [one for one in EXPERIMENTS if one.draw], ids=lambda one: one.name)
def test_a_figure_draws_what_is_made(experiment):
    found = {
        (row, column): [a_cell(50.0 + number + seed) for seed in (0, 1)]
        for number, row in enumerate(experiment.rows)
        for column in experiment.columns
    }
    panels = experiment.draw(found)
    assert panels and all(panel.series and all(panel.series.values()) for panel in panels)
    assert isinstance(panels_figure(experiment.title, panels), Figure)
    assert not [panel for panel in experiment.draw({}) if panel.series]
    first = next(iter(found))
    assert isinstance(experiment.draw({first: found[first]}), list)
