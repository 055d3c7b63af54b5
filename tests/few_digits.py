"""Clients with a few real digits, and runs that distil them."""

import dataclasses

import pytest
import reference
import torch
from torch import nn

from dpfl_lightning import data, models
from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.papers.distillation.distillation import Distillation

CLASSES = 3
SHAPE = (1, 8, 8)
NOTICE = pytest.mark.filterwarnings("ignore:strategy .*gradients of single classes")


def digits(counts: list[list[int]], seed: int = 0) -> Population:
    """Real 8x8 digits: client i has counts[i][c] records of class c, none of them another client's."""
    dataset = data.load("digits")
    generator = torch.Generator().manual_seed(seed)
    pools = [
        rows[torch.randperm(len(rows), generator=generator)].tolist()
        for rows in ((dataset.y == label).nonzero().flatten() for label in range(CLASSES))
    ]
    pairs = []
    for of_client in counts:
        rows = [pools[label].pop() for label, count in enumerate(of_client) for _ in range(count)]
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


def few(make_loop, *parts, counts=EQUAL, batch_size=None, **options):
    """A loop over clients with a few digits each, on full batches unless a size is given, without privacy."""
    clients = ClientOptions(count=len(counts), batch_size=batch_size or [sum(one) for one in counts])
    usual = {"population": digits(counts), "module": a_net(), "new_net": new_net, "privacy": None, "clients": clients}
    return make_loop(parts=parts, **usual | options)


def distilled(make_loop, population=None, privacy=None, rounds=2, others=(), net=new_net, engine="serial", **options):
    """A finished run, and its strategy."""
    strategy = Distillation(**{**SMALL, **options})
    population = digits(UNEQUAL) if population is None else population
    sizes = list(population.num_records)
    loop = make_loop(
        population=population,
        module=ClientModule(net(0)),
        new_net=net,
        clients=ClientOptions(count=len(sizes), batch_size=sizes),
        parts=[strategy, *others],
        privacy=privacy,
        rounds=rounds,
        evaluate_every=rounds,
        engine=ENGINES[engine](),
    )
    loop.run()
    return loop, strategy


def made_of(strategy: Distillation) -> dict:
    """Images, their momentum and the age of the model."""
    return strategy.state_dict()["made"][0]


def images_of(strategy: Distillation) -> torch.Tensor:
    return made_of(strategy)["images"]


def class_means(population: Population, params, rows_of=None) -> list[torch.Tensor]:
    """The gradient of each class's mean loss over all clients' records, of matrices only, `[d]`."""
    rows = torch.cat(population.train_of) if rows_of is None else population.train_of[rows_of]
    means = []
    for label in range(CLASSES):
        of_class = rows[population.y[rows] == label]
        gradients = reference.class_gradient(a_net().net, params, population.x[of_class], label)
        means.append(torch.cat([g.flatten() for g in gradients if g.dim() >= 2]) if len(of_class) else None)
    return means


class Target(Distillation):
    """Keeps the targets of its rounds."""

    def _target(self, combined, heard):
        target = super()._target(combined, heard)
        self.__dict__.setdefault("kept", []).append(target)
        self.noise_std = heard.noise_std
        return target


def target_of(make_loop, population, **options):
    """The target of a first round without noise, `[num_classes, d]`, which classes have one, and the parameters."""
    strategy = Target(**{**SMALL, **options})
    sizes = list(population.num_records)
    clients = ClientOptions(count=len(sizes), batch_size=sizes)
    loop = few(make_loop, strategy, population=population, clients=clients, rounds=1)
    params = {name: value.clone() for name, value in loop.module.unflatten(loop.module.flat).items()}
    loop.run()
    return *strategy.kept[0], params
