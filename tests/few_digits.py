"""Clients with a few real digits, and runs that distil them."""

from __future__ import annotations

import dataclasses

import pytest
import reference
import torch
from conftest import FIXED_KEY
from torch import nn

from dpfl_lightning import data, models
from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.strategies.distillation.distillation import Distillation

CLASSES = 3
SHAPE = (1, 8, 8)
NOTICE = pytest.mark.filterwarnings("ignore:strategy distillation. gradients of single classes")


def digits(counts: list[list[int]], seed: int = 0) -> Population:
    """Real 8x8 digits: client i has counts[i][c] records of class c, none of them another client's."""
    dataset = data.load("digits")
    generator = torch.Generator().manual_seed(seed)
    pools = [
        rows[torch.randperm(len(rows), generator=generator)].tolist()
        for rows in ((dataset.y == label).nonzero().flatten() for label in range(CLASSES))
    ]
    pairs = []
    for own in counts:
        rows = [pools[label].pop() for label, count in enumerate(own) for _ in range(count)]
        pairs.append((dataset.x[rows], dataset.y[rows]))
    test = dataset.test_y < CLASSES
    return Population.from_datasets(pairs, (dataset.test_x[test], dataset.test_y[test]), 0.0, num_classes=CLASSES)


UNEQUAL = [[9, 3, 5], [2, 8, 4], [6, 6, 1], [3, 2, 12]]
EQUAL = [[4, 4, 4]] * 4


def together(population: Population) -> Population:
    """One client that holds everything."""
    everything, none = torch.cat(population.train_of), torch.cat(population.held_out_of)
    return dataclasses.replace(population, train_of=[everything], held_out_of=[none])


def a_net(width: int = 4, seed: int = 0) -> ClientModule:
    torch.manual_seed(seed)
    return ClientModule(models.build("convnet", SHAPE, CLASSES, width=width, depth=2))


def new_net(seed: int) -> nn.Module:
    return a_net(seed=seed).net


SMALL = {
    "images_per_class": 2,
    "net_epochs": 2,
    "min_participants": 1,
    "min_records_per_target": 1,
    "evaluation_epochs": 2,
}


class Spy(Strategy, Callback):
    """What arrived in each round, and what was told of it."""

    def needs_updates(self, plan, view):
        return True

    def __init__(self):
        self._updates, self._views, self._states, self._told = [], [], [], []

    def after_step(self, state, updates, view):
        self._updates.append(updates)
        self._views.append(view)
        self._states.append(state)
        return state

    def on_round_end(self, view, report):
        self._told.append(report.metrics)


class Reports(Callback):
    """Keeps each round's number of records."""

    def __init__(self):
        self.kept = []

    def on_round_end(self, view, report):
        self.kept.append(report.records)


def distilled(make_loop, population=None, privacy=None, rounds=2, others=(), net=new_net, engine=None, **options):
    """A finished run, its strategy."""
    own = Distillation(**{**SMALL, **options})
    population = digits(UNEQUAL) if population is None else population
    sizes = list(population.num_records)
    loop = make_loop(
        population=population,
        module=ClientModule(net(0)),
        new_net=net,
        clients=ClientOptions(count=len(sizes), batch_size=sizes),
        parts=[own, *others],
        privacy=privacy,
        rounds=rounds,
        evaluate_every=rounds,
        **({} if engine is None else {"engine": ENGINES[engine]()}),
    )
    loop.run()
    return loop, own


def images_of(own: Distillation) -> torch.Tensor:
    return own.state_dict()["images"]


def class_means(population: Population, params, rows_of=None) -> list[torch.Tensor]:
    """The gradient of each class's mean loss over all clients' records, of matrices only, `[d]`."""
    rows = torch.cat(population.train_of) if rows_of is None else population.train_of[rows_of]
    found = []
    for label in range(CLASSES):
        own = rows[population.y[rows] == label]
        if len(own) == 0:
            found.append(None)
            continue
        gradients = reference.class_gradient(a_net().net, params, population.x[own], label)
        found.append(torch.cat([g.flatten() for g in gradients if g.dim() >= 2]))
    return found


class Target(Distillation):
    """Keeps the targets of its rounds."""

    def _target(self, combined):
        found = super()._target(combined)
        self.__dict__.setdefault("kept", []).append(found)
        return found


def target_of(make_loop, population, **options):
    """The target of a first round without noise, `[num_classes, d]`, and which classes are there."""
    own = Target(**{**SMALL, **options})
    sizes = list(population.num_records)
    clients = ClientOptions(count=len(sizes), batch_size=sizes)
    loop = make_loop(
        population=population, module=a_net(), new_net=new_net, clients=clients, parts=[own], privacy=None, rounds=1
    )
    start = loop.module.unflatten(loop.module.flat)
    loop.run()
    return *own.kept[0], {name: value.clone() for name, value in start.items()}


def private(epsilon=8.0, **options) -> PrivacyOptions:
    return PrivacyOptions(epsilon=epsilon, delta=1e-3, noise_key=FIXED_KEY, **options)
