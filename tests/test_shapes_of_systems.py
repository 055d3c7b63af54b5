"""Small fakes of the systems that plug in, driven through the real loop: later ones need no rewrite of it."""

import dataclasses
import itertools

import pytest
import torch
from conftest import FIXED_KEY, small_net
from fakes import two_phases
from torch import nn

from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.evaluation import ClientModels
from dpfl_lightning.federated.messages.plan import ClassGradients
from dpfl_lightning.federated.messages.query import SelectModel
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.privacy.accounting.planned import Planned
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import ExponentialMechanism
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted


class KMeansRoutes(Strategy):
    """KM-CDPFL: everybody starts from its cluster's model; updates are routed to clusters."""

    role = "route"

    def after_step(self, state, updates, view):
        if len(state.models) == 2:
            return state
        return dataclasses.replace(state, models=state.models.repeat(2, 1), model_of=tuple(i % 2 for i in range(4)))

    def weigh(self, updates, view):
        route = torch.zeros(len(view.state.models), len(updates.clients))
        route[[client % len(route) for client in updates.clients], range(len(updates.clients))] = 1.0
        return route


def test_km_cdpfl_grows_from_one_model_to_two(make_loop):
    loop = make_loop(parts=[SizeWeighted(), KMeansRoutes()])
    result = loop.run()
    assert loop.state.models.shape[0] == 2
    assert not torch.allclose(*loop.state.models)
    assert [client["model"] for client in result.clients] == [0, 1, 0, 1]
    assert sorted(path.name for path in loop.output_dir.glob("model*.pt")) == ["model_0.pt", "model_1.pt"]


class MeanRegularised(Strategy):
    """MR-MTL: every client keeps its own model, pulled to the mean of all."""

    def after_step(self, state, updates, view):
        if len(state.models) == 1:
            return dataclasses.replace(state, models=state.models.repeat(4, 1), model_of=(0, 1, 2, 3))
        return state

    def plan_round(self, plan, view):
        mean = view.state.models.mean(dim=0, keepdim=True)
        return dataclasses.replace(plan, anchors=mean, anchor_of=(0,) * len(plan.clients), pull=self._pull)

    def __init__(self, pull):
        self._pull = pull


def test_mr_mtl_keeps_n_models_near_their_mean(make_loop):
    def spread(pull):
        loop = make_loop(parts=[SizeWeighted(), MeanRegularised(pull)], rounds=4)
        loop.run()
        return float(loop.state.models.std(dim=0).norm())

    assert 0 < spread(pull=2.0) < spread(pull=0.0)


class WithPersonalLayer(ClientModule):
    """PRIVATEFL: a personal input transform that never leaves the client."""

    personal = ("0.weight",)


def test_privatefl_parameters_stay_with_the_client(make_loop):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 3))
    loop = make_loop(module=WithPersonalLayer(net))
    start = loop.module.flat
    loop.run()
    personal = loop.module.personal_mask
    assert torch.equal(loop.state.models[0][personal], start[personal]), "the server's copy never moves"
    own = [loop.clients.engine.personalised(loop.state.models[0], client)[personal] for client in range(4)]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(own))
    assert set(torch.load(loop.folder.checkpoint, weights_only=True)["clients"]["personal"]) == {0, 1, 2, 3}


def test_an_unknown_personal_name_is_refused():
    with pytest.raises(UserError, match="personal"):
        type("Odd", (ClientModule,), {"personal": ("nope",)})(small_net())


class TwoPhases(Strategy):
    """R-DPCFL in outline: a full-batch first round, then sampled rounds, and a charged selection."""

    def plan_run(self, schedule, view):
        return two_phases(schedule, selections=1)

    def plan_round(self, plan, view):
        if view.round == 1:
            return view.plan("first")
        if view.round == 3:
            models = torch.stack([view.state.models[0], torch.zeros_like(view.state.models[0])])
            choice = dict.fromkeys(plan.clients, ExponentialMechanism(0.1))
            self._answers = view.ask(SelectModel(mechanism_of=choice, models=models, loss_bound=2.0))
        return plan

    def weigh(self, updates, view):
        return torch.zeros(len(updates.clients)) if view.round == 1 else None

    def state_dict(self):
        return {"answers": dict(getattr(self, "_answers", {}))}


def test_two_phases_and_a_selection_are_planned_charged_and_paid(make_loop):
    phases = TwoPhases()
    loop = make_loop(parts=[SizeWeighted(), phases])
    start = loop.module.flat
    seen = []
    loop.callbacks.append(Watch(lambda view: seen.append(view.state.models[0].clone())))
    result = loop.run()
    assert torch.equal(seen[0], start), "an all-zero row leaves the model alone"
    assert not torch.equal(seen[1], start)
    events = loop.clients.budgets.ledger.events(0)
    assert [type(event).__name__ for event in events] == ["GaussianEvent"] * 2 + ["SelectionEvent", "GaussianEvent"]
    assert events[0].sample_rate == 1.0 and events[0].noise_multiplier == 5.0
    assert set(phases._answers) == {0, 1, 2, 3} and set(phases._answers.values()) <= {0, 1}
    for client in result.clients:
        assert 0.98 * client["epsilon_budget"] < client["epsilon_spent"] <= client["epsilon_budget"]


