"""Simulated updates: their noise and signals, and the weights that a table gives them."""

import pytest
import torch

from experiments.papers.noise_aware.simulated import noise_aware_weights, updates

pytestmark = pytest.mark.e2e


def test_simulated_updates_have_the_noise_and_the_ratio_they_say():
    """28,938 coordinates: a sampled variance is within 4 % with a false alarm once in 10^6."""
    for signal, spread in (("equal", 1), ("steps", 8)):
        (silent,), _, truth = updates(signal, 0.0, seed=1)
        assert torch.allclose(silent.double().square().sum(dim=1), truth.double(), rtol=0.04)
        (loud,), length, _ = updates(signal, 3.0, seed=1)
        added, quietest = (loud - silent).norm(dim=1), int(truth.argmin())
        assert float(added[quietest]) == pytest.approx(3 * 1.005 * float(truth[quietest]) ** 0.5, rel=0.01)
        torch.testing.assert_close(added, 1.005 * length, rtol=0.02, atol=0.0)
        assert float(added.max() / added.min()) == pytest.approx(spread, rel=0.02)


@pytest.mark.parametrize("noise", ["planned", "estimated"])
def test_simulated_weights_are_those_of_the_strategy(noise):
    rounds, length, variances = updates("equal", 1.0, seed=1, rounds=2)
    for weights in noise_aware_weights(noise, rounds, length, variances, models=1):
        assert weights.argmax() == int(variances.argmin()) and weights.min() > 0
