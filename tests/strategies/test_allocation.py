"""Quotas against the paper's closed form, worked examples, dynamic programming, and the conditions of a minimum."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning.algorithms import allocation
from dpfl_lightning.algorithms.allocation import (
    allocate_int,
    anchor_strength,
    noise_gain,
    noise_only,
    objective,
)
from dpfl_lightning.errors import UserError

FACTOR, BIAS = [1.0, 2.0, 4.0], np.array([0.5, 0.1, 0.0])


@pytest.mark.parametrize(
    ("exponent", "ratio", "whole", "cost"),
    [
        (1, 0, (7, 3, 2), 83),
        (1, 2, (7, 3, 2), 90.6),
        (1, 60, (1, 7, 4), 235),
        (2, 0, (5, 4, 3), 361),
        (2, 2, (5, 4, 3), 366.8),
        (2, 60, (5, 4, 3), 535),
    ],
)
def test_worked_examples(exponent, ratio, whole, cost):
    ours = allocate_int(FACTOR, 12, exponent, ratio * BIAS)
    assert ours.tolist() == list(whole)
    assert objective(ours, FACTOR, exponent, ratio * BIAS) == pytest.approx(cost)


def test_worked_examples_with_an_anchor():
    assert allocate_int(FACTOR, 12, anchor=1).tolist() == [6, 4, 2]
    assert allocate_int(FACTOR, 12, 2, anchor=10).tolist() == [5, 4, 3]


def least_cost(factor, total, exponent, bias, lower, upper, anchor):
    """By dynamic programming over clients: cost of the best whole quotas, infinite if there are none."""
    mean = total / len(factor)
    best = np.where(np.arange(total + 1) == 0, 0.0, np.inf)
    for phi, cost, low, high in zip(factor, bias, lower, upper, strict=True):
        after = np.full(total + 1, np.inf)
        for own in range(int(low), int(min(high, total)) + 1):
            here = phi * own ** (exponent + 1) + cost * own + anchor * (own - mean) ** 2
            after[own:] = np.minimum(after[own:], best[: total + 1 - own] + here)
        best = after
    return best[total]


@st.composite
def problems(draw, most_clients=5, most=24):
    """(factor, total, exponent, bias, lower, upper, anchor) that some quotas solve."""
    count = draw(st.integers(1, most_clients))
    many = lambda values: draw(st.lists(values, min_size=count, max_size=count))  # noqa: E731
    lower = many(st.integers(0, 3))
    upper = [low + more for low, more in zip(lower, many(st.integers(0, most)), strict=True)]
    total = draw(st.integers(sum(lower), min(sum(upper), most + sum(lower))))
    factor = many(st.one_of(st.floats(1e-3, 1e3), st.sampled_from([1.0, 2.0])))
    bias = many(st.one_of(st.just(0.0), st.floats(0, 50)))
    anchor = draw(st.sampled_from([0.0, 0.0, 0.3, 5.0, 1e9]))
    return factor, total, draw(st.sampled_from([1.0, 2.0, 1.4, 0.6])), bias, lower, upper, anchor


@pytest.mark.slow
@pytest.mark.parametrize("few", [allocation._FEW, 0], ids=["by the heap", "by prices"])
def test_whole_quotas_are_optimal(few, monkeypatch):
    monkeypatch.setattr(allocation, "_FEW", few)

    @given(problems())
    @settings(max_examples=400, deadline=None)
    def check(problem):
        factor, total, exponent, bias, lower, upper, anchor = problem
        ours = allocate_int(*problem)
        assert ours.sum() == total and bool((ours >= lower).all()) and bool((ours <= upper).all())
        found, best = objective(ours, factor, exponent, bias, anchor), least_cost(*problem)
        assert found <= best * (1 + 1e-9) + 1e-9

    check()


def test_whole_quotas_of_three_clients_by_trying_all():
    """The dynamic programme itself is held to enumeration."""
    factor, bias, lower, upper = [0.7, 2.0, 1.1], [3.0, 0.0, 1.0], [0, 1, 0], [9, 9, 4]
    for exponent, anchor, total in itertools.product((1.0, 2.0), (0.0, 2.0), (1, 7, 13)):
        costs = [
            objective(own, factor, exponent, np.array(bias), anchor)
            for own in itertools.product(*(range(low, high + 1) for low, high in zip(lower, upper, strict=True)))
            if sum(own) == total
        ]
        assert least_cost(factor, total, exponent, bias, lower, upper, anchor) == pytest.approx(min(costs))


@pytest.mark.parametrize("exponent", [1, 2])
def test_without_bias_it_is_the_closed_form(exponent):
    factor = np.exp(2 * np.random.default_rng(1).standard_normal(50))
    closed = noise_only(factor, 4000, exponent)
    quota = allocate_int(factor, 4000, exponent)
    assert np.abs(quota - closed).max() <= 1
    constant = allocate_int(factor, 4000, exponent, bias_cost=0.7 * 30)
    assert constant.tolist() == quota.tolist(), "a bias that all have alike changes nothing"


@pytest.mark.parametrize("exponent", [1, 2])
def test_gain_over_equal_quotas(exponent):
    draw = np.random.default_rng(2)
    for factor in (np.exp(draw.standard_normal(30)), np.full(30, 2.5)):
        formula = factor.sum() * (factor ** (-1 / exponent)).sum() ** exponent / 30 ** (exponent + 1)
        assert noise_gain(noise_only(factor, 500, exponent), factor, exponent) == pytest.approx(formula, rel=1e-9)
        assert formula >= 1 - 1e-12
    assert formula == pytest.approx(1.0), "all alike"
    assert noise_gain([4, 4, 0], [1.0, 1.0, math.inf]) == 1.0, "who has no budget is in neither"


def test_the_anchor_leads_from_least_noise_to_equal_quotas():
    factor = np.exp(np.random.default_rng(3).standard_normal(20))
    for exponent in (1, 2):
        assert allocate_int(factor, 100, exponent, anchor=1e12).tolist() == [5] * 20
        spread = [allocate_int(factor, 100, exponent, anchor=a).std() for a in (0, 0.1, 1, 10, 100)]
        assert spread == sorted(spread, reverse=True)
    assert anchor_strength(30, 100, 2.0, dissimilarity=0.5) == pytest.approx(30 * 0.5 * 4 * (1 / 100 + 1 / 800))


@pytest.mark.parametrize("exponent", [1.0, 2.0, 1.7])
def test_the_unit_of_the_factors_does_not_matter(exponent):
    factor, bias = np.exp(3 * np.random.default_rng(4).standard_normal(40)), np.linspace(0, 5, 40)
    plain = allocate_int(factor, 200, exponent, bias, upper=20, anchor=0.5)
    for unit in (1e-30, 1e30):
        scaled = allocate_int(factor * unit, 200, exponent, bias * unit, upper=20, anchor=0.5 * unit)
        assert scaled.tolist() == plain.tolist()


# ---- degenerate budgets and bounds


@pytest.mark.parametrize("exponent", [1.0, 2.0, 1.4])
def test_no_budget_takes_no_part_and_no_noise_takes_all_it_may(exponent):
    assert allocate_int([1.0, math.inf, 1.0], 8, exponent).tolist() == [4, 0, 4]
    assert allocate_int([1.0, 0.0, 1.0], 8, exponent, upper=6).tolist() == [1, 6, 1]
    assert allocate_int([0.0, 0.0, 0.0], 9, exponent).tolist() == [3, 3, 3]
    assert allocate_int([math.inf, 2.0], 5, exponent, lower=[0, 1]).tolist() == [0, 5]
    assert allocate_int([math.inf, math.inf], 0, exponent).tolist() == [0, 0]


def test_plain_cases():
    assert allocate_int([3.0], 7).tolist() == [7], "one client"
    assert allocate_int([1.0, 5.0, 9.0], 12, upper=4).tolist() == [4, 4, 4], "everybody in every round"
    assert allocate_int([1.0, 5.0], 0).tolist() == [0, 0]
    assert allocate_int([1.0, 1e9], 10, lower=2).tolist() == [8, 2], "a floor for fairness"
    assert allocate_int([2.0] * 4, 10, bias_cost=0.0, anchor=3.0).sum() == 10


def test_equal_clients_share_what_is_left_over():
    assert sorted(allocate_int([2.0] * 4, 10).tolist()) == [2, 2, 3, 3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"upper": 2}, "`upper` must sum to at least 12, got 6"),
        ({"lower": 5}, "`lower` must sum to at most 12, got 15"),
        ({"lower": 5, "upper": 4}, "`lower` must be from 0 to the upper bound, 4 for client 0, got 5"),
        ({"lower": -1}, "`lower` must be from 0"),
        ({"noise_factor": [1.0, math.inf, 2.0], "lower": 1}, "client 1, got 1.0. A client without a budget"),
        ({"noise_factor": [1.0, -1.0, 2.0]}, "`noise_factor` must be >= 0"),
        ({"noise_factor": [1.0, math.nan, 2.0]}, "`noise_factor` must be >= 0"),
        ({"noise_factor": []}, "`noise_factor` must hold one number for each client"),
        ({"exponent": 0}, "`exponent` must be above 0"),
        ({"anchor": -1.0}, "`anchor` must be >= 0"),
        ({"bias_cost": math.nan}, "`bias_cost` must be finite"),
        ({"total": -1}, "`total` must be >= 0"),
    ],
)
def test_what_no_quotas_can_keep_is_one_sentence(arguments, words):
    with pytest.raises(UserError, match=words):
        allocate_int(**{"noise_factor": FACTOR, "total": 12, **arguments})


def test_whole_totals_only():
    with pytest.raises(UserError, match=r"`total` must be a whole number, got 1\.5"):
        allocate_int(FACTOR, 1.5)


# ---- ten thousand settings, and a hundred thousand clients


@pytest.mark.slow
def test_quotas_are_never_overspent_in_ten_thousand_settings():
    """Sum, floors and caps to the last participation, whatever budgets and costs are: fixed seed, no false alarm."""
    draw = np.random.default_rng(5)
    for _ in range(10_000):
        count, rounds = int(draw.integers(1, 30)), int(draw.integers(1, 50))
        factor = 10.0 ** draw.uniform(-12, 12, count) if draw.random() < 0.5 else draw.uniform(0.1, 10, count)
        factor = np.where(draw.random(count) < 0.1, 0.0, factor)
        broke = draw.random(count) < 0.1
        broke[draw.integers(count)] = False
        each_round = int(draw.integers(1, (~broke).sum() + 1))
        quota = allocate_int(
            np.where(broke, np.inf, factor),
            each_round * rounds,
            float(draw.choice([1.0, 2.0, 1.3])),
            draw.exponential(1.0, count) * 10.0 ** draw.uniform(-6, 6) * (draw.random() < 0.5),
            upper=rounds,
            anchor=10.0 ** draw.uniform(-6, 6) * (draw.random() < 0.5),
        )
        assert quota.sum() == each_round * rounds
        assert quota.min() >= 0 and quota.max() <= rounds and not quota[broke].any()


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [1.0, 2.0])
@pytest.mark.parametrize("anchor", [0.0, 1.0])
def test_a_hundred_thousand_clients(exponent, anchor):
    draw = np.random.default_rng(6)
    factor, bias = np.exp(3 * draw.standard_normal(100_000)), draw.exponential(10.0, 100_000)
    total, upper = 20_000 * 200, 200
    begun = time.process_time()
    quota = allocate_int(factor, total, exponent, bias, upper=upper, anchor=anchor)
    assert time.process_time() - begun < 4, "0.1 to 0.3 s on one core"
    assert quota.sum() == total
    power = exponent + 1
    next_cost = factor * ((quota + 1.0) ** power - quota**power) + anchor * (2 * quota + 1) + bias
    before = np.maximum(quota - 1.0, 0)
    last_cost = factor * ((before + 1) ** power - before**power) + anchor * (2 * before + 1) + bias
    assert last_cost[quota > 0].max() <= next_cost[quota < upper].min() * (1 + 1e-6), "no exchange is cheaper"


# ---- what the paper's own objective does where noise is small


def active_clients(scale: float, cap: float, seed: int) -> int:
    """Clients with any quota on MNIST's settings under Gaussian noise, budgets times `scale`, heterogeneity known."""
    draw = np.random.default_rng(seed)
    epsilon, delta = scale * draw.uniform(0.1, 3, 100), draw.uniform(1e-5, 1e-4, 100)
    smoothness, convexity, offset, rounds = 5.514, 4.986, 1.960, 190  # the paper's estimates
    factor = np.log(1 / delta) / (600 * epsilon) ** 2
    scale_of_noise = 4 * 20**2 * 4266 * 2
    ratio = 20 / scale_of_noise * (smoothness + 3 / 8 * convexity * (offset + rounds))
    quota = allocate_int(factor, 20 * rounds, bias_cost=ratio * draw.exponential(0.3, 100), upper=cap)
    return int((quota > 0).sum())


def test_the_papers_bias_term_collapses_onto_few_clients_where_noise_is_small():
    """Means of ten seeds, as tolerated: 96, 34, 21, 20 of 100 clients with a cap; 96, 27, 4, 1 without."""
    for cap, expected in ((190, (96, 34, 21, 20)), (np.inf, (96, 27, 4, 1))):
        means = [np.mean([active_clients(scale, cap, seed) for seed in range(10)]) for scale in (1, 10, 100, 1000)]
        assert means == pytest.approx(expected, abs=3)
