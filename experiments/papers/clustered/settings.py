"""The papers' methods and data as arguments of `fit`, and the learning rate of each method."""

from __future__ import annotations

import math
from collections.abc import Mapping

from experiments.papers.experiment import Column, as_words

COLUMNS = {f"eps{epsilon}": Column(f"epsilon {epsilon}") for epsilon in (10, 5, 4, 3, 2)}

#: row -> what the tables call it, and the strategies
METHODS = {
    "dpfedavg": ("DPFedAvg", "{size_weighted: {}}"),
    "ifca": ("f-CDPFL", "{ifca: {num_clusters: 4}}"),
    "kmeans": ("KM-CDPFL", "{kmeans_clusters: {num_clusters: 4}}"),
    "ours": ("clustered, our default", "{clustered: {}}"),
    "paper": (
        "RC-DPFL",
        "{clustered: {num_clusters: 4, mixture: paper, first_round_noise_multiplier: same, selection: paper_argmin, "
        "reuse_first_round: false}}",
    ),
    "oracle": ("Oracle-CDPFL", "{oracle_clusters: {}}"),
}

SCALES = {
    "small": "60 rounds with noise calibrated for them, and disjoint records; in the paper 200, and overlapping ones",
    "paper": "200 rounds, and clients' records overlap, as in the paper",
}
ROUNDS = {"small": 60, "paper": 200}
THREE_SEEDS = {"paper": (0, 1, 2)}

_FOUR_GROUPS = "sizes: [3, 6, 6, 6]}"
ROTATION, LABEL_SHIFT = f"{{name: rotation, {_FOUR_GROUPS}", f"{{name: label_shift, {_FOUR_GROUPS}"
_IMAGES = {"privacy.clip_norm": "1"}
_CIFAR10 = {"data.name": "cifar10", "model.name": "resnet18", "privacy.clip_norm": "3"}
#: data and net, with the clip norm of each
DATA: dict[str, dict[str, str]] = {
    "mnist": {"data.name": "mnist", **_IMAGES, "data.groups": ROTATION},
    "fashion_mnist": {**_IMAGES, "data.groups": ROTATION},
    "cifar10": {**_CIFAR10, "data.groups": ROTATION},
    "cifar10_concept": {**_CIFAR10, "data.groups": LABEL_SHIFT},
}
CLIENTS = {"clients.count": "21", "clients.batch_size": "32", "data.test_per_client": "1666"}
_OVERLAPPING = {"data.partition.name": "overlapping"}

_RECORDS = {False: {"small": 2285, "paper": 8000}, True: {"small": 1904, "paper": 6600}}  # CIFAR-10 or not

#: the grid of `clustered.tuning` that all methods share, for images of one channel and so many rounds
RATES, TUNING_ROUNDS = ("0.05", "0.1", "0.2", "0.4"), 30
#: method -> column of `clustered.tuning` -> the learning rate that did best there
CHOSEN: dict[str, dict[str, float]] = {}
#: columns that take the rate of a neighbour
_NEAREST = {"eps10": "eps5", "eps4": "eps5", "eps3": "eps2"}
_UNTIL_CHOSEN, _OF_CIFAR10 = 0.2, 5e-4  # 0.2: of one model for all, noise_aware.tuning


def learning_rate(data: str, row: str, column: str, scale: str) -> float:
    """Of CIFAR-10 the revised paper's, else what public records chose for the method; for the run's number of steps.

    The noise of T steps has a multiplier ~ sqrt(T): with a learning rate ~ 1 / T neither the path nor the noise of the
    whole run depends on T.
    """
    if data.startswith("cifar10"):
        return _OF_CIFAR10 * _steps(data, "paper") / _steps(data, scale)
    chosen = CHOSEN.get(row, {}).get(_NEAREST.get(column, column), _UNTIL_CHOSEN)
    return chosen * TUNING_ROUNDS / ROUNDS["small"] * _steps(data, "small") / _steps(data, scale)


def _steps(data: str, scale: str) -> int:
    """Local steps of a whole run, at batch 32."""
    return ROUNDS[scale] * math.ceil(_records(data, scale) / 32)


def _records(data: str, scale: str) -> int:
    """Training records of a client."""
    return _RECORDS[data.startswith("cifar10")][scale]


def population(data: str, scale: str) -> dict[str, str]:
    """Options of the clients and their records, net and clip norm."""
    public = "10000" if data.startswith("cifar10") else "12000"
    dealt = _OVERLAPPING if scale == "paper" else {"data.public_records": public}
    return {**DATA[data], **CLIENTS, "data.records_per_client": str(_records(data, scale)), **dealt}


def words(data: str, row: str, column: str, scale: str, changed: Mapping[str, str] | None = None) -> list[str]:
    """A run of the main body.

    Args:
        data: a key of `DATA`.
        row: of `METHODS`.
        column: epsN.
        scale: small or paper.
        changed: options that differ, key -> text.
    """
    options = {
        **population(data, scale),
        **rounds(scale),
        "privacy.epsilon": column.removeprefix("eps"),
        "strategies": METHODS[row][1],
        "clients.learning_rate": f"{learning_rate(data, row, column, scale):.4g}",
    }
    return as_words({**options, **(changed or {})})


def rounds(scale: str) -> dict[str, str]:
    """Of the whole run; accuracy is looked at every five."""
    return {"rounds": str(ROUNDS[scale]), "evaluation.every": "5"}
