"""The paper's data, budgets and rivals as arguments of `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from experiments.papers.experiment import as_words


class Setting(NamedTuple):
    """What a data set goes with: its net by scale, clip norm, ends of the budgets, and the learning rate's start and
    the rounds after which it is half."""

    title: str
    options: Mapping[str, str]
    nets: Mapping[str, str]
    clip_norm: str
    epsilons: tuple[float, float]
    learning_rate: float
    half_after: int


_IMAGES = {"clients.count": "100", "data.partition.min_records": "10"}
_TINY = {"small": "cnn_tiny", "paper": "cnn_tiny"}
DATA = {
    "fashion_mnist": Setting(
        "Fashion-MNIST", _IMAGES, {"small": "cnn_tiny", "paper": "lenet5"}, "25", (0.5, 4), 0.05, 200
    ),
    "mnist": Setting("MNIST", _IMAGES, _TINY, "20", (0.1, 3), 0.05, 200),
    "cifar10": Setting("CIFAR-10", _IMAGES, {"small": "resnet20", "paper": "resnet20"}, "5", (1, 6), 0.2, 100),
    "diabetes": Setting(
        "diabetes",
        {"clients.count": "20", "data.partition.min_records": "8"},
        {"small": "linear", "paper": "linear"},
        "10",
        (1, 30),
        0.02,
        200,
    ),
}
MECHANISMS = {
    "gaussian": {
        "privacy.delta": "{name: uniform, low: 1e-5, high: 1e-4}",
        "privacy.accountant": "gdp",
    },
    "laplace": {"privacy.mechanism": "laplace", "privacy.delta": "0"},
}

_EQUAL, _PERSONAL = "uniform_selection: {}", {"model.personal_input": "true"}
#: row -> what the tables call it, its strategies, and further options
METHODS: dict[str, tuple[str, str, dict[str, str]]] = {
    "fedsgd": ("FedSGD, no privacy", _EQUAL, {"privacy": "null"}),
    "uniform": ("uniform (DPSGD with Gaussian, DMLDP with Laplace noise)", _EQUAL, {}),
    "weiavg": ("WeiAvg", f"epsilon_weighted: {{}}, {_EQUAL}", {}),
    "inverse": ("uniform, weights by inverse noise", f"inverse_noise: {{}}, {_EQUAL}", {}),
    "pfa": ("PFA", "pfa: {grouping: top}, uniform_selection: {top_fraction: 0.1}", {}),
    "privatefl": ("PRIVATEFL", _EQUAL, _PERSONAL),
    "ours": ("biased selection, our default (anchored)", "biased_selection: {}", {}),
    "least_noise": ("Proposition 1, capped", "biased_selection: {dissimilarity: 0}", {}),
    "two_stage": (
        "DPFL-BCS, the paper's two stages made sound",
        "two_stage_selection: {ratio: null, estimates: least_difference}",
        {},
    ),
    "privatefl_ours": ("PRIVATEFL-BCS, our default", "biased_selection: {}", _PERSONAL),
}

ROUNDS = {"small": 100, "paper": 200}
SCALES = {
    "small": "100 rounds with noise calibrated for them, and twice the learning rate, so that signal and noise of the "
    "whole run are nearly those of 200; Fashion-MNIST with the CNN of 4,266 parameters",
    "paper": "200 rounds; Fashion-MNIST with LeNet-5 of 61,706 parameters",
}
THREE_SEEDS = {"paper": (0, 1, 2)}
#: (data, mechanism) by the name of a column
PANELS = {f"{data}_{mechanism}": (data, mechanism) for data in DATA for mechanism in MECHANISMS}
IMAGES = {name: own for name, own in PANELS.items() if own[0] != "diabetes"}


def title_of(panel: str) -> str:
    """Of a key of `PANELS`.

    >>> title_of("mnist_laplace")
    'MNIST, Laplace'
    """
    data, mechanism = PANELS[panel]
    return f"{DATA[data].title}, {mechanism.capitalize()}"


def words(panel: str, row: str, scale: str, largest_epsilon: float | None = None, alpha: float = 3) -> list[str]:
    """One run.

    Args:
        panel: of `PANELS`.
        row: of `METHODS`.
        scale: small or paper.
        largest_epsilon: of the budgets; None is the data set's.
        alpha: of the Dirichlet distribution.
    """
    data, mechanism = PANELS[panel]
    own, (_, strategies, changed) = DATA[data], METHODS[row]
    low, high = own.epsilons[0], largest_epsilon or own.epsilons[1]
    faster = ROUNDS["paper"] / ROUNDS[scale]
    decay = f"learning_rate_decay: {{half_after: {own.half_after / faster:g}}}"
    options = {
        "rounds": str(ROUNDS[scale]),
        "data.name": data,
        "data.partition.name": "dirichlet",
        "data.partition.alpha": f"{alpha:g}",
        **own.options,
        "model.name": own.nets[scale],
        "clients.batch_size": "null",
        "clients.learning_rate": f"{own.learning_rate * faster:g}",
        "privacy.epsilon": f"{{name: uniform, low: {low:g}, high: {high:g}}}",
        **MECHANISMS[mechanism],
        "privacy.clip_norm": own.clip_norm,
        "privacy.adjacency": "replace_one",
        "strategies": f"{{{strategies}, {decay}}}",
        "evaluation.every": str(ROUNDS[scale] // (4 if changed is _PERSONAL else 10)),
    }
    if "privacy" in changed:
        options = {key: text for key, text in options.items() if not key.startswith("privacy.")}
    return as_words({**options, **changed})
