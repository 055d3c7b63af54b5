"""Quotas against the paper's closed form and dynamic programming; samplers of cohorts."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import cost_of_quotas, noise_only

from dpfl_lightning.algorithms import allocation
from dpfl_lightning.algorithms.allocation import (
    allocate_int,
    anchor_strength,
    noise_gain,
)
from dpfl_lightning.algorithms.cohorts import systematic
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
    assert cost_of_quotas(ours, FACTOR, exponent, ratio * BIAS) == pytest.approx(cost)


def test_worked_examples_with_an_anchor():
    assert allocate_int(FACTOR, 12, anchor=1).tolist() == [6, 4, 2]
    assert allocate_int(FACTOR, 12, 2, anchor=10).tolist() == [5, 4, 3]


def least_cost(factor, total, exponent, bias, upper, anchor):
    """By dynamic programming over clients: cost of the best whole quotas, infinite if there are none."""
    mean = total / len(factor)
    best = np.where(np.arange(total + 1) == 0, 0.0, np.inf)
    for phi, cost, high in zip(factor, bias, upper, strict=True):
        after = np.full(total + 1, np.inf)
        for own in range(int(min(high, total)) + 1):
            here = phi * own ** (exponent + 1) + cost * own + anchor * (own - mean) ** 2
            after[own:] = np.minimum(after[own:], best[: total + 1 - own] + here)
        best = after
    return best[total]


@st.composite
def problems(draw, most_clients=5, most=24):
    """(factor, total, exponent, bias, upper, anchor) that some quotas solve."""
    count = draw(st.integers(1, most_clients))
    many = lambda values: draw(st.lists(values, min_size=count, max_size=count))  # noqa: E731
    upper = many(st.integers(0, most))
    total = draw(st.integers(0, min(sum(upper), most)))
    factor = many(st.one_of(st.floats(1e-3, 1e3), st.sampled_from([1.0, 2.0])))
    bias = many(st.one_of(st.just(0.0), st.floats(0, 50)))
    anchor = draw(st.sampled_from([0.0, 0.0, 0.3, 5.0, 1e9]))
    return factor, total, draw(st.sampled_from([1.0, 2.0, 1.4, 0.6])), bias, upper, anchor


@pytest.mark.slow
@pytest.mark.parametrize("few", [allocation._FEW, 0], ids=["by the heap", "by prices"])
def test_whole_quotas_are_optimal(few, monkeypatch):
    monkeypatch.setattr(allocation, "_FEW", few)

    @given(problems())
    @settings(max_examples=400, deadline=None)
    def check(problem):
        factor, total, exponent, bias, upper, anchor = problem
        ours = allocate_int(*problem)
        assert ours.sum() == total and bool((ours >= 0).all()) and bool((ours <= upper).all())
        found, best = cost_of_quotas(ours, factor, exponent, bias, anchor), least_cost(*problem)
        assert found <= best * (1 + 1e-9) + 1e-9

    check()


@pytest.mark.parametrize("exponent", [1, 2])
def test_without_bias_it_is_the_closed_form(exponent):
    factor = np.exp(2 * np.random.default_rng(1).standard_normal(50))
    closed = noise_only(factor, 4000, exponent)
    quota = allocate_int(factor, 4000, exponent)
    assert np.abs(quota - closed).max() <= 1
    constant = allocate_int(factor, 4000, exponent, bias_cost=0.7 * 30)
    assert constant.tolist() == quota.tolist(), "a bias that all have changes nothing"


@pytest.mark.parametrize("exponent", [1, 2])
def test_gain_over_equal_quotas(exponent):
    draw = np.random.default_rng(2)
    for factor in (np.exp(draw.standard_normal(30)), np.full(30, 2.5)):
        formula = factor.sum() * (factor ** (-1 / exponent)).sum() ** exponent / 30 ** (exponent + 1)
        assert noise_gain(noise_only(factor, 500, exponent), factor, exponent) == pytest.approx(formula, rel=1e-9)
        assert formula >= 1 - 1e-12
    assert formula == pytest.approx(1.0), "all equal"
    assert noise_gain([4, 4, 0], [1.0, 1.0, math.inf]) == 1.0, "who has no budget is in neither"


def test_the_anchor_leads_from_least_noise_to_equal_quotas():
    factor = np.exp(np.random.default_rng(3).standard_normal(20))
    for exponent in (1, 2):
        assert allocate_int(factor, 100, exponent, anchor=1e12).tolist() == [5] * 20
        spread = [allocate_int(factor, 100, exponent, anchor=a).std() for a in (0, 0.1, 1, 10, 100)]
        assert spread == sorted(spread, reverse=True)
    assert anchor_strength(30, 100, 2.0, dissimilarity=0.5) == pytest.approx(30 * 0.5 * 4 * (1 / 100 + 1 / 800))


# ---- degenerate budgets and bounds


@pytest.mark.parametrize("exponent", [1.0, 2.0, 1.4])
def test_no_budget_takes_no_part_and_no_noise_takes_all_it_may(exponent):
    assert allocate_int([1.0, math.inf, 1.0], 8, exponent).tolist() == [4, 0, 4]
    assert allocate_int([1.0, 0.0, 1.0], 8, exponent, upper=6).tolist() == [1, 6, 1]
    assert allocate_int([0.0, 0.0, 0.0], 9, exponent).tolist() == [3, 3, 3]
    assert allocate_int([math.inf, 2.0], 5, exponent).tolist() == [0, 5]
    assert allocate_int([math.inf, math.inf], 0, exponent).tolist() == [0, 0]


def test_plain_cases():
    assert allocate_int([3.0], 7).tolist() == [7], "one client"
    assert allocate_int([1.0, 5.0, 9.0], 12, upper=4).tolist() == [4, 4, 4], "everybody in every round"
    assert allocate_int([1.0, 5.0], 0).tolist() == [0, 0]
    assert allocate_int([2.0] * 4, 10, bias_cost=0.0, anchor=3.0).sum() == 10
    assert sorted(allocate_int([2.0] * 4, 10).tolist()) == [2, 2, 3, 3]


def test_bounds_that_are_too_low_are_one_sentence():
    for factor in (FACTOR, [1.0, math.inf, 2.0]):
        able = sum(map(math.isfinite, factor))
        with pytest.raises(UserError, match=f"`upper` must sum to at least 12, got {2.0 * able}. 12 participations"):
            allocate_int(factor, 12, upper=2)


def some_quotas(clients=100, each_round=20, rounds=200, seed=0):
    epsilon = np.random.default_rng(seed).uniform(0.1, 3, clients)
    return allocate_int(epsilon**-2, each_round * rounds, upper=rounds)


def a_run(quota, rounds, seed=0):
    """The cohorts of all rounds, and how often each client took part."""
    draw, taken, cohorts = np.random.default_rng(seed), np.zeros_like(quota), []
    for left in range(rounds, 0, -1):
        cohorts.append(systematic(quota - taken, left, draw))
        np.add.at(taken, cohorts[-1], 1)
    return cohorts, taken


@pytest.mark.slow
@given(
    clients=st.integers(1, 12), rounds=st.integers(1, 15), each_round=st.integers(1, 12), seed=st.integers(0, 2**32 - 1)
)
@settings(max_examples=300, deadline=None)
def test_every_quota_is_used_in_full_rounds_of_distinct_clients(clients, rounds, each_round, seed):
    each_round = min(each_round, clients)
    factor = 10.0 ** np.random.default_rng(seed).uniform(-2, 2, clients)
    quota = allocate_int(factor, each_round * rounds, upper=rounds)
    cohorts, taken = a_run(quota, rounds, seed)
    assert all(len(cohort) == len(set(cohort.tolist())) == each_round for cohort in cohorts)
    assert taken.tolist() == quota.tolist()


@pytest.mark.e2e
def test_inclusion_is_the_quotas_share():
    """One round, 20,000 draws, seed 1, 100 clients: 4.9 standard errors, false alarm 1e-4."""
    quota, draws = some_quotas(), 20_000
    draw, hits = np.random.default_rng(1), np.zeros(100)
    for _ in range(draws):
        hits[systematic(quota, 200, draw)] += 1
    share = quota / 200
    error = np.sqrt(share * (1 - share) / draws)
    assert bool((np.abs(hits / draws - share) <= 4.9 * error + 1e-12).all())
    assert bool((hits[quota == 200] == draws).all())


def test_without_quotas_left_a_round_is_empty():
    assert len(systematic(np.zeros(2, dtype=np.int64), 4, np.random.default_rng(0))) == 0
