"""Random-effects weights: by formula, from what they are estimated, and what one client can do to them."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import FIXED_KEY, blobs, small_net
from estimated_rounds import some_deltas, updates_of
from fakes import Absent, Recorder
from simulated_updates import best_ratio, noise_aware_weights, signal_to_noise, simulated

from dpfl_lightning import strategies
from dpfl_lightning.algorithms.random_effects import (
    excess,
    lengths_of_signals,
    most_influence,
    opposed,
    spread_of_rounds,
)
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.aggregate import combine, normalised, raw_weights
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware

COUNT, PARAMS, RATE = 8, 83, 0.3
EPSILON = [0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
UNEQUAL = ClientOptions(count=4, batch_size=[4, 8, 16, 40], learning_rate=0.1)
MODES = ("planned", "estimated")


def planned(make_loop, *parts, epsilon=EPSILON, batch_size=(4, 8, 16, 32) * 2, rounds=8):
    """A loop of eight clients with unequal noise and steps, and its strategy."""
    privacy = None if epsilon is None else PrivacyOptions(epsilon=epsilon, delta=1e-3, noise_key=FIXED_KEY)
    loop = make_loop(
        parts=[NoiseAware(max_influence=1.0), *parts],
        privacy=privacy,
        clients=ClientOptions(count=COUNT, batch_size=list(batch_size), learning_rate=RATE),
        population=blobs(num_clients=COUNT),
        rounds=rounds,
    )
    loop.plan_schedule()
    return loop, loop.config.strategies[0]


def announced(loop, clients=range(COUNT)):
    """What the server knows of the next round's updates, the view, noise per step [C] and length of a step [C]."""
    view = loop.view(ServerState(torch.zeros(1, PARAMS), (0,) * COUNT))
    updates = ClientUpdates.announced(view.plan(clients=clients))
    size = RATE * np.array(updates.steps)
    return updates, view, PARAMS * (np.array(updates.noise_std) / size) ** 2, size


def moved(loop, updates, view):
    """What the server adds to its model."""
    plan = view.plan(clients=updates.clients)
    raw = raw_weights(loop.config.strategies, plan, updates, view)
    updates = dataclasses.replace(updates, route=(raw > 0).double())
    return loop.config.strategies[0].scale(combine(raw, updates), updates, normalised(raw), view)[0]


def like_noise(updates, seed=0, signal=0.0):
    draws = torch.randn(len(updates.clients), PARAMS, generator=torch.Generator().manual_seed(seed))
    noise = draws * torch.tensor(updates.noise_std)[:, None]
    return noise + signal * RATE * torch.tensor(updates.steps)[:, None]


# ---- the formula


@pytest.mark.parametrize("clients", [range(COUNT), (0, 3, 7)])
@pytest.mark.parametrize("between", [0.0, 0.05])
def test_shares_balance_noise_and_bias_and_the_step_is_that_of_the_clients_that_count(between, clients, make_loop):
    loop, strategy = planned(make_loop)
    strategy._between = torch.tensor([between, 1.0]).double()
    updates, view, noise, size = announced(loop, clients)
    assert size.max() > 3 * size.min()
    deltas = like_noise(updates)
    bias, target = 8 * len(noise) / COUNT * between, np.array(loop.population.num_records)[list(clients)]
    target = target / target.sum()
    level = (1 - (bias * target / (noise + bias)).sum()) / (1 / (noise + bias)).sum()
    share = (level + bias * target) / (noise + bias)  # of least noise and bias, of sum 1
    expected = torch.from_numpy(share * (share @ size) / size) @ deltas.double()
    step = moved(loop, dataclasses.replace(updates, deltas=deltas), view)
    torch.testing.assert_close(step.double(), expected, rtol=1e-4, atol=1e-7)


def test_without_noise_the_step_is_that_of_weights_by_size(make_loop):
    loop, _ = planned(make_loop, epsilon=None)
    updates, view, _, size = announced(loop)
    deltas = torch.from_numpy(size).float()[:, None] * torch.ones(COUNT, PARAMS)
    step = moved(loop, dataclasses.replace(updates, deltas=deltas), view)
    records = np.array(loop.population.num_records)
    torch.testing.assert_close(step, torch.full((PARAMS,), float(records @ size / records.sum())))


