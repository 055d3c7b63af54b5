"""Mechanism and sampling: divisor, noise level, distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accountant import gaussian_mu, get_accountant
from dpfl_lightning.privacy.events import GaussianEvent, LaplaceEvent
from dpfl_lightning.privacy.mechanism import Gaussian, Laplace, MechanismRows, mechanism_of
from dpfl_lightning.privacy.noise import SecureGenerator
from dpfl_lightning.privacy.sampling import draw_steps, poisson_rows
from dpfl_lightning.privacy.schedule import ClientSchedule, Planned, calibrate


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


@pytest.mark.parametrize("generator", [rng(3), SecureGenerator()], ids=["keyed", "secure"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_laplace_noise_has_the_stated_scale(dtype, generator):
    mechanism = Laplace(clip_norm=3.0, noise_multiplier=2.0, sample_rate=1.0, expected_batch_size=10.0)
    noisy = mechanism.privatise(torch.zeros(1, 200_000, dtype=dtype), generator)[0]
    assert noisy.dtype == dtype and noisy.shape == (200_000,)
    # Kolmogorov-Smirnov against Laplace(0.6), seed 3 or fresh: false alarm 1e-4
    assert stats.kstest(noisy.numpy() / 0.6, "laplace").pvalue > 1e-4
    assert float(noisy.double().std()) == pytest.approx(mechanism.noise_std(1, 1.0), rel=0.02)
    assert mechanism.noise_std(steps=4, learning_rate=0.5) == pytest.approx(0.5 * math.sqrt(2) * 0.6 * 2)
    assert mechanism.event(5) == LaplaceEvent(2.0, 5) and mechanism.clip_order == 1


def test_noise_is_independent_in_every_coordinate_and_call():
    mechanism = Laplace(1.0, 1.0, 1.0, 1.0)
    rows = torch.cat([mechanism.privatise(torch.zeros(1, 20_000, dtype=torch.float64), g) for g in [rng(4)] * 20])
    correlation = np.corrcoef(rows.numpy())[np.triu_indices(20, 1)] * math.sqrt(20_000)
    assert np.abs(correlation).max() < stats.norm.isf(1e-4 / 2 / 190)  # seed 4: false alarm 1e-4
    assert len(rows.flatten().unique()) == rows.numel()


@pytest.mark.parametrize("kind", [Gaussian, Laplace])
def test_rows_are_what_each_client_releases_alone(kind):
    mechanisms = [kind(1.0 + i, 0.0 if i == 1 else 2.0, 1.0, 4.0 + i) for i in range(3)]
    sums = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0))
    together = MechanismRows(mechanisms, [rng(i) for i in range(3)], sums).privatise(sums)
    alone = [m.privatise(own, rng(i)) for i, (m, own) in enumerate(zip(mechanisms, sums, strict=True))]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-6, atol=1e-7)
    assert torch.equal(together[1], sums[1] / 5.0), "without noise nothing is drawn"


def test_a_planned_event_is_its_mechanism():
    assert mechanism_of(GaussianEvent(0.25, 3.0, 7), 2.0, 40) == Gaussian(2.0, 3.0, 0.25, 10.0)
    assert mechanism_of(LaplaceEvent(3.0, 7), 2.0, 40) == Laplace(2.0, 3.0, 1.0, 40.0)
    with pytest.raises(KeyError, match="not solved"):
        mechanism_of(LaplaceEvent(None), 2.0, 40)


def planned_noise(event, epsilon, delta, count, accountant, adjacency):
    run = ClientSchedule(epsilon, delta, (Planned("train", event, count),))
    (solved,) = calibrate([run], get_accountant(accountant, adjacency))
    spent = get_accountant(accountant, adjacency).epsilon(solved.events(), delta)
    return solved.noise_multiplier("train"), spent


@pytest.mark.parametrize("count", [1, 40, 200])
@pytest.mark.parametrize(("adjacency", "sensitivity"), [("add_remove", 1), ("replace_one", 2)])
def test_as_many_releases_as_planned_cost_the_budget_and_no_more(count, adjacency, sensitivity):
    """Gaussian: noise / sensitivity = sqrt(T) / mu. Laplace: scale / sensitivity = T / epsilon."""
    for epsilon, delta in ((0.3, 1e-5), (1.5, 5e-5), (6.0, 1e-4)):
        noise, spent = planned_noise(GaussianEvent(1.0, None), epsilon, delta, count, "gdp", adjacency)
        mu = float(gaussian_mu(np.array([epsilon]), np.array([delta]))[0])
        assert noise / sensitivity == pytest.approx(math.sqrt(count) / mu, rel=1e-5)
        assert noise / sensitivity >= math.sqrt(count) / mu and epsilon * (1 - 1e-5) <= spent <= epsilon
        noise, spent = planned_noise(LaplaceEvent(None), epsilon, 0.0, count, "rdp", adjacency)
        assert noise / sensitivity == pytest.approx(count / epsilon, rel=1e-5)
        assert noise / sensitivity >= count / epsilon and epsilon * (1 - 1e-5) <= spent <= epsilon


def test_laplace_noise_may_use_a_delta():
    """Many small pure epsilons compose to less at a delta than their sum."""
    pure, _ = planned_noise(LaplaceEvent(None), 1.0, 0.0, 200, "rdp", "add_remove")
    approximate, spent = planned_noise(LaplaceEvent(None), 1.0, 1e-4, 200, "rdp", "add_remove")
    assert approximate < 0.6 * pure and 0.999 < spent <= 1.0
    with pytest.raises(UserError, match="`delta` must be in \\(0, 1\\), got 0"):
        planned_noise(GaussianEvent(1.0, None), 1.0, 0.0, 1, "rdp", "add_remove")


@pytest.mark.parametrize("kind", [Gaussian, Laplace])
def test_variance_of_a_full_update_is_that_of_the_papers_lemmas(kind):
    """E|Z|^2 of an update, 1000 parameters, 2000 draws, seed 5, within 2 % (Gaussian) and 3 % (Laplace)."""
    records, epsilon, delta, count, rate, clip = 600, 1.5, 5e-5, 40, 0.05, 20.0
    if kind is Gaussian:  # Lemma 1 with c_2 = sqrt(2)
        multiplier = 2 * math.sqrt(2 * count * math.log(1 / delta)) / epsilon
        formula = 4 * (rate * clip) ** 2 * 1000 * 2 * count * math.log(1 / delta) / (records * epsilon) ** 2
    else:  # Lemma 2
        multiplier = 2 * count / epsilon
        formula = 8 * 1000 * (clip * rate * count / (records * epsilon)) ** 2
    mechanism = kind(clip, multiplier, 1.0, float(records))
    noise = rate * mechanism.privatise(torch.zeros(2000, 1000, dtype=torch.float64), rng(5))
    assert float(noise.square().sum(dim=1).mean()) == pytest.approx(formula, rel=0.02 if kind is Gaussian else 0.03)
    assert mechanism.noise_std(1, rate) ** 2 * 1000 == pytest.approx(formula, rel=1e-12)


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
    for kind in (Gaussian, Laplace):
        with pytest.raises(UserError, match=f"`{key}`"):
            kind(**{**good, **change})


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
