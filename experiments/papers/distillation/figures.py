"""The figures over mislabelling, skew, noise, clients, images, rounds and participation: Figures 2, 3 and 6 to 10.

`distillation.default` has what they share: 20 clients by Dirichlet 1, half of them a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from dpfl_lightning.privacy.accounting.accountant import epsilon_text
from dpfl_lightning.runtime.text import markdown
from experiments.papers.distillation.accuracy import FEDAVG_ROUNDS, TEST
from experiments.papers.distillation.settings import (
    DISTILLED,
    FEDERATED,
    LOCAL,
    ROUNDS,
    SCALES,
    as_words,
    distillation,
    fedavg,
    population,
)
from experiments.papers.experiment import Column, Experiment, Found, Panel, Row, Training

CLIENTS = 20
_DATA = "fashion_mnist"
_SHARED = "distillation.default"
_MINUTES = {"small": 16, "paper": 1500}

_TITLES = {
    "distdd": "DistDD, half of the clients",
    "full": "DistDD, all clients",
    "median": "DistDD with the median",
    "local": "local matching, mean of clients",
    "gm": "centralised matching",
    "fedavg": "FedAvg",
}
_MADE = {"local": LOCAL, "fedavg": FEDERATED}
_OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"participation_fraction": 1.0},
    "median": {"aggregation": "median"},
}

_ONE_DATA_SET = (
    "On Fashion-MNIST; the paper has MNIST and CIFAR-10 beside it: --data.name mnist or cifar10, where their files are."
)
_ONE_STEP = "One image step a release, as in the condensation paper; the paper tells no number of steps."
_LOCAL = "At scale small four clients' own sets stand for all of them: shares are drawn alike for everybody."


def made(row: str, scale: str, clients: int = CLIENTS, alpha: float = 1.0, **options: Any) -> dict[str, Any]:
    """The options of a row's run.

    Args:
        row: of `_TITLES`.
        options: of the strategy, beside the row's.
    """
    if row == "fedavg":
        return {**population(_DATA, clients, alpha), **fedavg(scale, clients, FEDAVG_ROUNDS)}
    own = population(_DATA, 1 if row == "gm" else clients, alpha)
    return {**own, **distillation(scale, 1 if row == "gm" else clients, **{**_OPTIONS.get(row, {}), **options})}


def _cells(rows: Sequence[str], words: Any) -> dict[str, Training]:
    return {row: Training(words, study=_MADE.get(row, DISTILLED)) for row in rows}


def _rows(*names: str, shared: Sequence[str] = ()) -> dict[str, Row]:
    """Rows of an experiment; `shared` ones show one cell of `distillation.default` in every column."""
    return {
        name: Row(
            _TITLES[name],
            "test_accuracy",
            experiment=_SHARED if name in shared else None,
            column="default" if name in shared else None,
        )
        for name in names
    }


def _as_shared(title: str) -> Column:
    """The setting that figures share."""
    return Column(title, "default", _SHARED)


def _panel(
    found: Found, title: str, x: str, places: Mapping[str, float], log: str = "", titles: Mapping[str, str] = _TITLES
) -> Panel:
    """Accuracy of each row over the columns' places; a band where there are several seeds."""
    series = {}
    for row, name in titles.items():
        points: list[tuple] = []
        for column, at in places.items():
            cells = [cell["values"]["test_accuracy"] for cell in found.get((row, column), ())]
            if cells:
                points.append((at, fmean(cells), pstdev(cells)) if len(cells) > 1 else (at, cells[0]))
        if points:
            series[name] = points
    return Panel(title, x, "test accuracy, %", series, log=log)


def _figure(number: int, title: str, experiment: dict[str, Any]) -> Experiment:
    notes = (*experiment.pop("notes", ()), _ONE_STEP, _ONE_DATA_SET)
    return Experiment(
        name=f"distillation.figure{number}",
        title=f"Figure {number}, {title}",
        shows=TEST,
        scales=SCALES,
        minutes=_MINUTES,
        notes=notes,
        **experiment,
    )


# ---- what they share, which is Figure 9, too


def _default_words(row: str, column: str, scale: str) -> list[str]:
    own = made(row, scale)
    if row in ("distdd", "full"):
        own["evaluation.every"] = ROUNDS[scale] // 10
    return as_words(own)


DEFAULT = Experiment(
    name=_SHARED,
    title="The setting that figures share: Fashion-MNIST, 20 clients, Dirichlet 1, half of them a round",
    shows=TEST,
    rows=_rows(*_TITLES),
    columns={"default": Column("accuracy")},
    cells=_cells(list(_TITLES), _default_words),
    scales=SCALES,
    minutes=_MINUTES,
    notes=(_ONE_STEP, _LOCAL),
)


