"""Gradient inversion: what the server's ordinary work reconstructs of a client that has few records of a class."""

import tempfile
import warnings
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from dpfl_lightning.algorithms.server_training import public_generator, torch_seed
from dpfl_lightning.build import build_population
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserNotice
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.loop import FederatedLoop
from dpfl_lightning.papers.distillation.distillation import Distillation
from dpfl_lightning.papers.sets.distilled_set import DistilledSet
from experiments.papers.distillation.baselines import random_subset
from experiments.papers.run import CellContext

_STEPS = 300  # of the images towards the only release
_WIDTH = 32


def reconstructed(context: CellContext, records: int) -> dict[str, Any]:
    """Correlation of records with the images that a run makes of one release of a client with so many of each class.

    Each image is paired with one record of its class, so that the sum of the correlations is largest. So are images of
    noise, and the mean image of the class, of other people, which shows what knowing the class alone is worth.
    """
    options = context.options
    everything = build_population(options)
    own = random_subset(everything, records, options.seed)
    images, classes = _images_of_one_release(context, everything, own, records)
    draw = torch.Generator().manual_seed(torch_seed(public_generator(options.seed, "images of noise")))
    noise = torch.randn(images.shape, generator=draw)
    others = everything.x[everything.test], everything.y[everything.test]
    means = torch.stack([others[0][others[1] == label].mean(dim=0) for label in classes])
    names = {"correlation": images, "correlation_of_noise": noise, "correlation_of_class_mean": means}
    return {"values": {name: mean_correlation(x, classes, *own) for name, x in names.items()}}


def _images_of_one_release(
    context: CellContext, everything: Population, own: tuple[Tensor, Tensor], records: int
) -> tuple[Tensor, Tensor]:
    """Run `distillation` for one round with one client that has the records `own`; return its set."""
    options, classes = context.options, everything.num_classes
    test = everything.x[everything.test], everything.y[everything.test]
    population = Population.from_datasets([own], test, 0.0, num_classes=classes)
    strategy = Distillation(
        images_per_class=records,
        image_steps=_STEPS,
        reinit_every=1,
        min_participants=1,
        min_records_per_target=1,
        evaluation_epochs=1,
    )

    def new_net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        size = own[0][0].numel()
        return nn.Sequential(nn.Flatten(), nn.Linear(size, _WIDTH), nn.Sigmoid(), nn.Linear(_WIDTH, classes))

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserNotice)  # that one client is few, and without noise nothing is private
        FederatedLoop(
            population,
            ClientModule(new_net(options.seed)),
            rounds=1,
            clients=ClientOptions(count=1, batch_size=None),
            privacy=options.privacy,
            strategies=[strategy],
            seed=options.seed,
            output_dir=folder,
            new_net=new_net,
        ).run()
        return DistilledSet.load(folder).records


def mean_correlation(images: Tensor, classes: Tensor, records: Tensor, labels: Tensor) -> float:
    """Return the mean correlation of records and images that are paired one to one within each class."""
    found = []
    for label in labels.unique():
        pictures, own = images[classes == label].flatten(1), records[labels == label].flatten(1)
        between = torch.corrcoef(torch.cat([own, pictures]))[: len(own), len(own) :].nan_to_num()
        pairs = linear_sum_assignment(between.numpy(), maximize=True)
        found.append(between[pairs])
    return float(torch.cat(found).mean())
