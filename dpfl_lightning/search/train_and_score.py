"""Scores a set: new models are trained on it and scored on other records."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch
from torch import Tensor, nn

from dpfl_lightning.algorithms.server_training import Training, public_generator, torch_seed, trained_on
from dpfl_lightning.data import Population
from dpfl_lightning.errors import require
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.evaluation import evaluate
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.evaluation import ClientModels, Score
from dpfl_lightning.privacy.noise import Streams

NewNet = Callable[[int], nn.Module]

#: training of a model on a small set, as in the condensation paper, and training on all records
ON_A_SET = Training(epochs=300, momentum=0.9, weight_decay=5e-4, decayed=True)
ON_EVERYTHING = Training(epochs=30, momentum=0.9, weight_decay=5e-4, decayed=True)


@dataclass(frozen=True)
class Trained:
    """Scores of new models on the test set after training on one set."""

    scores: tuple[Score, ...]

    @property
    def accuracies(self) -> tuple[float, ...]:
        """In [0, 1], of each model."""
        return tuple(float(score.accuracy or 0.0) for score in self.scores)

    @property
    def mean(self) -> float:
        return fmean(self.accuracies)

    @property
    def std(self) -> float:
        """Population standard deviation of accuracies over models."""
        return pstdev(self.accuracies)


def train_and_score(
    new_net: NewNet,
    population: Population,
    records: tuple[Tensor, Tensor],
    how: Training = ON_A_SET,
    networks: int = 3,
    seed: int = 0,
) -> Trained:
    """Train `networks` new models on `records` (x `[n, *X]`, y `[n]`) and score them on the population's test set.

    Initialisation and order of each model depend only on its number and on `seed`.
    """
    require(population.test is not None, "test", "be given for a comparison", None)
    on_test, device = one_client(population), population.y.device
    module = _module(new_net(seed)).to(device)
    engine = SerialEngine()
    engine.setup(module, on_test, Streams(), "poisson")  # no noise is drawn
    scores = []
    for number in range(networks):
        begin, order = (torch_seed(public_generator(seed, "comparison", number, which)) for which in (0, 1))
        start = _module(new_net(begin)).flat.to(device)
        model = trained_on(module, start, records, how, order)
        scores.append(evaluate(module, on_test, ClientModels(model[None], (0,)), engine).test)
    return Trained(tuple(scores))


def _module(net: nn.Module) -> ClientModule:
    return net if isinstance(net, ClientModule) else ClientModule(net)


def one_client(population: Population, rows: Tensor | None = None) -> Population:
    """Return a population of one client with these training rows, or with all rows, without held-out records."""
    train_rows = torch.cat(population.train_of) if rows is None else rows
    return dataclasses.replace(population, train_of=[train_rows], held_out_of=[train_rows[:0]], groups=None, names=())
