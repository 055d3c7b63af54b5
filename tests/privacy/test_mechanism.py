"""Mechanism: what leaves a client are integers on a public grid; divisor, noise level, sensitivity."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import trapezoid

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, LaplaceEvent
from dpfl_lightning.privacy.accounting.gaussian import gaussian_mu
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.schedule import calibrate
from dpfl_lightning.privacy.mechanism import ENLARGED, MECHANISMS, Gaussian, Laplace, mechanism_of
from dpfl_lightning.privacy.noise import RandomGenerator, Streams

X = np.linspace(-60, 60, 120_001)  # noise of scale 1


def density(distribution):
    return np.exp(distribution.log_density(X))


def integrated(distribution):
    """Return the distribution function of noise of scale 1."""
    below = np.cumsum(density(distribution)) * (X[1] - X[0])
    return lambda drawn: np.interp(drawn, X + (X[1] - X[0]) / 2, below)


def rng(seed=0):
    return RandomGenerator(seed.to_bytes(32, "big"))


def test_the_divisor_is_the_expected_batch_size():
    mechanism = Gaussian(math.inf, 0.0, 0.1, 25.0)
    assert torch.equal(mechanism.privatise(torch.full((1, 3), 50.0), rng()), torch.full((1, 3), 2.0))
    assert mechanism.noise_std(steps=4, learning_rate=0.5) == 0, "no noise, though nothing is clipped"


@pytest.mark.parametrize("generator", [rng(3), Streams().generator("noise", 1, 0)], ids=["keyed", "fresh"])
@pytest.mark.parametrize("kind", MECHANISMS)
def test_noise_has_the_stated_level_also_on_an_empty_sum(kind, generator):
    mechanism = kind(clip_norm=3.0, noise_multiplier=2.0, sample_rate=1.0, expected_batch_size=10.0)
    for dtype in (torch.float32, torch.float64):
        noisy = mechanism.privatise(torch.zeros(1, 200_000, dtype=torch.float64), generator, dtype)[0]
        assert noisy.dtype == dtype and noisy.shape == (200_000,)
        # Kolmogorov-Smirnov, seed 3 or fresh: false alarm 1e-6
        assert stats.kstest(noisy.numpy() / (0.6 * ENLARGED), integrated(kind.distribution)).pvalue > 1e-6
        assert float(noisy.double().std()) == pytest.approx(mechanism.noise_std(1, 1.0), rel=0.02)
    unit = kind.accounted.unit_std
    assert mechanism.noise_std(steps=4, learning_rate=0.5) == pytest.approx(0.5 * unit * 0.6 * ENLARGED * 2)
    assert mechanism.event(5) == kind.accounted.of(1.0, 2.0, 5)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_a_density_is_symmetric_and_has_the_stated_moments(kind):
    total, variance, fourth = (trapezoid(X**power * density(kind.distribution), X) for power in (0, 2, 4))
    assert total == pytest.approx(1, rel=1e-6)
    assert math.sqrt(variance) == pytest.approx(kind.accounted.unit_std, rel=1e-6)
    assert fourth / variance**2 == pytest.approx(kind.distribution.kurtosis, rel=1e-5)
    assert np.allclose(density(kind.distribution), density(kind.distribution)[::-1], rtol=1e-9)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_a_kept_vector_changes_no_bit_and_one_that_does_not_fit_is_left_alone(kind):
    mechanism, sums = kind(1.0, 1.0, 0.1, 5.0), torch.randn(2, 70_000).double()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        new = mechanism.privatise(sums, rng(1), dtype)
        for shape, kept_dtype in itertools.product(((2, 70_000), (2, 69_999)), (torch.float32, torch.float64)):
            before, into = sums.clone(), torch.full(shape, float("nan"), dtype=kept_dtype)
            released = mechanism.privatise(sums, rng(1), dtype, into)
            assert torch.equal(released, new) and torch.equal(sums, before)
            fits = dtype == kept_dtype and shape == (2, 70_000)
            assert (released.data_ptr() == into.data_ptr()) == fits


CASES = [
    (kind, clip, z, count)
    for kind, clip, z, count in itertools.product(
        MECHANISMS, (1e-6, 0.3, 1.0, 20.0), (1e-4, 0.7, 5.0, 1e4), (1, 100, 10**6)
    )
]


def test_what_leaves_a_client_are_integers_times_a_public_power_of_two():
    """Of sums of every size, from far below the grid to as large as a million records, exact zeros and rounded ones."""
    for kind, clip, z, _ in CASES[::3]:
        mechanism = kind(clip, z, 1.0, expected_batch_size=32.0)
        values = torch.randn(64, generator=torch.Generator().manual_seed(0)).double()
        step = mechanism.grid(64)
        for size in (0.0, 1e-300, 1e-30, 1e-3 * step, clip, 1e6 * clip):
            for exact in (values, values.float().double()):
                released = mechanism.privatise(size * exact[None], rng(1), torch.float64)[0]
                integers = released / (step / 32.0)
                assert torch.equal(integers, integers.round())
                finer = size < 1e6 * clip  # where float64 holds the last bit
                assert len(integers.unique()) > 32 and (not finer or bool((integers % 2 == 1).any()))


def test_the_grid_depends_on_public_numbers_only_and_is_far_finer_than_the_noise():
    for kind, clip, z, count in CASES:
        mechanism = kind(clip, z, 1.0, 32.0)
        step = mechanism.grid(count)
        assert math.frexp(step)[0] == 0.5, "a power of two"
        assert step <= z * clip * 2.0**-18
        norm = {1: count, 2: math.sqrt(count)}[mechanism.clip_order]
        if z * norm > 2.0**40 / 400:
            continue  # see the next test
        assert mechanism.sensitivity(count) >= clip + step * norm, "the clip norm, and what rounding adds"
        assert mechanism.sensitivity(count) <= clip * ENLARGED <= 1.005 * clip
        assert mechanism.noise_scale(count) == mechanism.noise_scale() == pytest.approx(z * ENLARGED * clip, rel=1e-15)


def test_noise_covers_the_sensitivity_also_where_the_grid_cannot_be_fine():
    """10^7 coordinates in L1, and noise of 10^9 clip norms: more noise is added than usual, not too little."""
    for kind, z in itertools.product(MECHANISMS, (1e-9, 1.0, 1e9)):
        mechanism = kind(1.0, z, 1.0, 1.0)
        for count in (1, 10**5, 10**7):
            assert mechanism.noise_scale(count) >= z * mechanism.sensitivity(count)
            assert mechanism.noise_scale(count) / mechanism.grid(count) < 2.0**55, "integers of 64 bits hold its tails"


@pytest.mark.parametrize("piece", [200, 64])
def test_noise_is_added_to_the_rounded_sum_exactly(piece, monkeypatch):
    """The noise does not depend on the sum: two releases under one key differ by the rounded sums, bit for bit.

    Pieces of a sum share the grid of the whole sum, and no noise is used in two of them.
    """
    monkeypatch.setattr("dpfl_lightning.privacy.mechanism.PIECE", piece)
    for kind, clip, z, _ in CASES[::3]:
        mechanism = kind(clip, z, 1.0, 32.0)
        sums = clip * torch.randn(5, 40, generator=torch.Generator().manual_seed(2)).double()
        sums[0, 0], sums[1, 1], step = 1e6 * clip, -1e-20 * clip, mechanism.grid(200)
        noisy, noise = (mechanism.privatise(one, rng(2), torch.float64) for one in (sums, torch.zeros_like(sums)))
        assert torch.equal((noisy - noise) / (step / 32.0), (sums / step).round())
        assert len(noise.unique()) == noise.numel()
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(mechanism.privatise(sums, rng(2), dtype), noisy.to(dtype))


def test_neighbours_on_the_grid_are_no_further_apart_than_the_sensitivity():
    """Sums that differ by a record of exactly the clip norm, in hostile places: a coordinate, all, across halves."""
    draw = torch.Generator().manual_seed(4)
    for kind, clip, z, count in CASES:
        mechanism, count = kind(clip, z, 1.0, 1.0), min(count, 1000)
        step, order = mechanism.grid(count), mechanism.clip_order
        one = torch.zeros(count).double()
        one[0] = 1.0
        for direction in (one, torch.ones(count).double(), torch.randn(count, generator=draw).double()):
            record = clip * direction / direction.norm(p=order)
            for around in (torch.zeros(count).double(), step * (torch.arange(count) + 0.5 - 1e-9)):
                here, there = ((own / step).round() * step for own in (around, around + record))
                assert float((there - here).norm(p=order)) <= mechanism.sensitivity(count)


def test_noise_is_independent_in_every_coordinate_and_call():
    for kind in MECHANISMS:
        mechanism, generator = kind(1.0, 1.0, 1.0, 1.0), rng(4)
        rows = torch.cat([mechanism.privatise(torch.zeros(1, 20_000), generator, torch.float64) for _ in range(20)])
        correlation = np.corrcoef(rows.numpy())[np.triu_indices(20, 1)] * math.sqrt(20_000)
        assert np.abs(correlation).max() < stats.norm.isf(1e-6 / 2 / 190)  # seed 4: false alarm 1e-6


def test_a_planned_event_is_its_mechanism():
    assert mechanism_of(GaussianEvent(0.25, 3.0, 7), 2.0, 40) == Gaussian(2.0, 3.0, 0.25, 10.0)
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
        noise, spent = planned_noise(GaussianEvent(1.0, None), epsilon, delta, count, "pld", adjacency)
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
    """E|Z|^2 of an update, 1000 parameters, 2000 draws, seed 5, within 2 % (Gaussian) and 3 % (Laplace).

    Noise covers the enlarged clip norm, 0.35 % more than the papers'.
    """
    records, epsilon, delta, count, rate, clip = 600, 1.5, 5e-5, 40, 0.05, 20.0
    if kind is Gaussian:  # Lemma 1 with c_2 = sqrt(2)
        multiplier = 2 * math.sqrt(2 * count * math.log(1 / delta)) / epsilon
        formula = 4 * (rate * clip) ** 2 * 1000 * 2 * count * math.log(1 / delta) / (records * epsilon) ** 2
    else:  # Lemma 2
        multiplier = 2 * count / epsilon
        formula = 8 * 1000 * (clip * rate * count / (records * epsilon)) ** 2
    mechanism = kind(clip, multiplier, 1.0, float(records))
    noise = rate * mechanism.privatise(torch.zeros(2000, 1000), rng(5), torch.float64)
    assert float(noise.square().sum(dim=1).mean()) == pytest.approx(formula, rel=0.02 if kind is Gaussian else 0.03)
    assert mechanism.noise_std(1, rate) ** 2 * 1000 == pytest.approx(formula * ENLARGED**2, rel=1e-12)


def test_bad_values_are_named():
    good = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sample_rate": 0.1, "expected_batch_size": 10.0}
    bad = {
        "clip_norm": (0.0, math.inf),
        "noise_multiplier": (-1.0, math.inf, math.nan),
        "sample_rate": (1.8, 0.0),
        "expected_batch_size": (0.0,),
    }
    for kind, (key, values) in itertools.product(MECHANISMS, bad.items()):
        for value in values:
            with pytest.raises(UserError, match=f"`{key}`"):
                kind(**{**good, key: value})
