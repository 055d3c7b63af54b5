"""How well a scorer orders the candidates of a search."""

import math
from statistics import fmean
from typing import NamedTuple

from experiments.pages import markdown
from experiments.papers.experiment import Cells, Experiment


class Judgement(NamedTuple):
    """Agreement of a scorer's order of candidates with that of their federated test accuracy (`top5`: its best five).

    `winner` is the test accuracy of its choice in %, `regret` the points to the best one, `seconds` of a training.
    """

    candidates: int
    spearman: float
    kendall: float
    spearman_top5: float
    winner: float
    regret: float
    seconds: float


def judged(experiment: Experiment, cells: Cells, scorer: str) -> Judgement | None:
    """One scorer's ranking by hold-out accuracy; None for fewer than three candidates."""
    both = [row for row in experiment.rows if cells.get((row, scorer)) and cells.get((row, "federated"))]
    if len(both) < 3:
        return None
    from scipy.stats import kendalltau, spearmanr

    score = [_mean(cells, row, scorer, "holdout_accuracy") for row in both]
    true = [_mean(cells, row, "federated", "test_accuracy") for row in both]
    top = sorted(range(len(both)), key=true.__getitem__, reverse=True)[:5]
    chosen = true[max(range(len(both)), key=score.__getitem__)]
    return Judgement(
        len(both),
        float(spearmanr(score, true).statistic),
        float(kendalltau(score, true).statistic),
        float(spearmanr([score[i] for i in top], [true[i] for i in top]).statistic),
        chosen,
        max(true) - chosen,
        fmean(_mean(cells, row, scorer, "trial_seconds") for row in both),
    )


def _mean(cells: Cells, row: str, column: str, value: str) -> float:
    return fmean(cell["values"][value] for cell in cells[row, column])


def judgements(experiment: Experiment, cells: Cells) -> str:
    """A table of all scorers."""
    lines = []
    for scorer, column in experiment.columns.items():
        if (one := judged(experiment, cells, scorer)) is not None:
            spearman = with_interval(one.spearman, one.candidates)
            ranks = [spearman, f"{one.kendall:.2f}", with_interval(one.spearman_top5, min(5, one.candidates))]
            ends = (f"{number:.2f}" for number in (one.winner, one.regret))
            lines.append([column.title, str(one.candidates), *ranks, *ends, f"{one.seconds:.0f}"])
    ranks = ["Spearman (95 % interval)", "Kendall", "Spearman, top 5"]
    head = ["ranked by", "candidates", *ranks, "its choice, %", "regret", "seconds each"]
    return markdown(head, lines) if lines else ""


def with_interval(spearman: float, count: int) -> str:
    """A rank correlation of `count` pairs with its 95 % interval by Fisher's transformation (Fieller et al., 1957).

    >>> with_interval(0.65, 21), with_interval(1.0, 21), with_interval(0.5, 3)
    ('0.65 (0.29 to 0.85)', '1.00 (1.00 to 1.00)', '0.50')
    """
    if count <= 3:
        return f"{spearman:.2f}"
    middle, half = math.atanh(max(-1 + 1e-9, min(1 - 1e-9, spearman))), 1.96 * math.sqrt(1.06 / (count - 3))
    return f"{spearman:.2f} ({math.tanh(middle - half):.2f} to {math.tanh(middle + half):.2f})"
