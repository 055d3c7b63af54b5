"""The figures drawn from the tables' runs: Figures 2, 3 and 4, and Figure 5 of the revised paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev

from experiments.papers.clustered.accuracy import ACCURACIES, FAIRNESS, beside_reference
from experiments.papers.clustered.settings import COLUMNS, METHODS, SCALES, THREE_SEEDS
from experiments.papers.experiment import Experiment, Found, Panel, Row

_NUMBERS = {"mnist": 3, "fashion_mnist": 5, "cifar10": 7, "cifar10_concept": 9}
_TABLES = {data: f"clustered.table{number}" for data, number in _NUMBERS.items()}
_TITLES = {
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar10_concept": "CIFAR-10, renamed classes",
}
_METHODS = {name: title for name, (title, _) in METHODS.items()}
ON_OWN_RECORDS = "accuracy on each client's own test records, %"


def _mean(cells: Sequence[Mapping], value: str) -> float | None:
    known = [cell["values"][value] for cell in cells if value in cell["values"]]
    return fmean(known) if known else None


def _rows(sets: Sequence[str], fair: bool = True) -> dict[str, Row]:
    """A row for each method and data set, of the tables' cells; `fair`: with their fairness."""
    return {
        f"{method}_{data}": Row(
            f"{title}, {_TITLES[data]}",
            cell=method,
            experiment=_TABLES[data],
            beside=beside_reference(data) if fair else None,
        )
        for data in sets
        for method, title in _METHODS.items()
    }


def _bars(found: Found, data: str, column: str, values: Mapping[str, str]) -> dict[str, list[tuple]]:
    """Values by their names, a series for each method."""
    series = {}
    for method, title in _METHODS.items():
        cells = found.get((f"{method}_{data}", column), ())
        points = [(name, mean) for name, value in values.items() if (mean := _mean(cells, value)) is not None]
        if points:
            series[title] = points
    return series


def _clustering_curves(found: Found, data: str, columns: Mapping[str, str], methods: Sequence[str]) -> Panel:
    """Share of clients in the right cluster over rounds, mean and deviation over seeds."""
    series = {}
    for method in methods:
        for column, words in columns.items():
            curves = [
                cell["curves"].get("clustering_accuracy", {}) for cell in found.get((f"{method}_{data}", column), ())
            ]
            rounds = [at for at in (curves[0] if curves else ()) if all(at in curve for curve in curves)]
            spread = [[curve[at] for curve in curves] for at in rounds]
            points = [(int(at), fmean(own), pstdev(own)) for at, own in zip(rounds, spread, strict=True)]
            if points:
                series[f"{_METHODS[method]}{words}"] = points
    return Panel(f"{_TITLES[data]}: clients in the right cluster", "round", "%", series)


def _row(found: Found, data: str, columns: Mapping[str, str], methods: Sequence[str]) -> list[Panel]:
    """Of a data set: accuracy of every group and how unequally clients fare at epsilon 5, and clustering."""
    groups = _bars(found, data, "eps5", {f"C{k + 1}": f"accuracy_{k}" for k in range(4)})
    gaps = _bars(found, data, "eps5", {"F_acc": "fairness_gap_accuracy", "best - worst": "accuracy_gap"})
    return [
        Panel(f"{_TITLES[data]}: accuracy of each group", "group", "%", groups, kind="bars"),
        Panel(f"{_TITLES[data]}: unfairness", "", "points", gaps, kind="bars"),
        _clustering_curves(found, data, columns, methods),
    ]


def _draw_figure2(found: Found) -> list[Panel]:
    methods = ("ifca", "ours", "paper")
    return [panel for data in ("mnist", "fashion_mnist") for panel in _row(found, data, {"eps5": ""}, methods)]


def _draw_figure4(found: Found) -> list[Panel]:
    budgets = {column: f", epsilon {column[3:]}" for column in ("eps10", "eps5", "eps2")}
    sets = ("cifar10", "cifar10_concept")
    return [panel for data in sets for panel in _row(found, data, budgets, ("ifca", "ours"))]


def _figure_at_epsilon5(
    name: str, title: str, sets: Sequence[str], columns: Sequence[str], draw: Callable[[Found], list[Panel]]
) -> Experiment:
    return Experiment(
        name=name,
        title=title,
        shows=ON_OWN_RECORDS,
        rows=_rows(sets),
        columns={column: COLUMNS[column] for column in columns},
        cells={},
        scales=SCALES,
        seeds=THREE_SEEDS,
        shown=False,
        draw=draw,
    )


FIGURE2 = _figure_at_epsilon5(
    "clustered.figure2",
    "Figure 2 (Figure 4 of the revised paper), MNIST and Fashion-MNIST, epsilon 5",
    ("mnist", "fashion_mnist"),
    ("eps5",),
    _draw_figure2,
)
FIGURE4 = _figure_at_epsilon5(
    "clustered.figure4",
    "Figure 4 (Figure 6 of the revised paper), CIFAR-10, turned images against renamed classes",
    ("cifar10", "cifar10_concept"),
    ("eps10", "eps5", "eps2"),
    _draw_figure4,
)


# ---- over budgets


def _over_budgets(found: Found, data: str, value: str, words: str = "") -> dict[str, list[tuple]]:
    series: dict[str, list[tuple]] = {}
    for method, title in _METHODS.items():
        for column in COLUMNS:
            mean = _mean(found.get((f"{method}_{data}", column), ()), value)
            if mean is not None:
                series.setdefault(f"{title}{words}", []).append((float(column[3:]), mean))
    return series


def _draw_figure3(found: Found) -> list[Panel]:
    return [
        Panel(f"{_TITLES[data]}: {name}", "epsilon", "accuracy, %", _over_budgets(found, data, ACCURACIES[name]))
        for data in ("mnist", "fashion_mnist", "cifar10")
        for name in ("majority", "minority")
    ]


FIGURE3 = Experiment(
    name="clustered.figure3",
    title="Figure 3, accuracy of majority and minority over budgets",
    shows=ON_OWN_RECORDS,
    rows=_rows(("mnist", "fashion_mnist", "cifar10"), fair=False),
    columns=COLUMNS,
    cells={},
    scales=SCALES,
    seeds=THREE_SEEDS,
    shown=False,
    draw=_draw_figure3,
)


def _draw_revised_figure5(found: Found) -> list[Panel]:
    units = {"f_acc": "points", "f_loss": "nats", "gap": "points"}
    return [
        Panel(FAIRNESS[key][0], "epsilon", unit, _over_budgets(found, "cifar10", FAIRNESS[key][1]))
        for key, unit in units.items()
    ]


REVISED_FIGURE5 = Experiment(
    name="clustered.revised_figure5",
    title="Figure 5 of the revised paper, three measures of unfairness over budgets, CIFAR-10",
    shows="F_acc and best - worst in points, F_loss on held-out records in nats",
    rows=_rows(("cifar10",)),
    columns=COLUMNS,
    cells={},
    scales=SCALES,
    seeds=THREE_SEEDS,
    shown=False,
    draw=_draw_revised_figure5,
)

TRAINED = (FIGURE2, FIGURE3, FIGURE4, REVISED_FIGURE5)
