"""Noise multipliers, variances and prices from formulas alone."""

import pytest

from experiments.papers.clustered.formulas import (
    BATCH,
    RECORDS,
    full_batch_cost,
    noise_multiplier,
    selection_cost,
    update_variance,
)

# Both tables were computed once by another implementation, with Opacus' accountant.
#: epsilon -> z without a full batch, with it, epsilon of that round, z of the others beside 5
FULL_BATCH = {
    2: (2.0005, 2.7065, 1.34, 2.1374),
    3: (1.4846, 1.9335, 1.95, 1.5255),
    4: (1.2295, 1.5436, 2.53, 1.2469),
    5: (1.0784, 1.3104, 3.05, 1.0873),
    10: (0.7801, 0.8576, 5.01, 0.7809),
}
#: later batch -> z, variance of the first round, variance of a later one
BY_LATER_BATCH = {
    16: (1.132, 7.40e-7, 52.0),
    32: (1.310, 9.92e-7, 8.70),
    64: (1.588, 1.46e-6, 1.60),
    128: (2.010, 2.33e-6, 0.320),
    256: (2.645, 4.04e-6, 0.0692),
    512: (3.583, 7.42e-6, 0.0159),
    1024: (5.122, 1.52e-5, 4.06e-3),
    2048: (7.628, 3.36e-5, 1.12e-3),
    6600: (12.14, 8.51e-5, 8.51e-5),
}


def test_what_a_full_first_round_costs():
    for epsilon, (without, same, alone, own5) in FULL_BATCH.items():
        cost = full_batch_cost(float(epsilon))
        found = [cost["without"], cost["same"], cost["own5"]]
        assert found == pytest.approx([without, same, own5], rel=5e-3), epsilon
        assert cost["alone"] == pytest.approx(alone, abs=0.01), epsilon
        assert cost["increase"] == pytest.approx(100 * (same / without - 1), abs=0.5), epsilon
        assert cost["without"] < cost["own5"] < cost["own3"] < cost["same"], epsilon


def test_what_private_choices_cost():
    expected = {
        5: {"free": 1.310, "joint": 1.359, "subtracted": 1.605, "alone": 1.20},
        2: {"joint": 2.795, "alone": 0.43},
    }
    for epsilon, values in expected.items():
        cost = selection_cost(float(epsilon))
        assert {name: cost[name] for name in values} == pytest.approx(values, rel=5e-3, abs=0.005), epsilon
        assert cost["free"] < cost["joint"] < cost["subtracted"] and cost["alone_every_round"] > cost["alone"]


def test_noise_by_the_batch_of_later_rounds():
    for later, (z, of_first, of_later) in BY_LATER_BATCH.items():
        ours = noise_multiplier(5.0, RECORDS, later)
        assert ours == pytest.approx(z, rel=5e-3), later
        assert update_variance(RECORDS, ours) == pytest.approx(of_first, rel=0.01), later
        assert update_variance(later, ours) == pytest.approx(of_later, rel=0.01), later


def test_ten_times_the_batch_is_not_a_thousandth_of_the_variance():
    whole, tenth = noise_multiplier(5.0), noise_multiplier(5.0, 660)
    assert update_variance(660, tenth) / update_variance(RECORDS, whole) == pytest.approx(740, rel=0.01)
    small = noise_multiplier(5.0, BATCH)
    assert update_variance(BATCH, small) == pytest.approx(5.89, rel=0.01)
    assert update_variance(BATCH, small) / update_variance(RECORDS, whole) == pytest.approx(5.94e6, rel=0.01)
    assert whole / small == pytest.approx(1.215, rel=2e-3)


def test_what_raises_noise():
    for less, more in (
        ({"first_batch": 2048}, {"first_batch": 6600}),
        ({"batch": 32}, {"batch": 64}),
        ({"epochs": 1}, {"epochs": 2}),
        ({"rounds": 100}, {"rounds": 200}),
        ({"records": 13_200}, {"records": 6600}),
    ):
        assert noise_multiplier(5.0, **less) < noise_multiplier(5.0, **more) < noise_multiplier(4.0, **more), more
