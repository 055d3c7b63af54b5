"""Is the best net on a distilled set also the best in the federation, and the best hyperparameters? Figures 4 and 5."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from dpfl_lightning.runtime.text import markdown
from experiments.papers.cells import Cell
from experiments.papers.distillation.references import CLIENTS, SET_ASIDE, TUNED
from experiments.papers.distillation.settings import DISTILLED, as_words, distillation, population
from experiments.papers.experiment import Column, Experiment, Found, Panel, Row, Training

if TYPE_CHECKING:
    from experiments.papers.run import Making

ROUNDS, EARLY_ROUNDS = 10, 1
_SCALE = {"small": "12,000 records, 10 rounds; the set: 100 rounds, 10 images a class"}
_SHOWS = "accuracy of the candidate on the official test set, %, as each scorer trains it"
#: who says how good a candidate is; `federated` is what the others stand for
SCORERS = {
    "federated": f"federated, {ROUNDS} rounds",
    "distilled": "trained on the distilled set",
    "random": "trained on as many random records",
    "early": f"federated, {EARLY_ROUNDS} round",
}
_COLUMNS = {name: Column(title) for name, title in SCORERS.items()}
_SET = Cell("distillation.search_set", "distdd", "set", "small")

_CHOICE = (
    "Candidates are ranked by the accuracy on 12,000 public records, which the server holds out and nobody trains on. "
    "The test set is for this report: it chooses nothing, and it is what a choice is worth here."
)


def _population() -> dict[str, Any]:
    return {**population("fashion_mnist", CLIENTS, 1.0), "data.records_per_client": 1200, **SET_ASIDE}


def _set_words(row: str, column: str, scale: str) -> list[str]:
    return as_words({**_population(), **distillation("small", CLIENTS, **TUNED)})


SEARCH_SET = Experiment(
    name=_SET.experiment,
    title="The set that searches train on: Fashion-MNIST, 12,000 records of 10 clients, Dirichlet 1",
    shows="accuracy on the official test set, %; the mean of three fresh nets trained on it",
    rows={"distdd": Row("DistDD, image steps tuned on public records", "test_accuracy")},
    columns={"set": Column("accuracy")},
    cells={"distdd": Training(_set_words, study=DISTILLED)},
    scales=_SCALE,
    minutes={"small": 12},
)


def _words_of(scorer: str, candidate: Mapping[str, Any]) -> list[str]:
    """A federated run of the candidate; those that train on a set take the net, the rates and the records from it."""
    rounds = EARLY_ROUNDS if scorer == "early" else ROUNDS
    whole = {"rounds": rounds, "evaluation.every": rounds, "strategies": {"size_weighted": {}}}
    return as_words({**_population(), **whole, **candidate})


# ---- nets: use case B


class Net(NamedTuple):
    """A ConvNet of the searched space."""

    width: int
    depth: int
    norm: str
    pooling: str

    def __str__(self) -> str:
        return f"{self.width} wide, {self.depth} deep, norm {self.norm}, {self.pooling} pooling"


SPACE = tuple(
    itertools.starmap(Net, itertools.product((16, 32, 64), (2, 3), ("none", "instance", "group"), ("max", "avg")))
)
UNTUNED = Net(32, 3, "instance", "avg")
#: the net without a search, and twenty others, drawn once
NETS = {
    f"net{number:02}": net
    for number, net in enumerate([UNTUNED, *random.Random(0).sample([one for one in SPACE if one != UNTUNED], 20)])
}


def _nas_words(row: str, column: str, scale: str) -> list[str]:
    training = {"clients.batch_size": 32, "clients.learning_rate": 0.05}
    return _words_of(column, {"model": {"name": "convnet", **NETS[row]._asdict()}, **training})


def _nas(making: Making) -> Mapping[str, Any]:
    from experiments.papers.distillation import studies

    scorer = making.cell.column
    trained = scorer in ("federated", "early")
    return studies.candidate(making) if trained else studies.proxy_net(making, scorer, _SET)


class Judgement(NamedTuple):
    """How well one scorer's order of candidates is that of their federated test accuracy.

    Args:
        candidates: of how many.
        spearman, kendall: rank correlations over all of them.
        spearman_top5: over the five that are best in the federation.
        winner: test accuracy of the scorer's choice in the federation, %.
        regret: points from there to the best candidate.
        seconds: mean of a candidate's training.
    """

    candidates: int
    spearman: float
    kendall: float
    spearman_top5: float
    winner: float
    regret: float
    seconds: float


def judged(found: Found, rows: Sequence[str], scorer: str) -> Judgement | None:
    """One scorer's ranking by hold-out accuracy against federated test accuracies; None for fewer than three."""
    both = [row for row in rows if found.get((row, scorer)) and found.get((row, "federated"))]
    if len(both) < 3:
        return None
    from scipy.stats import kendalltau, spearmanr

    score = [_mean(found, row, scorer, "holdout_accuracy") for row in both]
    true = [_mean(found, row, "federated", "test_accuracy") for row in both]
    top = sorted(range(len(both)), key=true.__getitem__, reverse=True)[:5]
    chosen = true[max(range(len(both)), key=score.__getitem__)]
    return Judgement(
        len(both),
        float(spearmanr(score, true).statistic),
        float(kendalltau(score, true).statistic),
        float(spearmanr([score[one] for one in top], [true[one] for one in top]).statistic),
        chosen,
        max(true) - chosen,
        fmean(_mean(found, row, scorer, "trial_seconds") for row in both),
    )


