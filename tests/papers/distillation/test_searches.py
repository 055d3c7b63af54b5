"""Searches and summaries of the distillation paper."""

import random
from pathlib import Path

import pytest
from scipy.stats import kendalltau, spearmanr

from experiments.papers.cells import Cell, required_cells
from experiments.papers.distillation.judgements import judged
from experiments.papers.registry import experiments
from experiments.papers.run import RunnerOptions, options_of

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_the_repository")]
NAS, HPO = (experiments()[f"distillation.{name}"] for name in ("nas", "hpo"))
SCORERS = list(NAS.columns)


def options(cell: Cell):
    return options_of(cell, RunnerOptions(None, Path("results"), Path("runs")))


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
    assert NAS.summary(NAS, found).count("\n") == 5  # a head, its line, and four scorers
