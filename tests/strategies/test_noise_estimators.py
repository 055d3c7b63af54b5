"""Noise estimators on updates whose noise is known, and that knowledge itself against the paper's tables."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noisy_updates import (
    CLIP_NORM,
    NUM_PARAMS,
    excess,
    noisy_updates,
    total_variation,
    true_noise_var,
    update_noise_var,
)
from reference import paper_noise_multipliers

from dpfl_lightning.algorithms.noise_estimators import (
    ESTIMATORS,
    EstimatorOptions,
    chosen_rows,
    estimate,
)
from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS
from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.mechanism import ENLARGED, Gaussian
from dpfl_lightning.privacy.noise import RandomGenerator

BLIND = sorted(ESTIMATORS)
DISTS = [f"dist{number}" for number in range(1, 10)]


def some_updates(clients=6, params=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.linspace(0.5, 3, clients, dtype=torch.float64)[:, None]
    draws = torch.randn(clients + 1, params, generator=generator, dtype=torch.float64)
    return draws[0] + noise * draws[1:]


# ---- how good they are


@pytest.mark.slow
@pytest.mark.parametrize(("dist", "learning_rate"), [("dist1", 5e-3), ("dist3", 5e-3), ("dist8", 1e-3)])
def test_where_noise_drowns_the_signal_the_simple_ones_are_as_good(dist, learning_rate):
    deltas, truth = noisy_updates(dist, learning_rate)
    found = {name: estimate(deltas.float(), EstimatorOptions(name)).noise_var for name in BLIND}
    for name in ("rpca", "hetero_pca", "raw_norm"):
        assert excess(found[name], truth) < 1.01 and total_variation(found[name], truth) < 0.02
    assert excess(found["mean_residual"], truth) > 1.05
    assert excess(torch.ones(20), truth) > 4  # no weights at all
    oracle = estimate(deltas, EstimatorOptions("oracle"), truth).noise_var
    assert excess(oracle, truth) == pytest.approx(1, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own_share", "bands"),
    [
        (0.0, {"rpca": (1.02, 1.06), "hetero_pca": (1.0, 1.005), "raw_norm": (2.8, 3.4), "mean_residual": (1.1, 1.2)}),
        (0.1, {"rpca": (1.1, 1.3), "hetero_pca": (1.1, 1.2), "raw_norm": (2.8, 3.4), "mean_residual": (1.2, 1.35)}),
        (0.6, dict.fromkeys(BLIND, (2.2, 3.5))),  # what clients do not share looks like noise: all fail
    ],
)
def test_where_the_signal_is_as_loud_as_the_quietest_noise(own_share, bands):
    deltas, truth = noisy_updates("dist1", 1e-3, signal=2.0, own_share=own_share)
    for name, (low, high) in bands.items():
        assert low <= excess(estimate(deltas.float(), EstimatorOptions(name)).noise_var, truth) <= high, name


@pytest.mark.slow
@pytest.mark.parametrize("row_choice", ["random", "head"])
@pytest.mark.parametrize(("rows", "blocks"), [(5000, 1), (20_000, 1), (5000, None), (5000, 2)])
def test_some_parameters_will_do(rows, blocks, row_choice):
    deltas, truth = noisy_updates("dist1", 5e-3)
    found = estimate(deltas.float(), EstimatorOptions(rows=rows, blocks=blocks, row_choice=row_choice))
    assert excess(found.noise_var, truth) < 1.02
    assert 0.95 < float((found.noise_var / truth).median()) < 1.05
    assert found.diagnostics["blocks"] == min(blocks or 99, NUM_PARAMS // rows)
    assert found.diagnostics["converged"] == 1


@pytest.mark.slow
def test_the_error_of_a_subset_falls_with_its_size():
    """Estimates from disjoint blocks scatter by about sqrt(2 / rows)."""
    deltas, _ = noisy_updates("dist1", 5e-3)
    scatter = {}
    for rows in (700, 2800):
        options = EstimatorOptions(rows=rows, blocks=10)
        parts = [deltas[:, block] for block in chosen_rows(NUM_PARAMS, options)]
        whole = EstimatorOptions(rows=None)
        logs = torch.stack([estimate(part, whole).noise_var.log() for part in parts])
        scatter[rows] = float(logs.std(dim=0).median())
        assert scatter[rows] == pytest.approx(math.sqrt(2 / rows), rel=0.35)
    assert scatter[2800] < 0.7 * scatter[700]


def test_several_blocks_are_averaged():
    deltas = some_updates(params=1003)
    both = estimate(deltas, EstimatorOptions(rows=500, blocks=None, row_choice="head"))
    options = EstimatorOptions(rows=None)
    parts = [estimate(part, options).noise_var * 1003 / 500 for part in (deltas[:, :500], deltas[:, 503:])]
    torch.testing.assert_close(both.noise_var, torch.stack(parts).mean(dim=0))


# ---- the formulas


def test_gram_matrices_tell_what_the_updates_would():
    deltas = some_updates()
    norm, residual = (estimate(deltas, EstimatorOptions(name)).noise_var for name in ("raw_norm", "mean_residual"))
    torch.testing.assert_close(norm, (deltas**2).sum(dim=1))
    torch.testing.assert_close(residual, ((deltas - deltas.mean(dim=0)) ** 2).sum(dim=1))


@pytest.mark.parametrize("rank", [1, 2])
def test_hetero_pca_finds_noise_that_is_orthogonal(rank):
    """G = shared part of rank r + diagonal of the noise: then the diagonal is found, however unequal it is."""
    draw = np.random.default_rng(0)
    axes = np.linalg.qr(draw.standard_normal((300, 20)))[0].T
    noise = np.linspace(0.5, 2, 12)
    shared = draw.uniform(0.5, 1.5, (12, rank)) * np.stack([np.ones(12), np.tile([1.5, -1.5], 6)], axis=1)[:, :rank]
    deltas = shared @ axes[:rank] + noise[:, None] * axes[4:16]
    found = estimate(torch.from_numpy(deltas), EstimatorOptions("hetero_pca", rank=rank))
    assert found.noise_var.numpy() == pytest.approx(noise**2, rel=1e-3)
    assert found.diagnostics["rank"] == rank and found.diagnostics["last_move"] < 1e-3


def test_hetero_pca_takes_no_more_directions_than_clients_determine():
    """With as many as clients any diagonal would do, and the noise would vanish."""
    found = estimate(some_updates(clients=4), EstimatorOptions("hetero_pca", rank=9))
    assert found.diagnostics["rank"] == 1 and bool((found.noise_var > 0).all())


# ---- any order, unit and type; what is not finite


@pytest.mark.slow
@given(seed=st.integers(0, 1000), data=st.data(), name=st.sampled_from(BLIND), clients=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_estimates_follow_the_clients_and_the_square_of_the_unit(seed, data, name, clients):
    deltas, options = some_updates(clients, seed=seed), EstimatorOptions(name)
    order = data.draw(st.permutations(range(clients)))
    plain, mixed = (estimate(one, options).noise_var for one in (deltas, 7.3 * deltas[order]))
    torch.testing.assert_close(mixed, 7.3**2 * plain[order], rtol=1e-6, atol=1e-6 * float(plain.max()))


@pytest.mark.parametrize("name", BLIND)
@pytest.mark.parametrize("clients", [1, 2])
def test_one_or_two_updates_are_taken_by_their_length(name, clients):
    deltas = some_updates(clients)
    torch.testing.assert_close(estimate(deltas, EstimatorOptions(name)).noise_var, (deltas**2).sum(dim=1))


@pytest.mark.parametrize("name", BLIND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_updates_of_any_type(name, dtype):
    found = estimate(some_updates().to(dtype), EstimatorOptions(name)).noise_var
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, estimate(some_updates(), EstimatorOptions(name)).noise_var, rtol=0.05, atol=1.0)


@pytest.mark.parametrize("name", BLIND)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_spoils_no_other(name, bad):
    deltas, options = some_updates(), EstimatorOptions(name)
    spoilt = torch.cat([deltas[:2], deltas[:1], deltas[2:]])
    spoilt[2, 5] = bad
    found = estimate(spoilt, options).noise_var
    assert math.isinf(found[2]) and float(weights(found)[2]) == 0
    assert torch.equal(found[[0, 1, 3, 4, 5, 6]], estimate(deltas, options).noise_var)
    alone = estimate(torch.full((2, 5), bad), options).noise_var
    assert alone.tolist() == [math.inf] * 2 and weights(alone).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", sorted(set(BLIND) - {"mean_residual"}))
def test_a_gigantic_update_spoils_no_other(name):
    """Finite, but its square is not, in float32: it gets no weight, and the others get theirs (the mean is spoilt)."""
    deltas = some_updates().float()
    deltas[3] *= 1e30
    w = weights(estimate(deltas, EstimatorOptions(name)).noise_var)
    assert float(w.sum()) == pytest.approx(1) and float(w[3]) < 1e-6


@pytest.mark.parametrize("name", BLIND)
def test_a_zero_update_takes_nearly_all_the_weight(name):
    """The known attack: no estimator can tell; `max_weight` bounds it."""
    deltas = some_updates(12)
    deltas[4] = 0
    noise_var = estimate(deltas, EstimatorOptions(name)).noise_var
    if name != "mean_residual":
        assert float(weights(noise_var)[4]) > 0.9
    assert float(weights(noise_var, max_weight=0.5).max()) <= 0.5 * (1 + 1e-9)


# ---- which parameters


@given(
    num_params=st.integers(1, 300),
    rows=st.none() | st.integers(1, 400),
    blocks=st.none() | st.integers(1, 9),
    row_choice=st.sampled_from(["random", "head"]),
)
@settings(deadline=None)
def test_blocks_are_disjoint_and_of_one_size(num_params, rows, blocks, row_choice):
    options = EstimatorOptions(rows=rows, blocks=blocks, row_choice=row_choice)
    chosen = [torch.arange(num_params)[block].tolist() for block in chosen_rows(num_params, options)]
    size = min(rows or num_params, num_params)
    assert len(chosen) == min(blocks or num_params, num_params // size)
    assert all(len(block) == size for block in chosen)
    flat = [row for block in chosen for row in block]
    assert len(set(flat)) == len(flat) and all(block == sorted(block) for block in chosen)
    again = [torch.arange(num_params)[block].tolist() for block in chosen_rows(num_params, options)]
    assert again == chosen


def test_blocks_in_order_are_the_papers():
    """ResNet-18: 55 blocks of 200,000; the last one is the end, and the parameters before it are in none."""
    blocks = chosen_rows(11_181_642, EstimatorOptions(blocks=None, row_choice="head"))
    assert len(blocks) == 55 and blocks[1] == slice(200_000, 400_000) and blocks[-1] == slice(10_981_642, 11_181_642)
    assert chosen_rows(11_181_642, EstimatorOptions(row_choice="head")) == [slice(0, 200_000)]
    assert chosen_rows(28_938, EstimatorOptions()) == [slice(0, 28_938)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": "rpac"}, "`estimator` must be one of rpca, .*Did you mean `rpca`"),
        ({"row_choice": "hed"}, "`row_choice` must be one of random, head, got 'hed'. Did you mean `head`"),
        ({"rows": 0}, "`rows` must be at least 1"),
        ({"blocks": 0}, "`blocks` must be at least 1"),
        ({"rank": 0}, "`rank` must be at least 1"),
    ],
)
def test_mistakes_are_one_sentence(wrong, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(EstimatorOptions(), **wrong)


# ---- the truth


@pytest.mark.parametrize("curvature", [0.0, 2.0])
def test_variance_of_an_update_adds_up_over_steps_but_for_feedback(curvature):
    """The package's own mechanism; 2,000 updates of 40 parameters: 3 % is 6 standard deviations."""
    mechanism = Gaussian(clip_norm=3.0, noise_multiplier=2.0, sample_rate=0.1, expected_batch_size=5.0)
    generator, steps, learning_rate = RandomGenerator(bytes(32)), 15, 0.05
    theta = torch.zeros(2000, 40, dtype=torch.float64)
    for _ in range(steps):
        summed = 5.0 * (curvature * theta + 1.0)  # of gradients: linear in theta, not clipped
        theta -= learning_rate * mechanism.privatise(summed, generator, torch.float64)
    neglected = float(update_noise_var([2.0], [5.0], [steps], learning_rate, 3.0 * ENLARGED, 40)[0])
    assert neglected == pytest.approx(40 * mechanism.noise_std(steps, learning_rate) ** 2)
    feedback = sum((1 - learning_rate * curvature) ** (2 * k) for k in range(steps)) / steps
    assert float(theta.var(dim=0).sum()) == pytest.approx(feedback * neglected, rel=0.03)


