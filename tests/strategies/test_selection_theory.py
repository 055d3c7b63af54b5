"""The selection paper's analysis: noise models, the bound's algebra, what holds on quadratics and what fails."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpfl_lightning.algorithms.allocation import allocate_int, noise_only, objective
from dpfl_lightning.algorithms.selection_estimates import (
    PAPER_BIAS,
    Constants,
    NoiseModel,
    bias_noise_ratio,
    jain_index,
    laplace_noise,
)
from dpfl_lightning.privacy.accounting.accountant import gaussian_delta, gaussian_mu

SOUND_BIAS = 2.0  # what the proof supports instead of `PAPER_BIAS`
EPSILONS = np.array([0.1, 0.5, 1, 1.5, 3, 4, 6, 10])
INVERSE_MU = {
    1e-5: [30.7496, 7.0318, 3.7306, 2.5826, 1.3906, 1.0812, 0.7636, 0.4999],
    1e-4: [24.5081, 5.8938, 3.1857, 2.2292, 1.2232, 0.9587, 0.6851, 0.4553],
}
C2 = {
    1e-5: [0.9062, 1.0362, 1.0995, 1.1417, 1.2295, 1.2746, 1.3503, 1.4733],
    1e-4: [0.8076, 0.9710, 1.0497, 1.1018, 1.2091, 1.2636, 1.3545, 1.5001],
}


@pytest.mark.parametrize("delta", INVERSE_MU)
def test_gaussian_privacy_of_a_budget(delta):
    mu = gaussian_mu(EPSILONS, np.full(8, delta))
    assert 1 / mu == pytest.approx(INVERSE_MU[delta], rel=1e-4)
    spent = gaussian_delta(EPSILONS, mu)
    assert spent == pytest.approx(np.full(8, delta), rel=1e-9) and bool((spent <= delta).all())
    c2 = EPSILONS / (mu * math.sqrt(math.log(1 / delta)))  # smallest constant for which Lemma 1 holds
    assert c2 == pytest.approx(C2[delta], rel=1e-4)


def test_laplace_noise_is_lemma_2():
    records, epsilon, quota, rate, clip, params = 600, 1.5, 40, 0.05, 20.0, 4266
    lemma_2 = 8 * params * (clip * rate * quota / (records * epsilon)) ** 2
    assert laplace_noise(clip, params, epsilon, records).variance(quota, rate) == pytest.approx(lemma_2, rel=1e-12)


def convergence_bound(quota, rounds, cohort, noise, gamma_n, constants, bias_constant=PAPER_BIAS):
    """Theorem 5 with rho_min = 0: `L / (2 (gamma + T)) (gamma D + 4 / mu^2 A + 2 / mu B (gamma + T))`."""
    big, small, late = constants.smoothness, constants.strong_convexity, constants.lr_offset + rounds
    slots = cohort * rounds
    squares = (
        2 * constants.gradient_variance / cohort
        + 2 / (cohort**2 * rounds) * (quota * noise.variance(quota)).sum()
        + 2 * big / slots * (quota * gamma_n).sum()
    )
    linear = bias_constant * (quota / slots * gamma_n).sum()
    start = constants.lr_offset * constants.start_distance
    return big / (2 * late) * (start + 4 / small**2 * squares + 2 / small * linear * late)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_holds_on_quadratics_by_a_wide_margin(seed):
    """`F_n = (w - c_n)' H (w - c_n) / 2`, quotas of systematic draws in expectation, 40 runs each."""
    draw = np.random.default_rng(seed)
    count, width, cohort, rounds = 10, 5, 4, 200
    curved = np.linspace(0.5, 2.0, width)
    centres = draw.standard_normal((count, width))
    best = centres.mean(axis=0)
    gamma_n = 0.5 * ((best - centres) ** 2 * curved).sum(axis=1)
    constants = Constants(float((best**2).sum()), 8 * 2.0 / 0.5, 0.0, 2.0, 0.5)
    noise = NoiseModel(1.0, 1, draw.exponential(1e-3, count))
    quota = allocate_int(noise.factor, cohort * rounds, upper=rounds)
    spent = np.sqrt(noise.variance(quota) / width)
    errors = []
    for _ in range(40):
        w = np.zeros(width)
        for step in range(1, rounds + 1):
            chosen = draw.choice(count, cohort, p=quota / quota.sum())
            sent = curved * (w - centres[chosen]) + spent[chosen, None] * draw.standard_normal((cohort, width))
            w = w - 2 / (0.5 * (step + constants.lr_offset)) * sent.mean(axis=0)
        errors.append(0.5 * ((w - centres) ** 2 * curved).sum(axis=1).mean() - gamma_n.mean())
    bound = convergence_bound(quota, rounds, cohort, noise, gamma_n, constants, SOUND_BIAS)
    assert 0 < np.mean(errors) <= 0.1 * bound


def test_a_step_of_the_papers_proof_fails_and_the_corrected_one_does_not():
    """F_n = (w - c_n)^2 / 2, c = (0, 1), everything from client 0, at its minimum: eta 0.01, L = 1."""
    rate, share, centres, w, best = 0.01, np.array([1.0, 0.0]), np.array([0.0, 1.0]), 0.0, 0.5
    at_w, at_best, least = (w - centres) ** 2 / 2, (best - centres) ** 2 / 2, np.zeros(2)
    true = 2 * rate * (1 - rate) * (share * (at_best - at_w)).sum()
    claimed, corrected = (c * rate * (share * (at_best - least)).sum() for c in (PAPER_BIAS, SOUND_BIAS))
    assert true == pytest.approx(0.002475) and claimed == pytest.approx(0.001875)
    assert claimed < true <= corrected == pytest.approx(0.0025)


@pytest.mark.parametrize("exponent", [1, 2])
def test_allocation_minimises_the_part_of_the_bound_that_quotas_decide(exponent):
    draw = np.random.default_rng(7)
    constants, rounds, cohort, count = Constants(1.0, 20.0, 0.5, 2.0, 0.3), 300, 4, 8
    noise = NoiseModel(0.5, exponent, draw.exponential(1, count))
    gamma_n = draw.exponential(2, count)
    ratio = bias_noise_ratio(constants, rounds, cohort) / noise.scale

    def bounded(quota):
        return convergence_bound(quota, rounds, cohort, noise, gamma_n, constants)

    best = allocate_int(noise.factor, cohort * rounds, exponent, ratio * gamma_n)
    for giver, taker in np.argwhere(~np.eye(count, dtype=bool)):
        if best[giver]:
            other = best - np.eye(count, dtype=int)[giver] + np.eye(count, dtype=int)[taker]
            assert bounded(best) <= bounded(other) * (1 + 1e-12)


def test_the_objective_is_convex_client_by_client():
    """Second differences: (z + 1) z factor T^(z - 1) on the diagonal, nothing beside it."""
    draw = np.random.default_rng(8)
    for exponent in (1, 2):
        quota, factor, bias = draw.uniform(1, 20, 4), draw.exponential(1, 4), draw.exponential(1, 4)
        h = 1e-2
        for a in range(4):
            for b in range(4):
                ways = [
                    sign_a
                    * sign_b
                    * objective(quota + h * (sign_a * np.eye(4)[a] + sign_b * np.eye(4)[b]), factor, exponent, bias)
                    for sign_a in (1, -1)
                    for sign_b in (1, -1)
                ]
                curvature = sum(ways) / (4 * h**2)
                expected = (exponent + 1) * exponent * factor[a] * quota[a] ** (exponent - 1) if a == b else 0.0
                assert curvature == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_jain_index_of_extremes():
    assert jain_index([3, 3, 3]) == pytest.approx(1) and jain_index([0, 0, 5]) == pytest.approx(1 / 3)
    assert math.isnan(jain_index([0, 0]))


#: noise of a round's mean over that of quotas of least noise: equal quotas with equal weights, with weights by budget,
#: and with weights by inverse noise
TABLE = {
    (0.1, 3, 1): (10.2, 1.34, 1.03),
    (0.1, 3, 2): (7.8, 1.04, 0.80),
    (0.5, 4, 1): (3.0, 1.23, 1.02),
    (0.5, 4, 2): (2.5, 1.03, 0.86),
    (1, 6, 1): (2.4, 1.20, 1.02),
    (1, 6, 2): (2.0, 1.02, 0.87),
}


@pytest.mark.slow
@pytest.mark.parametrize(("low", "high", "exponent"), TABLE)
def test_most_of_the_gain_is_weighting_by_noise(low, high, exponent):
    """200 draws of 100 budgets, seed 10; the first column has heavy tails."""
    draw, rows = np.random.default_rng(10), []
    for _ in range(200):
        epsilon, delta = draw.uniform(low, high, 100), draw.uniform(1e-5, 1e-4, 100)
        factor = np.log(1 / delta) / epsilon**2 if exponent == 1 else epsilon**-2.0
        quota = noise_only(factor, 4000, exponent)
        ours = (quota ** (exponent + 1) * factor).sum() / 4000 / 20
        cohorts = np.array([draw.choice(100, 20, replace=False) for _ in range(50)])
        noise, budget = (40.0**exponent * factor)[cohorts], epsilon[cohorts]
        weights = [np.ones_like(noise), budget, 1 / noise]
        rows.append([((w / w.sum(1, keepdims=True)) ** 2 * noise).sum(1).mean() / ours for w in weights])
    equal, by_budget, by_noise = np.mean(rows, axis=0)
    expected = TABLE[low, high, exponent]
    assert equal == pytest.approx(expected[0], rel=0.1)
    assert (by_budget, by_noise) == pytest.approx(expected[1:], rel=0.03)
