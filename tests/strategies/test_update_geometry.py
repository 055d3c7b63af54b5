"""Noise of the first round, separation and overlap: formulas against simulation, and the geometry of noisy updates."""

import math

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.stats import multivariate_normal

from dpfl_lightning.algorithms.update_geometry import Updates, centred_gram, cut, overlap, ward
from dpfl_lightning.algorithms.update_groups import Separation, distances


def plain(x, noise_std=1.0) -> Updates:
    return Updates(centred_gram(torch.from_numpy(x)), np.full(len(x), noise_std), x.shape[1])


@pytest.mark.parametrize("dimension", [1, 10])
@pytest.mark.parametrize(("separation", "known"), [(0.0, 1.0), (1.0, 0.3173), (2.0, 0.0455)])
def test_overlap_is_the_mass_that_two_gaussians_share(dimension, separation, known):
    """Seed 0, 400,000 draws: standard error below 0.0008, so one of six fails by chance in 1e-4 of runs."""
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


def test_wards_clustering_is_scipys_and_weights_are_copies_of_points():
    for seed in range(10):
        x = random_updates(np.random.default_rng(seed))
        merges = linkage(x, "ward")
        added, ours = ward(np.stack([centred_gram(torch.from_numpy(x))] * 2), np.ones(9))
        np.testing.assert_allclose(added[1], merges[:, 2] ** 2 / 2)
        for groups in range(1, 10):
            theirs = cut_tree(merges, groups).ravel()
            expected = {tuple(np.flatnonzero(theirs == k)) for k in range(groups)}
            assert {tuple(one) for one in cut(ours[1], groups)} == expected
        twice = np.concatenate([x, x[:3]])
        copied, _ = ward(centred_gram(torch.from_numpy(twice))[None], np.ones(12))
        weighted, _ = ward(centred_gram(torch.from_numpy(x))[None], np.array([2.0] * 3 + [1.0] * 6))
        np.testing.assert_allclose(copied[0, 3:], weighted[0], err_msg="points of weight 2 are two points")


def test_distances_are_freed_of_noise_and_of_the_client_itself():
    """Seed 0: the mean of 400 squared distances from the own and the other group; 5 standard errors."""
    rng = np.random.default_rng(0)
    noise = np.array([0.5, 0.5, 1.0, 1.0, 2.0, 3.0])
    groups, far = [np.arange(3), np.arange(3, 6)], 8.0
    drawn = []
    for _ in range(400):
        x = rng.standard_normal((6, 50)) * noise[:, None]
        x[3:, 0] += far
        drawn.append(distances(Updates(centred_gram(torch.from_numpy(x)), noise, 50), groups)[0])
    error = 5 * np.std(drawn, axis=0) / math.sqrt(len(drawn))
    expected = far**2 * np.kron(1 - np.eye(2), np.ones((3, 1)))
    assert (np.abs(np.mean(drawn, axis=0) - expected) < error).all() and error[:2].max() < 0.2 * far**2


def test_a_separation_counts_noise_and_the_spread_of_clients():
    """Seed 0. 200 clients in two groups at distance 12: noise 1, and a spread of 2 along the line between them."""
    x = np.random.default_rng(0).standard_normal((200, 300))
    groups = [np.arange(100), np.arange(100, 200)]
    x[100:, 0] += 12.0
    assert Separation.of(plain(x), groups).least == pytest.approx(6.0, rel=0.1)
    x[:, 0] += 2 * np.random.default_rng(1).standard_normal(200)
    apart = Separation.of(plain(x), groups)
    assert apart.least == pytest.approx(6.0 / math.sqrt(5), rel=0.15) and apart.spread == pytest.approx(4.0, rel=0.3)


def test_a_noisy_client_is_not_parted_from_its_group():
    """Seed 0. Two groups of five, one client of each five times as noisy: without weights these two are a group."""
    rng = np.random.default_rng(0)
    noise = np.array([5.0, 1, 1, 1, 1] * 2)
    groups = [[1, 2, 3, 4], [6, 7, 8, 9]]
    with_weights, without = 0, 0
    for _ in range(20):
        x = rng.standard_normal((10, 2000)) * noise[:, None]
        x[5:, :200] += 8.0
        updates = Updates(centred_gram(torch.from_numpy(x)), noise, 2000)
        cuts = [cut(ward(updates.gram[None], w)[1][0], 2) for w in (updates.weights, np.ones(10))]
        right = [[[i for i in one.tolist() if i not in (0, 5)] for one in groups_of] == groups for groups_of in cuts]
        with_weights, without = with_weights + right[0], without + right[1]
    assert with_weights == 20 and without == 0


def test_coordinates_keep_distances_and_follow_the_clients():
    rng = np.random.default_rng(1)
    x = random_updates(rng, 6, 40)
    found = plain(x, 0.5).coordinates(6)
    theirs = np.linalg.norm(x[:, None] - x[None], axis=2) / 0.5
    np.testing.assert_allclose(np.linalg.norm(found[:, None] - found[None], axis=2), theirs, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(plain(2 - 3 * x, 1.5).coordinates(2), found[:, :2], err_msg="no sign is arbitrary")
    order = rng.permutation(6)
    np.testing.assert_allclose(plain(x[order], 0.5).coordinates(2), found[order, :2], atol=1e-9)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_or_equal_updates(count):
    updates = Updates(centred_gram(torch.zeros(count, 5)), np.ones(count), 5)
    assert updates.coordinates(2).tolist() == [[0.0, 0.0]] * count
    merges = ward(np.zeros((1, count, count)), np.ones(count))[1][0]
    assert sorted(np.concatenate(cut(merges, count)).tolist()) == list(range(count)) and len(cut(merges, 1)[0]) == count


def test_without_noise_separations_are_infinite():
    x = np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    updates = plain(x, 0.0)
    assert Separation.of(updates, [np.array([0, 1]), np.array([2])]).least == math.inf
    assert Separation.of(updates, [np.array([0]), np.array([1])]).least == 0.0
