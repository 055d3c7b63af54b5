"""Noise of the first round, separation and overlap: formulas against simulation, and the geometry of noisy updates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from noisy_updates import update_noise_var
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.stats import multivariate_normal

from dpfl_lightning.algorithms.update_geometry import Updates, WardTree, centred_gram, expected_separation, overlap
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.client_plan import plan
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.rdp import sampled_gaussian_rdp
from dpfl_lightning.privacy.accounting.schedule import calibrate

RECORDS, ROUNDS, DELTA = 6600, 200, 1e-4
RESNET = 11_181_642  # parameters


def plain(x, noise_std=1.0) -> Updates:
    return Updates(centred_gram(torch.from_numpy(x)), np.full(len(x), noise_std), x.shape[1], np.zeros(len(x)))


@pytest.mark.parametrize("dimension", [1, 2, 10])
@pytest.mark.parametrize(("separation", "known"), [(0.0, 1.0), (1.0, 0.3173), (2.0, 0.0455)])
def test_overlap_is_the_mass_that_two_gaussians_share(dimension, separation, known):
    """Seed 0, 400,000 draws: standard error below 0.0008, so one of nine fails by chance in 1e-4 of runs."""
    assert overlap(separation) == pytest.approx(known, abs=5e-5)
    rng = np.random.default_rng(0)
    far = np.full(dimension, 2 * 1.7 * separation / math.sqrt(dimension))  # distance / std = 2 * separation
    draws = rng.normal(0.0, 1.7, (400_000, dimension))
    here = multivariate_normal(np.zeros(dimension), 1.7**2).logpdf(draws)
    there = multivariate_normal(far, 1.7**2).logpdf(draws)
    assert np.minimum(1, np.exp(there - here)).mean() == pytest.approx(known, abs=0.0035)


def two_phase_noise(
    first: int, later: int, epsilon: float = 5.0, epochs: int = 1, rounds: int = ROUNDS, records: int = RECORDS
) -> float:
    """One multiplier for a first round of batches of `first` and later ones of `later`."""
    lines = (
        Planned("first", GaussianEvent(first / records, None, epochs * math.ceil(records / first)), 1),
        Planned("train", GaussianEvent(later / records, None, epochs * math.ceil(records / later)), rounds - 1),
    )
    return calibrate([ClientSchedule(epsilon, DELTA, lines)], get_accountant("rdp"))[0].noise_multiplier("train")


def update_var(noise: float, batch: int) -> float:
    steps = math.ceil(RECORDS / batch)
    return float(update_noise_var([noise], [batch], [steps], 5e-4, 3.0, RESNET)[0])


@pytest.mark.parametrize(
    ("later", "noise", "var_first", "var_later"),
    [
        (16, 1.132, 7.40e-7, 52.0),
        (32, 1.310, 9.92e-7, 8.70),
        (128, 2.010, 2.33e-6, 0.320),
        (512, 3.583, 7.42e-6, 0.0159),
        (6600, 12.14, 8.51e-5, 8.51e-5),
    ],
)
def test_noise_of_both_phases_under_one_multiplier(later, noise, var_first, var_later):
    """6600 records, epsilon 5, delta 1e-4, 200 rounds, clip norm 3, learning rate 5e-4, ResNet-18."""
    found = two_phase_noise(RECORDS, later)
    assert found == pytest.approx(noise, rel=5e-3)
    assert update_var(found, RECORDS) == pytest.approx(var_first, rel=1e-2)
    assert update_var(found, later) == pytest.approx(var_later, rel=1e-2)


def test_ten_times_the_batch_has_not_a_thousandth_of_the_noise():
    """For the multiplier grows with the batch: 740 in place of 1000, and 5.94e6 in place of 206.25^3 = 8.77e6."""
    whole, tenth, small = (two_phase_noise(first, 32) for first in (6600, 660, 32))
    assert update_var(tenth, 660) / update_var(whole, 6600) == pytest.approx(740, rel=1e-2)
    assert update_var(small, 32) / update_var(whole, 6600) == pytest.approx(5.94e6, rel=1e-2)


def test_separation_grows_with_the_root_of_the_batch_less_what_the_noise_grows():
    small, whole = two_phase_noise(32, 32), two_phase_noise(RECORDS, 32)
    growth = whole / small
    assert growth == pytest.approx(1.215, rel=2e-3)
    ratio = expected_separation(0.1, RECORDS, whole) / expected_separation(0.1, RECORDS, small, batch_size=32)
    assert ratio == pytest.approx(math.sqrt(RECORDS / 32) / growth, rel=1e-9)


def test_the_joint_multiplier_is_monotone():
    usual = {"first": 660, "later": 66, "epsilon": 4.0, "epochs": 1, "rounds": 20, "records": 660}
    noise = two_phase_noise(**usual)
    for more in ({"later": 132}, {"epochs": 2}, {"rounds": 40}):
        assert two_phase_noise(**usual | more) > noise
    for less in ({"first": 330}, {"epsilon": 8.0}, {"records": 1320}):
        assert two_phase_noise(**usual | less) < noise


def test_a_full_batch_has_no_amplification():
    noise, orders = np.array([0.7, 5.0]), np.array([1.1, 2.0, 10.9, 63.0, 1024.0])
    found = sampled_gaussian_rdp(np.ones(2), noise, tuple(orders))
    np.testing.assert_allclose(found, orders / (2 * noise[:, None] ** 2), rtol=1e-12)


def test_an_own_first_noise_is_what_makes_the_full_batch_cheap():
    usual = {"num_records": RECORDS, "batch_size": 32, "rounds": ROUNDS, "delta": DELTA, "epsilon": 5.0}
    without, same = plan(**usual), plan(**usual, first_round="full")
    apart = plan(**usual, first_round="full", first_round_noise_multiplier=5.0)
    cost = [one.noise_multiplier / without.noise_multiplier for one in (apart, same)]
    assert cost == pytest.approx([1.0083, 1.2151], rel=1e-3)


def random_updates(rng, count=9, num_params=70):
    return rng.standard_normal((count, num_params)) * rng.uniform(0.5, 3, (count, 1)) + rng.standard_normal(num_params)


def test_the_gram_matrix_is_that_of_the_centred_updates(monkeypatch):
    x = random_updates(np.random.default_rng(0))
    centred = x - x.mean(axis=0)
    np.testing.assert_allclose(centred_gram(torch.from_numpy(x)), centred @ centred.T, atol=1e-12)
    monkeypatch.setattr("dpfl_lightning.algorithms.update_geometry._COLUMNS", 7)
    np.testing.assert_allclose(centred_gram(torch.from_numpy(x)), centred @ centred.T, atol=1e-12)
    same = torch.full((5, 11), 1 / 3)
    assert not centred_gram(same).any(), "no rounding noise where updates are the same"


def test_equal_noise_leaves_wards_groups_as_they_are():
    for seed in range(10):
        x = random_updates(np.random.default_rng(seed))
        tree = plain(x, 0.3).tree
        merges = linkage(x, "ward")
        for groups in range(1, 10):
            theirs = cut_tree(merges, groups).ravel()
            ours = tree.cut(groups)
            assert len(ours) == groups
            assert {tuple(one) for one in ours} == {tuple(np.flatnonzero(theirs == k)) for k in range(groups)}


def test_distances_of_means_are_freed_of_noise():
    """Seed 0: the mean of 400 squared distances; 5 standard errors."""
    rng = np.random.default_rng(0)
    noise = np.array([0.5, 0.5, 1.0, 1.0, 2.0, 3.0])
    groups, far = [np.arange(3), np.arange(3, 6)], 8.0
    squares = []
    for _ in range(400):
        x = rng.standard_normal((6, 50)) * noise[:, None]
        x[3:, 0] += far
        updates = Updates(centred_gram(torch.from_numpy(x)), noise, 50, np.zeros(6))
        gap = updates.signal[:3, :3].mean() + updates.signal[3:, 3:].mean() - 2 * updates.signal[:3, 3:].mean()
        squares.append(gap)
        assert updates.half_distances(groups)[0, 1] == pytest.approx(math.sqrt(max(gap, 0)) / 2)
    error = 5 * np.std(squares) / math.sqrt(len(squares))
    assert abs(np.mean(squares) - far**2) < error < 0.2 * far**2


def test_a_noisy_client_is_not_parted_from_its_group():
    """Two groups of five, one client of each five times as noisy: plain Ward parts these two from all the others.

    Seed 0.
    """
    rng = np.random.default_rng(0)
    noise = np.array([5.0, 1, 1, 1, 1] * 2)
    groups = [list(range(5)), list(range(5, 10))]
    with_noise, without = 0, 0
    for _ in range(20):
        x = rng.standard_normal((10, 2000)) * noise[:, None]
        x[5:, :200] += 8.0
        updates = Updates(centred_gram(torch.from_numpy(x)), noise, 2000, np.zeros(10))
        with_noise += [one.tolist() for one in updates.tree.cut(2)] == groups
        without += [one.tolist() for one in plain(x).tree.cut(2)] == groups
    assert with_noise == 20 and without == 0


def test_coordinates_keep_distances_and_follow_the_clients():
    rng = np.random.default_rng(1)
    x = random_updates(rng, 6, 40)
    found = plain(x, 0.5).coordinates(6)
    theirs = np.linalg.norm(x[:, None] - x[None], axis=2) / 0.5
    np.testing.assert_allclose(np.linalg.norm(found[:, None] - found[None], axis=2), theirs, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(plain(2 - 3 * x, 1.5).coordinates(2), found[:, :2], err_msg="no sign is arbitrary")
    order = rng.permutation(6)
    np.testing.assert_allclose(plain(x[order], 0.5).coordinates(2), found[order, :2], atol=1e-9)


def test_a_noisy_client_draws_no_direction_to_itself():
    """Seed 0. One client of 100 times the noise; the first coordinate still tells the groups of the others apart."""
    rng = np.random.default_rng(0)
    noise = np.array([100.0] + [1.0] * 9)
    x = rng.standard_normal((10, 5000)) * noise[:, None]
    x[5:, :500] += 4.0
    found = Updates(centred_gram(torch.from_numpy(x)), noise, 5000, np.zeros(10)).coordinates(2)
    gaps = [abs(found[1:5, axis].mean() - found[5:, axis].mean()) / found[1:5, axis].std() for axis in (0, 1)]
    assert max(gaps) > 10


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_or_equal_updates(count):
    updates = Updates(centred_gram(torch.zeros(count, 5)), np.ones(count), 5, np.zeros(count))
    assert updates.coordinates(2).tolist() == [[0.0, 0.0]] * count
    tree = WardTree(np.zeros((count, count)))
    assert sorted(np.concatenate(tree.cut(count)).tolist()) == list(range(count)) and len(tree.cut(1)[0]) == count


def test_without_noise_separations_are_infinite():
    x = np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    updates = plain(x, 0.0)
    assert updates.separation([np.array([0, 1]), np.array([2])]) == math.inf
    assert updates.separation([np.array([0]), np.array([1])]) == 0.0


def test_variance_of_an_update_is_that_of_noise_and_of_sampled_records():
    """64 records, batches of 16, 50 parameters, z 2, rate 0.1: the lemma without sampling, and the formula with it."""
    torch.manual_seed(0)
    gradients = torch.nn.functional.normalize(torch.randn(64, 50, dtype=torch.float64), dim=1)
    spread = (1 - float(gradients.mean(dim=0).square().sum())) / 16
    lemma = float(update_noise_var([2.0], [16.0], [4], 0.1, 1.0, num_params=50))
    full = lemma + 4 * 0.1**2 * spread
    assert lemma == pytest.approx(0.03125) and full == pytest.approx(0.0337, rel=5e-3)
    drawn = torch.rand(20_000, 4, 64).argsort(dim=2)[:, :, :16]
    steps = gradients[drawn].mean(dim=2) + 2.0 * torch.randn(20_000, 4, 50, dtype=torch.float64) / 16
    seen = float((0.1 * steps.sum(dim=1)).var(dim=0).sum())
    assert seen == pytest.approx(full, rel=0.05) and seen == pytest.approx(lemma, rel=0.15)


def test_sampled_records_are_nothing_beside_a_large_nets_noise_and_something_beside_a_small_ones():
    resnet, cnn = 11_181_642, 28_938
    assert RECORDS / (resnet * two_phase_noise(RECORDS, 32) ** 2) == pytest.approx(3.4e-4, rel=0.02)
    assert 8000 / (cnn * 1.26**2) == pytest.approx(0.17, rel=0.03)


@pytest.mark.parametrize(("epsilon", "safe"), [(0.1, True), (0.5, True), (0.99, True), (40.0, False)])
def test_the_classic_bound_is_conservative_below_one_and_no_bound_far_above(epsilon, safe):
    noise = math.sqrt(2 * math.log(1.25 / 1e-5)) / epsilon
    spent = get_accountant("gdp").epsilon([GaussianEvent(1.0, noise, 1)], 1e-5)
    assert (spent < epsilon) == safe
