"""What a set is worth: beside random records, noise, the centralised method and all data; and with privacy."""

from __future__ import annotations

from typing import Any

from experiments.papers.distillation.accuracy import TEST
from experiments.papers.distillation.settings import (
    DISTILLED,
    FEDERATED,
    as_words,
    distillation,
    net,
    population,
    study,
)
from experiments.papers.experiment import Column, Experiment, Row, Training

CLIENTS = 10
_ALPHAS = {"alpha1": 1.0, "alpha0.1": 0.1}
SMALL = {"small": "100 rounds, ConvNet of width 32, at most 64 records a class and client, 10 images a class"}
TEN = {"image_steps": 10}
_DSA = {**TEN, "augmentation": "dsa"}
#: the best of distillation.tuning, and the records that chose it, which no client holds then
TUNED = {"image_steps": 30, "image_learning_rate": 3.0}
SET_ASIDE = {"data.public_records": 12_000}

#: row -> what the table calls it, how its cells are made, options of the strategy, and whether clients' shares matter
_SETS: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "literal": ("DistDD as printed: one initialisation", "distilled", {"mode": "paper_literal"}, True),
    "one_step": ("DistDD, new initialisations", "distilled", {}, True),
    "ten_steps": ("DistDD, ten image steps a release", "distilled", TEN, True),
    "ten_steps_dsa": ("DistDD, ten steps and DSA", "distilled", _DSA, True),
    "tuned": ("DistDD, image steps tuned on public records", "distilled", TUNED, True),
    "tuned_dsa": ("DistDD, image steps tuned, and DSA", "distilled", {**TUNED, "augmentation": "dsa"}, True),
    "centralised": ("centralised matching, ten steps", "distilled", TEN, False),
    "centralised_dsa": ("centralised matching, ten steps and DSA", "distilled", _DSA, False),
    "local": ("local matching, ten steps: mean of four clients", "local", TEN, True),
    "union": ("local matching, ten steps: one image a class of every client, together", "union", TEN, True),
    "random": ("as many random real records", "random_records", {}, False),
    "random_dsa": ("as many random real records, trained with DSA", "random_records", {"augmentation": "dsa"}, False),
    "noise": ("as many images of noise", "noise", {}, False),
    "whole": ("all records, 30 epochs", "all_records", {}, False),
}

_TUNED_NOTE = (
    "Where image steps are tuned, clients hold 48,000 records: the 12,000 of distillation.tuning are set aside."
)


def _words(row: str, column: str, scale: str) -> list[str]:
    clients = 1 if row.startswith("centralised") else CLIENTS
    own = population("fashion_mnist", clients, _ALPHAS[column])
    own |= SET_ASIDE if row.startswith("tuned") else {}
    return as_words({**own, **distillation("small", clients, **_SETS[row][2])})


BASELINES = Experiment(
    name="distillation.baselines",
    title="What a set of 10 images a class is worth, Fashion-MNIST, 10 clients, half of them a round, without privacy",
    shows=TEST,
    rows={
        name: Row(title, "test_accuracy", column=None if by_client else "alpha1")
        for name, (title, _, _, by_client) in _SETS.items()
    },
    columns={name: Column(f"Dirichlet {alpha:g}") for name, alpha in _ALPHAS.items()},
    cells={name: Training(_words, study=study(made)) for name, (_, made, _, _) in _SETS.items()},
    scales=SMALL,
    minutes={"small": 14},
    notes=(
        "More image steps a release cost neither traffic nor privacy. Rows in which clients play no part show the same "
        "cell twice.",
        "Nets train 300 epochs on a set, and 1,000 with an augmentation of each batch where DSA is named.",
        "Of local matching the first four clients stand for all ten: shares are drawn alike for everybody.",
        _TUNED_NOTE,
    ),
)


# ---- step sizes of the images

