"""References for a federated set, which a simulation can make because it holds all data. Nothing here is private."""

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor, nn

from dpfl_lightning.algorithms.gradient_matching import SyntheticSet
from dpfl_lightning.algorithms.server_training import Training, public_generator, torch_seed
from dpfl_lightning.build import FederatedLoop
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserNotice
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.search import train_and_score as search
from dpfl_lightning.search.train_and_score import one_client
from dpfl_lightning.sets.distilled_set import DistilledSet
from dpfl_lightning.strategies.distillation.distillation import Distillation

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


def noise_set(population: Population, images_per_class: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The images of noise with which distillation begins."""
    generator = torch.Generator().manual_seed(torch_seed(public_generator(seed, "images")))
    images = SyntheticSet.of_noise(population.num_classes, images_per_class, population.input_shape, generator)
    x, y = images.records
    return x.to(population.x), y.to(population.y)


def centralised_matching(
    population: Population, new_net: NewNet, rounds: int, seed: int = 0, device: str = "auto", **options: Any
) -> DistilledSet:
    """The set of one client with all records, after as many rounds of `Distillation(**options)`."""
    return _matched(one_client(population), new_net, rounds, seed, device, options)


def local_matching(
    population: Population, new_net: NewNet, rounds: int, seed: int = 0, device: str = "auto", **options: Any
) -> list[DistilledSet]:
    """The set that each client would make alone, of the classes that it has."""
    sets = []
    for rows in population.train_of:
        images = _matched(one_client(population, rows), new_net, rounds, seed, device, options)
        has = torch.isin(images.y, population.y[rows].unique().to(images.y))
        sets.append(DistilledSet(images.x[has], images.y[has], images.card))
    return sets


def _matched(
    population: Population, new_net: NewNet, rounds: int, seed: int, device: str, options: dict[str, Any]
) -> DistilledSet:
    strategy = Distillation(**{"min_participants": 1, "min_records_per_target": 1, **options})
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserNotice)  # that nothing is private here
        FederatedLoop(
            population,
            ClientModule(new_net(seed)),
            rounds=rounds,
            clients=ClientOptions(count=1, batch_size=population.num_records[0]),
            privacy=None,
            strategies=[strategy],
            seed=seed,
            output_dir=folder,
            device=device,
            evaluate_every=rounds,
            new_net=new_net,
        ).run()
        return DistilledSet.load(folder)
