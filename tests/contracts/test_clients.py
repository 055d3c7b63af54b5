"""A client releases the same bits among others, alone, and for requests that have crossed as bytes."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import EVERY_ENGINE, PowerCut, break_off, private

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.jobs import ClassGradients
from dpfl_lightning.federated.messages.query import ChargedQuery, SelectModel
from dpfl_lightning.federated.messages.requests import Ask, Train, train_requests
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.federated.transport.ranked import RankChannel
from dpfl_lightning.papers.baselines.ifca import Ifca
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import ExponentialMechanism, Mechanism
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


@pytest.mark.e2e
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


@pytest.mark.e2e
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


@pytest.mark.e2e
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


@pytest.fixture
def counting_steps(monkeypatch):
    """A mechanism with state: noise grows with the steps that a client has taken before."""
    really = Mechanism.privatise

    def privatise(self, clipped_sum, generator, dtype=torch.float32, into=None, kept=None):
        before = kept.get("steps", torch.zeros(1))
        kept["steps"] = before + 1
        return really(self, clipped_sum, generator, dtype, into) * (1 + before.to(dtype))

    monkeypatch.setattr(Mechanism, "privatise", privatise)


def kept_steps(loop):
    return {client: int(kept["steps"]) for client, kept in sorted(loop.clients.held.kept.items())}


@pytest.mark.e2e
@pytest.mark.usefixtures("counting_steps")
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_what_a_mechanism_keeps_stays_with_the_client(engine, steps, make_loop):
    """Between steps and rounds, in checkpoints, and for requests of one client alone."""
    made = {"engine": ENGINES[engine](), "rounds": 3}
    made |= {} if STEPS[steps] is None else {"clients": STEPS[steps]}
    unbroken = make_loop(**made)
    unbroken.run()
    assert kept_steps(unbroken) == {client: 3 * row.steps for client, row in enumerate(unbroken.config.settings)}
    broken = break_off(make_loop(**{**made, "engine": ENGINES[engine]()}), 3)
    again = make_loop(**{**made, "engine": ENGINES[engine]()}, output_dir=broken.output_dir)
    again.run(resume=True)
    assert torch.equal(again.state.models, unbroken.state.models) and kept_steps(again) == kept_steps(unbroken)
    clients, view, models = begun(make_loop(**{**made, "engine": ENGINES[engine]()}))
    plan = view.plan()
    for number, request in zip(plan.clients, train_requests(plan, models), strict=True):
        clients.client(number).handle(request)
    assert {client: int(kept["steps"]) for client, kept in clients.held.kept.items()} == {
        client: row.steps for client, row in enumerate(unbroken.config.settings)
    }
    clients.close()


@pytest.mark.usefixtures("counting_steps")
def test_a_client_that_fails_keeps_what_it_had(make_loop, monkeypatch):
    clients, view, models = begun(make_loop(rounds=2))
    plan = view.plan()
    one, request = clients.client(1), train_requests(plan, models)[1]
    one.handle(request)
    before = one.kept

    def fails(*args, **options):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(type(clients.engine), "change", fails)
        with pytest.raises(OSError, match="disk"):
            one.handle(request)
    assert torch.equal(one.kept["steps"], before["steps"])
    clients.close()


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
    with pytest.raises(UserError, match="be record where clients release gradients of classes"):
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
    other._set_up((), Streams(), "poisson", net, 1, (chosen.blocks_of, chosen.held_out_blocks_of))
    for client in range(4):
        records = other.engine.clients.client(client).records
        everyone = torch.arange(len(records))
        assert torch.equal(records.held_out()[1], chosen.held_out(client)[1])
        assert torch.equal(records.batch(everyone)[1], chosen.records(client, everyone)[1])
