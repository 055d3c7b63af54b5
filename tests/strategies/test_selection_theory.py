"""The selection paper's analysis: noise models, the bound's algebra, what holds on quadratics and what fails."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from dpfl_lightning.algorithms.allocation import allocate_int, allocate_real, noise_only, objective
from dpfl_lightning.algorithms.selection_noise import (
    PAPER_BIAS,
    SOUND_BIAS,
    Curvature,
    NoiseModel,
    bias_noise_ratio,
    convergence_bound,
    gaussian_noise,
    jain_index,
    laplace_noise,
    linear_model_curvature,
    objective_coefficients,
    selection_skew,
    smallest_c2,
)
from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.accountant import gaussian_delta, gaussian_mu

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
    assert smallest_c2(EPSILONS, delta) == pytest.approx(C2[delta], rel=1e-4)


def test_the_papers_constant_is_enough_up_to_a_budget_near_8():
    for delta, largest in ((1e-5, 7.97), (5e-5, 7.67), (1e-4, 7.53)):
        assert smallest_c2(largest - 0.01, delta) < math.sqrt(2) < smallest_c2(largest + 0.01, delta)


def test_unified_noise_is_lemma_1_and_lemma_2():
    records, epsilon, delta, quota, rate, clip, params, c2 = 600, 1.5, 5e-5, 40, 0.05, 20.0, 4266, 1.3
    lemma_1 = 4 * (rate * clip * c2) ** 2 * params * quota * math.log(1 / delta) / (records * epsilon) ** 2
    assert gaussian_noise(clip, params, epsilon, delta, records, c2).variance(quota, rate) == pytest.approx(
        lemma_1, rel=1e-12
    )
    lemma_2 = 8 * params * (clip * rate * quota / (records * epsilon)) ** 2
    assert laplace_noise(clip, params, epsilon, records).variance(quota, rate) == pytest.approx(lemma_2, rel=1e-12)
    exact = gaussian_noise(clip, params, epsilon, delta, records, c2=None)
    tightest = gaussian_noise(clip, params, epsilon, delta, records, c2=float(smallest_c2(epsilon, delta)))
    assert exact.variance(quota) == pytest.approx(tightest.variance(quota), rel=1e-9)


def some_constants(draw):
    strong = draw.uniform(0.05, 2)
    return Curvature(strong * draw.uniform(1, 20), strong, draw.choice([None, draw.uniform(0.1, 200)]))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("bias_constant", [PAPER_BIAS, SOUND_BIAS])
def test_the_bounds_terms_are_those_of_its_recursion(seed, bias_constant):
    """`L / (2 (gamma + T)) (gamma D + 4 / mu^2 A + 2 / mu B (gamma + T))`, with the recursion's A and B."""
    draw = np.random.default_rng(seed)
    curve, count, cohort, rounds = some_constants(draw), 7, 3, int(draw.integers(5, 300))
    quota = draw.multinomial(cohort * rounds, np.full(count, 1 / count))
    gamma_n, skew, start, variance = draw.exponential(1, count), draw.uniform(), draw.exponential(), draw.exponential()
    noise = NoiseModel(draw.exponential(), int(draw.integers(1, 3)), draw.exponential(1, count))
    bound = convergence_bound(quota, rounds, cohort, noise, gamma_n, curve, start, variance, skew, bias_constant)
    big, small, late = curve.smoothness, curve.strong_convexity, curve.offset + rounds
    slots = cohort * rounds
    squares = (
        2 * variance / cohort
        + 2 / (cohort**2 * rounds) * (quota * noise.variance(quota)).sum()
        + 2 * big / slots * (quota * gamma_n).sum()
    )
    linear = bias_constant * ((quota / slots - skew / count) * gamma_n).sum()
    total = big / (2 * late) * (curve.offset * start + 4 / small**2 * squares + 2 / small * linear * late)
    assert bound.total == pytest.approx(total, rel=1e-12)
    assert bound.total == pytest.approx(sum(vars(bound).values()), rel=1e-15)


def test_the_recursion_ends_where_it_is_said_to():
    draw = np.random.default_rng(0)
    for _ in range(300):
        curve = dataclasses.replace(some_constants(draw), lr_offset=None)
        squares, linear, distance = draw.exponential(5), draw.exponential(), (start := draw.exponential(10))
        for step in range(1, 301):
            rate = curve.learning_rate(step)
            distance = (1 - curve.strong_convexity * rate) * distance + rate**2 * squares + rate * linear
            late = step + curve.offset
            most = (curve.offset * start + 4 * squares / curve.strong_convexity**2) / late
            assert distance <= (most + 2 * linear / curve.strong_convexity) * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_holds_on_quadratics_by_a_wide_margin(seed):
    """`F_n = (w - c_n)' H (w - c_n) / 2`, quotas of systematic draws in expectation, 40 runs each."""
    draw = np.random.default_rng(seed)
    count, width, cohort, rounds = 10, 5, 4, 200
    curved = np.linspace(0.5, 2.0, width)
    centres, curve = draw.standard_normal((count, width)), Curvature(2.0, 0.5)
    best = centres.mean(axis=0)
    gamma_n = 0.5 * ((best - centres) ** 2 * curved).sum(axis=1)
    noise = NoiseModel(1.0, 1, draw.exponential(1e-3, count))
    quota = allocate_int(noise.factor, cohort * rounds, upper=rounds)
    spent = np.sqrt(noise.variance(quota) / width)
    errors = []
    for _ in range(40):
        w = np.zeros(width)
        for step in range(1, rounds + 1):
            chosen = draw.choice(count, cohort, p=quota / quota.sum())
            sent = curved * (w - centres[chosen]) + spent[chosen, None] * draw.standard_normal((cohort, width))
            w = w - curve.learning_rate(step) * sent.mean(axis=0)
        errors.append(0.5 * ((w - centres) ** 2 * curved).sum(axis=1).mean() - gamma_n.mean())
    bound = convergence_bound(quota, rounds, cohort, noise, gamma_n, curve, float((best**2).sum()))
    assert 0 < np.mean(errors) <= 0.1 * bound.total


