"""Figures of the clustering papers that need more than one line per row."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.papers.experiment import Cells, Experiment, Panel
from experiments.papers.figures import mean_of, panel


def groups_and_fairness(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Figures 2 and 4: accuracy of each group and unfairness at epsilon 5, and clients in the right cluster."""
    sets = {row.partition("_")[2]: line.title.removeprefix(f"{line.series}, ") for row, line in experiment.rows.items()}
    panels = []
    for data, title in sets.items():
        rows = [row for row in experiment.rows if row.partition("_")[2] == data]
        groups = {f"C{k + 1}": f"accuracy_{k}" for k in range(4)}
        gaps = {"F_acc": "fairness_gap_accuracy", "best - worst": "accuracy_gap"}
        panels += [
            _bars(experiment, cells, rows, f"{title}: accuracy of each group", "group", "%", groups),
            _bars(experiment, cells, rows, f"{title}: unfairness", "", "points", gaps),
            _clustering_curves(experiment, cells, data, f"{title}: clients in the right cluster"),
        ]
    return panels


def _bars(
    experiment: Experiment, cells: Cells, rows: Sequence[str], title: str, x: str, y: str, values: Mapping[str, str]
) -> Panel:
    series = {}
    for row in rows:
        means = {name: mean_of(cells.get((row, "eps5"), ()), value) for name, value in values.items()}
        points: list[tuple] = [(name, mean) for name, mean in means.items() if mean is not None]
        series[experiment.rows[row].series or ""] = points
    return Panel(title, x, y, series, kind="bars")


def _clustering_curves(experiment: Experiment, cells: Cells, data: str, title: str) -> Panel:
    """Share of clients in the right cluster over rounds, mean and deviation over seeds."""
    several = len(experiment.columns) > 1
    series: dict[str, Sequence[tuple]] = {}
    for method in ("ifca", "ours") if several else ("ifca", "ours", "paper"):
        for column, setting in experiment.columns.items():
            drawn = panel(
                experiment, cells, title="", x="", y="", rows=[f"{method}_{data}"], columns=[column],
                curve="curves.clustering_accuracy",
            )  # fmt: skip
            budget = f", {setting.title}" if several else ""
            series |= {f"{name}{budget}": points for name, points in drawn.series.items()}
    return Panel(title, "round", "%", series)


def principal_points(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Figure 1: updates in two principal components, by true group."""
    axes = "first direction", "second direction"
    return [
        Panel(f"{experiment.columns[column].title}, {experiment.rows[row].title}", *axes, _by_group(runs[0]), "points")
        for (row, column), runs in cells.items()
    ]


def _by_group(cell: Mapping[str, Any]) -> dict[str, list[tuple]]:
    series: dict[str, list[tuple]] = {}
    for group, point in zip(cell["clients"]["true_group"], cell["points"], strict=True):
        series.setdefault(f"group {group}", []).append(tuple(point))
    return series


def variances_by_batches(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Figure 3 of the revision."""
    y = "log10 of noise variance, all parameters"
    return [
        Panel("An update of the first round", "batch of the first round", y, _lines(cells, "first_b", True), log="x"),
        Panel("An update of a later round", "batch of later rounds", y, _lines(cells, "later_b", False), log="x"),
    ]


def noise_by_batches(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Figure 8 of the revision."""
    y = "noise multiplier z"
    return [
        Panel("z by the batch of the first round", "batch of the first round", y, _lines(cells, "b", True), log="xy"),
        Panel("z by the batch of later rounds", "batch of later rounds", y, _lines(cells, "b", False), log="xy"),
    ]


def _lines(cells: Cells, prefix: str, over_first: bool) -> dict[str, list[tuple]]:
    """Values over the first batch with a line for each later one, or the other way round."""
    series: dict[str, list[tuple]] = {}
    for (row, column), runs in cells.items():
        if row.startswith(prefix):
            first, later = int(column[1:]), int(row.removeprefix(prefix))
            name, x = (f"later batch {later}", first) if over_first else (f"first batch {first}", later)
            series.setdefault(name, []).append((x, runs[0]["values"][row]))
    return series
