"""Choices among models: private in the exact sense, planned, charged when they happen, remembered."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from conftest import blobs, private, small_net
from fakes import a_view
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import passes_like
from scipy.stats import chisquare
from torch import nn

from dpfl_lightning.build import ENGINES
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client import answers
from dpfl_lightning.federated.client.answers import summed_losses
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.query import ChargedQuery, LowestLoss, NoMechanism, SelectModel
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.models.model import FORWARD_CHUNK
from dpfl_lightning.papers.clustered.model_selection import ModelSelection
from dpfl_lightning.privacy.accounting.events import NonPrivateEvent, SelectionEvent
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import ExponentialMechanism
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted

BUDGETS = (4.0, 6.0, 8.0, 10.0)  # of `make_loop`


class Choosing(Strategy):
    """Clients choose between the server's model and zeros, in each round from the second on."""

    def __init__(self, absent=None, same=(), **options):
        self._choice = ModelSelection(**options, key="strategies.choosing")
        self._absent, self._same, self._seen = absent or {}, same, {}

    def plan_run(self, schedule, view):
        return self._choice.plan_run(schedule, view, schedule.rounds - 1)

    def plan_round(self, plan, view):
        plan = plan.only(lambda client: view.round not in self._absent.get(client, ()))
        other = view.state.models if view.round in self._same else torch.zeros_like(view.state.models)
        if view.round >= 2:
            self._seen[view.round] = self._choice.choose(plan, view, torch.cat([view.state.models, other]))
        return plan

    def state_dict(self):
        return {"choice": self._choice.state_dict(), "seen": {round: dict(one) for round, one in self._seen.items()}}

    def load_state_dict(self, state):
        self._choice.load_state_dict(state["choice"])
        self._seen = dict(state["seen"])


@pytest.fixture
def choosing(make_loop):
    """`choosing(num_rounds, **options)`: a loop of clients that choose, and the strategy."""

    def make(num_rounds, /, absent=None, same=(), strategy=None, loop=None, **options):
        strategy = strategy or Choosing(absent, same, **options)
        return make_loop(parts=[SizeWeighted(), strategy], rounds=num_rounds, **(loop or {})), strategy

    return make


def paid(loop, client=0):
    """Rounds in which the client paid for a selection."""
    charges = read_ledger(loop.clients.folder.ledger_file)
    return [one.round for one in charges if (one.client, one.purpose) == (client, "select")]


# ---- one selection


def a_module():
    """Two classes, one input; `models_of` are its four parameters."""
    return ClientModule(torch.nn.Linear(1, 2))


def scores(module, models, x, y, bound):
    """What the mechanism of `SelectModel` adds its noise to, `[M]`."""
    query = SelectModel(mechanism_of={0: ExponentialMechanism(1.0)}, models=models, loss_bound=bound)
    return answers._bounded_sum(ChargedQuery.of(query), 0, module, x, y, passes_like(x, y), answers._scores)


def probabilities(module, models, x, y, epsilon, bound):
    """Exact law of the Gumbel argmax: the softmax of epsilon times the summed scores."""
    return torch.softmax(epsilon * scores(module, models, x, y, bound), dim=0)


@pytest.mark.e2e
@settings(deadline=None, max_examples=30)
@given(
    scale=st.sampled_from([0.1, 3.0, 100.0, 1e30, math.inf]),
    epsilon=st.floats(0.01, 4.0),
    bound=st.floats(0.1, 5.0),
    seed=st.integers(0, 10**6),
    records=st.integers(2, 12),
)
def test_one_record_changes_no_probability_by_more_than_e_to_the_epsilon(scale, epsilon, bound, seed, records):
    """Also for models and records of any size, infinite ones among them."""
    generator = torch.Generator().manual_seed(seed)
    module = a_module()
    models = torch.randn(3, 4, generator=generator) * min(scale, 1e30)
    x, y = torch.randn(records, 1, generator=generator), torch.randint(2, (records,), generator=generator)
    x[0] *= scale
    whole = probabilities(module, models, x, y, epsilon, bound)
    without = probabilities(module, models, x[1:], y[1:], epsilon, bound)
    ratio = torch.maximum(whole / without, without / whole)
    assert float(ratio.max()) <= math.exp(epsilon) * (1 + 1e-9)


