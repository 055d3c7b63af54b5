"""What one round of training shows: groups found by it, how noise hides them, and updates in two dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.papers.clustered.settings import LABEL_SHIFT, METHODS, words
from experiments.papers.experiment import Column, Experiment, Found, Panel, Row, Training

if TYPE_CHECKING:
    from experiments.papers.recorder import Recorder

#: row of cells -> strategies
_FOUND = {
    "ours": ("ours", METHODS["ours"][1]),
    "paper": ("the papers', 4 groups given", METHODS["paper"][1]),
    "paper_auto": ("the papers', number not told", METHODS["paper"][1].replace("num_clusters: 4, ", "")),
}
_SHOWN = {
    "clusters_perfect": "share of seeds with the true groups",
    "adjusted_rand_index": "adjusted Rand index",
    "num_clusters": "number of groups",
    "separation": "least separation",
    "confident": "share of seeds that are confident",
}


def first_round(row: str, column: str) -> Recorder:
    """Of a run that ends after one round."""
    from experiments.papers.clustered.recorder import FirstRound

    return FirstRound()


#: column -> what it is called, its budget, and what differs from Fashion-MNIST's turned images
_POPULATIONS: dict[str, tuple[str, str, dict[str, str]]] = {
    "rotation": ("turned images", "eps5", {}),
    "rotation_eps2": ("turned images, epsilon 2", "eps2", {}),
    "rotation_700": ("turned images, 700 records a client", "eps5", {"data.records_per_client": "700"}),
    "label_shift": ("renamed classes", "eps5", {"data.groups": LABEL_SHIFT}),
    "none": ("no groups", "eps5", {"data.groups": "null"}),
}


def _found_words(row: str, column: str, scale: str) -> list[str]:
    _, budget, changed = _POPULATIONS[column]
    return words("fashion_mnist", "ours", budget, scale, {"strategies": _FOUND[row][1], **changed})


FOUND = Experiment(
    name="clustered.found",
    title="Groups of clients found from one round alone, Fashion-MNIST, 21 clients in groups of 3, 6, 6 and 6",
    shows="mean over ten seeds",
    rows={
        f"{name}_{value}": Row(f"{title}: {text}", value, name)
        for name, (title, _) in _FOUND.items()
        for value, text in _SHOWN.items()
    },
    columns={name: Column(title) for name, (title, _, _) in _POPULATIONS.items()},
    cells=dict.fromkeys(_FOUND, Training(_found_words, first_round)),
    scales={"small": "one round of training, with the noise of 60, 2,285 records a client"},
    seeds={"small": tuple(range(10))},
    minutes={"small": 0.3},
    notes=(
        "Ours has noise multiplier 5 in its first round, the papers' that of all rounds. Separations are not the same "
        "quantity: ours is in units of the known noise of a parameter, theirs of the spread in two dimensions.",
        "Where there are no groups the right number is one, which the papers' rule cannot say.",
    ),
)


# ---- how much noise the first round stands

_NOISES = (1, 2, 3, 5, 10, 20)
_SIZES = ("2285", "700")


def _separation_words(row: str, column: str, scale: str) -> list[str]:
    noise, records = column.removeprefix("z"), row.removeprefix("n")
    strategies = f"{{clustered: {{first_round_noise_multiplier: {noise}}}}}"
    changed = {"strategies": strategies, "data.records_per_client": records}
    return words("fashion_mnist", "ours", "eps10", scale, changed)


def _draw_separation(found: Found) -> list[Panel]:
    def lines(value: str) -> dict[str, list[tuple]]:
        series: dict[str, list[tuple]] = {}
        for size in _SIZES:
            row = f"n{size}_{value}"
            for noise in _NOISES:
                if cells := found.get((row, f"z{noise}")):
                    mean = sum(cell["values"][value] for cell in cells) / len(cells)
                    series.setdefault(f"{size} records", []).append((noise, mean))
        return series

    x = "noise multiplier of the first round"
    return [
        Panel("Groups found", x, "adjusted Rand index", lines("adjusted_rand_index"), log="x"),
        Panel("Least separation", x, "separation, in units of noise", lines("separation"), log="xy"),
    ]


SEPARATION = Experiment(
    name="clustered.separation",
    title="Groups of clients against the noise of the first round, Fashion-MNIST, turned images",
    shows="mean over three seeds",
    rows={
        f"n{size}_{value}": Row(f"{size} records a client: {text}", value, f"n{size}")
        for size in _SIZES
        for value, text in _SHOWN.items()
    },
    columns={f"z{noise}": Column(f"noise multiplier {noise}") for noise in _NOISES},
    cells={f"n{size}": Training(_separation_words, first_round) for size in _SIZES},
    scales={"small": "one round of training"},
    seeds={"small": (0, 1, 2)},
    minutes={"small": 0.3},
    draw=_draw_separation,
    notes=("By formula the separation is g N / 2z, with g the distance of two groups' mean clipped gradients.",),
)


# ---- Figure 1: updates of round 1 in two dimensions

_SETS = {"fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
_PANELS = {
    "batch32_eps10": ("batch 32, epsilon 10", "dpfedavg", "eps10"),
    "full_eps10": ("all records, epsilon 10", "paper", "eps10"),
    "full_eps4": ("all records, epsilon 4", "paper", "eps4"),
}


def _figure1_words(row: str, column: str, scale: str) -> list[str]:
    _, method, budget = _PANELS[row]
    return words(column, method, budget, scale)


def _draw_figure1(found: Found) -> list[Panel]:
    axes = "first direction", "second direction"
    return [
        Panel(f"{_SETS[column]}, {_PANELS[row][0]}", *axes, _by_group(cells[0]), "points")
        for (row, column), cells in found.items()
    ]


def _by_group(cell: Mapping[str, Any]) -> dict[str, list[tuple]]:
    series: dict[str, list[tuple]] = {}
    for group, point in zip(cell["clients"]["true_group"], cell["points"], strict=True):
        series.setdefault(f"group {group}", []).append(tuple(point))
    return series


FIGURE1 = Experiment(
    name="clustered.figure1",
    title="Figure 1 (Figure 2 of the revised paper), updates of round 1 in two principal components",
    shows="silhouette of the true groups in two dimensions: 1 far apart, 0 not at all",
    rows={name: Row(title, "silhouette", name) for name, (title, _, _) in _PANELS.items()},
    columns={name: Column(title) for name, title in _SETS.items()},
    cells=dict.fromkeys(_PANELS, Training(_figure1_words, first_round)),
    scales={"small": "one round, with the noise of 60, disjoint records", "paper": "one round, with the noise of 200"},
    minutes={"small": 5, "paper": 15},
    draw=_draw_figure1,
    notes=(
        "In the paper's figure groups blur at batch 32 and are four tight ones with all records, looser at epsilon 4.",
    ),
)

MEASURED = (FOUND, SEPARATION, FIGURE1)
