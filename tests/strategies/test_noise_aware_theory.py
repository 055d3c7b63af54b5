"""Noise of a round's sum on quadratics whose curvature, noise and distances are known exactly.

Client i's records are `sqrt(P / 2) e_j` with targets that make `f_i(theta) = |theta - centre_i|^2 / 2`.
"""

from __future__ import annotations

import math

import pytest
import torch
from conftest import FIXED_KEY
from fakes import Recorder
from torch import nn

from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware

NUM_PARAMS = 1200
EPOCHS = (2, 3, 4)  # local steps of the three clients, each on all records
CENTRES = (1.0, 2.0, 4.0)  # in every coordinate
CLIP_NORM, NOISE = 8.0 * NUM_PARAMS, (0.1, 0.2, 0.4)  # gradients are never so long


@pytest.mark.parametrize("objective", ["min_variance", "max_snr"])
def test_the_noise_of_the_sum_is_that_of_its_parts(objective, make_loop):
    """Independent noises: `sum_i w_i^2 v_i` without a factor of clients (Lemma D.4), v_i with the steps' feedback.

    `max_snr` scales the sum to the three steps that clients of equal data take on average. 1,200 coordinates: 16 % of
    a variance is four standard deviations, and so is the bound on the mean.
    """
    lr, scale = 0.1, math.sqrt(NUM_PARAMS / 2)
    net = nn.Linear(NUM_PARAMS, 1, bias=False)
    nn.init.zeros_(net.weight)
    pairs = [(scale * torch.eye(NUM_PARAMS), torch.full((NUM_PARAMS,), scale * centre)) for centre in CENTRES]
    make_loop(
        Population.from_datasets(pairs, held_out=0),
        ClientModule(net),
        PrivacyOptions(noise_multiplier=NOISE, clip_norm=CLIP_NORM, delta=1e-4, noise_key=FIXED_KEY),
        ClientOptions(count=3, batch_size=NUM_PARAMS, local_epochs=EPOCHS, learning_rate=lr),
        parts=[NoiseAware("oracle", objective), seen := Recorder()],
        rounds=1,
    ).run()
    model, weights, steps = seen.models[0][0].double(), seen.reports[0].weights[0], torch.tensor(EPOCHS).double()
    step_var = [(lr * CLIP_NORM * noise / NUM_PARAMS) ** 2 for noise in NOISE]
    true = torch.tensor(step_var, dtype=torch.float64) * steps
    signal = steps if objective == "max_snr" else torch.ones(3)
    torch.testing.assert_close(weights, (signal / true) / (signal / true).sum())
    pull = [1 - (1 - lr) ** count for count in EPOCHS]
    mean = sum(float(w) * part * centre for w, part, centre in zip(weights, pull, CENTRES, strict=True))
    kept = [sum((1 - lr) ** (2 * k) for k in range(count)) for count in EPOCHS]
    variance = sum(float(w) ** 2 * step_var[i] * kept[i] for i, w in enumerate(weights))
    factor = 3 / float(weights @ steps) if objective == "max_snr" else 1.0
    assert float(model.var()) == pytest.approx(factor**2 * variance, rel=0.16)
    assert float(model.mean()) == pytest.approx(factor * mean, abs=4 * factor * math.sqrt(variance / NUM_PARAMS))
