"""Simulations of the mixture's claims: overlap, recovery, M by MSS, and the rate of EM."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from experiments.papers.clustered.recovery import (
    TRUE,
    em_rate,
    em_step,
    grouped,
    number_of_groups,
    overlap,
    overlap_by_sampling,
    recovery,
)


@pytest.mark.parametrize("nested", [False, True])
def test_means_are_as_far_apart_as_is_said(nested):
    """Noise adds p (1/3 + 1/6) to the squared distance of the means of 3 and of 6 clients."""
    params = 50_000
    points = grouped(100.0, params, 0, nested)
    means = torch.stack([points[group == TRUE].mean(dim=0) for group in range(4)])
    distances = torch.cdist(means, means)
    assert float(distances[0, 1]) == pytest.approx(math.sqrt(200**2 + params / 2), rel=0.03)
    assert points.shape == (21, params)
    assert (float(distances[0, 2]) > 2 * float(distances[0, 1])) == nested


@pytest.mark.parametrize("separation", [0.0, 1.0, 2.0, 3.0])
def test_the_overlap_of_two_gaussians_is_two_tails(separation):
    assert overlap_by_sampling(separation, draws=400_000) == pytest.approx(2 * norm.sf(separation), rel=0.05)


def test_the_distance_from_two_tails_is_in_standard_errors():
    """A standard error of n draws in [0, 1] is at most 1 / (2 sqrt(n - 1))."""
    found = overlap(1.0, draws=10_000)
    assert found["formula"] == pytest.approx(0.317310508, rel=1e-8)
    assert 0 < abs(found["sampled"] - found["formula"]) * 2 * math.sqrt(9_999) <= found["errors"] < 3


def test_the_bound_of_the_lemma_says_nothing_of_recovery():
    few, all_records = recovery(32, 0.02, 5.0, draws=2), recovery(6600, 0.02, 5.0, draws=2)
    assert few["bound"] < 1e-4 and few["paper"] == few["robust"] == 0, "as if separated, and nothing is found"
    assert all_records["paper"] == all_records["robust"] == 1
    rho = all_records["z"] / few["z"]
    assert all_records["separation"] / few["separation"] == pytest.approx(math.sqrt(6600 / 32) / rho)


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")
def test_the_number_of_groups_is_found_when_they_are_far_apart_and_mss_misses_nested_ones():
    far = number_of_groups(3.0, 2000, draws=2)
    assert far["mss_equidistant"] == far["robust_equidistant"] == 1 and far["mss_nested"] == 0


def em_by_hand(points, psi):
    """The same step, point by point."""
    total, means, squares = np.zeros(2), np.zeros(2), np.zeros(2)
    shares = []
    for point in points:
        density = [
            weight * math.exp(-((point - psi[k]) ** 2) / (2 * psi[2 + k])) / math.sqrt(2 * math.pi * psi[2 + k])
            for k, weight in enumerate((psi[4], 1 - psi[4]))
        ]
        shares.append(np.array(density) / sum(density))
        total += shares[-1]
        means += shares[-1] * point
    means /= total
    for point, share in zip(points, shares, strict=True):
        squares += share * (point - means) ** 2
    return [*means, *(squares / total), total[0] / len(points)]


def test_a_step_of_em_is_the_textbooks():
    points, psi = np.random.default_rng(0).standard_normal(50), np.array([-1.0, 0.5, 0.8, 1.5, 0.3])
    assert em_step(points, psi) == pytest.approx(em_by_hand(points, psi))


def test_em_is_faster_the_less_groups_overlap_but_not_as_fast_as_the_root_of_the_overlap():
    rates = [em_rate(separation, seeds=1) for separation in (2.0, 3.0, 4.0)]
    assert [one["rate"] for one in rates] == sorted((one["rate"] for one in rates), reverse=True)
    assert rates[0]["rate"] == pytest.approx(0.727, abs=0.03) and rates[1]["rate"] == pytest.approx(0.192, abs=0.02)
    assert all(one["rate"] > one["order"] for one in rates)