@pytest.mark.slow
def test_answers_follow_that_law():
    """6,000 answers of seed 0 against the exact law, chi-square at a false-alarm rate of 0.1 %."""
    module, generator = a_module(), torch.Generator().manual_seed(1)
    models, x, y = torch.randn(3, 4, generator=generator), torch.randn(4, 1, generator=generator), torch.arange(4) % 2
    query = SelectModel(mechanism_of={0: ExponentialMechanism(1.5)}, models=models, loss_bound=1.0)
    draws, passes = np.random.default_rng(0), passes_like(x, y)
    chosen = [answers.answer(ChargedQuery.of(query), 0, module, x, y, draws, passes) for _ in range(6000)]
    expected = 6000 * probabilities(module, models, x, y, 1.5, 1.0).numpy()
    assert expected.min() > 300 and chisquare(np.bincount(chosen, minlength=3), expected).pvalue > 1e-3


def pooled_net():
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 2), nn.Flatten(), nn.Linear(24, 3))
    )


@pytest.mark.e2e
@pytest.mark.parametrize(("net", "shape"), [(small_net, (6,)), (pooled_net, (1, 8, 8))])
def test_scores_are_summed_over_all_records_whatever_the_model_says(net, shape):
    module, records = ClientModule(net()), 2 * FORWARD_CHUNK + 7
    x, y = torch.randn(records, *shape, generator=torch.Generator().manual_seed(0)), torch.arange(records) % 3
    x[3] = math.nan
    x = clipped_sum_for(module.net, module.sample_loss, x[:0], y[:0])[0].enter(x)
    models = torch.stack([module.flat, 2 * module.flat])
    with torch.no_grad():
        losses = [module.sample_loss(module.unflatten(model), x, y).nan_to_num(2.0).clamp(0, 2) for model in models]
        exact = torch.stack([(1 - one.double() / 2).sum() for one in losses])
        plain = [module.sample_loss(module.unflatten(model), x[4:], y[4:]).double().sum() for model in models]
        torch.testing.assert_close(summed_losses(module, models, x[4:], y[4:]), torch.stack(plain))
    torch.testing.assert_close(scores(module, models, x, y, 2.0), exact, rtol=1e-6, atol=0.0)


def test_the_lowest_loss_and_the_first_of_equals():
    module = a_module()
    x, y, none = torch.zeros(5, 1), torch.ones(5, dtype=torch.long), {0: NoMechanism("plain")}
    bad, good = torch.tensor([0.0, 0.0, 9.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 90.0])
    for models, best in (([bad, good, good], 1), ([good, bad], 0), ([bad, bad], 0), ([bad * math.nan, bad], 1)):
        query = LowestLoss(mechanism_of=none, models=torch.stack(models))
        assert query.read(0, answers.answer(ChargedQuery.of(query), 0, module, x, y, None, passes_like(x, y))) == best


@pytest.mark.e2e
def test_every_engine_gives_the_same_answers(choosing):
    def seen(name):
        loop, strategy = choosing(6, loop={"engine": ENGINES[name]()}, selection="exponential", epsilon=0.05)
        loop.run()
        return strategy._seen

    reference = seen("serial")
    assert {row for one in reference.values() for row in one.values()} == {0, 1}, "noise decides here"
    assert all(seen(name) == reference for name in ENGINES)


# ---- planned


def test_a_share_of_each_budget_pays_for_each_choice(choosing, make_loop):
    schedule = choosing(20)[0].plan_schedule()
    assert [own.count_of("select") for own in schedule.clients] == [2] * 4
    events = [schedule.planned(client, "select").event for client in range(4)]
    assert events == [SelectionEvent(0.03 * epsilon) for epsilon in BUDGETS]
    alone = make_loop(parts=[SizeWeighted()], rounds=20).plan_schedule()
    for own, without in zip(schedule.clients, alone.clients, strict=True):
        assert own.noise_multiplier("train") > without.noise_multiplier("train")


