"""Updates that a simulated network loses or delays: charged, in no sum, and a round with too few changes nothing."""

import math

import pytest
import torch
from attack_tools import Releases
from conftest import blobs, break_off
from fakes import Absent

from dpfl_lightning.config.options import NetworkOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.server.history import read
from dpfl_lightning.federated.server.traffic import Network
from dpfl_lightning.strategies.aggregation.uniform import Uniform

HALF = NetworkOptions(dropout=[0.0, 1.0, 0.0, 1.0])


@pytest.mark.parametrize("single", [False, True], ids=["streamed", "single updates"])
def test_a_lost_update_is_charged_and_is_in_no_sum(single, make_loop):
    loop = make_loop(blobs(), parts=[Uniform(), *[Releases()] * single], rounds=1, network=HALF)
    train, true, before = loop.clients.train, [], loop.module.flat.clone()

    def spied(plan, models, raw_weights):
        updates = train(plan, models, raw_weights)
        true.append(updates.total.rounded(raw_weights.sum(dim=1)) if updates.deltas is None else updates.deltas[[0, 2]])
        return updates

    loop.clients.train = spied
    loop.run()
    torch.testing.assert_close(loop.state.models[0], before + true[0].mean(dim=0))
    assert [loop.clients.account(client).releases for client in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("lost", [1.0, [1.0, 1.0, 1.0, 0.0]])
def test_with_too_few_updates_models_stay_and_budgets_are_spent(lost, make_loop):
    network = NetworkOptions(dropout=lost, min_participants=2)
    loop = make_loop(blobs(), parts=[Uniform()], rounds=2, network=network)
    before = loop.module.flat.clone()
    if lost == 1.0:
        loop.run()
    else:
        with pytest.warns(UserNotice, match="1 client sent an update that arrived, fewer than the 2"):
            loop.run()
    assert torch.equal(loop.state.models[0], before)
    assert [loop.clients.account(client).releases for client in range(4)] == [2, 2, 2, 2]


def test_too_few_clients_are_not_charged(make_loop):
    parts = [Uniform(), Absent({1: (2, 3)})]
    loop = make_loop(blobs(), parts=parts, rounds=1, network=NetworkOptions(min_participants=3))
    with pytest.warns(UserNotice, match="2 clients could take part, fewer than the 3"):
        loop.run()
    assert [loop.clients.account(client).releases for client in range(4)] == [0, 0, 0, 0]


def test_more_participants_than_clients_are_refused(make_loop):
    with pytest.raises(UserError, match=r"`network.min_participants` must be at most the 4 clients of the run, got 5"):
        make_loop(blobs(), parts=[Uniform()], network=NetworkOptions(min_participants=5))


def test_losses_follow_from_seed_and_round_at_the_stated_rate():
    network = Network(NetworkOptions(dropout=0.3), 1000, seed=1)
    lost = [network.training(round, dict.fromkeys(range(1000), 7), 7)[0] for round in (1, 2, 1)]
    assert lost[0] == lost[2] != lost[1]
    assert 250 < len(lost[0]) < 350
    some = {*range(3, 50)}
    assert network.training(1, dict.fromkeys(some, 7), 7)[0] == lost[0] & some, "the other clients do not matter"


BAD = {
    "dropout": 1.1,
    "compute_seconds": -1.0,
    "time_limit": 0.0,
    "up_megabits_per_second": 0.0,
    "down_megabits_per_second": [1.0, 2.0],
    "latency_seconds": -0.1,
}


@pytest.mark.parametrize("name", BAD)
def test_values_have_a_range(name, make_loop):
    with pytest.raises(UserError, match=f"network.{name}"):
        make_loop(blobs(), parts=[Uniform()], network=NetworkOptions(**{name: BAD[name]}))


def test_as_many_are_late_as_the_exponential_distribution_says():
    """P(late) is exp(-(limit - latency) / mean)."""
    options = NetworkOptions(compute_seconds=2.0, time_limit=3.0, latency_seconds=1.0)
    network = Network(options, 1000, seed=1)
    late = [network.training(round, dict.fromkeys(range(1000), 7), 7) for round in (1, 2, 1)]
    assert late[0] == late[2] != late[1] and late[0][1] == len(late[0][0])
    assert abs(late[0][1] - 1000 * math.exp(-1)) < 60
    some = {*range(3, 50)}
    assert network.training(1, dict.fromkeys(some, 7), 7)[0] == late[0][0] & some, "the other clients do not matter"


@pytest.mark.e2e
def test_a_late_update_is_charged_counted_and_in_no_sum(make_loop):
    """Two of the four clients are slow: as if their updates were dropped, and the server waits until the limit."""
    slow = NetworkOptions(compute_seconds=[0.0, 1e9, 0.0, 1e9], time_limit=5.0, latency_seconds=0.5)
    loop, expected = (make_loop(parts=[Uniform()], rounds=2, network=network) for network in (slow, HALF))
    result, dropped = loop.run(), expected.run()
    assert torch.equal(loop.state.models, expected.state.models)
    assert [loop.clients.account(client).releases for client in range(4)] == [2, 2, 2, 2]
    assert result.metrics["network_seconds"] == 2 * 5.0
    rounds = [one.values for one in read(loop.output_dir / "metrics.jsonl")]
    assert [(one["train_lost_updates"], one["train_late_updates"]) for one in rounds] == [(2.0, 2.0)] * 2
    assert dropped.metrics["lost_updates"] == 2 and "late_updates" not in dropped.metrics


@pytest.mark.e2e
def test_stragglers_of_a_resumed_run_are_those_of_the_unbroken_one(make_loop):
    some = NetworkOptions(compute_seconds={"name": "uniform", "low": 1, "high": 3}, time_limit=2.0)
    unbroken = make_loop(rounds=4, network=some)
    assert unbroken.run().metrics["late_updates"] < 4
    broken = break_off(make_loop(rounds=4, network=some), 3)
    resumed = make_loop(rounds=4, network=some, output_dir=broken.output_dir)
    resumed.run(resume=True)
    assert torch.equal(resumed.state.models, unbroken.state.models)
