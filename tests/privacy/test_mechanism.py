"""Mechanism and sampling: divisor, noise level, distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.mechanism import Gaussian
from dpfl_lightning.privacy.sampling import draw_steps, poisson_rows


def rng(seed=0):
    return np.random.default_rng(seed)


def test_the_divisor_is_the_expected_batch_size():
    mechanism = Gaussian(math.inf, 0.0, 0.1, 25.0)
    assert torch.equal(mechanism.privatise(torch.full((1, 3), 50.0), rng()), torch.full((1, 3), 2.0))
    assert mechanism.noise_std(steps=4, learning_rate=0.5) == 0, "no noise, though nothing is clipped"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_has_the_stated_level_also_on_an_empty_sum(dtype):
    mechanism = Gaussian(clip_norm=3.0, noise_multiplier=2.0, sample_rate=0.1, expected_batch_size=10.0)
    noisy = mechanism.privatise(torch.zeros(1, 200_000, dtype=dtype), rng())[0]
    assert noisy.dtype == dtype
    # Kolmogorov-Smirnov against N(0, 0.6), seed 0: false alarm 1e-4
    assert stats.kstest(noisy.numpy() / 0.6, "norm").pvalue > 1e-4
    assert mechanism.noise_std(steps=4, learning_rate=0.5) == pytest.approx(0.5 * 0.6 * 2)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clip_norm": math.inf}, "clip_norm"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"sample_rate": 1.8}, "sample_rate"),
        ({"sample_rate": 0.0}, "sample_rate"),
        ({"expected_batch_size": 0.0}, "expected_batch_size"),
    ],
)
def test_bad_values_are_named(change, key):
    good = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sample_rate": 0.1, "expected_batch_size": 10.0}
    with pytest.raises(UserError, match=f"`{key}`"):
        Gaussian(**{**good, **change})


def test_poisson_sizes_are_binomial_and_records_equally_likely():
    generator = rng(1)
    draws = [poisson_rows(50, 0.1, generator) for _ in range(20_000)]
    sizes = np.bincount([len(draw) for draw in draws], minlength=51)
    expected = stats.binom.pmf(np.arange(51), 50, 0.1) * len(draws)
    kept = expected > 5  # chi-square over sizes and over records, seed 1: false alarm 1e-4 each
    chi = ((sizes - expected) ** 2 / expected)[kept].sum()
    assert stats.chi2.sf(chi, kept.sum() - 1) > 1e-4
    counts = np.bincount(np.concatenate(draws), minlength=50)
    assert stats.chi2.sf(((counts - 2000) ** 2 / (2000 * 0.9)).sum(), 49) > 1e-4
    assert all(len(set(draw)) == len(draw) for draw in draws)


def test_a_tiny_rate_gives_empty_batches():
    assert any(len(rows) == 0 for rows in draw_steps("poisson", 100, 0.001, 50, rng()))


def test_shuffled_epochs_use_every_record_once():
    batches = list(draw_steps("shuffle", 10, 0.3, 4, rng()))
    assert [len(batch) for batch in batches] == [3, 3, 3, 1]
    assert sorted(np.concatenate(batches)) == list(range(10))
