"""Searches and summaries of the distillation paper."""

import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kendalltau, spearmanr

from dpfl_lightning import models
from dpfl_lightning.federated.server.traffic import BYTES
from dpfl_lightning.strategies.distillation.costs import traffic
from experiments.papers.cells import Cell, finished, required_cells
from experiments.papers.distillation.figures import judged, with_interval
from experiments.papers.drawing import panels_figure
from experiments.papers.registry import experiments
from experiments.papers.run import RunnerOptions, options_of

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_the_repository")]
NAS, HPO = (experiments()[f"distillation.{name}"] for name in ("nas", "hpo"))
SCORERS = list(NAS.columns)


def options(cell: Cell):
    return options_of(cell, RunnerOptions(None, Path("results"), Path("runs")))


def net_of(row: str) -> dict:
    return options(Cell(NAS.name, row, "federated", "small", 0)).model


def test_the_searched_nets_are_drawn_once():
    """The draw itself: changing it changes what finished cells mean."""
    space = [
        {"name": "convnet", "width": width, "depth": depth, "norm": norm, "pooling": pooling}
        for width in (16, 32, 64)
        for depth in (2, 3)
        for norm in ("none", "instance", "group")
        for pooling in ("max", "avg")
    ]
    untuned = {"name": "convnet", "width": 32, "depth": 3, "norm": "instance", "pooling": "avg"}
    drawn = random.Random(0).sample([net for net in space if net != untuned], 20)
    assert [net_of(row) for row in NAS.rows] == [untuned, *drawn]
    assert NAS.rows["net01"].title == "64 wide, 2 deep, norm none, avg pooling" and len(HPO.rows) == 20


@pytest.mark.usefixtures("tuned")
def test_the_set_and_the_searches_have_the_same_clients():
    of_set = options(Cell("distillation.search_set", "distdd", "set", "small", 0))
    for experiment in (NAS, HPO):
        for cell in required_cells(experiment, "small"):
            assert (options(cell).data, options(cell).clients.count) == (of_set.data, of_set.clients.count)


def random_cells(rows) -> dict:
    """Accuracies of every scorer: public and test ones disagree, so that a choice by the wrong one shows."""
    draw = random.Random(0)
    same = {"trial_seconds": 10.0, "set_run_seconds": 100.0, "set_gigabytes": 1.0, "gigabytes": 0.5}

    def a_cell():
        accuracies = {name: draw.uniform(60, 90) for name in ("holdout_accuracy", "test_accuracy")}
        return {"values": accuracies | same}

    return {(row, scorer): [a_cell()] for row in rows for scorer in SCORERS}


def values(found, rows, scorer, name) -> list[float]:
    return [found[row, scorer][0]["values"][name] for row in rows]


def test_rank_correlations_are_scipys():
    rows = list(NAS.rows)
    found = random_cells(rows)
    true = values(found, rows, "federated", "test_accuracy")
    top = sorted(range(len(rows)), key=lambda row: -true[row])[:5]
    for scorer in SCORERS:
        judgement, score = judged(NAS, found, scorer), values(found, rows, scorer, "holdout_accuracy")
        assert judgement.spearman == pytest.approx(spearmanr(score, true).statistic), scorer
        assert judgement.kendall == pytest.approx(kendalltau(score, true).statistic), scorer
        among = spearmanr([score[row] for row in top], [true[row] for row in top]).statistic
        assert judgement.spearman_top5 == pytest.approx(among), scorer
        assert judgement.candidates == 21 and judgement.seconds == 10.0, scorer


def test_no_test_record_chooses():
    """The winner is the best on public records, whatever the test set says of it; its regret is shown."""
    rows = list(NAS.rows)
    found = random_cells(rows)
    for scorer in SCORERS:
        held_out = values(found, rows, scorer, "holdout_accuracy")
        chosen = rows[held_out.index(max(held_out))]
        true = values(found, rows, "federated", "test_accuracy")
        judgement = judged(NAS, found, scorer)
        assert judgement.winner == found[chosen, "federated"][0]["values"]["test_accuracy"]
        assert judgement.regret == pytest.approx(max(true) - judgement.winner)
    changed = {key: [{"values": dict(cell[0]["values"])}] for key, cell in found.items()}
    for row in rows:  # other test accuracies of the proxy change nothing
        changed[row, "distilled"][0]["values"]["test_accuracy"] = 0.0
    assert judged(NAS, changed, "distilled") == judged(NAS, found, "distilled")


