"""Weights from variances: optimal, capped by water-filling, and defined where a division is not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning.algorithms.noise_weights import weights

variances = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


@given(
    values=st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 100)), min_size=1, max_size=15),
    seed=st.integers(0, 1000),
)
@settings(deadline=None)
def test_no_other_weights_give_less_noise_or_a_better_ratio_of_signal_to_noise(values, seed):
    v, steps = doubles([value for value, _ in values]), doubles([count for _, count in values])
    points = torch.rand(1000, len(v), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 4 + 1e-12
    points = points / points.sum(dim=1, keepdim=True)  # many mixtures of few and of many clients

    def noise(w):
        return (w**2 * v).sum(dim=-1)

    def ratio(w):
        return (w * steps).sum(dim=-1) ** 2 / noise(w)

    w = weights(v, floor=0.0)
    assert float(noise(w)) == pytest.approx(1 / float((1 / v).sum()), rel=1e-12)
    assert bool((noise(torch.cat([points, 0.99 * w + 0.01 * points])) >= noise(w) * (1 - 1e-12)).all())
    w = weights(v, [int(count) for count in steps], objective="max_snr", floor=0.0)
    assert bool((ratio(torch.cat([points, 0.99 * w + 0.01 * points])) <= ratio(w) * (1 + 1e-9)).all())


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
        ([0.0] + [1.0] * 19, {"max_weight": 0.5}, [0.5] + [0.5 / 19] * 19),
        ([3.0], {}, [1.0]),
        ([0.0], {}, [1.0]),
        ([0.0, 0.0, 0.0, 0.0], {}, [0.25] * 4),
        ([0.0, 0.0, 0.0, 4.0], {}, [1 / 3] * 3 + [0.0]),  # the median is 0, too
        ([1.0, math.inf, 1.0], {}, [0.5, 0.0, 0.5]),
        ([1.0, math.nan, 3.0], {}, [0.75, 0.0, 0.25]),
        ([math.inf, math.nan], {}, [0.0, 0.0]),
        ([], {}, []),
        ([1e-320, 1.0, 1.0], {}, [1.0, 0.0, 0.0]),
        ([1.0], {"max_weight": 0.3}, [1.0]),  # too few for the cap weigh the same
        ([1.0, 9.0], {"max_weight": 0.3}, [0.5, 0.5]),
        ([1.0, 9.0, math.inf], {"max_weight": 0.4}, [0.5, 0.5, 0.0]),
    ],
)
def test_edges(values, options, expected):
    assert weights(doubles(values), **options).tolist() == pytest.approx(expected, abs=2e-6)
    assert weights(torch.tensor([1, 1], dtype=torch.int64)).dtype == torch.float64