_TUNING_ROUNDS = 40
_PUBLIC = {"data.use_public": True, **SET_ASIDE}
_STEPS_TRIED = {
    f"lr{rate:g}_steps{steps}": {"image_learning_rate": rate, "image_steps": steps}
    for steps in (10, 30)
    for rate in (0.1, 0.3, 1.0, 3.0, 10.0)
}


def _tuning_words(row: str, column: str, scale: str) -> list[str]:
    own = distillation("small", CLIENTS, **_STEPS_TRIED[row])
    rounds = {"rounds": _TUNING_ROUNDS, "evaluation.every": _TUNING_ROUNDS}
    return as_words({**population("fashion_mnist", CLIENTS, 1.0), **_PUBLIC, **own, **rounds})


TUNING = Experiment(
    name="distillation.tuning",
    title="Steps of the images towards a release, on public records alone: 10 clients with 10,000 of them, Dirichlet 1",
    shows="accuracy on 2,000 other public records, %, mean of three fresh nets trained on the set",
    rows={
        name: Row(f"learning rate {own['image_learning_rate']:g}, {own['image_steps']} steps", "test_accuracy")
        for name, own in _STEPS_TRIED.items()
    },
    columns={"public": Column("accuracy")},
    cells=dict.fromkeys(_STEPS_TRIED, Training(_tuning_words, study=DISTILLED)),
    scales={"small": f"{_TUNING_ROUNDS} rounds, ConvNet of width 32, at most 64 records a class and client"},
    minutes={"small": 3},
    notes=("No private record and no test record takes part.",),
)

# ---- by size

_SIZES = (1, 10, 20, 50)
_SIZED = {
    "tuned": Row("DistDD, image steps tuned on public records", "test_accuracy"),
    "random": Row("as many random real records", "test_accuracy"),
}


def _size_words(row: str, column: str, scale: str) -> list[str]:
    images = int(column.removeprefix("ipc"))
    own = distillation("small", CLIENTS, **TUNED, images_per_class=images)
    return as_words({**population("fashion_mnist", CLIENTS, 1.0), **SET_ASIDE, **own})


SIZES = Experiment(
    name="distillation.sizes",
    title="What a set is worth by its size, in the setting of distillation.baselines at Dirichlet 1",
    shows=TEST,
    rows=_SIZED,
    columns={
        f"ipc{images}": Column(f"{images} a class", *(("alpha1", BASELINES.name) if images == 10 else ()))
        for images in _SIZES
    },
    cells={
        "tuned": Training(_size_words, study=DISTILLED),
        "random": Training(_size_words, study=study("random_records")),
    },
    scales={"small": "100 rounds, ConvNet of width 32, at most 64 records a class and client"},
    minutes={"small": 14},
)

# ---- with privacy

_BUDGET = {"privacy.epsilon": 8.0, "privacy.delta": 1e-5, "privacy.clip_norm": 1.0}
_PRIVATE: dict[str, Any] = {**TEN, "participation_fraction": 1.0}
_PRIVATE_ROUNDS, _FEW_ROUNDS = 50, 20
_METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "noise_aware": ("DistDD, rows weighed by their noise", {**_PRIVATE, "row_weights": "noise_aware"}),
    "equal": ("DistDD, all rows alike", _PRIVATE),
    "one_step": ("DistDD, one image step", {**_PRIVATE, "image_steps": 1}),
    "tuned": (
        "DistDD, rows weighed by their noise, 20 rounds, image steps tuned on public records",
        {**_PRIVATE, **TUNED, "row_weights": "noise_aware"},
    ),
}