def test_candidates_that_are_not_made_are_left_out():
    rows = list(NAS.rows)
    found = random_cells(rows[:7])
    del found[rows[0], "distilled"], found[rows[1], "federated"]
    assert judged(NAS, found, "distilled").candidates == 5 and judged(NAS, found, "early").candidates == 6
    assert judged(NAS, {}, "distilled") is None and NAS.summary(NAS, {}) == ""
    assert NAS.summary(NAS, found).count("\n") == 7  # a head, its line, and six scorers


def test_rank_correlations_have_an_interval_of_their_number_of_candidates():
    found = random_cells(list(NAS.rows))
    judgement = judged(NAS, found, "distilled")
    line = next(line for line in NAS.summary(NAS, found).splitlines() if "trained on the distilled set" in line)
    whole, top = (line.split("|")[place].strip() for place in (3, 5))
    assert whole == with_interval(judgement.spearman, 21) and top == with_interval(judgement.spearman_top5, 5)
    draw, inside = np.random.default_rng(0), 0
    for _ in range(400):  # ranks of normal pairs whose correlation is 0.7, and Spearman's 0.68
        pairs = draw.multivariate_normal([0, 0], [[1, 0.7], [0.7, 1]], 21)
        words = re.findall(r"-?[\d.]+", with_interval(spearmanr(pairs).statistic, 21))
        inside += float(words[1]) <= 6 / math.pi * math.asin(0.35) <= float(words[2])
    assert 0.92 < inside / 400 < 0.98


# ---- figures


def a_cell(accuracy: float) -> dict:
    values = random_cells(["net00"])["net00", "distilled"][0]["values"] | {"test_accuracy": accuracy}
    return {"values": values, "curve": {"10": accuracy - 5, "20": accuracy}, "epsilon_max": 8.0}


def _gigabytes(floats: int) -> float:
    return BYTES * floats / 1e9


def test_traffic_of_tunings_crosses_where_the_formula_says():
    """Figure 5 from its finished cells, of the net that the set was made with: a set of 100 rounds of five clients, who
    send two counts for each class, too; ten rounds of all ten clients for a training."""
    found = finished(Path("experiments/results"), experiments()["distillation.figure5"], "small", ())
    own = {key: cells for key, cells in found.items() if key[0] == "net00"}
    net = models.build("convnet", (1, 28, 28), 10, width=32, depth=3, norm="instance", pooling="avg")
    params = sum(p.numel() for p in net.parameters())
    matched = sum(p.numel() for p in net.parameters() if p.dim() >= 2)
    of_set, of_training = traffic(100 * 5, params, 10 * (matched + 2)), traffic(10 * 10, params, params)
    assert values(own, ["net00"], "distilled", "set_gigabytes") == [pytest.approx(_gigabytes(of_set.total), rel=1e-5)]
    assert values(own, ["net00"], "federated", "gigabytes") == [pytest.approx(_gigabytes(of_training.total), rel=1e-5)]
    (drawn,) = [panel for panel in experiments()["distillation.figure5"].panels(own) if panel.title == "Traffic"]
    on_set, each = (dict(points) for points in drawn.series.values())
    for n in on_set:
        assert (n > 1 + of_set.total / of_training.total) == (on_set[n] < each[n])
        assert on_set[n] == pytest.approx(_gigabytes(of_set.total + of_training.total), rel=1e-5)
        assert each[n] == pytest.approx(_gigabytes(n * of_training.total), rel=1e-5)


def test_a_row_with_several_seeds_in_one_column_has_a_band_in_all():
    found = {("random", "ipc1"): [a_cell(50.0)], ("random", "ipc10"): [a_cell(70.0), a_cell(74.0)]}
    (drawn,) = experiments()["distillation.sizes"].panels(found)
    assert list(drawn.series.values()) == [[(1, 50.0, 0.0), (10, 72.0, 2.0)]]
    panels_figure("sizes", [drawn])


def test_figure_6_shows_the_papers_epsilon_beside_those_of_runs():
    """The largest of all seeds; nothing where no cell is made, and a dash for a form that has none."""
    cells = {("sum", "sigma10"): (12.0, 12.30001), ("sum", "sigma1"): (500.0,), ("paper_mean", "sigma10"): (0.2,)}
    found = {key: [a_cell(50.0) | {"epsilon_max": own} for own in epsilons] for key, epsilons in cells.items()}
    figure = experiments()["distillation.figure6"]
    lines = [[word.strip() for word in line.split("|")[1:-1]] for line in figure.summary(figure, found).splitlines()]
    assert lines[0][0] == "sigma" and lines[0][1].startswith("eq. 41")
    assert lines[2:] == [["1", "9.68962", "500", "-"], ["10", "0.968962", "12.3001", "0.2"]]
    assert figure.summary(figure, {}) == ""