def test_a_step_of_the_papers_proof_fails_and_the_corrected_one_does_not():
    """F_n = (w - c_n)^2 / 2, c = (0, 1), everything from client 0, at its minimum: eta 0.01, L = 1."""
    rate, share, centres, w, best = 0.01, np.array([1.0, 0.0]), np.array([0.0, 1.0]), 0.0, 0.5
    at_w, at_best, least = (w - centres) ** 2 / 2, (best - centres) ** 2 / 2, np.zeros(2)
    true = 2 * rate * (1 - rate) * (share * (at_best - at_w)).sum()
    claimed, corrected = (c * rate * (share * (at_best - least)).sum() for c in (PAPER_BIAS, SOUND_BIAS))
    assert true == pytest.approx(0.002475) and claimed == pytest.approx(0.001875)
    assert claimed < true <= corrected == pytest.approx(0.0025)


@pytest.mark.parametrize("seed", range(5))
def test_the_ratio_is_that_of_the_coefficients(seed):
    draw = np.random.default_rng(seed)
    curve, scale, rounds, cohort = some_constants(draw), draw.exponential(), int(draw.integers(2, 300)), 20
    for bias_constant in (PAPER_BIAS, SOUND_BIAS):
        of_noise, of_bias = objective_coefficients(rounds, cohort, scale, curve, bias_constant)
        ratio = bias_noise_ratio(rounds, cohort, scale, curve, bias_constant)
        assert ratio == pytest.approx(of_bias / of_noise, rel=1e-12)
    exact = dataclasses.replace(curve, lr_offset=None)
    big, small = curve.smoothness, curve.strong_convexity
    assert bias_noise_ratio(rounds, cohort, scale, exact, PAPER_BIAS) == pytest.approx(
        cohort / scale * (4 * big + 3 / 8 * small * rounds), rel=1e-12
    )
    assert bias_noise_ratio(rounds, cohort, scale, exact) == pytest.approx(
        cohort / scale * (5 * big + small * rounds / 2), rel=1e-12
    )


@pytest.mark.parametrize("exponent", [1, 2])
def test_allocation_minimises_the_part_of_the_bound_that_quotas_decide(exponent):
    draw = np.random.default_rng(7)
    curve, rounds, cohort, count = Curvature(2.0, 0.3), 30, 4, 8
    noise = NoiseModel(5.0, exponent, draw.exponential(1, count))
    gamma_n = draw.exponential(2, count)
    ratio = bias_noise_ratio(rounds, cohort, noise.scale, curve)

    def bounded(quota):
        return convergence_bound(quota, rounds, cohort, noise, gamma_n, curve, 1.0).total

    best = allocate_real(noise.factor, cohort * rounds, exponent, ratio * gamma_n)[0]
    for _ in range(200):
        move = draw.standard_normal(count)
        other = np.maximum(best + 0.05 * (move - move.mean()), 0)
        assert bounded(best) <= bounded(other * best.sum() / other.sum()) * (1 + 1e-12)


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


def test_skew_of_equal_quotas_is_one():
    draw = np.random.default_rng(9)
    for _ in range(20):
        least = draw.exponential(1, 6)
        assert selection_skew(np.full(6, 7), least + draw.exponential(1, 6), least) == pytest.approx(1, abs=1e-12)
    assert jain_index([3, 3, 3]) == pytest.approx(1) and jain_index([0, 0, 5]) == pytest.approx(1 / 3)
    assert math.isnan(jain_index([0, 0]))


def test_curvature_of_linear_models():
    assert linear_model_curvature("softmax", 2.0, 0.1).smoothness == pytest.approx(2.1)
    assert linear_model_curvature("binary", 2.0, 0.1).smoothness == pytest.approx(1.1)
    assert Curvature(2.0, 0.5).offset == 32 and Curvature(2.0, 0.5).learning_rate(8) == pytest.approx(0.1)
    for wrong in (lambda: linear_model_curvature("hinge", 1, 1), lambda: linear_model_curvature("softmax", 1, 0)):
        with pytest.raises(UserError):
            wrong()
    with pytest.raises(UserError, match="`strong_convexity` must be in"):
        Curvature(1.0, 2.0)


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
        factor = gaussian_noise(1, 1, epsilon, delta, 1, c2=2).factor if exponent == 1 else epsilon**-2.0
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
