"""The figures drawn from trained runs: curves, estimates of unlikeness, and sweeps over budgets and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from experiments.papers.experiment import Column, Experiment, Found, Panel, Row, Training
from experiments.papers.selection.accuracy import METHODS_TABLE, ON_TEST_SET, SOURCE, selection_recorder
from experiments.papers.selection.settings import (
    DATA,
    IMAGES,
    METHODS,
    SCALES,
    THREE_SEEDS,
    title_of,
    words,
)

_SHORT = {
    "fedsgd": "FedSGD",
    "uniform": "uniform",
    "weiavg": "WeiAvg",
    "inverse": "inverse noise",
    "pfa": "PFA",
    "privatefl": "PRIVATEFL",
    "ours": "biased (ours)",
    "least_noise": "Proposition 1",
    "two_stage": "two stages",
    "privatefl_ours": "PRIVATEFL-BCS",
}


# ---- Figure 2: accuracy over rounds


def _curves(cells: Sequence[Mapping]) -> list[tuple]:
    """Round, mean over seeds and half the height of the band."""
    curves = [cell["test_curve"] for cell in cells]
    rounds = [at for at in (curves[0] if curves else ()) if all(at in curve for curve in curves)]
    spread = [[curve[at] for curve in curves] for at in rounds]
    return [(int(at), fmean(own), pstdev(own)) for at, own in zip(rounds, spread, strict=True)]


def _draw_figure2(found: Found) -> list[Panel]:
    panels = []
    for panel in IMAGES:
        series = {_SHORT[name]: _curves(found.get((name, panel), ())) for name in METHODS}
        made = {name: points for name, points in series.items() if points}
        panels.append(Panel(title_of(panel), "round", ON_TEST_SET, made))
    return panels


FIGURE2 = Experiment(
    name="selection.figure2",
    title="Figure 2, accuracy over rounds, the runs of selection.methods",
    shows=ON_TEST_SET,
    rows={name: Row(title, "test_accuracy", experiment=SOURCE) for name, (title, _, _) in METHODS.items()},
    columns=METHODS_TABLE.columns,
    cells={},
    scales=SCALES,
    seeds=THREE_SEEDS,
    shown=False,
    draw=_draw_figure2,
    notes=("Bands are the standard deviation over seeds.",),
)


# ---- Figure 3 (6 to 14): whom two stages avoid


def _draw_figure3(found: Found) -> list[Panel]:
    panels = []
    for panel in IMAGES:
        clients: dict[str, list[float]] = next(
            (cell["clients"] for cell in found.get(("two_stage", panel), ()) if "clients" in cell), {}
        )
        for name, title in (("unlikeness", "estimated unlikeness (loss)"), ("quota", "participations")):
            series = {title: list(enumerate(clients[name]))} if name in clients else {}
            panels.append(Panel(f"{title_of(panel)}: {title}", "client", title, series, kind="points"))
    return panels


FIGURE3 = Experiment(
    name="selection.figure3",
    title="Figures 3 and 6 to 14, estimated unlikeness of each client after ten rounds, and how often it takes part",
    shows="one seed of the two stages of selection.methods",
    rows={"two_stage": Row(METHODS["two_stage"][0], "test_accuracy", experiment=SOURCE)},
    columns=METHODS_TABLE.columns,
    cells={},
    scales=SCALES,
    seeds=THREE_SEEDS,
    shown=False,
    draw=_draw_figure3,
    notes=(
        "Clients that did not report in ten rounds have the mean. Noise decides the estimates: the smallest of several "
        "noised differences falls with their number, so clients that report often look alike.",
    ),
)


# ---- Figures 4 and 5: sweeps

_SWEPT = ("uniform", "weiavg", "inverse", "pfa", "privatefl", "ours", "two_stage")
_EPSILONS = {"fashion_mnist": range(1, 7), "mnist": range(1, 7), "cifar10": range(2, 11, 2)}
_ALPHAS = (0.5, 1, 3, 8)


def _swept_columns(values: Mapping[str, Sequence[float]], usual: Mapping[str, float], name: str) -> dict[str, Column]:
    """The values of each panel's data; the usual value is a cell of selection.methods."""
    columns = {}
    for panel, (data, _) in IMAGES.items():
        for value in values[data]:
            there = {"cell": panel, "experiment": SOURCE} if value == usual[data] else {}
            columns[f"{panel}_{value:g}"] = Column(f"{title_of(panel)}, {name} {value:g}", **there)
    return columns


def _place(column: str) -> tuple[str, float]:
    panel, _, value = column.rpartition("_")
    return panel, float(value)


def _draw_swept(found: Found, label: str, log: str = "") -> list[Panel]:
    series: dict[str, dict[str, list[tuple]]] = {panel: {} for panel in IMAGES}
    for (row, column), cells in found.items():
        panel, value = _place(column)
        accuracies = [cell["values"]["test_accuracy"] for cell in cells]
        series[panel].setdefault(_SHORT[row], []).append((value, fmean(accuracies), pstdev(accuracies)))
    return [
        Panel(title_of(panel), label, ON_TEST_SET, {name: sorted(points) for name, points in own.items()}, log=log)
        for panel, own in series.items()
    ]


def _epsilon_words(row: str, column: str, scale: str) -> list[str]:
    panel, value = _place(column)
    return words(panel, row, scale, largest_epsilon=value)


def _alpha_words(row: str, column: str, scale: str) -> list[str]:
    panel, value = _place(column)
    return words(panel, row, scale, alpha=value)


def _draw_figure4(found: Found) -> list[Panel]:
    return _draw_swept(found, "largest epsilon")


def _draw_figure5(found: Found) -> list[Panel]:
    return _draw_swept(found, "alpha of the Dirichlet distribution", "x")


_ROWS = {name: Row(METHODS[name][0], "test_accuracy") for name in _SWEPT}
_MINUTES = {"small": 2.5, "paper": 20}

FIGURE4 = Experiment(
    name="selection.figure4",
    title="Figure 4, accuracy by the largest budget",
    shows=ON_TEST_SET + " after the last round",
    rows=_ROWS,
    columns=_swept_columns(_EPSILONS, {data: own.epsilons[1] for data, own in DATA.items()}, "epsilon up to"),
    cells=dict.fromkeys(_ROWS, Training(_epsilon_words, selection_recorder)),
    scales=SCALES,
    seeds=THREE_SEEDS,
    minutes=_MINUTES,
    draw=_draw_figure4,
    notes=(
        "The paper's values cannot be read off its figure: biased selection is best everywhere, and uniform selection "
        "and PRIVATEFL do not gain from larger budgets of some.",
    ),
)

FIGURE5 = Experiment(
    name="selection.figure5",
    title="Figure 5, accuracy by how unequally classes are dealt",
    shows=ON_TEST_SET + " after the last round",
    rows=_ROWS,
    columns=_swept_columns(dict.fromkeys(DATA, _ALPHAS), dict.fromkeys(DATA, 3.0), "alpha"),
    cells=dict.fromkeys(_ROWS, Training(_alpha_words, selection_recorder)),
    scales=SCALES,
    seeds=THREE_SEEDS,
    minutes=_MINUTES,
    draw=_draw_figure5,
    notes=("The paper's values cannot be read off its figure: all fall with alpha, biased selection least.",),
)

TRAINED = (FIGURE2, FIGURE3, FIGURE4, FIGURE5)
