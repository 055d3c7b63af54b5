"""What the papers do not show: learning rates, parts of the method, batch sizes, and weights by noise in clusters."""

from __future__ import annotations

from experiments.papers.clustered.accuracy import ACCURACIES, group_recorder
from experiments.papers.clustered.settings import (
    LABEL_SHIFT,
    METHODS,
    RATES,
    TUNING_ROUNDS,
    learning_rate,
    words,
)
from experiments.papers.experiment import Column, Experiment, Row, Training

_MINUTES = {"small": 9.0}
_SMALL = {"small": "60 rounds, disjoint records"}
_ON_OWN = "accuracy on each client's own test records, %"
#: what most tables here show of a cell
_SHOWN = {**ACCURACIES, "worst": "accuracy_worst", "right cluster": "clustering_accuracy"}


def _rows(titles: dict[str, str], shown: dict[str, str]) -> dict[str, Row]:
    return {
        f"{cell}_{name.replace(' ', '_')}": Row(f"{title}: {name}", value, cell)
        for cell, title in titles.items()
        for name, value in shown.items()
    }


# ---- learning rates

_PUBLIC = {"data.use_public": "true", "data.partition.name": "overlapping", "rounds": str(TUNING_ROUNDS)}
_TUNING_ROWS = {f"{name}_{rate}": Row(f"{title}, {rate}") for name, (title, _) in METHODS.items() for rate in RATES}


def _tuning_words(row: str, column: str, scale: str) -> list[str]:
    name, _, rate = row.rpartition("_")
    return words("fashion_mnist", name, column, "small", {**_PUBLIC, "clients.learning_rate": rate})


TUNING = Experiment(
    name="clustered.tuning",
    title="Learning rates, Fashion-MNIST, turned images, on public records alone",
    shows="mean accuracy of the clients, %, who draw from 10,000 public records, scored on draws of 2,000 others",
    rows=_TUNING_ROWS,
    columns={column: Column(f"epsilon {column[3:]}") for column in ("eps5", "eps2")},
    cells=dict.fromkeys(_TUNING_ROWS, Training(_tuning_words, group_recorder)),
    scales={"small": f"{TUNING_ROUNDS} rounds"},
    minutes={"small": 4.5},
    notes=(
        "No private record takes part. All methods have the same grid, and each its best rate of it in the tables.",
    ),
)


# ---- parts of the method

_CLUSTERED: dict[str, tuple[str, str]] = {
    "ours": ("our default", "{clustered: {}}"),
    "known": ("4 groups given", "{clustered: {num_clusters: 4}}"),
    "no_reuse": ("first updates not used for training", "{clustered: {reuse_first_round: false}}"),
    "same_noise": ("the same noise in all rounds", "{clustered: {first_round_noise_multiplier: same}}"),
    "argmin": ("choices without noise", "{clustered: {selection: paper_argmin}}"),
    "every_round": (
        "a choice in every round, of range 0.015",
        "{clustered: {selection: exponential, selection_epsilon: 0.015}}",
    ),
    "no_choice": ("no choice: stays with its likeliest group", "{clustered: {selection: server_similarity}}"),
    "drawn_only": ("models drawn in all rounds", "{clustered: {switch_round: 60}}"),
    "papers_mixture": ("the papers' mixture", "{clustered: {mixture: paper, num_clusters: 4}}"),
    "ifca": ("f-CDPFL", METHODS["ifca"][1]),
    "ifca_argmin": ("f-CDPFL, choices without noise", "{ifca: {num_clusters: 4, selection: paper_argmin}}"),
    "local": ("every client alone", "{local: {}}"),
    "mr_mtl": ("MR-MTL, pull 1", "{mr_mtl: {pull: 1}}"),
    "oracle": ("true groups known", METHODS["oracle"][1]),
}
_LIKE = {"ifca": "ifca", "ifca_argmin": "ifca", "oracle": "oracle"}
_SHIFTS = {"rotation": "turned images", "label_shift": "renamed classes"}


def _ablation_words(row: str, column: str, scale: str) -> list[str]:
    shift = {"data.groups": LABEL_SHIFT} if column.startswith("label_shift") else {}
    changed = {"strategies": _CLUSTERED[row][1], **shift}
    return words("fashion_mnist", _LIKE.get(row, "ours"), column.rpartition("_")[2], scale, changed)