@pytest.mark.parametrize(
    ("options", "rounds", "most", "count"),
    [
        ({}, 200, 100, 20),
        ({}, 5, 4, 1),
        ({}, 200, 7, 7),
        ({"rounds": 9}, 200, 100, 9),
        ({"selection": "exponential"}, 200, 100, 100),
        ({"selection": "paper_argmin"}, 200, 100, 100),
    ],
)
def test_how_many_choices_are_planned(options, rounds, most, count, tmp_path):
    view = a_view(tmp_path, rounds=rounds)
    selection = ModelSelection(**options)
    assert selection.plan_run(view.schedule, view, most).clients[0].count_of("select") == count


def test_a_client_without_a_budget_needs_a_number(choosing):
    privacy = {"privacy": private([4.0, math.inf, 8.0, 10.0], noise_multiplier=2.0)}
    words = r"`strategies\.choosing\.selection_epsilon` must be a number if .* no budget, got None. Client 1"
    with pytest.raises(UserError, match=words):
        choosing(3, loop=privacy)[0].plan_schedule()
    loop, _ = choosing(3, loop=privacy, epsilon=0.2)
    loop.run()
    assert loop.schedule.planned(1, "select").event == SelectionEvent(0.2) and paid(loop, 1) == [2]


def test_a_regression_needs_a_bound(choosing):
    population = blobs()
    real = dataclasses.replace(population, y=population.y.float(), num_classes=1)
    regression = {"population": real, "module": ClientModule(small_net(classes=1))}
    with pytest.raises(UserError, match=r"choosing\.loss_bound` must be a number for a regression"):
        choosing(3, loop=regression)[0].plan_schedule()
    assert choosing(3, loop=regression, loss_bound=4.0)[0].run().finished


# ---- charged when it happens, remembered


@pytest.mark.e2e
def test_the_first_rounds_choose_and_the_answer_stays(choosing):
    loop, strategy = choosing(6, rounds=2)
    result, seen = loop.run(), strategy._seen
    assert paid(loop) == [2, 3]
    assert seen[3] == seen[4] == seen[6] and set(seen[2]) == {0, 1, 2, 3}
    for client in result.clients:
        assert 0.98 * client["epsilon_budget"] < client["epsilon_spent"] <= client["epsilon_budget"]


@pytest.mark.e2e
def test_clients_choose_in_every_round_or_when_models_differ_or_when_they_are_back(choosing):
    for options, rounds in (
        ({"selection": "exponential"}, [[2, 3, 4, 5, 6]] * 4),
        ({"same": (2, 3), "rounds": 1}, [[4]] * 4),
        ({"absent": {1: (2, 3), 2: (3,)}, "rounds": 2}, [[2, 3], [4, 5], [2, 4], [2, 3]]),
    ):
        loop, strategy = choosing(6, **options)
        loop.run()
        assert [paid(loop, client) for client in range(4)] == rounds
        if "same" in options:
            seen = strategy._seen
            assert seen[2] == seen[3] == {} and seen[4] == seen[5] != {}
        assert "absent" not in options or 1 not in strategy._seen[2]


@pytest.mark.e2e
def test_clients_that_cannot_pay_keep_their_last_answer(choosing):
    class OnceFewer(Choosing):
        def plan_run(self, schedule, view):
            planned = super().plan_run(schedule, view)
            fewer = dataclasses.replace(planned.planned(0, "select"), count=1)
            lines = (*planned.clients[0].planned[:-1], fewer)
            return planned.replan(lambda i, own: dataclasses.replace(own, planned=lines) if i == 0 else own)

    loop, strategy = choosing(5, strategy=OnceFewer(rounds=3, epsilon=0.01))
    loop.run()
    assert paid(loop, 0) == [2] and paid(loop, 1) == [2, 3, 4]
    assert len({strategy._seen[round][0] for round in (2, 3, 4, 5)}) == 1


# ---- without privacy


@pytest.mark.e2e
def test_without_privacy_clients_choose_plainly_and_nothing_is_promised(choosing):
    for options in ({"selection": "exponential", "epsilon": 0.1}, {"selection": "paper_argmin"}):
        loop, strategy = choosing(8, loop={"privacy": None}, **options)
        loop.run()
        assert strategy._seen[8] == dict.fromkeys(range(4), 0), "a trained model is better than none"
        assert all(math.isinf(one.epsilon) for one in loop.clients.budgets.guarantees())
        charges = read_ledger(loop.clients.folder.ledger_file)
        assert {type(one.event) for one in charges if one.purpose == "select"} == {NonPrivateEvent}
