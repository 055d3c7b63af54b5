"""The selection paper's analysis: noise, ratio of bias and noise, and estimates from noisy losses."""

import math

import numpy as np
import pytest
from reference import noise_only

from dpfl_lightning.algorithms.allocation import allocate_int
from dpfl_lightning.algorithms.selection_estimates import jain_index, shrunken_heterogeneity
from dpfl_lightning.privacy.accounting.gaussian import gaussian_delta, gaussian_mu

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


def test_jain_index_of_extremes():
    assert jain_index([3, 3, 3]) == pytest.approx(1) and jain_index([0, 0, 5]) == pytest.approx(1 / 3)
    assert math.isnan(jain_index([0, 0]))


def some_reports(draw, spread):
    """Ten rounds of 20 of 100 clients, losses 1.5 and between clients `spread`, noise of U[0.1, 3] budgets."""
    epsilon = draw.uniform(0.1, 3, 100)
    factor = 1 / (gaussian_mu(epsilon, np.full(100, 5e-5)) * 600) ** 2
    share = noise_only(factor, 1.0)
    counts = np.bincount(np.concatenate([draw.choice(100, 20, replace=False, p=share) for _ in range(10)]), None, 100)
    noise_std = np.sqrt(factor / factor.min())
    means = (
        1.5
        + spread * draw.standard_normal(100)
        + noise_std * draw.standard_normal(100) / np.sqrt(np.maximum(counts, 1))
    )
    return means, counts, noise_std, factor


@pytest.mark.slow
def test_pure_noise_makes_no_difference():
    """500 seeds; the chance is 3 %, so 93 % fail once in 10^6 suites."""
    draw, zeros = np.random.default_rng(0), 0
    for _ in range(500):
        means, counts, noise_std, factor = some_reports(draw, spread=0.0)
        estimate, between = shrunken_heterogeneity(means, counts, noise_std, max_loss=100.0)
        if between == 0:
            zeros += 1
            assert np.ptp(estimate) == 0
            quota = allocate_int(factor, 4000, bias_cost=30 * estimate)
            assert quota.tolist() == allocate_int(factor, 4000).tolist()
    assert zeros >= 0.93 * 500


def test_one_report_has_nothing_to_be_compared_with():
    """Rounding leaves a spread above 0 in one of ten draws."""
    draw = np.random.default_rng(0)
    for _ in range(100):
        report, noise = draw.normal(1.5), draw.exponential()
        estimate, between = shrunken_heterogeneity([report, 0.0], [3, 0], [noise, 1.0], max_loss=100.0)
        assert between == 0 and estimate == pytest.approx(np.full(2, max(report, 0.0)))


def test_exactly_what_noise_gives_is_no_difference():
    """Two clients, one report each, noise 1: Q = S - 1 = 1."""
    estimate, between = shrunken_heterogeneity([0.0, np.sqrt(2.0)], [1, 1], [1.0, 1.0], max_loss=10.0)
    assert between == 0 and np.ptp(estimate) == 0


def test_a_true_spread_is_found():
    """Spread 0.5, noise 0.1: variance within 10 % of 0.25 on average over 200 draws of 100 clients, seed 1."""
    draw, found = np.random.default_rng(1), []
    for _ in range(200):
        truth = 3 + 0.5 * draw.standard_normal(100)
        reports = truth + 0.1 * draw.standard_normal(100)
        estimate, between = shrunken_heterogeneity(reports, np.ones(100), np.full(100, 0.1), max_loss=100.0)
        found.append(between)
        assert np.corrcoef(estimate, truth)[0, 1] > 0.9
    assert np.mean(found) == pytest.approx(0.25, rel=0.1)


def test_estimates_stay_in_range_and_the_unseen_get_the_mean():
    estimate, between = shrunken_heterogeneity([-50.0, 80.0, 7.0], [9, 9, 0], [1.0, 1.0, 1.0], max_loss=2.3)
    assert between > 0 and estimate.tolist() == [0.0, 2.3, 2.3]
    assert shrunken_heterogeneity([0.0], [0], [1.0], 2.3) == (pytest.approx([0.0]), 0.0)