def _private_words(row: str, column: str, scale: str) -> list[str]:
    own = {name: value for name, value in population("fashion_mnist", CLIENTS, 1.0).items() if name != "privacy"}
    if row == "dpfedavg":
        training = {"clients.batch_size": 64, "clients.learning_rate": 0.1, "strategies": {"size_weighted": {}}}
        return as_words({**own, **_BUDGET, **net("small"), "rounds": 20, "evaluation.every": 5, **training})
    own |= SET_ASIDE if row == "tuned" else {}
    made = distillation("small", CLIENTS, **_METHODS[row][1])
    rounds = _FEW_ROUNDS if row == "tuned" else _PRIVATE_ROUNDS
    return as_words({**own, **_BUDGET, **made, "rounds": rounds, "evaluation.every": rounds})


PRIVATE = Experiment(
    name="distillation.private",
    title="With record-level privacy, epsilon 8 at delta 1e-5, Fashion-MNIST, 10 clients, Dirichlet 1, width 32",
    shows=TEST,
    rows={
        **{name: Row(title, "test_accuracy") for name, (title, _) in _METHODS.items()},
        "dpfedavg": Row("DP-FedAvg, 20 rounds", "test_accuracy"),
    },
    columns={"eps8": Column("epsilon 8")},
    cells={
        **dict.fromkeys(_METHODS, Training(_private_words, study=DISTILLED)),
        "dpfedavg": Training(_private_words, study=FEDERATED),
    },
    scales={"small": f"DistDD: {_PRIVATE_ROUNDS} rounds, all clients and all their records, 10 images a class"},
    minutes={"small": 16},
    notes=(
        "One release of a DistDD round is a noised gradient for each class: 11 models of traffic a client and round, "
        "where DP-FedAvg has two. At the same traffic DP-FedAvg could have 275 rounds; here it has 20.",
        "Learning rate 0.1 and batch 64 of DP-FedAvg were fixed beforehand; nothing was tuned on these records.",
        _TUNED_NOTE,
    ),
)


# ---- what gradients give away

_FEW = (10, 100, 1000)
_NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "logistic": ("logistic regression", {"model": {"name": "logistic"}}),
    "convnet": ("ConvNet", net("small")),
}
_STEPS = 500


def _inversion_words(row: str, column: str, scale: str) -> list[str]:
    records = row.removesuffix("_private").removeprefix("records")
    alone = {"min_participants": 1, "min_records_per_target": 1, "images_per_class": 1, "image_steps": _STEPS}
    own = {**alone, "net_epochs": 0, "evaluation_epochs": 1, "sampling": "full"}
    return as_words(
        {
            "data.name": "fashion_mnist",
            "data.records_per_client": int(records),
            "data.partition.name": "stratified",
            "clients.count": 1,
            "clients.batch_size": None,
            "rounds": 1,
            "strategies": {"distillation": own},
            **(_BUDGET if row.endswith("_private") else {"privacy": None}),
            **_NETS[column][1],
        }
    )


_GIVEN = {f"records{count}": f"{count:,} records, without noise" for count in _FEW} | {
    "records10_private": "10 records, epsilon 8"
}
INVERSION = Experiment(
    name="distillation.inversion",
    title="What one round of class gradients gives away: one client, a tenth of its records of each class on average",
    shows="correlation of the server's image of a class with the nearest record, mean over classes",
    rows={
        f"{cell}_{value}": Row(f"{title}: nearest {of}", value, cell)
        for cell, title in _GIVEN.items()
        for value, of in {"own": "of its own", "strangers": "of as many strangers"}.items()
    },
    columns={name: Column(title) for name, (title, _) in _NETS.items()},
    cells=dict.fromkeys(_GIVEN, Training(_inversion_words, study=study("given_away"))),
    scales={"small": f"one round, one image a class, {_STEPS} image steps"},
    minutes={"small": 0.3},
    notes=(
        "The server does here what it always does, for one participant whom distillation refuses unless "
        "`min_participants` and `min_records_per_target` are set to 1. Strangers are test records of the same class.",
        "With the privacy of epsilon 8 at delta 1e-5 the images are like nobody.",
    ),
)

YARDSTICKS = (BASELINES, TUNING, SIZES, PRIVATE, INVERSION)