def _mean(found: Found, row: str, column: str, value: str) -> float:
    """Over seeds."""
    return fmean(cell["values"][value] for cell in found[row, column])


def _summary(rows: Sequence[str]) -> Callable[[Found], str]:
    """A table of all scorers."""

    def summary(found: Found) -> str:
        lines = []
        for scorer, title in SCORERS.items():
            if (own := judged(found, rows, scorer)) is not None:
                ranks = (f"{one:.2f}" for one in (own.spearman, own.kendall, own.spearman_top5))
                gains = (f"{own.winner:.2f}", f"{own.regret:.2f}", f"{own.seconds:.0f}")
                lines.append([title, str(own.candidates), *ranks, *gains])
        head = [
            "ranked by",
            "candidates",
            "Spearman",
            "Kendall",
            "Spearman, top 5",
            "its choice, %",
            "regret",
            "seconds each",
        ]
        return markdown(head, lines) if lines else ""

    return summary


def _draw(found: Found) -> list[Panel]:
    """Each scorer's accuracy on public records against the federated test accuracy, a point for each candidate."""
    panels = []
    for scorer, title in SCORERS.items():
        rows = [row for row, column in found if column == scorer and (row, "federated") in found]
        points = [
            (_mean(found, row, scorer, "holdout_accuracy"), _mean(found, row, "federated", "test_accuracy"))
            for row in rows
        ]
        if scorer != "federated" and points:
            x, y = "accuracy on public records, %", f"federated, {ROUNDS} rounds: test set, %"
            panels.append(Panel(title, x, y, {"candidates": points}, kind="points"))
    return panels


NAS = Experiment(
    name="distillation.nas",
    title="Search of a net: 21 ConvNets, Fashion-MNIST, 10 clients of 1,200 records on average, Dirichlet 1",
    shows=_SHOWS,
    rows={name: Row(str(net), "test_accuracy") for name, net in NETS.items()},
    columns=_COLUMNS,
    cells=dict.fromkeys(NETS, Training(_nas_words, study=_nas)),
    scales=_SCALE,
    minutes={"small": 1},
    draw=_draw,
    summary=_summary(list(NETS)),
    notes=(
        _CHOICE,
        "The first net is the one without a search; the others are drawn once from the 36 of width 16, 32 or 64, depth "
        "2 or 3, no, instance or group norm, max or average pooling. All train with batch 32 and learning rate 0.05.",
        "The set is made once, with the first net (distillation.search_set). Nets train 200 epochs on it.",
    ),
)


# ---- hyperparameters: use case A


class Rates(NamedTuple):
    """What clients train with."""

    learning_rate: float
    batch_size: int
    local_epochs: int

    def __str__(self) -> str:
        epochs = f"{self.local_epochs} epoch{'s' * (self.local_epochs > 1)}"
        return f"learning rate {self.learning_rate:g}, batch {self.batch_size}, {epochs}"


RATES = {
    f"rate{number:02}": Rates(*one)
    for number, one in enumerate(itertools.product((0.003, 0.01, 0.03, 0.1, 0.3), (16, 64), (1, 2)))
}


def _hpo_words(row: str, column: str, scale: str) -> list[str]:
    net = {"model": {"name": "convnet", **UNTUNED._asdict()}}
    return _words_of(column, {**net, **{f"clients.{name}": value for name, value in RATES[row]._asdict().items()}})


