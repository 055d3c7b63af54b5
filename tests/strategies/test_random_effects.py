"""Random-effects weights: shares by formula, kept for any selection, and the variance between clients found."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import FIXED_KEY, blobs, small_net
from fakes import Recorder

from dpfl_lightning import strategies
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.aggregate import combine, normalised, raw_weights
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.privacy.accounting.gaussian import gaussian_mu

EPSILON = [0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
COUNT, ROUNDS, RATE, DELTA = len(EPSILON), 8, 0.3, 1e-3


def planned(make_loop, privacy=(), rounds=ROUNDS, batch_size=None, **selection):
    name, options = next(iter(selection.items())) if selection else ("", None)
    usual = {"epsilon": EPSILON, "delta": DELTA, "noise_key": FIXED_KEY, **dict(privacy or ())}
    loop = make_loop(
        parts=[*strategies.build({"random_effects": {}, **({name: options} if name else {})}), Recorder()],
        privacy=None if privacy is None else PrivacyOptions(**usual),
        clients=ClientOptions(count=COUNT, batch_size=batch_size, learning_rate=RATE),
        population=blobs(num_clients=COUNT),
        rounds=rounds,
    )
    loop.plan_schedule()
    return loop, loop.strategies[0]


def combined(loop, clients, deltas, models=1, model_of=(0,) * COUNT):
    """What the server adds to its models, and the view."""
    view = loop.view(ServerState(torch.zeros(models, deltas.shape[1]), model_of))
    plan = view.plan(clients=clients)
    updates = dataclasses.replace(ClientUpdates.announced(plan), deltas=deltas)
    raw = raw_weights(loop.strategies, plan, updates, view)
    updates = dataclasses.replace(updates, route=(raw > 0).double())
    return loop.strategies[0].scale(combine(raw, updates), updates, normalised(raw), view), view


def noise_of(loop):
    """d (B / (mu D))^2 T for Gaussian noise: of the mean gradient in each of T participations."""
    rounds = np.array([schedule.count_of("train") for schedule in loop.schedule.clients])
    mu = gaussian_mu(np.array(EPSILON), np.full(COUNT, DELTA))
    return 83 * rounds / (mu * np.array(loop.population.num_records)) ** 2, rounds


@pytest.mark.parametrize("selection", [{}, {"uniform_selection": {"clients_per_round": 3}}], ids=["all", "some"])
@pytest.mark.parametrize("between", [0.0, 0.05])
def test_an_update_counts_by_its_clients_share_beside_any_others(between, selection, make_loop):
    loop, strategy = planned(make_loop, **selection)
    strategy._compare = lambda updates, view: None
    strategy._spread, strategy._precision = between, 1.0
    noise, rounds = noise_of(loop)
    share = 1 / (noise / rounds + between)
    share /= share.sum()
    for clients in ((0, 3, 7), (1, 7)):
        deltas = torch.randn(len(clients), 83, generator=torch.Generator().manual_seed(0))
        expected = torch.from_numpy(share[[*clients]] * ROUNDS / rounds[[*clients]]) @ deltas.double()
        (moved,), view = combined(loop, clients, deltas)
        assert float((moved - expected).norm() / expected.norm()) < 0.005, "noise on a grid has 0.35 % more"
        weight = (share[[*clients]] * ROUNDS / rounds[[*clients]]).sum()
        assert strategy.metrics(view)["sum_of_weights"] == pytest.approx(weight, rel=0.005)


@pytest.mark.parametrize("between", [0.0, 0.05])
def test_shares_are_of_gradients_and_an_update_of_more_steps_is_longer(between, make_loop):
    """The sum of equal gradients has the least error at these shares, however many steps each update has."""
    loop, strategy = planned(make_loop, batch_size=[4, 8, 16, 32] * 2)
    strategy._compare = lambda updates, view: None
    strategy._spread, strategy._precision = between, 1.0
    view = loop.view(ServerState(torch.zeros(1, 83), (0,) * COUNT))
    announced = ClientUpdates.announced(view.plan())
    size = RATE * np.array(announced.steps)
    assert size.max() > 4 * size.min()
    noise = 83 * (np.array(announced.noise_std) / size) ** 2
    share = 1 / (noise / ROUNDS + between) / size
    moved, _ = combined(loop, range(COUNT), torch.eye(COUNT, 83))
    torch.testing.assert_close(moved[0, :COUNT].double(), torch.from_numpy(share / share.sum()), rtol=0.01, atol=0)


def test_without_noise_it_is_the_mean_of_the_clients_of_each_model(make_loop):
    loop, _ = planned(make_loop, privacy=None)
    deltas = torch.randn(COUNT, 83, generator=torch.Generator().manual_seed(1))
    for model_of in ((0,) * COUNT, (0, 1, 1, 1, 0, 1, 1, 1)):
        moved, _ = combined(loop, range(COUNT), deltas, max(model_of) + 1, model_of)
        for row, change in enumerate(moved):
            mine = deltas[[client for client in range(COUNT) if model_of[client] == row]]
            torch.testing.assert_close(change, mine.mean(dim=0))
    half, _ = combined(loop, (0, 1, 2, 3), torch.ones(4, 83))
    torch.testing.assert_close(half, torch.full((1, 83), 0.5), msg="the share of a client that is away is not used")


@pytest.mark.parametrize("selection", ["uniform_selection", "biased_selection"])
def test_shares_of_a_whole_run_are_kept_whatever_the_quotas_are(selection, make_loop):
    """If every update is 1, all rounds together move the model by 1 a round on average."""
    loop, strategy = planned(
        make_loop,
        **{selection: {"clients_per_round": 3, "min_participation": 1}}
        if selection == "biased_selection"
        else {selection: {"clients_per_round": 3}},
    )
    seen = loop.strategies[-1]
    loop.run()
    strategy._compare = lambda updates, view: None
    moved = sum(float(combined(loop, one.clients, torch.ones(len(one.clients), 83))[0][0, 0]) for one in seen.reports)
    assert moved == pytest.approx(ROUNDS, rel=1e-5)


@pytest.mark.parametrize("spread", [0.0, 0.02])
def test_the_variance_between_clients_is_their_spread_beyond_the_known_noise(spread, make_loop):
    """Thirty rounds of all clients, each with its mean gradient and noise; d = 83: 4 standard errors."""
    loop, strategy = planned(make_loop, privacy={"epsilon": [20 * one for one in EPSILON]}, rounds=30)
    draw, found = torch.Generator().manual_seed(2), []
    view = loop.view(ServerState(torch.zeros(1, 83), (0,) * COUNT))
    plan = view.plan()
    announced = ClientUpdates.announced(plan)
    for _ in range(40):
        strategy._spread = strategy._precision = 0.0
        own = (spread / 83) ** 0.5 * torch.randn(COUNT, 83, generator=draw)
        for _ in range(30):
            noise = torch.tensor(announced.noise_std)[:, None] * torch.randn(COUNT, 83, generator=draw)
            strategy._compare(dataclasses.replace(announced, deltas=RATE * (own + 0.3) + noise), view)
        found.append(strategy._spread / strategy._precision)
    error = np.std(found) / len(found) ** 0.5
    assert np.mean(found) == pytest.approx(spread, abs=4 * error) and error < 0.002


def test_personal_parameters_have_no_noise_to_subtract(make_loop):
    loop, strategy = planned(make_loop)
    module = ClientModule(small_net(), personal=["0.weight"])
    view = dataclasses.replace(loop.view(ServerState(torch.zeros(1, 83), (0,) * COUNT)), module=module)
    announced = ClientUpdates.announced(view.plan())
    noise = torch.tensor(announced.noise_std)[:, None] * torch.randn(
        COUNT, 83, generator=torch.Generator().manual_seed(0)
    )
    strategy._compare(dataclasses.replace(announced, deltas=noise * ~module.personal_mask), view)
    assert abs(strategy._spread) < 4 * (2 * COUNT / module.num_sent) ** 0.5, "of the noise alone"
    expected = noise_of(loop)[0] * module.num_sent / 83
    strategy._shares(view)
    np.testing.assert_allclose(strategy._planned[2], expected, rtol=0.01)  # noise on a grid has more


@pytest.mark.e2e
def test_it_reports_and_resumes_what_it_has_found(make_loop):
    loop, strategy = planned(make_loop, uniform_selection={"clients_per_round": 4})
    result = loop.run()
    assert result.metrics["variance_between_clients"] == strategy._variance_between() >= 0
    again = strategies.build({"random_effects": {}})[0]
    again.load_state_dict(strategy.state_dict())
    assert again._variance_between() == strategy._variance_between()


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_by_default_the_updates_of_a_round_have_a_spread(count, make_loop):
    """The variance between clients is estimated from rounds of at least two; a single client takes part alone."""
    loop = make_loop(
        parts=strategies.build({"random_effects": {}, "uniform_selection": {}}),
        privacy=PrivacyOptions(epsilon=4.0, delta=DELTA, noise_key=FIXED_KEY),
        clients=ClientOptions(count=count, batch_size=None, learning_rate=RATE),
        population=blobs(num_clients=count),
        rounds=8,
    )
    assert loop.run().finished
    assert (loop.strategies[0]._precision > 0) == (count > 1)
