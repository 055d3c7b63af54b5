"""The distillation paper's methods and data as arguments of `fit`, at the paper's size and at one for two cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import yaml

SCALES = {
    "small": "100 rounds, ConvNet of width 32, at most 64 records a class and client, 10 images a class",
    "paper": "500 rounds, ConvNet of width 128, at most 256 records a class and client, 100 images a class",
}
ROUNDS = {"small": 100, "paper": 500}
WIDTH = {"small": 32, "paper": 128}
RECORDS_PER_CLASS = {"small": 64, "paper": 256}
IMAGES_PER_CLASS = {"small": 10, "paper": 100}
DATA_TITLES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}


def text(value: Any) -> str:
    """A mapping or list as a person types it.

    >>> text({"distillation": {"image_steps": 10}})
    '{distillation: {image_steps: 10}}'
    """
    dumped = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return dumped.strip().removesuffix("\n...")  # which YAML puts after a number or null


def as_words(options: Mapping[str, Any]) -> list[str]:
    """Options as a person types them."""
    return [word for key, value in options.items() for word in (f"--{key}", text(value))]


def population(data: str, clients: int, alpha: float) -> dict[str, Any]:
    """Clients by Dirichlet draws of each class, with enough records for a batch of 64 each; without privacy."""
    return {
        "data.name": data,
        "data.partition": {"name": "dirichlet", "alpha": alpha, "min_records": 64},
        "clients.count": clients,
        "privacy": None,
    }


def net(scale: str) -> dict[str, Any]:
    """The paper's ConvNet, or a narrower one."""
    return {"model": {"name": "convnet", "width": WIDTH[scale]}}


def distillation(scale: str, clients: int, **options: Any) -> dict[str, Any]:
    """The strategy with half of the clients a round, the condensation paper's learning rate of the images, and no set
    looked at before the last one.

    Args:
        options: of `Distillation`, in place of these.
    """
    own = {
        "images_per_class": IMAGES_PER_CLASS[scale],
        "image_learning_rate": 0.1,
        "participation_fraction": 0.5,
        "records_per_class": RECORDS_PER_CLASS[scale],
        **options,
    }
    if clients < 10:
        own = {"min_participants": 1, "min_records_per_target": 1, **own}
    rounds = ROUNDS[scale]
    return {**net(scale), "rounds": rounds, "evaluation.every": rounds, "strategies": {"distillation": own}}


def fedavg(scale: str, clients: int, rounds: Mapping[str, int], pull: float = 0.0) -> dict[str, Any]:
    """Federated averaging of half of the clients a round, one local epoch at batch 64; with `pull` FedProx."""
    prox = {"fedprox": {"pull": pull}} if pull else {}
    return {
        **net(scale),
        "rounds": rounds[scale],
        "evaluation.every": max(1, rounds[scale] // 10),
        "clients.batch_size": 64,
        "clients.learning_rate": 0.05,
        "strategies": {"size_weighted": {}, "uniform_selection": {"clients_per_round": (clients + 1) // 2}, **prox},
    }


def study(name: str) -> Callable[[Any], Mapping[str, Any]]:
    """A function of `studies` that makes a cell, imported when it does: declarations import no torch."""

    def made(making: Any) -> Mapping[str, Any]:
        from experiments.papers.distillation import studies

        function: Callable[[Any], Mapping[str, Any]] = getattr(studies, name)
        return function(making)

    return made


DISTILLED, FEDERATED, LOCAL = study("distilled"), study("federated"), study("local")
