"""Weights from variances: optimal, capped by water-filling, and defined where a division is not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.errors import UserError

variances = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def simplex_points(count, seed):
    """Many mixtures of few and of many clients, `[1000, count]`."""
    draws = torch.rand(1000, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 4 + 1e-12
    return draws / draws.sum(dim=1, keepdim=True)


@given(values=variances, seed=st.integers(0, 1000))
@settings(deadline=None)
def test_no_other_weights_give_less_noise(values, seed):
    v = doubles(values)
    w = weights(v, floor=0.0)
    least = float((w**2 * v).sum())
    assert least == pytest.approx(1 / float((1 / v).sum()), rel=1e-12)
    others = simplex_points(len(v), seed)
    others = torch.cat([others, 0.99 * w + 0.01 * others])
    assert bool(((others**2 * v).sum(dim=1) >= least * (1 - 1e-12)).all())


@given(
    values=st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 100)), min_size=2, max_size=10),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_no_other_weights_give_a_better_ratio_of_signal_to_noise(values, seed):
    v, steps = doubles([value for value, _ in values]), doubles([count for _, count in values])

    def ratio(w):
        return (w * steps).sum(dim=-1) ** 2 / (w**2 * v).sum(dim=-1)

    w = weights(v, [int(count) for count in steps], objective="max_snr", floor=0.0)
    others = simplex_points(len(v), seed)
    assert bool((ratio(torch.cat([others, 0.99 * w + 0.01 * others])) <= ratio(w) * (1 + 1e-9)).all())


@pytest.mark.slow
@given(values=variances, unit=st.sampled_from([7.3, 1e-300, 1e290]))
@settings(deadline=None)
def test_the_unit_of_variances_does_not_matter(values, unit):
    torch.testing.assert_close(weights(doubles(values) * unit), weights(doubles(values)), rtol=1e-9, atol=1e-12)


@given(values=variances, cap=st.floats(0.02, 1.0), data=st.data())
@settings(deadline=None)
def test_what_is_cut_goes_to_the_others_in_proportion(values, cap, data):
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


def test_a_cap_that_does_not_bind_changes_nothing():
    v = doubles([1.0, 2.0, 3.0])
    assert torch.equal(weights(v, max_weight=0.9), weights(v))
    assert weights(doubles([1.0, 10.0, 10.0, 1000.0]), max_weight=0.4).tolist() == pytest.approx(
        [0.4, 0.4 * 0.74626866, 0.4 * 0.74626866, 0.00298507], abs=0.003
    )


def test_a_zero_update_takes_nearly_all_unless_capped():
    """The floor only prevents the division: that is the known weakness of inverse variances."""
    v = doubles([0.0] + [1.0] * 19)
    assert float(weights(v)[0]) == pytest.approx(0.99998, abs=1e-5)
    assert float(weights(v, floor=1e-3)[0]) == pytest.approx(1000 / 1019)
    assert weights(v, max_weight=0.5).tolist() == pytest.approx([0.5] + [0.5 / 19] * 19)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], [1.0]),
        ([0.0], [1.0]),
        ([0.0, 0.0, 0.0, 0.0], [0.25] * 4),
        ([0.0, 0.0, 0.0, 4.0], [1 / 3] * 3 + [0.0]),  # the median is 0, too
        ([1.0, math.inf, 1.0], [0.5, 0.0, 0.5]),
        ([1.0, math.nan, 3.0], [0.75, 0.0, 0.25]),
        ([math.inf, math.nan], [0.0, 0.0]),
        ([], []),
        ([1e-320, 1.0, 1.0], [1.0, 0.0, 0.0]),
    ],
)
def test_edges(values, expected):
    assert weights(doubles(values)).tolist() == pytest.approx(expected, abs=2e-6)


def test_too_few_for_the_cap_weigh_the_same():
    assert weights(doubles([1.0]), max_weight=0.3).tolist() == [1.0]
    assert weights(doubles([1.0, 9.0]), max_weight=0.3).tolist() == [0.5, 0.5]
    assert weights(doubles([1.0, 9.0, math.inf]), max_weight=0.4).tolist() == [0.5, 0.5, 0.0]


def test_weights_are_float64_whatever_came():
    assert weights(torch.tensor([1, 1], dtype=torch.int64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"objective": "max_snt"}, "`objective` must be one of min_variance, max_snr, got 'max_snt'.*`max_snr`"),
        ({"floor": -1.0}, "`floor` must be >= 0"),
        ({"max_weight": 0.0}, r"`max_weight` must be in \(0, 1\], got 0.0"),
        ({"max_weight": 1.5}, "`max_weight`"),
    ],
)
def test_mistakes_are_one_sentence(wrong, words):
    with pytest.raises(UserError, match=words):
        weights(torch.ones(3), [1, 1, 1], **wrong)
