"""References for a federated set, which a simulation can make because it holds all data. Nothing here is private."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch
from torch import Tensor, nn

from dpfl_lightning.algorithms.server_training import Training, public_generator, torch_seed
from dpfl_lightning.data import Population
from dpfl_lightning.search import train_and_score as search

NewNet = Callable[[int], nn.Module]

#: training of a model on a small set, as in the condensation paper, and training on all records
ON_A_SET = Training(epochs=300, momentum=0.9, weight_decay=5e-4, decayed=True)
ON_EVERYTHING = Training(epochs=30, momentum=0.9, weight_decay=5e-4, decayed=True)


@dataclass(frozen=True)
class Trained:
    """Accuracies in [0, 1] of new models on the test set after training on one set."""

    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.accuracies)

    @property
    def std(self) -> float:
        """Population standard deviation over models."""
        return pstdev(self.accuracies)


def train_and_score(
    new_net: NewNet,
    population: Population,
    records: tuple[Tensor, Tensor],
    how: Training = ON_A_SET,
    networks: int = 3,
    seed: int = 0,
) -> Trained:
    """Train `networks` new models on `records` (x `[n, *X]`, y `[n]`) and score them on the population's test set."""
    scores = (search.train_and_score(new_net, population, records, how, seed, number) for number in range(networks))
    return Trained(tuple(float(score.accuracy or 0.0) for score in scores))


def whole(population: Population) -> tuple[Tensor, Tensor]:
    rows = torch.cat(population.train_of)
    return population.x[rows], population.y[rows]


def random_subset(population: Population, images_per_class: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """So many real records of each class, drawn from all clients' without replacement; all, if there are fewer."""
    x, y = whole(population)
    generator = torch.Generator().manual_seed(torch_seed(public_generator(seed, "random subset")))
    order = torch.randperm(len(y), generator=generator).to(y.device)
    rows = torch.cat([order[y[order] == label][:images_per_class] for label in range(population.num_classes)])
    return x[rows], y[rows]
