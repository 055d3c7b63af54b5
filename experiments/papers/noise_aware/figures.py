"""Figures of the noise-aware paper that need more than one line per row."""

from collections.abc import Mapping

from experiments.papers.experiment import Cells, Experiment, Panel
from experiments.papers.noise_aware.formulas import falsified_noise


def noise_by_batch_size(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Figure 2: a line for each batch size over epsilon, and the clients of Dist8."""
    of_size = {column: cells["eps1", column][0]["values"] for row, column in cells if row == "eps1"}
    surface = {
        f"batch {column[1:]}": [(float(row[3:]), values[row]) for row in experiment.rows]
        for column, values in of_size.items()
    }
    clients = sorted(variance for values in of_size.values() for _, variance in values["clients"])
    bars = {"clients": [(str(place), variance) for place, variance in enumerate(clients, start=1)]}
    return [
        Panel("Noise variance of an update", "epsilon", "variance, all parameters", surface, log="y"),
        Panel("20 clients of Dist8, sorted", "client", "variance, all parameters", bars, kind="bars"),
    ]


def claims_by_formula(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Figure 5, right: the noise of WeiAvg's sum when one client claims more than its budget."""
    claims = [float(name.removeprefix("claim")) for name in experiment.columns if name.startswith("claim")]
    points = [(claim, noise) for claim, (noise, _) in zip(claims, falsified_noise(claims), strict=True)]
    title = "WeiAvg under that claim, by formula"
    return [Panel(title, "claimed epsilon", "noise of the sum", {"WeiAvg": points}, log="x")]


def figure6(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Weights by robust PCA of 200,000 parameters."""
    return [_weights(_first_round(cells), {"oracle": "oracle", "rpca_200000": "Robust-HDP"})]


def figure7(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Weights by robust PCA of more and more parameters."""
    counts = [int(row.removeprefix("rows")) for row in experiment.rows]
    names = {"oracle": "oracle", **{f"rpca_{count}": f"{count:,} parameters" for count in counts}}
    return [_weights(_first_round(cells, f"rows{counts[0]}"), names)]


def figure9(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Singular values of the updates and of their low-rank part."""
    panels = []
    for (_, column), runs in cells.items():
        spectra = zip(("updates", "their low-rank part"), runs[0]["first_round"]["singular_values"], strict=True)
        series = {name: list(enumerate(values, start=1)) for name, values in spectra}
        panels.append(Panel(column.capitalize(), "number", "singular value", series))
    return panels


def figure10(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Weights, and true and estimated variances."""
    lists = _first_round(cells)
    names = {"truth": "true", "rpca_variance": "estimated"}
    variances = {title: _by_budget(lists, name) for name, title in names.items() if name in lists}
    title = "Noise variance of updates, per parameter"
    return [
        _weights(lists, {"oracle": "oracle", "rpca": "Robust-HDP"}),
        Panel(title, "client, sorted by epsilon", "variance / lr^2", variances, log="y"),
    ]


def weights_of_60(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Figures 12 and 13: weights by formula and of one round."""
    series = {}
    for runs in cells.values():
        values = runs[0]["values"]
        if "oracle_weights" in values:
            series["oracle"] = list(enumerate(values["oracle_weights"], start=1))
            series["WeiAvg"] = list(enumerate(values["weiavg_weights"], start=1))
        else:
            series["Robust-HDP"] = _by_budget(runs[0]["first_round"], "rpca_weights")
    return [Panel("Weights of 60 clients, Dist1", "client, sorted by epsilon", "weight", series)]


def _first_round(cells: Cells, row: str = "excess") -> Mapping[str, list]:
    """The lists of one number per client, empty if the cell is missing."""
    return next((runs[0]["first_round"] for (name, _), runs in cells.items() if name == row), {})


def _by_budget(lists: Mapping[str, list], name: str) -> list[tuple]:
    """A client's number over its place when sorted by budget."""
    order = sorted(range(len(lists["epsilon"])), key=lambda client: lists["epsilon"][client])
    return [(place, lists[name][client]) for place, client in enumerate(order, start=1)]


def _weights(lists: Mapping[str, list], names: Mapping[str, str]) -> Panel:
    series = {
        title: _by_budget(lists, f"{name}_weights") for name, title in names.items() if f"{name}_weights" in lists
    }
    if lists:
        total = sum(lists["epsilon"])
        claimed = {**lists, "weiavg_weights": [epsilon / total for epsilon in lists["epsilon"]]}
        series["WeiAvg"] = _by_budget(claimed, "weiavg_weights")
    return Panel("Weights", "client, sorted by epsilon", "weight", series)