def test_the_variance_between_clients_is_found_without_the_noise():
    """Thirty rounds of eight clients with known variances, of which no noise is subtracted."""
    draw, noise = torch.Generator().manual_seed(0), np.geomspace(0.1, 10, COUNT)
    for between in (0.0, 0.5):
        found = []
        for _ in range(40):
            own = (between / PARAMS) ** 0.5 * torch.randn(COUNT, PARAMS, generator=draw)
            std = torch.from_numpy((noise / PARAMS) ** 0.5).float()[:, None]
            rounds = own + 0.3 + std * torch.randn(30, COUNT, PARAMS, generator=draw)
            parts = [spread_of_rounds(rounds[t], rounds[:t].mean(0), noise) for t in range(1, 30)]
            spread, weight = np.sum(parts, axis=0)
            found.append(spread / weight)
        error = np.std(found) / len(found) ** 0.5
        assert np.mean(found) == pytest.approx(between, abs=4 * error) and error < 0.02


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("budgets", "signal", "ratio", "least"),
    [("dist1", "equal", 0.3, 0.98), ("dist1", "steps", 0.3, 0.98), ("dist9", "steps", 0.1, 0.9)],
)
def test_signal_per_noise_of_simulated_updates_is_nearly_the_best(budgets, signal, ratio, least):
    rounds, length, variances = simulated(signal, ratio, seed=0, budgets=budgets, rounds=3)
    truth = length.double().numpy(), variances.double().numpy()
    best = best_ratio(*truth, most_influence(20))
    for noise in MODES:
        weights = noise_aware_weights(noise, rounds, length, variances)[-1]
        assert signal_to_noise(weights, *truth) > least * best, noise


def test_lengths_of_signals_are_equal_where_noise_hides_them():
    products = np.array([1.0, 1.2, 0.8, -0.5])
    assert lengths_of_signals(products, np.full(4, 10.0)).tolist() == [1.0] * 4
    sharp = lengths_of_signals(products, np.full(4, 1e-9))
    assert sharp[:3] / sharp[0] == pytest.approx(products[:3], rel=1e-3) and 0 < sharp[3] < 0.01


# ---- from what


@pytest.mark.parametrize("noise", MODES)
def test_what_a_client_sends_for_personal_parameters_changes_no_weight(noise, view):
    net = torch.nn.Sequential(torch.nn.Linear(4, 5, bias=False), torch.nn.Linear(5, 4, bias=False))
    view = dataclasses.replace(view, module=ClientModule(net, personal=["1.weight"]))
    deltas = torch.cat([some_deltas(4, 20), torch.zeros(4, 20)], dim=1)
    honest = NoiseAware(noise).weigh(updates_of(deltas, noise_std=(1.0, 2.0, 2.0, 3.0)), view)
    deltas[0, 20:] = 9
    again = NoiseAware(noise).weigh(updates_of(deltas, noise_std=(1.0, 2.0, 2.0, 3.0)), view)
    assert torch.equal(again, honest) and not torch.equal(honest[0], honest[3])


def test_false_claims_of_budget_records_batch_and_steps_change_no_bit_of_estimated_weights(view):
    """The same updates, announced otherwise; both the weights and the length of the step are equal."""
    deltas, found = some_deltas(8, 500), []
    facts, mechanism = view.facts, view.mechanism(0)
    lies = dataclasses.replace(
        facts,
        num_records=(10**6, *facts.num_records[1:]),
        batch_size=(1, *facts.batch_size[1:]),
        reported_epsilon=(1e6, *facts.reported_epsilon[1:]),
    )
    honest = updates_of(deltas[:4], [3] * 4, (1.0,) * 4, mechanism_of=(mechanism,) * 4)
    false = dataclasses.replace(mechanism, noise_multiplier=1e-6, expected_batch_size=1)
    liar = updates_of(deltas[:4], [10**6, 3, 3, 3], (1e-9, 1.0, 1.0, 1.0), mechanism_of=(false, *[mechanism] * 3))
    for known, updates in ((facts, honest), (lies, liar)):
        strategy, seen = NoiseAware("estimated"), dataclasses.replace(view, facts=known)
        for _ in range(3):
            share = strategy.weigh(updates, seen)
            found.append((share, strategy.scale(deltas[:1], updates, share[None] / share.sum(), seen)))
    for before, after in zip(found[:3], found[3:], strict=True):
        assert all(map(torch.equal, before, after))


# ---- what one client can do


def test_updates_against_most_others_are_opposed_unless_they_are_more_than_a_third():
    def found(against, empty=()):
        draws = torch.randn(9, 2000, generator=torch.Generator().manual_seed(0)).double() / 2000**0.5
        draws[:, 0] += 0.3
        draws[against] *= -1
        draws[list(empty)] = 0
        return np.flatnonzero(opposed((draws @ draws.T).numpy(), 2000)).tolist()

    assert found([2]) == found([2], empty=[0, 5]) == [2], "empty updates hide nobody"
    assert found([2, 3, 4, 6]) == [], "more than a third may be honest"
    assert opposed(np.eye(4), 0).tolist() == [False] * 4
    assert not opposed(np.array([[1.0, -1.0], [-1.0, 1.0]]), 2000).any()


