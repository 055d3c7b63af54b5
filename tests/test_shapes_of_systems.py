"""Strategies of kinds that no strategy of ours is, driven through the real loop."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.evaluation import ClientModels
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.privacy.accounting.planned import Planned
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted


class OtherNet(Strategy):
    """The clients receive a model that is not the server's."""

    _calls = 0

    def final_models(self, state, view):
        self._calls += 1
        return ClientModels(torch.ones_like(state.models), state.model_of)


def test_the_final_models_of_a_strategy_are_exported_and_asked_for_once_a_round(make_loop):
    other = OtherNet()
    loop = make_loop(parts=[SizeWeighted(), other])
    loop.run()
    assert other._calls == 3, "though evaluation, result and export all ask for them"
    assert torch.equal(load_file(loop.output_dir / "model.safetensors")["0.bias"], torch.ones(8))


class Greedy(Strategy):
    """Lowers its noise without declaring it."""

    def plan_round(self, plan, view):
        quiet = tuple(dataclasses.replace(m, noise_multiplier=m.noise_multiplier / 2) for m in plan.mechanism_of)
        return dataclasses.replace(plan, mechanism_of=quiet)


def test_a_release_that_was_not_planned_is_refused_before_it_is_charged(make_loop):
    loop = make_loop(parts=[SizeWeighted(), Greedy()])
    with pytest.raises(RuntimeError, match="declares it in `plan_run`"):
        loop.run()
    assert read_ledger(loop.clients.folder.ledger_file) == []


class PlansAnew(Strategy):
    """Plans the last round anew, by `change(line) -> line` of what each client has paid for."""

    def __init__(self, change):
        self._change = change

    def replan(self, schedule, view):
        if view.round < view.run.rounds or len(schedule.clients[0].planned) > 1:
            return schedule

        def change(client, planned):
            (train,) = planned.planned
            paid = dataclasses.replace(train, count=view.used(client, "train"))
            event = dataclasses.replace(train.event, noise_multiplier=None)
            return dataclasses.replace(planned, planned=(self._change(paid), Planned("last", event, 1)))

        return schedule.replan(change)

    def plan_round(self, plan, view):
        return view.plan("last") if view.round == view.run.rounds else plan


FULL = ClientOptions(count=4, batch_size=None, learning_rate=0.3)


def test_the_rest_of_a_run_can_be_planned_anew_within_the_budget(make_loop):
    loop = make_loop(parts=[SizeWeighted(), PlansAnew(lambda line: line)], clients=FULL)
    result = loop.run()
    for client, budget in enumerate([4.0, 6.0, 8.0, 10.0]):
        *early, last = loop.clients.budgets.ledger.events(client)
        assert len(early) == 2 and last.noise_multiplier == pytest.approx(early[0].noise_multiplier, rel=1e-4)
        assert result.clients[client]["epsilon_spent"] == budget


ONE_LESS, OTHER = (
    lambda line: dataclasses.replace(line, count=line.count - 1),
    lambda line: dataclasses.replace(line, purpose="other"),
)


@pytest.mark.parametrize(
    ("clients", "change", "words"),
    [
        (FULL, ONE_LESS, "the schedule of client 0 plans now"),
        (FULL, OTHER, "the schedule of client 0 plans now"),
        (None, lambda line: line, r"only full batches .* got 'train: Gaussian noise of sampled batches'"),
    ],
)
def test_a_new_plan_must_contain_the_paid_releases(clients, change, words, make_loop):
    with pytest.raises(UserError, match=words):
        make_loop(parts=[SizeWeighted(), PlansAnew(change)], clients=clients).run()