def _draw_figure9(found: Found) -> list[Panel]:
    series = {}
    for (row, _), cells in found.items():
        curves = [cell["curve"] for cell in cells]
        rounds = [at for at in curves[0] if all(at in curve for curve in curves)]
        series[_TITLES[row]] = [
            (int(at), fmean(own), pstdev(own)) for at in rounds for own in [[curve[at] for curve in curves]]
        ]
    return [Panel("Fashion-MNIST", "round", "test accuracy of one net, %", series)]


FIGURE9 = _figure(
    9,
    "accuracy over rounds, all clients against half of them",
    {
        "rows": _rows("full", "distdd"),
        "columns": {"default": _as_shared("last round")},
        "cells": {},
        "draw": _draw_figure9,
    },
)


# ---- Figure 2: wrong labels

_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
_WRONG = {f"{unit}_{share:g}": (unit, share) for unit in ("records", "clients") for share in _SHARES}


def _figure2_words(row: str, column: str, scale: str) -> list[str]:
    unit, share = _WRONG[column]
    return as_words({**made(row, scale), "data.mislabelled": {"name": unit, "share": share}})


def _draw_figure2(found: Found) -> list[Panel]:
    return [
        _panel(
            found,
            f"Wrong labels by {unit}",
            f"share of {unit}",
            {"none": 0.0, **{name: share for name, (own, share) in _WRONG.items() if own == unit}},
        )
        for unit in ("records", "clients")
    ]


_ROWS2 = ("fedavg", "local", "distdd", "median")
FIGURE2 = _figure(
    2,
    "wrong labels",
    {
        "rows": _rows(*_ROWS2),
        "columns": {
            "none": _as_shared("none"),
            **{name: Column(f"{unit} {share:g}") for name, (unit, share) in _WRONG.items()},
        },
        "cells": _cells(_ROWS2, _figure2_words),
        "draw": _draw_figure2,
        "notes": (
            "Class y is called (y + 1) mod 10 by everybody. The paper speaks of portions of records and of clients: a "
            "median can help against clients only, and below one half. Where all labels are wrong, nobody is right.",
            "The median is of clients' class means, which only runs without privacy may send.",
            _LOCAL,
        ),
    },
)


# ---- Figure 3: skew

_DIRS = {f"dir{alpha:g}": alpha for alpha in (0.1, 0.3, 0.5, 0.7)}


def _figure3_words(row: str, column: str, scale: str) -> list[str]:
    return as_words(made(row, scale, alpha=_DIRS[column]))


_ROWS3 = ("gm", "distdd", "local", "fedavg")
FIGURE3 = _figure(
    3,
    "skew of the classes",
    {
        "rows": _rows(*_ROWS3, shared=("gm",)),
        "columns": {
            **{name: Column(f"Dirichlet {alpha:g}") for name, alpha in _DIRS.items()},
            "dir1": _as_shared("Dirichlet 1"),
        },
        "cells": _cells(("distdd", "local", "fedavg"), _figure3_words),
        "draw": lambda found: [_panel(found, "Fashion-MNIST", "Dirichlet", {**_DIRS, "dir1": 1.0})],
        "notes": (_LOCAL,),
    },
)


# ---- Figure 6: noise

_SIGMAS = {f"sigma{sigma:g}": sigma for sigma in (0.01, 0.1, 1.0, 10.0, 100.0)}
_NOISY = {"sum": "DistDD, noise on the sum, eq. 10", "paper_mean": "DistDD, noise on the mean, as in the appendix"}
_TITLES6 = {"distdd": "DistDD without noise", **_NOISY}


_CLIP_NORM, _DELTA = 1.0, 1e-5


def _figure6_words(row: str, column: str, scale: str) -> list[str]:
    """Poisson draws of as many records a class as the scale says; all of a client's at the paper's size."""
    own = made("distdd", scale, noise_scale=row, sampling="poisson" if scale == "small" else "full")
    batch = {"clients.batch_size": 640} if scale == "small" else {}
    noise = {"privacy.noise_multiplier": _SIGMAS[column], "privacy.delta": _DELTA, "privacy.clip_norm": _CLIP_NORM}
    return as_words({**{name: value for name, value in own.items() if name != "privacy"}, **batch, **noise})


def _draw_figure6(found: Found) -> list[Panel]:
    by_sigma = _panel(found, "By the noise multiplier that is told", "sigma", _SIGMAS, "x", _TITLES6)
    by_epsilon: dict[str, list[tuple]] = {}
    for row, title in _NOISY.items():
        for column in _SIGMAS:
            for cell in found.get((row, column), ()):
                if cell.get("epsilon_max"):
                    by_epsilon.setdefault(title, []).append((cell["epsilon_max"], cell["values"]["test_accuracy"]))
    return [
        by_sigma,
        Panel("By the epsilon of the whole run", "epsilon", "test accuracy, %", by_epsilon, kind="points", log="x"),
    ]


