"""Samplers: quotas to the last participation, inclusion probabilities, and what the paper's sampler leaves unused."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning.algorithms.allocation import allocate_int
from dpfl_lightning.algorithms.cohorts import SAMPLERS, draw_cohort, systematic
from dpfl_lightning.errors import UserError


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
