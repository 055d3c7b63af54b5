"""Quotas against the paper's closed form, dynamic programming and the conditions of a minimum; samplers of cohorts."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpfl_lightning.algorithms import allocation
from dpfl_lightning.algorithms.allocation import (
    allocate_int,
    allocate_real,
    anchor_strength,
    noise_gain,
    noise_only,
    objective,
)
from dpfl_lightning.algorithms.cohorts import SAMPLERS, draw_cohort, systematic
from dpfl_lightning.errors import UserError

FACTOR, BIAS = [1.0, 2.0, 4.0], np.array([0.5, 0.1, 0.0])


@pytest.mark.parametrize(
    ("exponent", "ratio", "real", "price", "whole", "cost"),
    [
        (1, 0, (6.857143, 3.428571, 1.714286), 13.714286, (7, 3, 2), 83),
        (1, 2, (6.671429, 3.535714, 1.792857), 14.342857, (7, 3, 2), 90.6),
        (1, 60, (1.285714, 6.642857, 4.071429), 32.571429, (1, 7, 4), 235),
        (2, 0, (5.436982, 3.844527, 2.718491), None, (5, 4, 3), 361),
        (2, 2, (5.422178, 3.851408, 2.726415), None, (5, 4, 3), 366.8),
        (2, 60, (4.990156, 4.055962, 2.953881), None, (5, 4, 3), 535),
    ],
)
def test_worked_examples(exponent, ratio, real, price, whole, cost):
    quota, found = allocate_real(FACTOR, 12, exponent, ratio * BIAS)
    assert quota == pytest.approx(real, abs=1e-6)
    assert price is None or found == pytest.approx(price, abs=1e-6)
    ours = allocate_int(FACTOR, 12, exponent, ratio * BIAS)
    assert ours.tolist() == list(whole)
    assert objective(ours, FACTOR, exponent, ratio * BIAS) == pytest.approx(cost)


def test_worked_examples_with_cap_and_anchor():
    quota, price = allocate_real(FACTOR, 12, upper=5)
    assert quota == pytest.approx((5, 4.666667, 2.333333), abs=1e-6) and price == pytest.approx(18.666667, abs=1e-6)
    assert allocate_real(FACTOR, 12, anchor=1)[0] == pytest.approx((5.806452, 3.870968, 2.322581), abs=1e-6)
    assert allocate_int(FACTOR, 12, anchor=1).tolist() == [6, 4, 2]
    assert allocate_real(FACTOR, 12, 2, anchor=10)[0] == pytest.approx((4.973300, 3.965588, 3.061112), abs=1e-6)
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


@example(([1.0, 1.0], 1, 2.0, [1.0, 1.0], [0, 1], [0, 1], 0.0), False)
@given(problems(most_clients=6), st.booleans())
@settings(max_examples=200, deadline=None)
def test_real_quotas_keep_the_conditions_of_a_minimum(problem, capped):
    factor, total, exponent, bias, lower, upper, anchor = problem
    if anchor and exponent not in (1, 2):
        anchor = 0.0
    quota, price = allocate_real(factor, total, exponent, bias, lower, upper if capped else np.inf, anchor)
    high = np.minimum(upper if capped else np.inf, total)
    assert quota.sum() == pytest.approx(total, rel=1e-9, abs=1e-9)
    slope = (exponent + 1) * np.array(factor) * quota**exponent + np.array(bias) + 2 * anchor * quota
    size = np.abs(slope).max() + abs(price) + 1
    free = (quota > np.array(lower) + 1e-9) & (quota < high - 1e-9)
    assert np.abs(slope[free] - price).max(initial=0) <= 1e-7 * size
    assert bool((slope[(quota <= np.array(lower)) & (quota < high)] >= price - 1e-7 * size).all())
    assert bool((slope[(quota >= high) & (quota > lower)] <= price + 1e-7 * size).all())


@pytest.mark.parametrize("exponent", [1, 2])
def test_without_bias_it_is_the_closed_form(exponent):
    draw = np.random.default_rng(1)
    factor = np.exp(2 * draw.standard_normal(50))
    closed = noise_only(factor, 4000, exponent)
    assert allocate_real(factor, 4000, exponent)[0] == pytest.approx(closed, rel=1e-9)
    constant = allocate_real(factor, 4000, exponent, bias_cost=0.7 * 30)[0]
    assert constant == pytest.approx(closed, rel=1e-9), "a bias that all have alike changes nothing"


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
        assert allocate_real(factor, 100, exponent, anchor=1e12)[0] == pytest.approx(np.full(20, 5.0), abs=1e-6)
        assert allocate_int(factor, 100, exponent, anchor=1e12).tolist() == [5] * 20
        spread = [allocate_real(factor, 100, exponent, anchor=a)[0].std() for a in (0, 0.1, 1, 10, 100)]
        assert spread == sorted(spread, reverse=True)
    assert anchor_strength(30, 100, 2.0, dissimilarity=0.5, condition_number=10) == pytest.approx(
        30 * 0.5 * 4 * (1 / 100 + 1 / 80)
    )


@pytest.mark.parametrize("exponent", [1.0, 2.0, 1.7])
def test_the_unit_of_the_factors_does_not_matter(exponent):
    factor, bias = np.exp(3 * np.random.default_rng(4).standard_normal(40)), np.linspace(0, 5, 40)
    anchor = 0.5 if exponent in (1, 2) else 0.0
    plain = allocate_real(factor, 200, exponent, bias, upper=20, anchor=anchor)
    for unit in (1e-30, 1e30):
        scaled = allocate_real(factor * unit, 200, exponent, bias * unit, upper=20, anchor=anchor * unit)
        assert scaled[0] == pytest.approx(plain[0], rel=1e-9, abs=1e-9)
        assert scaled[1] == pytest.approx(plain[1] * unit, rel=1e-9)
        whole = allocate_int(factor * unit, 200, exponent, bias * unit, upper=20, anchor=anchor * unit)
        assert whole.tolist() == allocate_int(factor, 200, exponent, bias, upper=20, anchor=anchor).tolist()


# ---- degenerate budgets and bounds


@pytest.mark.parametrize("exponent", [1.0, 2.0, 1.4])
def test_no_budget_takes_no_part_and_no_noise_takes_all_it_may(exponent):
    assert allocate_int([1.0, math.inf, 1.0], 8, exponent).tolist() == [4, 0, 4]
    assert allocate_real([1.0, math.inf, 1.0], 8, exponent)[0] == pytest.approx([4, 0, 4])
    assert allocate_int([1.0, 0.0, 1.0], 8, exponent, upper=6).tolist() == [1, 6, 1]
    assert allocate_int([0.0, 0.0, 0.0], 9, exponent).tolist() == [3, 3, 3]
    assert allocate_int([math.inf, 2.0], 5, exponent, lower=[0, 1]).tolist() == [0, 5]
    assert allocate_int([math.inf, math.inf], 0, exponent).tolist() == [0, 0]
    assert allocate_real([math.inf, math.inf], 0, exponent)[0].tolist() == [0, 0]


@pytest.mark.parametrize("allocate", [allocate_int, lambda *a, **k: allocate_real(*a, **k)[0]])
def test_plain_cases(allocate):
    assert allocate([3.0], 7).tolist() == pytest.approx([7]), "one client"
    assert allocate([1.0, 5.0, 9.0], 12, upper=4).tolist() == pytest.approx([4, 4, 4]), "everybody in every round"
    assert allocate([1.0, 5.0], 0).tolist() == [0, 0]
    assert allocate([1.0, 1e9], 10, lower=2).tolist() == pytest.approx([8, 2]), "a floor for fairness"
    assert allocate([2.0] * 4, 10, bias_cost=0.0, anchor=3.0).sum() == pytest.approx(10)
    assert sorted(allocate_int([2.0] * 4, 10).tolist()) == [2, 2, 3, 3]


def test_what_no_quotas_can_keep_is_one_sentence():
    for arguments, words in (
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
    ):
        for allocate in (allocate_real, allocate_int):
            with pytest.raises(UserError, match=words):
                allocate(**{"noise_factor": FACTOR, "total": 12, **arguments})
    with pytest.raises(UserError, match=r"`total` must be a whole number, got 1\.5"):
        allocate_int(FACTOR, 1.5)
    with pytest.raises(UserError, match="`exponent` must be 1 or 2 with an anchor"):
        allocate_real(FACTOR, 12, 1.4, anchor=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [1.0, 2.0])
@pytest.mark.parametrize("anchor", [0.0, 1.0])
def test_a_hundred_thousand_clients(exponent, anchor):
    draw = np.random.default_rng(6)
    factor, bias = np.exp(3 * draw.standard_normal(100_000)), draw.exponential(10.0, 100_000)
    total, upper = 20_000 * 200, 200
    begun = time.process_time()
    quota, price = allocate_real(factor, total, exponent, bias, upper=upper, anchor=anchor)
    whole = allocate_int(factor, total, exponent, bias, upper=upper, anchor=anchor)
    assert time.process_time() - begun < 4, "0.1 to 0.3 s on one core"
    assert quota.sum() == pytest.approx(total, rel=1e-6) and whole.sum() == total
    slope = (exponent + 1) * factor * quota**exponent + bias + 2 * anchor * quota
    free = (quota > 0) & (quota < upper)
    assert slope[free] == pytest.approx(np.full(free.sum(), price), rel=1e-6)
    assert bool((slope[quota == 0] >= price * (1 - 1e-6)).all())
    assert bool((slope[quota == upper] <= price * (1 + 1e-6)).all())
    best, ours = (objective(own, factor, exponent, bias, anchor) for own in (quota, whole))
    assert best * (1 - 1e-9) <= ours <= best * 1.01


def some_quotas(clients=100, each_round=20, rounds=200, seed=0):
    epsilon = np.random.default_rng(seed).uniform(0.1, 3, clients)
    return allocate_int(epsilon**-2, each_round * rounds, upper=rounds)


def a_run(sampler, quota, rounds, each_round, seed=0):
    """The cohorts of all rounds, and how often each client took part."""
    draw, taken, cohorts = np.random.default_rng(seed), np.zeros_like(quota), []
    for left in range(rounds, 0, -1):
        cohorts.append(draw_cohort(sampler, quota, taken, left, each_round, draw))
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
    cohorts, taken = a_run("quota_systematic", quota, rounds, each_round, seed)
    assert all(len(cohort) == len(set(cohort.tolist())) == each_round for cohort in cohorts)
    assert taken.tolist() == quota.tolist()


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


@pytest.mark.slow
def test_the_papers_sampler_draws_large_quotas_too_rarely_and_runs_out_of_clients():
    """Weighted draws one after the other: inclusion falls short, slots stay unused (seed 2, means of several runs)."""
    quota = some_quotas()
    draw, hits, largest = np.random.default_rng(2), 0, int(quota.argmax())
    for _ in range(5000):
        hits += largest in draw_cohort("weighted_without_replacement", quota, np.zeros_like(quota), 200, 20, draw)
    target = quota[largest] / 200
    assert hits / 5000 < target - 5 * np.sqrt(target * (1 - target) / 5000)
    unused = []
    for seed in range(5):
        cohorts, taken = a_run("weighted_without_replacement", quota, 200, 20, seed)
        assert bool((taken <= quota).all())
        assert all(len(set(cohort.tolist())) == len(cohort) <= 20 for cohort in cohorts)
        unused.append(int((quota - taken).sum()))
    assert np.mean(unused) > 0


@pytest.mark.slow
def test_with_replacement_has_the_analysis_expectation():
    """Mean participations of one draw are K times the share; 20,000 draws, seed 3, false alarm 1e-4."""
    quota, draws = some_quotas(clients=10, each_round=3, rounds=50), 20_000
    draw, hits = np.random.default_rng(3), np.zeros(10)
    for _ in range(draws):
        np.add.at(hits, draw_cohort("with_replacement", quota, np.zeros_like(quota), 50, 3, draw), 1)
    share = quota / quota.sum()
    assert bool((np.abs(hits / (3 * draws) - share) <= 4.5 * np.sqrt(share / (3 * draws))).all())


def test_clients_that_were_away_keep_their_slots():
    """Half of the clients miss the first half of the run: later they are in every round that their slots fill."""
    quota, rounds = np.full(10, 5), 20  # 2.5 clients a round
    draw, taken, sizes = np.random.default_rng(4), np.zeros(10, dtype=np.int64), []
    for left in range(rounds, 0, -1):
        here = np.where(left > 10, np.arange(10) % 2 == 0, True)
        cohort = draw_cohort("quota_systematic", np.where(here, quota, 0), taken, left, 3, draw)
        assert bool(here[cohort].all())
        taken[cohort] += 1
        sizes.append(len(cohort))
    assert taken.tolist() == quota.tolist()
    assert set(sizes[:10]) <= {0, 1, 2}, "who is away is not replaced: others would overspend"


def test_what_cannot_be_used_any_more_is_left():
    remaining, draw = np.array([9, 9, 0]), np.random.default_rng(5)
    assert systematic(remaining, 2, draw).tolist() == [0, 1]
    assert systematic(remaining, 1, draw).tolist() == [0, 1]


def test_without_quotas_left_a_round_is_empty():
    for sampler in SAMPLERS:
        assert len(draw_cohort(sampler, np.array([2, 3]), np.array([2, 3]), 4, 2, np.random.default_rng(0))) == 0
    with pytest.raises(UserError, match=r"`sampler` must be one of .* Did you mean `quota_systematic`"):
        draw_cohort("systematic", np.array([1]), np.array([0]), 1, 1, np.random.default_rng(0))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_round_of_a_hundred_thousand_clients(sampler):
    quota = some_quotas(100_000, 20_000, 200)
    draw, taken = np.random.default_rng(6), np.zeros_like(quota)
    begun = time.process_time()
    for left in range(200, 190, -1):
        np.add.at(taken, draw_cohort(sampler, quota, taken, left, 20_000, draw), 1)
    assert (time.process_time() - begun) / 10 < 0.2, "10 ms on one core"