def per_parameter(dist, of_weights, clients=20):
    """`sum_i w_i^2 v_i / (P lr^2)`, the paper's table 3."""
    truth = true_noise_var(dist, 1.0, num_params=1, clients=clients)
    return float((of_weights(truth) ** 2 * truth).sum())


@pytest.mark.slow
def test_table_3_follows_from_the_formulas():
    """Least noise, equal weights, and weights by claimed epsilon; no training."""
    rows = {
        weights: [0.2697, 0.4762, 0.0758, 0.6471, 0.3905, 7.629, 2.275, 13.85, 6.022],
        lambda v: torch.full_like(v, 1 / 20): [1.278, 16.91, 16.19, 26.74, 25.55, 67.13, 18.60, 85.48, 43.17],
    }
    for of_weights, expected in rows.items():
        assert [per_parameter(dist, of_weights) for dist in DISTS] == pytest.approx(expected, rel=0.005)
    by_epsilon = [1.025, 1.895, 0.9195, 3.228, 4.585, 27.74, 9.873, 48.07, 34.87]
    for dist, expected in zip(DISTS, by_epsilon, strict=True):
        share = torch.tensor(EPSILONS[dist][20]) / sum(EPSILONS[dist][20])
        assert per_parameter(dist, lambda _, share=share: share) == pytest.approx(expected, rel=0.005)


