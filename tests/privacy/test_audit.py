"""The statistics of an audit: golden values, coverage, and bounds that stay below the truth."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from dpfl_lightning.auditing import bounds as audit
from dpfl_lightning.auditing import one_run
from dpfl_lightning.privacy.accounting.gaussian import gaussian_epsilon


@settings(max_examples=60, deadline=None)
@given(
    canaries=st.integers(1, 60),
    share=st.floats(0, 1),
    right=st.floats(0, 1),
    epsilon=st.floats(0, 5),
    delta=st.sampled_from([0.0, 1e-9, 1e-4, 0.1, 1.0]),
)
def test_the_p_value_is_the_papers_sum(canaries, share, right, epsilon, delta):
    guessed = round(share * canaries)
    correct = round(right * guessed)
    chance = 1 / (1 + math.exp(-epsilon))
    likely = binom.pmf(np.arange(guessed + 1), guessed, chance)
    tail = likely[correct:].sum()
    worst = max((likely[correct - i : correct].sum() / i for i in range(1, correct + 1)), default=0.0)
    expected = min(1.0, tail + 2 * canaries * delta * worst)
    ours = audit.one_run_p_value(canaries, guessed, correct, epsilon, delta)
    assert ours == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.slow
def test_one_run_bounds_fail_as_rarely_as_they_say():
    """Randomised response and Gaussian noise on every canary, seed 0: 35 failures of 200 have a chance of 1e-3."""
    rng, m, failed = np.random.default_rng(0), 150, {"plain": 0, "curve": 0}
    epsilon, mu = 1.0, 1.0
    for _ in range(200):
        included = rng.random(m) < 0.5
        told = included ^ (rng.random(m) > 1 / (1 + math.exp(-epsilon)))
        tallies = audit.guesses(told + 0.01 * rng.random(m), included, audit.numbers_of_guesses(m))
        failed["plain"] += audit.one_run_epsilon(m, tallies, 0.1, delta=1e-9) > epsilon
        tallies = audit.guesses(mu * included + rng.standard_normal(m), included, audit.numbers_of_guesses(m))
        failed["curve"] += audit.one_run_weakness(m, tallies, 0.1, audit.gaussian_curve) > mu
    assert max(failed.values()) < 35, failed


def test_one_run_bounds_grow_with_right_guesses_and_fall_with_delta():
    bounds = [audit.one_run_epsilon(200, [(100, right)], 0.05, 1e-5) for right in (60, 80, 95, 100)]
    assert bounds == sorted(bounds) and bounds[0] < bounds[-1]
    curves = [audit.one_run_weakness(200, [(100, right)], 0.05, audit.gaussian_curve) for right in (60, 80, 95, 100)]
    assert curves == sorted(curves) and curves[0] < curves[-1]
    looser = [audit.one_run_epsilon(200, [(100, 90)], 0.05, delta) for delta in (0.0, 1e-4, 1e-3, 1e-2)]
    assert looser == sorted(looser, reverse=True) and looser[0] > looser[-1]
    shared = audit.one_run_epsilon(200, [(100, 90), (2, 1)], 0.05, 1e-5)
    assert shared == pytest.approx(audit.one_run_epsilon(200, [(100, 90)], 0.025, 1e-5), rel=1e-6)


def test_guesses_on_both_sides_are_counted():
    rng = np.random.default_rng(1)
    scores, included = rng.standard_normal(99), rng.random(99) < 0.5
    for (guessed, right), k in zip(audit.guesses(scores, included, (1, 7, 49)), (1, 7, 49), strict=True):
        order = np.argsort(scores)
        assert guessed == 2 * k and right == included[order[-k:]].sum() + (~included[order[:k]]).sum()


def test_a_curve_of_points_lies_below_the_truth_and_meets_it():
    """Of a Gaussian: what is known of it at some points hides no more than it does."""
    deltas = one_run.DELTAS
    points = audit.curve_of_points(gaussian_epsilon(np.full(len(deltas), 1.3), deltas), deltas)
    true = audit.gaussian_curve(1.3)
    powers = np.linspace(0.001, 0.999, 200)
    gaps = np.array([true(power) - points(power) for power in powers])
    assert (gaps > -1e-6).all() and gaps.max() < 2e-3


@pytest.mark.slow
def test_intervals_fail_as_rarely_as_they_say():
    """Seed 2: 74 failures of 1,000 at 0.05, and 28 where they are exact, have a chance of 1e-3."""
    rng, failed = np.random.default_rng(2), np.zeros(6)
    for _ in range(1000):
        inside, outside = 3.0 + 2.0 * (0.7 + rng.standard_normal(20)), 3.0 + 2.0 * rng.standard_normal(15)
        low, high = audit.shift_interval(inside, outside, 0.05)
        low_std, high_std = audit.std_interval(float(inside.std(ddof=1)), 19, 0.05)
        low_rate, high_rate = audit.rate_interval(rng.binomial(30, 0.2), 30, 0.05)
        failed += [low > 0.7, high < 0.7, low_std > 2, high_std < 2, low_rate > 0.2, high_rate < 0.2]
    assert (failed < 74).all() and (failed[:4] > 28).all(), failed  # the first four are exact


@pytest.mark.parametrize("apart", [0.0, 0.5, -3.0, 50.0, 1e4, -1e4])
def test_a_shift_far_beyond_the_noise_is_bounded_as_well(apart):
    """Also where noncentral t probabilities cannot be found; the same order as the estimate."""
    rng = np.random.default_rng(3)
    inside, outside = apart + rng.standard_normal(200), rng.standard_normal(200)
    low, high = audit.shift_interval(inside, outside, 1e-4)
    assert low < apart < high and high - low < 1 + 0.5 * abs(apart)
    assert audit.shift_interval(outside, inside, 1e-4) == pytest.approx((-high, -low), rel=1e-6)
    assert audit.shift_interval(np.ones(3), np.zeros(3), 0.05) == (math.inf, math.inf), "without noise"
    assert audit.shift_interval(np.ones(3), np.ones(3), 0.05) == (0.0, 0.0)


@pytest.mark.e2e
def test_releases_to_tell_are_enough_and_not_too_many():
    """Significance 0.01, 10 % misses: 300 samples of 1.5 mu, seed 4; 50 or more misses have a chance of 1e-4."""
    rng, mu = np.random.default_rng(4), 0.8
    count = audit.releases_to_tell(mu, 1.5, 0.01)
    missed = sum(
        audit.shift_interval(1.5 * mu + rng.standard_normal(count), rng.standard_normal(count), 0.01)[0] <= mu
        for _ in range(300)
    )
    assert 5 <= missed < 50


@pytest.mark.slow
@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_a_threshold_stays_below_the_truth_and_comes_near(mu):
    """A Gaussian's epsilon, 100 audits at significance 0.05, seed 5: 13 failures have a chance of 1e-3."""
    rng = np.random.default_rng(5)
    truth = float(gaussian_epsilon(np.array([mu]), np.array([0.01]))[0])
    bounds = [
        audit.threshold_epsilon(mu + rng.standard_normal(2000), rng.standard_normal(2000), 0.05, 0.01)
        for _ in range(100)
    ]
    assert sum(bound > truth for bound in bounds) <= 12
    assert np.median(bounds) > 0.3 * truth


def test_a_threshold_sees_who_is_missing_as_well_as_who_is_there():
    """Low scores that only a data set without the canary has."""
    rng = np.random.default_rng(6)
    outside = np.where(rng.random(2000) < 0.5, -9.0, rng.standard_normal(2000))
    assert audit.threshold_epsilon(rng.standard_normal(2000), outside, 0.05, 1e-5) > 4