class Watch(Callback):
    def __init__(self, see):
        self._see = see

    def on_round_end(self, view, report):
        self._see(view)


class ClassGradientRun(Strategy):
    """DistDD in outline: class gradients move a synthetic set at the server; a net trained on it is delivered."""

    def plan_run(self, schedule, view):
        def change(client, own):
            (train,) = own.planned
            event = dataclasses.replace(train.event, sample_rate=1.0, steps=1)
            return dataclasses.replace(own, planned=(Planned("class_gradients", event, train.count),))

        return schedule.replan(change)

    def plan_round(self, plan, view):
        return view.plan("class_gradients", job=ClassGradients(view.facts.num_classes))

    def step(self, state, combined, view):
        self._synthetic = combined  # [1, num_classes, P]
        return dataclasses.replace(state, models=torch.randn_like(state.models))

    _calls = 0

    def final_models(self, state, view):
        self._calls += 1
        return ClientModels(torch.ones_like(state.models), state.model_of)


def test_class_gradients_reach_the_server_and_another_net_is_delivered(make_loop):
    distiller = ClassGradientRun()
    loop = make_loop(parts=[SizeWeighted(), distiller])
    loop.run()
    assert distiller._calls == 3, "once a round, though evaluation, result and export all ask for it"
    assert distiller._synthetic.shape == (1, 3, loop.module.num_params)
    assert torch.equal(torch.load(loop.output_dir / "model.pt")["0.bias"], torch.ones(8))
    assert all(event.steps == 1 for event in loop.clients.budgets.ledger.events(2))


class Cohort(Strategy):
    """DPFL-BCS in outline: quotas planned, a cohort a round."""

    def plan_run(self, schedule, view):
        def change(client, own):
            return dataclasses.replace(own, planned=(dataclasses.replace(own.planned[0], count=1 + client % 2),))

        return schedule.replan(change)

    def plan_round(self, plan, view):
        return plan.only(lambda client: client in (view.round - 1, view.round))


def test_quotas_leave_more_budget_for_each_participation(make_loop):
    loop = make_loop(
        parts=[SizeWeighted(), Cohort()], privacy=PrivacyOptions(epsilon=4.0, delta=1e-3, noise_key=FIXED_KEY)
    )
    result = loop.run()
    noise = [client["noise_multiplier"] for client in result.clients]
    assert noise[0] < noise[1], "one participation in place of two"
    assert [len(loop.clients.budgets.ledger.events(client)) for client in range(4)] == [1, 2, 1, 1]


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


class Anew(Strategy):
    """Plans the last round anew, by `change(line) -> line` of what each client has paid for."""

    def __init__(self, change):
        self._change = change

    def replan(self, schedule, view):
        if view.round < view.run.rounds or len(schedule.clients[0].planned) > 1:
            return schedule

        def change(client, own):
            (train,) = own.planned
            paid = dataclasses.replace(train, count=view.used(client, "train"))
            event = dataclasses.replace(train.event, noise_multiplier=None)
            return dataclasses.replace(own, planned=(self._change(paid), Planned("last", event, 1)))

        return schedule.replan(change)

    def plan_round(self, plan, view):
        return view.plan("last") if view.round == view.run.rounds else plan


FULL = ClientOptions(count=4, batch_size=None, learning_rate=0.3)


def test_what_is_left_can_be_planned_anew_and_the_budget_is_what_holds(make_loop):
    loop = make_loop(parts=[SizeWeighted(), Anew(lambda line: line)], clients=FULL)
    result = loop.run()
    for client, budget in enumerate([4.0, 6.0, 8.0, 10.0]):
        *early, last = loop.clients.budgets.ledger.events(client)
        assert len(early) == 2 and last.noise_multiplier == pytest.approx(early[0].noise_multiplier, rel=1e-4)
        assert result.clients[client]["epsilon_spent"] == budget


@pytest.mark.parametrize(
    ("clients", "change", "words"),
    [
        (FULL, lambda line: dataclasses.replace(line, count=line.count - 1), "the schedule of client 0 plans now"),
        (FULL, lambda line: dataclasses.replace(line, purpose="other"), "the schedule of client 0 plans now"),
        (None, lambda line: line, "`clients.batch_size` must be null"),
    ],
)
def test_a_new_plan_must_hold_what_was_paid_for(clients, change, words, make_loop):
    with pytest.raises(UserError, match=words):
        make_loop(parts=[SizeWeighted(), Anew(change)], clients=clients).run()
