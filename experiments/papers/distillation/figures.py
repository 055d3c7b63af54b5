"""Figures and summaries of the distillation paper: searches and costs."""

import math
from statistics import fmean, median
from typing import NamedTuple

from dpfl_lightning.runtime.text import markdown
from experiments.papers.experiment import Cells, Experiment, Panel
from experiments.papers.figures import mean_of


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


def scorers(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Each scorer's accuracy on public records against the federated test accuracy, a point for each candidate."""
    panels = []
    for scorer, column in experiment.columns.items():
        points: list[tuple] = [
            (_mean(cells, row, scorer, "holdout_accuracy"), _mean(cells, row, "federated", "test_accuracy"))
            for row, name in cells
            if name == scorer and (row, "federated") in cells
        ]
        if scorer != "federated":
            y = f"{experiment.columns['federated'].title}: test set, %"
            panels.append(Panel(column.title, "accuracy on public records, %", y, {"candidates": points}, "points"))
    return panels


def best_of_first(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Figure 4: test accuracy of the best of the first k candidates, by the scorer that chooses it."""
    both = [row for row in experiment.rows if all((row, scorer) in cells for scorer in ("federated", "distilled"))]
    curves: dict[str, list[tuple]] = {}

    def best(scorer: str, k: int) -> str:
        return max(both[:k], key=lambda row: _mean(cells, row, scorer, "holdout_accuracy"))

    for k in range(1, len(both) + 1):
        for name, row, scorer in (
            ("FedAvg without a search", both[0], "federated"),
            ("chosen and trained on the set", best("distilled", k), "distilled"),
            ("chosen on the set, then FedAvg", best("distilled", k), "federated"),
            ("chosen by FedAvg", best("federated", k), "federated"),
        ):
            curves.setdefault(name, []).append((k, _mean(cells, row, scorer, "test_accuracy")))
    return [Panel("Fashion-MNIST", "candidates seen", "test accuracy, %", curves)]


def costs_of_tunings(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Figure 5: cost of n federated tunings, or of a distillation, n trainings on its set and a federated one."""
    on_set = [run for (_, scorer), runs in cells.items() if scorer == "distilled" for run in runs]
    federated = [run for (_, scorer), runs in cells.items() if scorer == "federated" for run in runs]
    if not (on_set and federated):
        return []
    panels = []
    for title, unit, once, each_on_set, each in (
        ("Time", "hours", "set_run_seconds", "trial_seconds", "trial_seconds"),
        ("Traffic", "gigabytes", "set_gigabytes", "", "gigabytes"),
    ):
        scale = 3600 if unit == "hours" else 1
        run, distillation = ((mean_of(*mean) or 0.0) / scale for mean in ((federated, each), (on_set, once)))
        trial = (mean_of(on_set, each_on_set) or 0.0) / scale if each_on_set else 0.0
        curves: dict[str, list[tuple]] = {
            "one set, then one federated training": [(n, distillation + n * trial + run) for n in range(1, 21)],
            "a federated training for each": [(n, n * run) for n in range(1, 21)],
        }
        panels.append(Panel(title, "tunings", unit, curves))
    return panels


def costs_of_sets(experiment: Experiment, cells: Cells) -> str:
    """A table of what each row that asks clients costs: rounds, traffic, and the median of minutes over cells."""
    lines = []
    for row, one in experiment.rows.items():
        made = [cell for column in experiment.columns for cell in cells.get((row, column), ())]
        made = [cell for cell in made if "gigabytes" in cell["values"]]
        if made:
            rounds = ", ".join(map(str, sorted({cell["rounds"] for cell in made})))
            megabytes = max(1000 * cell["values"]["gigabytes"] for cell in made)
            minutes = median(cell["values"]["run_seconds"] for cell in made) / 60
            lines.append([one.title, rounds, f"{megabytes:.0f}", f"{minutes:.0f}"])
    head = ["what clients are asked for", "rounds", "MB sent to and by all clients", "minutes, on one core"]
    return markdown(head, lines) if lines else ""
