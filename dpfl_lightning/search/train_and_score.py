"""Scores a set: a new model is trained on it and scored on other records."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpfl_lightning.algorithms.server_training import Training, public_generator, torch_seed, trained_on
from dpfl_lightning.data import Population
from dpfl_lightning.errors import require
from dpfl_lightning.federated.client.evaluation import PlainScorer, evaluate
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.evaluation import ClientModels, Score


def train_and_score(
    new_model: Callable[[int], nn.Module],
    population: Population,
    records: tuple[Tensor, Tensor],
    how: Training,
    seed: int = 0,
    number: int = 0,
) -> Score:
    """Train a new model on `records` (x `[n, *X]`, y `[n]`) and return its score on the population's test set.

    Initialisation (`new_model` builds it from a seed) and order depend only on `seed` and on the number of the model.
    """
    require(population.test is not None, "test", "be given for a comparison", None)
    on_test, device = one_client(population), population.y.device
    module = _module(new_model(seed)).to(device)
    begin, order = (torch_seed(public_generator(seed, "comparison", number, which)) for which in (0, 1))
    model = trained_on(module, _module(new_model(begin)).flat.to(device), records, how, order)
    return evaluate(module, on_test, ClientModels(model[None], (0,)), PlainScorer(module, on_test)).test


def one_client(population: Population) -> Population:
    """Return a population of one client with all training records, without held-out ones."""
    rows = torch.cat(population.train_of)
    return dataclasses.replace(population, train_of=[rows], held_out_of=[rows[:0]], groups=None, names=())


def _module(net: nn.Module) -> ClientModule:
    return net if isinstance(net, ClientModule) else ClientModule(net)