ABLATIONS = Experiment(
    name="clustered.ablations",
    title="Parts of the method, and other ways to serve groups, Fashion-MNIST",
    shows=_ON_OWN + "; clients in the right cluster in the last round, %; models sent to a client in the whole run",
    rows=_rows({name: title for name, (title, _) in _CLUSTERED.items()}, _SHOWN | {"models sent": "models_down"}),
    columns={
        f"{shift}_eps{epsilon}": Column(f"{title}, epsilon {epsilon}")
        for shift, title in _SHIFTS.items()
        for epsilon in (5, 2)
    },
    cells=dict.fromkeys(_CLUSTERED, Training(_ablation_words, group_recorder)),
    scales=_SMALL,
    minutes=_MINUTES,
    notes=(
        "What chooses without noise has an infinite epsilon and protects nobody: the epsilon of a column is then the "
        "budget that the noise of its training was solved for.",
        "Rows of one method differ in the named part only; all have the learning rate of that method in the tables.",
    ),
)


# ---- batch sizes of the later rounds

_BATCHES = ("16", "32", "64", "128")
_BATCHED = {name: METHODS[name][0] for name in ("dpfedavg", "ours", "oracle")}


def _batch_words(row: str, column: str, scale: str) -> list[str]:
    size = column.removeprefix("b")
    rate = learning_rate("fashion_mnist", row, "eps5", scale) * int(size) / 32
    changed = {"clients.batch_size": size, "clients.learning_rate": f"{rate:.4g}"}
    return words("fashion_mnist", row, "eps5", scale, changed)


BATCH_SIZES = Experiment(
    name="clustered.batch_sizes",
    title="Batch sizes of the rounds after the first one, Fashion-MNIST, turned images, epsilon 5",
    shows=_ON_OWN + "; clients in the right cluster in the last round, %",
    rows=_rows(_BATCHED, _SHOWN),
    columns={f"b{size}": Column(f"batch {size}") for size in _BATCHES},
    cells=dict.fromkeys(_BATCHED, Training(_batch_words, group_recorder)),
    scales=_SMALL,
    minutes=_MINUTES,
    notes=("One local epoch a round at any batch size; the learning rate grows with it, as steps become fewer.",),
)


# ---- noise-aware weights inside clusters

_BASES = {"size": ("weights by size", "size_weighted: {}"), "noise": ("noise-aware weights", "noise_aware: {}")}
_DIVIDED = {
    "one": ("one model", ""),
    "ours": ("clustered", ", clustered: {}"),
    "oracle": ("true groups known", ", oracle_clusters: {}"),
}
_COMPOSED = {
    f"{division}_{base}": (f"{division_title}, {base_title}", f"{{{base_words}{division_words}}}")
    for division, (division_title, division_words) in _DIVIDED.items()
    for base, (base_title, base_words) in _BASES.items()
}
_UNEQUAL = {
    "clients.count": "24",
    "clients.batch_size": "{name: choice, values: [16, 32, 64, 128]}",
    "data.records_per_client": "2000",
    "data.groups": "{name: rotation, count: 3}",
}


def _composed_words(row: str, column: str, scale: str) -> list[str]:
    budgets = f"{{name: {column}, source: sampled, scale: 5}}"
    changed = {**_UNEQUAL, "privacy.epsilon": budgets, "strategies": _COMPOSED[row][1]}
    return words("fashion_mnist", "ours", "eps5", scale, changed)


COMPOSED = Experiment(
    name="clustered.composed",
    title="Weights by noise inside clusters: 24 clients with unequal budgets and batch sizes in three groups of 8",
    shows=_ON_OWN + "; clients in the right cluster in the last round, %",
    rows={
        name: row
        for name, row in _rows(
            {name: title for name, (title, _) in _COMPOSED.items()},
            {"all": "accuracy", "worst": "accuracy_worst", "right cluster": "clustering_accuracy"},
        ).items()
        if not (name.startswith("one_") and row.value == "clustering_accuracy")  # one model is in no cluster
    },
    columns={dist: Column(f"{dist.capitalize()} times 5") for dist in ("dist1", "dist3", "dist5")},
    cells=dict.fromkeys(_COMPOSED, Training(_composed_words, group_recorder)),
    scales={"small": "60 rounds, disjoint records, 2,000 a client"},
    seeds={"small": (0, 1, 2)},
    minutes={"small": 8},
    notes=(
        "Budgets are those of the noise-aware paper times 5: a first round of all records at noise multiplier 5 costs "
        "0.7 by itself.",
        "No paper combines the two. All rows have the learning rate of our default in the tables.",
    ),
)

BEYOND = (TUNING, ABLATIONS, BATCH_SIZES, COMPOSED)
