"""A client releases the same bits among others, alone, and for requests that have crossed as bytes."""

import pytest
import torch
from conftest import EVERY_ENGINE, PowerCut

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.federated.messages.query import ChargedQuery, SelectModel
from dpfl_lightning.federated.messages.requests import Ask, train_request
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.papers.baselines.ifca import Ifca
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import ExponentialMechanism
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import ToNode

WAYS = {
    "as an object": lambda request: request,
    "over the wire": lambda request: wire.decode(ToNode, wire.encode(ToNode("plan", request))).request,
}
STEPS = {"one step": ClientOptions(count=4, batch_size=None, learning_rate=0.3), "steps": None}


def begun(loop):
    """The clients of a loop before its first round, the plan of the round, and the models."""
    loop.plan_schedule()
    loop.output_dir.mkdir()
    loop.clients.begin(loop.output_dir, loop.run_plan(), None, ended=False)
    state = ServerState(loop.module.flat[None], (0,) * loop.population.num_clients)
    return loop.clients, loop.view(state), state.models


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_a_client_alone_releases_what_it_does_among_others(engine, steps, way, make_loop):
    made = {} if STEPS[steps] is None else {"clients": STEPS[steps]}
    clients, view, models = begun(make_loop(engine=ENGINES[engine](), **made))
    plan = clients.accept(view.plan())
    together = clients.train(plan, models, None).released
    clients.close()
    alone, _, _ = begun(make_loop(engine=ENGINES[engine](), **made))
    for row, client in enumerate(plan.clients):
        request = WAYS[way](train_request(plan, row, models))
        assert torch.equal(alone.client(client).handle(request), together[row])
    assert torch.equal(alone.held.counts, clients.held.counts)
    assert read_ledger(alone.folder.ledger_file) == read_ledger(clients.folder.ledger_file)
    alone.close()


def test_a_client_pays_before_it_computes_and_until_its_plan_is_spent(make_loop, monkeypatch):
    loop = make_loop(rounds=2)
    clients, view, models = begun(loop)
    plan, one = view.plan(), clients.client(2)
    request = train_request(plan, plan.clients.index(2), models)

    def cut(*args):
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(clients.engine, "carry_out", cut)
        with pytest.raises(PowerCut):
            one.handle(request)
    assert [charge.client for charge in read_ledger(clients.folder.ledger_file)] == [2]
    assert one.handle(request) is not None
    assert one.handle(request) is None, "two rounds were planned"
    assert len(read_ledger(clients.folder.ledger_file)) == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_client_alone_answers_as_among_others(way, make_loop):
    def asked(loop):
        clients, _, models = begun(loop)
        (line,) = (one for one in loop.schedule.clients[1].planned if one.purpose == "select")
        mechanism = {1: ExponentialMechanism(line.event.epsilon)}
        return clients, SelectModel(mechanism_of=mechanism, models=models.repeat(2, 1), loss_bound=2.0)

    clients, question = asked(make_loop(parts=[Ifca()], rounds=1))
    answer = clients.ask(ChargedQuery.of(question), 1)[1]
    alone, same = asked(make_loop(parts=[Ifca()], rounds=1))
    assert alone.client(1).handle(WAYS[way](Ask(1, same))) == answer