def _summarise_figure6(found: Found) -> str:
    """The paper's epsilon of each sigma beside the whole run's, which is the largest of its clients and seeds."""
    from dpfl_lightning.strategies.distillation.costs import paper_epsilon

    lines = []
    for column, sigma in _SIGMAS.items():
        spent = [[cell["epsilon_max"] for cell in found.get((row, column), ())] for row in _NOISY]
        if any(spent):
            of_paper = epsilon_text(paper_epsilon(sigma, _DELTA, _CLIP_NORM))
            lines.append([f"{sigma:g}", of_paper, *(epsilon_text(max(own)) if own else "-" for own in spent)])
    head = ["sigma", "eq. 41, to compare with", *(f"whole run, noise on the {name}" for name in ("sum", "mean"))]
    return markdown(head, lines) if lines else ""


FIGURE6 = _figure(
    6,
    "noise, with the epsilon of the whole run",
    {
        "rows": {
            **_rows("distdd", shared=("distdd",)),
            **{name: Row(title, "test_accuracy") for name, title in _NOISY.items()},
        },
        "columns": {name: Column(f"sigma {sigma:g}") for name, sigma in _SIGMAS.items()},
        "cells": dict.fromkeys(_NOISY, Training(_figure6_words, study=DISTILLED)),
        "draw": _draw_figure6,
        "summary": _summarise_figure6,
        "notes": (
            "The paper has noise on the sum in its eq. 10 and on the mean in its appendix, which is as many times more "
            "as a batch has records of a class; the ledger holds either as what it is on the sum. Its eq. 41 counts "
            "one release of the whole run, and takes the noise multiplier for a standard deviation.",
            "At scale small clients draw 640 records on average in a round, at scale paper they take all.",
        ),
    },
)


# ---- Figures 7, 8 and 10

_COUNTS = {f"n{count}": count for count in (10, 20, 50, 100)}


def _figure7_words(row: str, column: str, scale: str) -> list[str]:
    return as_words(made(row, scale, clients=_COUNTS[column]))


_ROWS7 = ("local", "full", "distdd")
FIGURE7 = _figure(
    7,
    "number of clients, who share the same records",
    {
        "rows": _rows(*_ROWS7),
        "columns": {name: _as_shared("20") if count == 20 else Column(str(count)) for name, count in _COUNTS.items()},
        "cells": _cells(_ROWS7, _figure7_words),
        "draw": lambda found: [_panel(found, "Fashion-MNIST", "clients", _COUNTS, log="x")],
        "notes": (_LOCAL,),
    },
)

_IMAGES = {f"ipc{images}": images for images in (1, 10, 20, 30, 40, 50)}


def _figure8_words(row: str, column: str, scale: str) -> list[str]:
    return as_words(made(row, scale, images_per_class=_IMAGES[column]))


_ROWS8 = ("local", "gm", "distdd")
FIGURE8 = _figure(
    8,
    "images a class",
    {
        "rows": _rows(*_ROWS8),
        "columns": {name: Column(str(images)) for name, images in _IMAGES.items()},
        "cells": _cells(_ROWS8, _figure8_words),
        "draw": lambda found: [_panel(found, "Fashion-MNIST", "images a class", _IMAGES)],
        "notes": (
            "The paper calls local matching a weak rival in some figures and the ceiling in this one: both kinds are "
            "here, one set a client, and one of everybody's records.",
            _LOCAL,
        ),
    },
)

_FRACTIONS = {f"share{10 * tenth}": tenth / 10 for tenth in range(1, 11)}


def _figure10_words(row: str, column: str, scale: str) -> list[str]:
    return as_words(made(row, scale, participation_fraction=_FRACTIONS[column], min_participants=1))


FIGURE10 = _figure(
    10,
    "share of the clients that take part in a round",
    {
        "rows": {**_rows("distdd", "local", "gm", shared=("local", "gm")), "distdd": Row("DistDD", "test_accuracy")},
        "columns": {
            name: _as_shared("50 %") if share == 0.5 else Column(f"{share:.0%}".replace("%", " %"))
            for name, share in _FRACTIONS.items()
        },
        "cells": _cells(("distdd",), _figure10_words),
        "draw": lambda found: [_panel(found, "Fashion-MNIST", "share of clients", _FRACTIONS)],
        "notes": (_LOCAL,),
    },
)

FIGURES = (DEFAULT, FIGURE2, FIGURE3, FIGURE6, FIGURE7, FIGURE8, FIGURE9, FIGURE10)
