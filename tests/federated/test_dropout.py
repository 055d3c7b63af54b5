"""Updates that a simulated network loses: charged, in no sum, and a round with too few changes nothing."""

import pytest
import torch
from attack_tools import Releases
from conftest import blobs

from dpfl_lightning.config.options import NetworkOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.traffic import Network
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware
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


def test_weights_from_estimates_go_without_the_lost(make_loop):
    network = NetworkOptions(dropout=0.5)
    loop = make_loop(blobs(), parts=[NoiseAware()], rounds=6, network=network)
    assert loop.run().finished and bool(loop.state.models.isfinite().all())


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
    class Pair(Strategy):
        def plan_round(self, plan, view):
            return plan.only(lambda client: client < 2)

    loop = make_loop(blobs(), parts=[Uniform(), Pair()], rounds=1, network=NetworkOptions(min_participants=3))
    with pytest.warns(UserNotice, match="2 clients could take part, fewer than the 3"):
        loop.run()
    assert [loop.clients.account(client).releases for client in range(4)] == [0, 0, 0, 0]


def test_more_participants_than_clients_are_refused(make_loop):
    with pytest.raises(UserError, match=r"`network.min_participants` must be at most the 4 clients of the run, got 5"):
        make_loop(blobs(), parts=[Uniform()], network=NetworkOptions(min_participants=5))


def test_losses_follow_from_seed_and_round_at_the_stated_rate():
    network = Network.of(NetworkOptions(dropout=0.3), 1000, seed=1)
    lost = [network.lost(round, range(1000)) for round in (1, 2, 1)]
    assert lost[0] == lost[2] != lost[1]
    assert 250 < len(lost[0]) < 350
    assert network.lost(1, [3, 4]) <= {3, 4}


@pytest.mark.parametrize("dropout", [-0.1, 1.1])
def test_a_probability_is_within_0_and_1(dropout, make_loop):
    with pytest.raises(UserError, match=r"network.dropout"):
        make_loop(blobs(), parts=[Uniform()], network=NetworkOptions(dropout=dropout))
