"""What biased selection gains, and does not lose, on a made-up problem of ten classes and thirty clients."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from conftest import FIXED_KEY
from torch import nn

from dpfl_lightning import strategies
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.data.partition import partition
from dpfl_lightning.errors import UserNotice
from dpfl_lightning.federated.client.module import ClientModule

CLIENTS, COHORT = 30, 6
UNIFORM = {"uniform_selection": {"clients_per_round": COHORT}}
ANCHORED = {"biased_selection": {"clients_per_round": COHORT}}
LEAST_NOISE = {"biased_selection": {"clients_per_round": COHORT, "dissimilarity": 0.0}}


def problem(seed):
    """Class means of size 0.35 in unit noise, rows of length 1, a constant 0.3; Dirichlet(0.5), at least 8 records."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(10, size=7000)
    x = 0.35 * draw.standard_normal((10, 64))[labels] + draw.standard_normal((7000, 64))
    x = np.hstack([x / np.linalg.norm(x, axis=1, keepdims=True), np.full((7000, 1), 0.3)]).astype(np.float32)
    parts = partition("dirichlet", labels[:6000], CLIENTS, draw, alpha=0.5, min_records=8)
    pairs = [(torch.from_numpy(x[rows]), torch.from_numpy(labels[rows])) for rows in parts]
    test = torch.from_numpy(x[6000:]), torch.from_numpy(labels[6000:])
    return Population.from_datasets(pairs, test=test, held_out=0.0, num_classes=10)


def accuracy(make_loop, own, low, high, seed, rounds=100):
    """After full-batch rounds with budgets uniform between low and high, in per cent."""
    net = nn.Linear(65, 10, bias=False)
    nn.init.zeros_(net.weight)
    epsilon = {"name": "uniform", "low": low, "high": high}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserNotice)
        loop = make_loop(
            population=problem(seed),
            module=ClientModule(net),
            rounds=rounds,
            clients=ClientOptions(count=CLIENTS, batch_size=None, learning_rate=4.0),
            privacy=PrivacyOptions(
                epsilon=epsilon, delta=1e-5, accountant="gdp", adjacency="replace_one", noise_key=FIXED_KEY
            ),
            parts=strategies.build({**own, "learning_rate_decay": {"half_after": 50}}),
            seed=seed,
            evaluate_every=rounds,
        )
        return 100 * loop.run().test_accuracy


@pytest.mark.slow
def test_biased_selection_gains_much_where_noise_is_large(make_loop):
    """One seed and 20 rounds of the setting below."""
    biased, uniform = (accuracy(make_loop, own, 0.1, 3, seed=0, rounds=20) for own in (ANCHORED, UNIFORM))
    assert biased > uniform + 10


@pytest.mark.slow
def test_it_gains_where_noise_is_large_and_loses_little_where_it_is_small(make_loop):
    """Six seeds: 20 points above equal quotas at budgets 0.1 to 3; the anchor repairs the bias at 10 to 300."""
    found = {
        (name, low): np.mean([accuracy(make_loop, own, low, high, seed) for seed in range(6)])
        for name, own in (("uniform", UNIFORM), ("least noise", LEAST_NOISE), ("anchored", ANCHORED))
        for low, high in ((0.1, 3), (10, 300))
    }
    print(found)
    assert found["least noise", 0.1] >= found["uniform", 0.1] + 20
    assert found["anchored", 0.1] >= found["uniform", 0.1] + 20
    assert found["anchored", 10] >= found["least noise", 10]
    assert found["anchored", 10] >= found["uniform", 10] - 1.5
