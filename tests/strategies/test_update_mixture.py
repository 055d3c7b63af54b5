"""Memberships from the first round's updates: the sound mixture, and the papers' with what it does wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from grouped_updates import CNN, TRUE, grouped, updates_of
from scipy.stats import norm
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import GaussianMixture
from sklearn.preprocessing import MinMaxScaler, StandardScaler

from dpfl_lightning.algorithms.update_geometry import overlap
from dpfl_lightning.algorithms.update_groups import GroupOptions
from dpfl_lightning.algorithms.update_mixture import (
    memberships,
    paper_mixture,
    robust_mixture,
    scaled_principal_coordinates,
    switch_round,
)

GROUPS = [np.flatnonzero(group == TRUE) for group in range(4)]


def robust(x, **options):
    return robust_mixture(torch.from_numpy(x), [1.0] * len(x), [0.0] * len(x), GroupOptions(**options))


def score(mixture) -> float:
    return adjusted_rand_score(TRUE, mixture.responsibilities.argmax(dim=1))


# ---- the sound one


@pytest.mark.parametrize("num_groups", [None, 4])
def test_groups_far_apart_have_sure_members(num_groups):
    found = robust(grouped(25, CNN, 0), num_groups=num_groups)
    assert score(found) == 1 and found.num_groups == 4 and found.confident
    assert found.separation == pytest.approx(25, rel=0.05) and found.overlap < 1e-100
    torch.testing.assert_close(found.responsibilities, torch.eye(4, dtype=torch.float64)[torch.from_numpy(TRUE)])
    assert found.embedding.shape == (21, 2)
    assert found.diagnostics["separation_of_4"] == pytest.approx(found.separation)
    assert 7 < found.diagnostics["separation_threshold"] < 14
    biased = math.sqrt(25**2 + CNN / 4 * (1 / 6 + 1 / 6))
    assert found.diagnostics["separation_with_noise"] == pytest.approx(biased, rel=0.03)


def test_noise_is_one_group_or_an_unsure_mixture():
    for seed in range(5):
        x = np.random.default_rng(100 + seed).standard_normal((21, 2000))
        found, given = robust(x), robust(x, num_groups=4)
        assert found.num_groups == 1 and found.responsibilities.eq(1).all()
        assert given.num_groups == 4
        for own in (found, given):
            assert not own.confident and own.overlap == 1 and switch_round(own.overlap, 200) == 1


def test_memberships_are_soft_between_groups_that_touch():
    """Seed 0: three groups in a row, noise of standard deviation 1; beside the law they were drawn from."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((120, 2))
    x[:, 0] += np.repeat([0.0, 3.0, 6.0], 40)
    found = memberships(updates_of(x), [np.arange(40), np.arange(40, 80), np.arange(80, 120)])
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    assert 10 < (found.max(axis=1) < 0.9).sum() < 80
    middle = norm(3).pdf(x[:, 0]) / sum(norm(centre).pdf(x[:, 0]) for centre in (0, 3, 6))
    assert np.abs(found[:, 1] - middle).mean() < 0.1


def test_where_em_fails_the_cut_decides(monkeypatch):
    x = grouped(25, 2000, 0)
    expected = np.eye(4)[TRUE]
    monkeypatch.setattr(GaussianMixture, "predict_proba", lambda self, points: np.eye(4)[[1] * 21])
    np.testing.assert_array_equal(memberships(updates_of(x), GROUPS), expected, "a component without a client")
    monkeypatch.undo()

    def broken(self, points):
        raise ValueError("a component collapsed")

    monkeypatch.setattr(GaussianMixture, "fit", broken)
    np.testing.assert_array_equal(memberships(updates_of(x), GROUPS), expected)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_or_identical_updates(count):
    same = torch.ones(count, 7)
    for num_groups in (None, 4):
        for found in (
            robust_mixture(same, [1.0] * count, [0.0] * count, GroupOptions(num_groups)),
            paper_mixture(same, num_groups),
        ):
            assert found.responsibilities.isfinite().all() and found.embedding.isfinite().all()
            torch.testing.assert_close(found.responsibilities.sum(dim=1), torch.ones(count, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_updates_of_any_type(dtype):
    x = torch.from_numpy(grouped(25, 2000, 1)).to(dtype)
    assert score(robust_mixture(x, [1.0] * 21, [0.0] * 21)) == score(paper_mixture(x, 4)) == 1


# ---- rounds


@pytest.mark.parametrize(
    ("separation", "mpo", "last"), [(0.0, 1.0, 1), (1.24, 0.215, 78), (5.0, 5.7e-7, 99), (6.0, 2e-9, 100), (99, 0, 100)]
)
def test_the_round_in_which_losses_take_over(separation, mpo, last):
    assert overlap(separation) == pytest.approx(mpo, rel=0.02, abs=1e-9)
    assert switch_round(overlap(separation), 200) == last
    assert [switch_round(overlap(separation), rounds) for rounds in (1, 2)] == [1, 1]


# ---- the papers' one


def test_the_papers_pipeline_is_scikit_learns():
    for seed in range(5):
        x = grouped(8.0, 300, seed) * np.random.default_rng(seed).uniform(0.1, 9, 300) + 5.0
        x[:, 7] = 1.5  # a parameter that nobody moves
        theirs = PCA(21).fit(StandardScaler().fit_transform(x)).transform(x)[:, :2]
        theirs = MinMaxScaler().fit_transform(theirs)
        ours = scaled_principal_coordinates(torch.from_numpy(x))
        for axis in (0, 1):
            turned = 1 - ours[:, axis]
            error = min(np.abs(one - theirs[:, axis]).max() for one in (ours[:, axis], turned))
            assert error < 1e-8
        mixture = GaussianMixture(
            4, covariance_type="spherical", init_params="k-means++", tol=1e-6, random_state=3, weights_init=[0.25] * 4
        ).fit(ours)
        mixture.weights_ = np.full(4, 0.25)
        gaps = [
            np.linalg.norm(mixture.means_[a] - mixture.means_[b]) / (2 * np.sqrt(max(mixture.covariances_[[a, b]])))
            for a in range(4)
            for b in range(a)
        ]
        found = paper_mixture(torch.from_numpy(x), 4, seed=3)
        assert found.separation == pytest.approx(min(gaps)) and found.overlap == pytest.approx(2 * norm.sf(min(gaps)))
        np.testing.assert_allclose(found.responsibilities, mixture.predict_proba(ours), atol=1e-9)
        assert found.confident, "it is never unsure"
