"""The papers' methods and data as arguments of `fit`, and the learning rate of each method."""

from __future__ import annotations

from dpfl_lightning.reproduction.experiment import Column

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
    "small": "60 rounds with noise calibrated for them, clients hold disjoint records; in the paper 200 and overlapping",
    "paper": "200 rounds, clients' records overlap, as in the paper",
}
THREE_SEEDS = {"paper": (0, 1, 2)}

_FOUR_GROUPS = "sizes: [3, 6, 6, 6]}"
ROTATION, LABEL_SHIFT = f"{{name: rotation, {_FOUR_GROUPS}", f"{{name: label_shift, {_FOUR_GROUPS}"
_IMAGES = ["--privacy.clip_norm", "1"]
_CIFAR10 = ["--data.name", "cifar10", "--model.name", "resnet18", "--privacy.clip_norm", "3"]
#: data and net, with the clip norm of each
DATA: dict[str, list[str]] = {
    "mnist": ["--data.name", "mnist", *_IMAGES, "--data.groups", ROTATION],
    "fashion_mnist": [*_IMAGES, "--data.groups", ROTATION],
    "cifar10": [*_CIFAR10, "--data.groups", ROTATION],
    "cifar10_concept": [*_CIFAR10, "--data.groups", LABEL_SHIFT],
}
#: data -> scale -> training records of each of 21 clients
RECORDS = {
    "mnist": {"small": "2285", "paper": "8000"},
    "fashion_mnist": {"small": "2285", "paper": "8000"},
    "cifar10": {"small": "1904", "paper": "6600"},
    "cifar10_concept": {"small": "1904", "paper": "6600"},
}
CLIENTS = ["--clients.count", "21", "--clients.batch_size", "32", "--data.test_per_client", "1666"]

#: the grid that all methods share, for images of one channel
RATES = ("0.05", "0.1", "0.2", "0.4")
#: method -> column of `clustered.tuning` -> the learning rate that did best there
CHOSEN: dict[str, dict[str, str]] = {}
#: columns that take the rate of a neighbour
_NEAREST = {"eps4": "eps5", "eps3": "eps2"}
_UNTIL_CHOSEN, _OF_CIFAR10 = "0.1", "5e-4"


def learning_rate(data: str, row: str, column: str) -> str:
    """Of CIFAR-10 the revised paper's; else what public records chose for the method, 0.1 until they have."""
    if data.startswith("cifar10"):
        return _OF_CIFAR10
    return CHOSEN.get(row, {}).get(_NEAREST.get(column, column), _UNTIL_CHOSEN)


def population(data: str, scale: str) -> list[str]:
    """The clients and their records, net and clip norm."""
    pool = {"small": ["--data.public_records", "12000" if RECORDS[data]["small"] == "2285" else "10000"]}
    dealt = pool.get(scale, ["--data.partition.name", "overlapping"])
    return [*DATA[data], *CLIENTS, "--data.records_per_client", RECORDS[data][scale], *dealt]


def words(data: str, row: str, column: str, scale: str, strategies: str = "") -> list[str]:
    """A run of the main body.

    Args:
        data: a key of `DATA`.
        row: of `METHODS`, whose learning rate is taken, and whose strategies unless there are others.
        column: epsN.
        scale: small or paper.
        strategies: as an option.
    """
    return [
        *(*population(data, scale), *rounds(scale)),
        *("--privacy.epsilon", column.removeprefix("eps")),
        *("--strategies", strategies or METHODS[row][1]),
        *("--clients.learning_rate", learning_rate(data, row, column)),
    ]


def rounds(scale: str) -> list[str]:
    """Of the whole run; accuracy is looked at every five."""
    return ["--rounds", {"small": "60", "paper": "200"}[scale], "--evaluation.every", "5"]
