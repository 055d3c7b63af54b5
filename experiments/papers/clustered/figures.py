"""Figures of the clustering papers that need more than one line per row."""

from collections.abc import Mapping

from experiments.papers.experiment import Cells, Experiment, Panel
from experiments.papers.figures import mean_of, panel


def groups_and_fairness(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Figure 2: accuracy of each group and unfairness at epsilon 5, and clients in the right cluster over rounds."""
    groups = {f"C{k + 1}": f"accuracy_{k}" for k in range(4)}
    gaps = {"F_acc": "fairness_gap_accuracy", "best - worst": "accuracy_gap"}
    title, of_cell = "Fashion-MNIST: clients in the right cluster", "curves.clustering_accuracy"
    rows = ["ifca", "ours", "paper"]
    return [
        _bars(experiment, cells, "Fashion-MNIST: accuracy of each group", "group", "%", groups),
        _bars(experiment, cells, "Fashion-MNIST: unfairness", "", "points", gaps),
        panel(experiment, cells, title=title, x="round", y="%", rows=rows, curve=of_cell),
    ]


def _bars(experiment: Experiment, cells: Cells, title: str, x: str, y: str, values: Mapping[str, str]) -> Panel:
    series = {}
    for row, line in experiment.rows.items():
        means = {name: mean_of(cells.get((row, "eps5"), ()), value) for name, value in values.items()}
        points: list[tuple] = [(name, mean) for name, mean in means.items() if mean is not None]
        series[line.title] = points
    return Panel(title, x, y, series, kind="bars")


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
