"""PFA: groups by budget, projections against dense linear algebra, and its place in a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import FIXED_KEY

from dpfl_lightning import strategies
from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.strategies.aggregation.pfa import larger_budgets, projected_mean

DIST2 = np.array([5.45, 1, 1.15, 0.2, 4.52, 4.88, 0.98, 0.2, 1.05, 0.93, 1, 0.21, 0.21, 1.27, 0.89, 1.17])


def setting(clients=6, params=40, public=3, seed=0):
    deltas = torch.randn(clients, params, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    weights = torch.arange(1, clients + 1, dtype=torch.float64)
    return deltas, weights / weights.sum(), torch.arange(clients) >= clients - public


def dense(deltas, weights, public, variant, components):
    """By dense P x P projections, one private client at a time."""
    mean, std = deltas[public].mean(0), deltas[public].std(0, correction=0)
    if variant == "liu_printed":
        shift, scale = torch.zeros_like(mean), torch.ones_like(mean)
        rows = (weights[public] @ deltas[public])[None]
    else:
        shift, scale = mean, std if variant == "hdpfl" else torch.ones_like(mean)
        rows = (deltas[public] - shift) / scale
    directions = torch.linalg.svd(rows, full_matrices=False).Vh[: min(components, len(rows))]
    projection = directions.T @ directions
    total = weights[public] @ deltas[public]
    for weight, delta in zip(weights[~public], deltas[~public], strict=True):
        total = total + weight * (projection @ ((delta - shift) / scale) * scale + shift)
    return total


@pytest.mark.parametrize("variant", ["liu_code", "liu_printed", "hdpfl"])
@pytest.mark.parametrize("components", [1, 2])
def test_the_gram_trick_is_the_dense_projection(variant, components):
    if variant == "liu_printed" and components > 1:
        return
    own = setting()
    expected = dense(*own, variant, components)
    torch.testing.assert_close(projected_mean(*own, variant, components), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("variant", ["liu_code", "hdpfl"])
def test_one_public_client_is_its_own_direction(variant):
    deltas, weights, public = setting(public=1)
    direction = deltas[-1] / deltas[-1].norm()
    private = weights[:-1] @ deltas[:-1]
    expected = weights[-1] * deltas[-1] + direction * (direction @ private)
    torch.testing.assert_close(projected_mean(deltas, weights, public, variant), expected)


@pytest.mark.parametrize("public", [0, 6])
def test_one_kind_alone_is_the_weighted_mean(public):
    deltas, weights, _ = setting()
    kind = torch.full((6,), public > 0)
    torch.testing.assert_close(projected_mean(deltas, weights, kind, "liu_code"), weights @ deltas)


def test_identical_public_updates_have_no_direction_but_a_mean():
    deltas, weights, public = setting()
    deltas[public] = deltas[-1].clone()
    torch.testing.assert_close(projected_mean(deltas, weights, public, "liu_code"), deltas[-1])


@pytest.mark.parametrize("grouping", ["mixture", "kmeans", "hierarchical"])
def test_groups_by_budget(grouping):
    assert np.flatnonzero(larger_budgets(DIST2, grouping, 0.1, 0)).tolist() == [0, 4, 5]


def test_top_budgets():
    assert np.flatnonzero(larger_budgets(DIST2, "top", 0.1, 0)).tolist() == [0, 5]
    assert np.flatnonzero(larger_budgets(np.array([1.0, 1.0, 1.0, 2.0]), "top", 0.1, 0)).tolist() == [3]
    assert larger_budgets(np.ones(4), "mixture", 0.1, 0).all()


def test_it_is_weiavg_when_all_claim_the_same(make_loop):
    def trained(name):
        privacy = PrivacyOptions(epsilon=5.0, delta=1e-3, noise_key=FIXED_KEY)
        loop = make_loop(parts=strategies.build({name: None}), privacy=privacy, rounds=2)
        loop.run()
        return loop.state.models

    torch.testing.assert_close(trained("pfa"), trained("epsilon_weighted"))
