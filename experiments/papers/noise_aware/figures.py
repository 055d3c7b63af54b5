"""Figures of the noise-aware paper that need more than one line per row."""

from collections.abc import Mapping

from experiments.papers.experiment import Cells, Experiment, Panel


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


def _by_budget(lists: Mapping[str, list], name: str) -> list[tuple]:
    """A client's number over its place when sorted by budget."""
    order = sorted(range(len(lists["epsilon"])), key=lambda client: lists["epsilon"][client])
    return [(place, lists[name][client]) for place, client in enumerate(order, start=1)]
