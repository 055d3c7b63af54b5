"""What a federated set is compared with: made of what it says, by the same strategy, scored in the same way."""

import dataclasses

import pytest
import torch
from torch import nn

from dpfl_lightning import data, models
from dpfl_lightning.algorithms.server_training import Training
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.strategies.distillation.distillation import Distillation
from experiments.papers.distillation.baselines import (
    centralised_matching,
    noise_set,
    random_subset,
    train_and_score,
    whole,
)

pytestmark = pytest.mark.e2e

QUICK = Training(epochs=30, learning_rate=0.03, momentum=0.9, weight_decay=5e-4, decayed=True)
OPTIONS = {"images_per_class": 2, "net_epochs": 5, "evaluation_epochs": 1, "device": "cpu"}


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


def run_of(strategy, make_loop, population, **options):
    return make_loop(
        population=population, module=ClientModule(new_net(3)), new_net=new_net, parts=[strategy], **options
    )


def test_noise_is_what_distillation_begins_with(population, make_loop):
    strategy = Distillation(images_per_class=2, min_participants=1, evaluation_epochs=1)
    loop = run_of(strategy, make_loop, population, clients=ClientOptions(count=4, batch_size=8))
    loop.plan_schedule()
    x, y = noise_set(population, 2)
    begins = strategy._synthetic(loop.view(ServerState(loop.module.flat[None], (0,) * 4)))
    assert torch.equal(x, begins.images.flatten(0, 1)) and y.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.fixture
def one_thread():
    """Sums of several threads have other roundings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_centralised_matching_is_the_strategy_with_one_client(population, make_loop):
    found = centralised_matching(population, new_net, rounds=2, seed=3, **OPTIONS)
    train, nothing = torch.cat(population.train_of), population.train_of[0][:0]
    everything = dataclasses.replace(population, train_of=[train], held_out_of=[nothing])
    options = {name: value for name, value in OPTIONS.items() if name != "device"}
    strategy = Distillation(min_participants=1, min_records_per_target=1, **options)
    clients = ClientOptions(count=1, batch_size=120)
    with pytest.warns(UserWarning, match="without noise"):
        run_of(strategy, make_loop, everything, privacy=None, rounds=2, seed=3, clients=clients).run()
    assert torch.equal(found.x, strategy.state_dict()["images"].flatten(0, 1))
    assert found.card["clients"] == 1 and found.card["records"] == 120


def test_nets_learn_more_from_more(population):
    """Real records, and matched images, against noise: the same net for every set."""
    everything, few, noise = (
        train_and_score(new_net, population, records, QUICK, networks=1).mean
        for records in (whole(population), random_subset(population, 2), noise_set(population, 2))
    )
    matched = centralised_matching(population, new_net, 3, image_steps=10, reinit_every=3, **OPTIONS)
    assert everything > 0.9 and everything > few > noise + 0.1
    assert train_and_score(new_net, population, matched.records, QUICK, networks=1).mean > noise + 0.1