def _hpo(making: Making) -> Mapping[str, Any]:
    from experiments.papers.distillation import studies

    scorer = making.cell.column
    trained = scorer in ("federated", "early")
    return studies.candidate(making) if trained else studies.proxy_hyperparameters(making, scorer, _SET)


HPO = Experiment(
    name="distillation.hpo",
    title="Search of hyperparameters: 20 settings, Fashion-MNIST, 10 clients of 1,200 records on average, Dirichlet 1",
    shows=_SHOWS,
    rows={name: Row(str(rates), "test_accuracy") for name, rates in RATES.items()},
    columns=_COLUMNS,
    cells=dict.fromkeys(RATES, Training(_hpo_words, study=_hpo)),
    scales=_SCALE,
    minutes={"small": 1},
    draw=_draw,
    summary=_summary(list(RATES)),
    notes=(
        _CHOICE,
        "No paper's: the paper announces this use and has no numbers of it.",
        "On a set a net makes 60 passes for each local epoch, by plain SGD as clients do.",
    ),
)


# ---- Figures 4 and 5, from the cells of the search of a net


def _draw_figure4(found: Found) -> list[Panel]:
    """What the best of the first k candidates is worth, by whom it is chosen."""
    there = [row for row in NETS if all((row, scorer) in found for scorer in ("federated", "distilled"))]
    curves: dict[str, list[tuple]] = {}

    def best(scorer: str, k: int) -> str:
        return max(there[:k], key=lambda row: _mean(found, row, scorer, "holdout_accuracy"))

    for k in range(1, len(there) + 1):
        for name, row, scorer in (
            ("FedAvg without a search", there[0], "federated"),
            ("chosen and trained on the set", best("distilled", k), "distilled"),
            ("chosen on the set, then FedAvg", best("distilled", k), "federated"),
            ("chosen by FedAvg", best("federated", k), "federated"),
        ):
            curves.setdefault(name, []).append((k, _mean(found, row, scorer, "test_accuracy")))
    return [Panel("Fashion-MNIST", "candidates seen", "test accuracy, %", curves)]


def _draw_figure5(found: Found) -> list[Panel]:
    """Hours and gigabytes of n tunings: a distillation, n trainings on its set, a federated one; or n of the latter."""
    on_set = [cell["values"] for (_, scorer), cells in found.items() if scorer == "distilled" for cell in cells]
    runs = [cell["values"] for (_, scorer), cells in found.items() if scorer == "federated" for cell in cells]
    if not (on_set and runs):
        return []
    panels = []
    for title, unit, once, each_on_set, each in (
        ("Time", "hours", "set_run_seconds", "trial_seconds", "trial_seconds"),
        ("Traffic", "gigabytes", "set_gigabytes", None, "gigabytes"),
    ):
        scale = 3600 if unit == "hours" else 1
        run = fmean(own[each] for own in runs) / scale
        trial = fmean(own[each_on_set] for own in on_set) / scale if each_on_set else 0.0
        made = fmean(own[once] for own in on_set) / scale
        tunings = range(1, 21)
        curves = {
            "one set, then one federated training": [(n, made + n * trial + run) for n in tunings],
            "a federated training for each": [(n, n * run) for n in tunings],
        }
        panels.append(Panel(title, "tunings", unit, curves))
    return panels


def _from_nas(number: int, title: str, draw: Callable[[Found], list[Panel]], notes: tuple[str, ...]) -> Experiment:
    return Experiment(
        name=f"distillation.figure{number}",
        title=f"Figure {number}, {title}",
        shows=_SHOWS,
        rows={name: Row(row.title, row.value, experiment=NAS.name) for name, row in NAS.rows.items()},
        columns={name: _COLUMNS[name] for name in ("federated", "distilled")},
        cells={},
        scales=_SCALE,
        shown=False,
        draw=draw,
        notes=notes,
    )


FIGURE4 = _from_nas(
    4,
    "search of a net, the best of the first k candidates",
    _draw_figure4,
    ("From the cells of distillation.nas. The choice is made on public records, the curves are of the test set.",),
)
FIGURE5 = _from_nas(
    5,
    "what n tunings cost",
    _draw_figure5,
    (
        "From the cells of distillation.nas: means of what was measured on one machine, where clients and server share "
        "its cores; a network's time is not in it, its bytes are.",
    ),
)

SEARCHES = (SEARCH_SET, NAS, HPO, FIGURE4, FIGURE5)