def test_noise_falls_with_the_square_of_the_batch_size():
    batch_sizes = [16, 32, 64, 128]
    z = paper_noise_multipliers(1.0, batch_sizes, 2400)
    steps = [math.ceil(2400 / batch) for batch in batch_sizes]
    found = update_noise_var(z.tolist(), batch_sizes, steps, 0.01, CLIP_NORM, NUM_PARAMS)
    assert found.tolist() == pytest.approx([404.3, 100.1, 25.24, 6.295], rel=0.01)


@pytest.mark.slow
def test_the_heaviest_clients_of_the_published_lists():
    expected = [(13, 0.387), (13, 0.348), (13, 0.551), (11, 0.383), (13, 0.543), (8, 0.274), (15, 0.227), (13, 0.209)]
    for dist, (client, weight) in zip(DISTS, [*expected, (13, 0.605)], strict=True):
        found = weights(true_noise_var(dist, 1.0))
        assert int(found.argmax()) == client and float(found.max()) == pytest.approx(weight, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_sizes", "second", "six"), [((128,) * 60, 0.049, None), (BATCH_SIZES[60], 0.191, 0.537)]
)
def test_sixty_clients_of_eight_classes(batch_sizes, second, six):
    """Figures 12 and 13: weight of the client with the second largest budget, and of the six largest together."""
    epsilons = EPSILONS["dist1"][60]
    z = paper_noise_multipliers(epsilons, batch_sizes, 800)
    steps = [math.ceil(800 / batch) for batch in batch_sizes]
    found = weights(update_noise_var(z.tolist(), batch_sizes, steps, 0.01, CLIP_NORM, NUM_PARAMS))
    assert float(found[sorted(range(60), key=epsilons.__getitem__)[-2]]) == pytest.approx(second, abs=0.01)
    if six:
        assert float(found.topk(6).values.sum()) == pytest.approx(six, abs=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", BLIND)
def test_a_gpu_agrees(name):
    deltas, options = some_updates(), EstimatorOptions(name, rows=50)
    torch.testing.assert_close(estimate(deltas.cuda(), options).noise_var, estimate(deltas, options).noise_var)
