"""Noise estimators on updates whose noise is known, and that knowledge itself against the paper's tables."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noisy_updates import excess, noisy_updates, total_variation, update_noise_var

from dpfl_lightning.papers.robust_hdp.noise_estimators import (
    ESTIMATORS,
    EstimatorOptions,
    blocks_of,
    estimate,
)
from dpfl_lightning.papers.robust_hdp.noise_weights import weights
from dpfl_lightning.privacy.mechanism import ENLARGED, Gaussian
from dpfl_lightning.privacy.noise import RandomGenerator

BLIND = sorted(ESTIMATORS)


def some_updates(clients=6, params=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.linspace(0.5, 3, clients, dtype=torch.float64)[:, None]
    draws = torch.randn(clients + 1, params, generator=generator, dtype=torch.float64)
    return draws[0] + noise * draws[1:]


def noise_var_of(deltas, name, **options):
    return estimate(deltas, EstimatorOptions(name, **options)).noise_var


# ---- accuracy


@pytest.mark.slow
@pytest.mark.parametrize(("dist", "learning_rate"), [("dist1", 5e-3), ("dist3", 5e-3), ("dist8", 1e-3)])
def test_where_noise_drowns_the_signal_simple_estimators_are_as_good(dist, learning_rate):
    deltas, truth = noisy_updates(dist, learning_rate)
    for name in ("rpca", "hetero_pca", "raw_norm"):
        noise_var = noise_var_of(deltas.float(), name)
        assert excess(noise_var, truth) < 1.01 and total_variation(noise_var, truth) < 0.02
    assert excess(noise_var_of(deltas.float(), "mean_residual"), truth) > 1.05
    assert excess(torch.ones(20), truth) > 4  # no weights at all
    oracle = estimate(deltas, EstimatorOptions("oracle"), truth).noise_var
    assert excess(oracle, truth) == pytest.approx(1, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("row_choice", ["random", "head"])
@pytest.mark.parametrize("rows", [5000, 20_000])
def test_some_parameters_will_do(rows, row_choice):
    deltas, truth = noisy_updates("dist1", 5e-3)
    estimated = estimate(deltas.float(), EstimatorOptions(rows=rows, row_choice=row_choice))
    assert excess(estimated.noise_var, truth) < 1.02
    assert 0.95 < float((estimated.noise_var / truth).median()) < 1.05
    assert estimated.diagnostics["converged"] == 1


# ---- formulas


def test_simple_estimators_are_their_formulas():
    deltas = some_updates()
    torch.testing.assert_close(noise_var_of(deltas, "raw_norm"), (deltas**2).sum(dim=1))
    residual = ((deltas - deltas.mean(dim=0)) ** 2).sum(dim=1)
    torch.testing.assert_close(noise_var_of(deltas, "mean_residual"), residual)
    deltas = some_updates(params=1003)
    head = noise_var_of(deltas, "rpca", rows=500, row_choice="head")
    torch.testing.assert_close(head, noise_var_of(deltas[:, :500], "rpca", rows=None) * 1003 / 500)


@pytest.mark.parametrize("rank", [1, 2])
def test_hetero_pca_finds_noise_that_is_orthogonal(rank):
    """G = shared part of rank r + diagonal of the noise: then the diagonal is found, however unequal it is."""
    draw = np.random.default_rng(0)
    axes = np.linalg.qr(draw.standard_normal((300, 20)))[0].T
    noise = np.linspace(0.5, 2, 12)
    shared = draw.uniform(0.5, 1.5, (12, rank)) * np.stack([np.ones(12), np.tile([1.5, -1.5], 6)], axis=1)[:, :rank]
    deltas = shared @ axes[:rank] + noise[:, None] * axes[4:16]
    estimated = estimate(torch.from_numpy(deltas), EstimatorOptions("hetero_pca", rank=rank))
    assert estimated.noise_var.numpy() == pytest.approx(noise**2, rel=1e-3)
    assert estimated.diagnostics["rank"] == rank and estimated.diagnostics["last_move"] < 1e-3
    # no more directions than clients determine: with as many, any diagonal would do
    few = estimate(some_updates(clients=4), EstimatorOptions("hetero_pca", rank=9))
    assert few.diagnostics["rank"] == 1 and bool((few.noise_var > 0).all())


# ---- any order, unit and type; what is not finite


@pytest.mark.slow
@given(seed=st.integers(0, 1000), data=st.data(), name=st.sampled_from(BLIND), clients=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_estimates_follow_the_clients_and_the_square_of_the_unit(seed, data, name, clients):
    deltas = some_updates(clients, seed=seed)
    order = data.draw(st.permutations(range(clients)))
    plain, mixed = (noise_var_of(one, name) for one in (deltas, 7.3 * deltas[order]))
    torch.testing.assert_close(mixed, 7.3**2 * plain[order], rtol=1e-6, atol=1e-6 * float(plain.max()))


@pytest.mark.parametrize("name", BLIND)
def test_updates_of_any_number_type_and_size(name):
    for clients in (1, 2):
        deltas = some_updates(clients)
        torch.testing.assert_close(noise_var_of(deltas, name), (deltas**2).sum(dim=1))
    expected = noise_var_of(some_updates(), name)
    for dtype in (torch.float32, torch.bfloat16):
        noise_var = noise_var_of(some_updates().to(dtype), name)
        assert noise_var.dtype == torch.float64
        torch.testing.assert_close(noise_var, expected, rtol=0.05, atol=1.0)
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = torch.cat([some_updates()[:2], some_updates()[:1], some_updates()[2:]])
        spoilt[2, 5] = bad
        noise_var = noise_var_of(spoilt, name)
        assert math.isinf(noise_var[2]) and float(weights(noise_var)[2]) == 0
        assert torch.equal(noise_var[[0, 1, 3, 4, 5, 6]], expected), "an update that is not finite spoils no other"
        alone = noise_var_of(torch.full((2, 5), bad), name)
        assert alone.tolist() == [math.inf] * 2 and weights(alone).tolist() == [0.0, 0.0]
    if name != "mean_residual":  # the mean is spoilt
        gigantic = some_updates().float()
        gigantic[3] *= 1e30  # finite, but its square is not, in float32
        w = weights(noise_var_of(gigantic, name))
        assert float(w.sum()) == pytest.approx(1) and float(w[3]) < 1e-6


@pytest.mark.parametrize("name", BLIND)
def test_a_zero_update_takes_nearly_all_the_weight(name):
    """The known attack: no estimator can tell; `max_weight` bounds it."""
    deltas = some_updates(12)
    deltas[4] = 0
    noise_var = noise_var_of(deltas, name)
    assert name == "mean_residual" or float(weights(noise_var)[4]) > 0.9
    assert float(weights(noise_var, max_weight=0.5).max()) <= 0.5 * (1 + 1e-9)


# ---- which parameters


@pytest.mark.parametrize("row_choice", ["random", "head"])
@pytest.mark.parametrize("blocks", [1, 3, None])
@pytest.mark.parametrize(("num_params", "rows", "size"), [(300, 40, 40), (300, None, 300), (30, 40, 30), (80, 40, 40)])
def test_as_many_blocks_of_different_parameters_are_read_as_there_are(num_params, rows, size, blocks, row_choice):
    options = EstimatorOptions(rows=rows, blocks=blocks, row_choice=row_choice)
    found, again = (
        [torch.arange(num_params)[block].tolist() for block in blocks_of(num_params, options)] for _ in range(2)
    )
    assert found == again and all(block == sorted(block) and len(block) == size for block in found)
    assert len(found) == min(blocks or 99, num_params // size)
    assert len({*itertools.chain(*found)}) == size * len(found), "no parameter twice"
    assert row_choice == "random" or found[0] == list(range(size))


def test_blocks_are_those_of_the_paper():
    """Section 3.6: M_1 = M[0 : p'], ..., M_Q = M[p - p' : p], Q = floor(p / p'); the estimate is their mean."""
    options = EstimatorOptions(rows=200_000, blocks=None, row_choice="head")
    blocks = blocks_of(11_181_642, options)  # ResNet-18
    assert len(blocks) == 55 and blocks[1] == slice(200_000, 400_000) and blocks[-1].stop == 11_181_642
    assert blocks[-1].start - blocks[-2].stop == 181_642, "which no block reads"
    deltas = some_updates(params=1003)
    parts = [deltas[:, :500], deltas[:, 503:]]
    expected = sum(noise_var_of(part, "rpca", rows=None) for part in parts) * 1003 / 500 / 2
    for blocks, several in ((None, expected), (1, noise_var_of(parts[0], "rpca", rows=None) * 1003 / 500)):
        found = estimate(deltas, EstimatorOptions(rows=500, blocks=blocks, row_choice="head"))
        torch.testing.assert_close(found.noise_var, several)
        assert found.diagnostics["converged"] == 1


# ---- the truth


@pytest.mark.parametrize("curvature", [0.0, 2.0])
def test_variance_of_an_update_adds_up_over_steps_but_for_feedback(curvature):
    """The package's mechanism; 2,000 updates of 40 parameters: 3 % is 6 standard deviations."""
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


variances = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.e2e
@given(values=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=15), seed=st.integers(0, 1000))
@settings(deadline=None)
def test_no_other_weights_give_less_noise(values, seed):
    v = doubles(values)
    points = torch.rand(1000, len(v), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 4 + 1e-12
    points = points / points.sum(dim=1, keepdim=True)  # many mixtures of few and of many clients

    def noise(w):
        return (w**2 * v).sum(dim=-1)

    w = weights(v, floor=0.0)
    assert float(noise(w)) == pytest.approx(1 / float((1 / v).sum()), rel=1e-12)
    assert bool((noise(torch.cat([points, 0.99 * w + 0.01 * points])) >= noise(w) * (1 - 1e-12)).all())


@pytest.mark.e2e
@given(values=variances, cap=st.floats(0.02, 1.0), unit=st.sampled_from([7.3, 1e-300, 1e290]), data=st.data())
@settings(deadline=None)
def test_what_is_cut_goes_to_the_others_in_proportion_in_any_order_and_unit(values, cap, unit, data):
    order = data.draw(st.permutations(range(len(values))))
    free, capped = weights(doubles(values)), weights(doubles(values), max_weight=cap)
    most = max(cap, 1 / len(values))
    assert float(capped.sum()) == pytest.approx(1, rel=1e-12) and bool((capped <= most * (1 + 1e-9)).all())
    full = capped > most * (1 - 1e-9)
    assert bool((capped[~full] >= free[~full] * (1 - 1e-9)).all())
    if not bool(full.all()):
        factor = capped[~full] / free[~full]
        torch.testing.assert_close(factor, factor[:1].expand_as(factor))
        assert bool((free[full] * factor[0] >= most * (1 - 1e-6)).all()), "cut without need"
    torch.testing.assert_close(weights(doubles(values)[order], max_weight=cap), capped[order])
    torch.testing.assert_close(weights(doubles(values) * unit), free, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([1.0, 2.0, 3.0], {"max_weight": 0.9}, [6 / 11, 3 / 11, 2 / 11]),  # a cap that does not bind
        ([0.0] + [1.0] * 19, {"floor": 1e-3}, [1000 / 1019] + [1 / 1019] * 19),
        ([0.0], {}, [1.0]),
        ([0.0, 0.0, 0.0, 0.0], {}, [0.25] * 4),
        ([0.0, 0.0, 0.0, 4.0], {}, [1 / 3] * 3 + [0.0]),  # the median is 0, too
        ([1.0, math.inf, 1.0], {}, [0.5, 0.0, 0.5]),
        ([math.inf, math.nan], {}, [0.0, 0.0]),
        ([], {}, []),
        ([1e-320, 1.0, 1.0], {}, [1.0, 0.0, 0.0]),
        ([1.0, 9.0], {"max_weight": 0.3}, [0.5, 0.5]),  # too few for the cap weigh the same
        ([1.0, 9.0, math.inf], {"max_weight": 0.4}, [0.5, 0.5, 0.0]),
    ],
)
def test_edges(values, options, expected):
    assert weights(doubles(values), **options).tolist() == pytest.approx(expected, abs=2e-6)
    assert weights(torch.tensor([1, 1], dtype=torch.int64)).dtype == torch.float64
