"""Noise of the first round, separation and overlap: formulas against simulation, and the geometry of noisy updates."""

import math

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.stats import multivariate_normal

from dpfl_lightning.algorithms.update_geometry import Updates, WardTree, centred_gram, overlap


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
