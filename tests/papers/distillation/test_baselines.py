"""What a federated set is compared with: made of what it says, and scored in the same way."""

import pytest
import torch
from torch import nn

from dpfl_lightning import data, models
from dpfl_lightning.algorithms.server_training import Training
from dpfl_lightning.data import Population
from experiments.papers.distillation.baselines import random_subset, train_and_score, whole

pytestmark = pytest.mark.e2e

QUICK = Training(epochs=30, learning_rate=0.03, momentum=0.9, weight_decay=5e-4, decayed=True)


@pytest.fixture(scope="module")
def population() -> Population:
    """Four clients of real digits 0 to 2; the last one has no 2."""
    dataset = data.load("digits")
    rows = [(dataset.y == label).nonzero().flatten()[:40].tolist() for label in range(3)]
    counts = [[12, 4, 10], [8, 16, 10], [10, 10, 20], [10, 10, 0]]
    own = [[rows[label].pop() for label, count in enumerate(one) for _ in range(count)] for one in counts]
    test = dataset.test_y < 3
    pairs = [(dataset.x[one], dataset.y[one]) for one in own]
    return Population.from_datasets(pairs, (dataset.test_x[test], dataset.test_y[test]), 0.0, num_classes=3)


def new_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return models.build("convnet", (1, 8, 8), 3, width=8, depth=2)


def test_the_whole_data_and_random_subsets_are_real_records(population):
    x, y = whole(population)
    assert y.bincount().tolist() == [40, 40, 40] and x.shape == (120, 1, 8, 8)
    everything = {tuple(one.flatten().tolist()) for one in x}
    x, y = random_subset(population, 5)
    assert y.bincount().tolist() == [5, 5, 5]
    chosen = {tuple(one.flatten().tolist()) for one in x}
    assert len(chosen) == 15 and chosen <= everything
    assert not torch.equal(x, random_subset(population, 5, seed=1)[0])
    assert random_subset(population, 1000)[1].bincount().tolist() == [40, 40, 40]


def test_models_learn_more_from_more(population):
    everything, few = (
        train_and_score(new_net, population, records, QUICK, networks=1).mean
        for records in (whole(population), random_subset(population, 2))
    )
    assert everything > 0.9 and everything > few > 0.4
