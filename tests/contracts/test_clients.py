"""A client releases the same bits among others, alone, and for requests that have crossed as bytes."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import EVERY_ENGINE, PowerCut, private

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.plan import ClassGradients
from dpfl_lightning.federated.messages.query import ChargedQuery, SelectModel
from dpfl_lightning.federated.messages.requests import Ask, Train, train_requests
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.federated.transport.ranked import RankChannel
from dpfl_lightning.papers.baselines.ifca import Ifca
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import ExponentialMechanism
from dpfl_lightning.privacy.noise import Streams
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
        request = WAYS[way](train_requests(plan, models)[row])
        assert torch.equal(alone.client(client).handle(request), together[row])
    assert torch.equal(alone.held.counts, clients.held.counts)
    assert read_ledger(alone.folder.ledger_file) == read_ledger(clients.folder.ledger_file)
    alone.close()


def test_a_client_pays_before_it_computes_and_until_its_plan_is_spent(make_loop, monkeypatch):
    loop = make_loop(rounds=2)
    clients, view, models = begun(loop)
    plan, one = view.plan(), clients.client(2)
    request = train_requests(plan, models)[plan.clients.index(2)]

    def cut(*args):
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(clients.engine, "compute", cut)
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


def test_a_question_names_the_asked_client_alone(make_loop):
    loop = make_loop(parts=[Ifca()], rounds=1)
    clients, _, models = begun(loop)
    mechanisms = {client: ExponentialMechanism(1.0) for client in (0, 1)}
    question = SelectModel(mechanism_of=mechanisms, models=models.repeat(2, 1), loss_bound=2.0)
    with pytest.raises(ValueError, match="client 1 must name it alone"):
        clients.client(1).handle(Ask(1, question))
    assert read_ledger(clients.folder.ledger_file) == []


def test_a_request_is_of_a_known_kind(make_loop):
    class Louder(Train):
        pass

    clients, view, models = begun(make_loop())
    request = train_requests(view.plan(), models)[0]
    with pytest.raises(TypeError, match="the framework's jobs"):
        clients.client(0).handle(Louder(**vars(request)))
    assert read_ledger(clients.folder.ledger_file) == []


def test_gradients_of_classes_of_persons_are_refused_before_a_charge(make_loop):
    persons = torch.arange(40) // 2
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    people = Population.from_datasets([(x, y)] * 4, held_out=0.0, num_classes=3, persons=[persons] * 4)
    privacy = private(unit="person", rows_per_person=2)
    clients, view, models = begun(make_loop(population=people, privacy=privacy))
    request = dataclasses.replace(train_requests(view.plan(), models)[0], job=ClassGradients(3))
    with pytest.raises(UserError, match="be record with gradients of classes"):
        clients.client(0).handle(request)
    assert read_ledger(clients.folder.ledger_file) == []


def test_every_rank_has_the_chosen_rows_of_persons(make_loop):
    persons, generator = torch.arange(40) // 2, torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 6, generator=generator), torch.arange(40) % 3
    people = Population.from_datasets([(x, y)] * 4, held_out=0.4, num_classes=3, persons=[persons] * 4)
    full, privacy = ClientOptions(count=4, batch_size=None), private(unit="person", rows_per_person=2)
    loop = make_loop(population=people, privacy=privacy, clients=full)
    chosen = loop.population.chosen(b"0" * 32)
    other = RankChannel(ENGINES["serial"](), SimpleNamespace(rank=1, size=2, cores=1))
    other.take(loop.module, loop.population)
    net = loop.module.net.state_dict()
    other._set_up((), Streams(), "poisson", net, 1, (chosen.units, chosen.held_out_units))
    for client in range(4):
        records = other.engine.clients.client(client).records
        everyone = torch.arange(len(records))
        assert torch.equal(records.held_out()[1], chosen.held_out(client)[1])
        assert torch.equal(records.batch(everyone)[1], chosen.records(client, everyone)[1])