def test_honest_updates_are_hardly_ever_false_or_too_long():
    noise, alarms = np.geomspace(1, 100, 20), 0
    for seed in range(200):
        draws = torch.randn(20, 500, generator=torch.Generator().manual_seed(seed)).double()
        draws *= torch.from_numpy((noise / 500) ** 0.5)[:, None]
        gram = (draws @ draws.T).numpy()
        alarms += opposed(gram, 500).sum() + (excess(np.diag(gram), noise, 500) > 0).sum()
    assert alarms <= 4, "of 4,000"


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:round 1. noise_aware gives no weight")
@pytest.mark.parametrize("noise", MODES)
@pytest.mark.parametrize("length", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("along", [{0: -1.0}, {1: 1.0}, {0: 0.7, 1: 0.7}], ids=["against", "beside", "half"])
@pytest.mark.parametrize("count", [2, 12])
def test_no_client_has_more_than_its_bound_or_leads_the_step(count, along, length, noise, view):
    """Weak signals, with the same crafted update in the first six of seven rounds."""
    strategy, facts = NoiseAware(noise), dataclasses.replace(view.facts, num_records=(9,) * count)
    view = dataclasses.replace(view, facts=facts, learning_rate=(1.0,) * count)
    for number in range(7):
        deltas = torch.randn(count, 2000, generator=torch.Generator().manual_seed(number)) / 2000**0.5
        deltas[:, 0] += 0.1
        if number < 6:
            deltas[0] = 0
            for place, part in along.items():
                deltas[0, place] = part * length
        updates = updates_of(deltas, [1] * count, (2000**-0.5,) * count)
        share = strategy.weigh(updates, view)
        step = strategy.scale((share / share.sum()).float()[None] @ deltas, updates, share[None] / share.sum(), view)[0]
        parts = share * strategy._length
        assert float(parts[0]) <= most_influence(count) * float(parts.sum()) * (1 + 1e-6)
        assert bool(step.isfinite().all()) and float(step[2:].norm()) < 1.5
        assert count == 2 or float(step.norm()) < 1.5
    if count > 2 and noise == "planned":
        assert float(share[0] / share.sum()) > 0.5 / count, "its honest update counts again"


# ---- edges


@pytest.mark.e2e
@pytest.mark.parametrize("noise", MODES)
def test_cohorts_of_one_two_and_newcomers(noise, make_loop):
    parts = [NoiseAware(noise), Absent({1: (0, 1, 3), 2: (0, 2)}), seen := Recorder()]
    loop = make_loop(parts=parts, clients=UNEQUAL, rounds=3)
    result = loop.run()
    assert [tuple(report.weights.shape) for report in seen.reports] == [(1, 1), (1, 2), (1, 4)]
    assert all(float(report.weights.sum()) == pytest.approx(1) for report in seen.reports)
    assert bool(loop.state.models.isfinite().all()) and result.metrics["variance_between_clients"] >= 0


@pytest.mark.filterwarnings("ignore:round .* gives no weight")
@pytest.mark.parametrize("length", [1.0, 1e4])
def test_a_false_client_does_not_make_the_others_differ(length, make_loop):
    loop, strategy = planned(make_loop)
    updates, view, _, _ = announced(loop)
    for seed in range(6):
        deltas = like_noise(updates, seed, signal=1.0)
        deltas[0] *= -length
        strategy.weigh(dataclasses.replace(updates, deltas=deltas), view)
    assert "differences between clients" in strategy.remarks(view)[0], strategy.remarks(view)


@pytest.mark.e2e
def test_beside_kmeans_weights_are_those_within_the_clusters(make_loop):
    """Each client has a separate model there; weights that were scaled for each start model would all be equal."""
    parts = [*strategies.build({"noise_aware": {}, "kmeans_clusters": {"num_clusters": 1}}), seen := Recorder()]
    make_loop(parts=parts, clients=UNEQUAL, rounds=2).run()
    weights = seen.reports[1].weights
    assert bool((weights == weights[:1]).all()), "one cluster has one rule"
    assert float(weights.max()) > 0.3


def test_large_updates_are_folded_to_a_bounded_memory(view, monkeypatch):
    monkeypatch.setattr("dpfl_lightning.strategies.aggregation.noise_aware._KEPT", 40)
    strategy = NoiseAware("estimated")
    strategy.weigh(updates_of(torch.ones(4, 83)), dataclasses.replace(view, module=ClientModule(small_net())))
    assert strategy._sums.shape == (4, 10)
