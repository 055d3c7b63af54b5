"""Runs over the nodes of sites: equal to the simulation, resumed after losses, refused if no site could accept them."""

import dataclasses
import math
import shutil
import threading

import fake_flower
import pytest
import torch
from conftest import FIXED_KEY, PowerCut
from sites import OF_PERSONS, SITES, charges, configured, listening, nodes_of, over, planned, state_of, with_copy

from dpfl_lightning.commands.evaluate import evaluate_run
from dpfl_lightning.commands.ledger import main as ledger
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.messages.clients import LostClients
from dpfl_lightning.federated.server.history import read
from dpfl_lightning.federated.server.round import Round
from dpfl_lightning.loop import build_loop
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.reporting import description
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.node.accept import accept, open_study
from dpfl_lightning.sites.node.service import Node
from dpfl_lightning.sites.server import flower
from dpfl_lightning.sites.server.addresses import connection_to
from dpfl_lightning.sites.server.channel import Sites
from dpfl_lightning.sites.server.connections import Connection, SocketConnection
from dpfl_lightning.sites.server.deploy import export, loop_over, planning_loop, terms_of
from dpfl_lightning.sites.terms import read_site, read_terms
from dpfl_lightning.sites.wire import digest

pytestmark = pytest.mark.e2e

FOUR = {
    "clients": {"count": 4, "learning_rate": 0.5, "batch_size": 180},
    "privacy": {"epsilon": [2, 4, 8, 8]},
}
FEW_IMAGES = {"min_participants": 3, "evaluation_epochs": 2, "images_per_class": 1, "net_epochs": 1}
NET = {"name": "convnet", "width": 4, "depth": 2}

#: strategy -> its options, and those of the run
OTHERS = {
    "noise_aware": ({}, {}),
    "biased_selection": ({}, {}),
    "kmeans_clusters": ({}, {}),
    "clustered": ({}, {"rounds": 4, **FOUR}),  # a first round of full batches, and choices of a model
    "mixed_effects": ({}, {}),
    "mr_mtl": ({}, {}),  # personal models
    "pfa": ({}, {}),
    "distillation": (FEW_IMAGES, {"model": NET}),
    "distillation_as_printed": (FEW_IMAGES, {"model": NET}),
    "local_distillation": (FEW_IMAGES, {"model": NET}),
    "feature_means": ({"evaluation_epochs": 2, "images_per_class": 1}, {"rounds": 1, "model": NET}),
}


def by_client(charged):
    return sorted(charged, key=lambda charge: (charge.client, charge.round, charge.number))


def compared(folder, **more):
    """The models of the simulation and of the federation, whose ledgers are equal."""
    simulated = build_loop(configured(folder / "simulated", key=FIXED_KEY, **more))
    simulated.run()
    terms = planned(folder, **more)
    nodes = nodes_of(folder, terms)
    loop = over(nodes, terms, configured(folder / "real", **more))
    result = loop.run()
    assert result.finished and not result.guarantee.source.protects, "the test key is a caveat of every guarantee"
    expected = read_ledger(folder / "simulated" / "ledger.jsonl")
    assert by_client(read_ledger(folder / "real" / "ledger.jsonl")) == by_client(expected), "the mirror"
    assert not (folder / "real" / "private.json").exists(), "the server has no private counts"
    training, test = (description.dataset(loop.config.facts, loop.info, context) for context in ("training", "test"))
    assert (training["name"], test["name"]) == ("records of sites", "digits") and "digits" not in training["source"]
    assert loop.config.facts.origin == {} and math.isnan(loop.info.estimated_seconds), "the server knows neither"
    for client, node in enumerate(nodes):
        assert charges(node.state, terms) == [one for one in expected if one.client == client]
        node.close()
    return simulated.state.models, loop.state.models


@pytest.mark.parametrize("unit", ["record", "person"])
def test_the_federation_has_the_bits_and_ledgers_of_the_simulation(unit, tmp_path, capsys):
    more = {**OF_PERSONS, "clients": {"count": 3, "batch_size": 60}} if unit == "person" else {}
    expected, model = compared(tmp_path, strategies={"ifca": {}}, **more)  # updates and questions
    assert torch.equal(model, expected)
    assert ledger([str(tmp_path / "real")]) == 0
    assert f"-differential privacy per {unit} (" in capsys.readouterr().out
    scores = evaluate_run(configured(tmp_path), tmp_path / "real")
    assert scores["test_accuracy"] is not None
    assert not any(one["accuracy"] for one in scores["clients"]), "the server holds none of their records"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", sorted(OTHERS))
def test_other_strategies_have_the_bits_of_the_simulation_too(tmp_path, strategy):
    given, more = OTHERS[strategy]
    expected, model = compared(tmp_path, strategies={strategy: given}, **more)
    assert torch.equal(model, expected)


def test_a_strategy_that_divides_by_fewer_records_has_the_bits_of_a_simulation(tmp_path):
    fixed = {**FEW_IMAGES, "sampling": "fixed", "records_per_class": 8}
    models = compared(tmp_path, strategies={"distillation": fixed}, model=NET, rounds=1)
    assert torch.equal(*models)


def over_flower(paths, monkeypatch):
    """Channels over Flower, which `fake_flower` stands for: SuperNodes with our client app, and these sockets."""
    monkeypatch.setattr(flower, "POLL", 0.01)
    fake_flower.install(monkeypatch)
    handlers = fake_flower.app("client_app").app.handlers
    grid = fake_flower.FakeGrid({7 + place: str(path) for place, path in enumerate(paths)}, handlers)
    return flower.connected(grid, len(paths), 60.0)


def test_over_unix_sockets_or_flower_and_after_a_restart_of_a_node(tmp_path, monkeypatch):
    terms = planned(tmp_path)
    nodes = nodes_of(tmp_path, terms)
    reference = over(nodes, terms, configured(tmp_path / "reference"))
    reference.run()
    expected = reference.state.models
    for node in nodes:
        node.close()
    paths = [tmp_path / f"{client}.socket" for client in range(SITES)]
    sockets = tuple(SocketConnection(str(path), wait=60.0) for path in paths)
    again = [Node(node.state, open_study) for node in nodes]
    lines = [len(charges(node.state, terms)) for node in again]
    with listening(again[2], paths[2]), listening(again[1], paths[1]), listening(again[0], paths[0]):
        for name, channels in {"sockets": sockets, "flower": over_flower(paths, monkeypatch)}.items():
            loop = loop_over(configured(tmp_path / name), Sites(terms, channels))
            loop.run()
            assert torch.equal(loop.state.models, expected), "nodes send what they have released"
    assert [len(charges(node.state, terms)) for node in again] == lines, "and charge nothing"
    for node in again:
        node.close()


def test_a_node_that_dies_in_a_round_ends_the_run_which_resumes_with_the_same_bits(tmp_path):
    terms = planned(tmp_path)
    expected = build_loop(configured(tmp_path / "simulated", key=FIXED_KEY))
    expected.run()
    nodes = nodes_of(tmp_path, terms)
    calls, first, newest = [], tmp_path / "first", tmp_path / "newest"
    shutil.copytree(nodes[0].state.path, first)

    def dying(content):
        calls.append(1)
        if len(calls) == 3:  # hello, round 1, round 2: it charges and releases, and its reply is lost
            nodes[1].handle(content)
            nodes[1].close()
            raise ConnectionError("gone")
        return nodes[1].handle(content)

    channels = (nodes[0].handle, dying, nodes[2].handle)
    options = configured(tmp_path / "real")
    with pytest.raises(UserError, match=r"client 1: gone.*The run was saved"):
        loop_over(options, Sites(terms, channels)).run()
    nodes[1] = Node(nodes[1].state, open_study)  # started again
    shutil.copytree(nodes[0].state.path, newest)
    nodes[0] = with_copy(nodes[0], first)
    with pytest.raises(LostClients, match=r"got from client 0 0 of 2: .*older copy"):
        over(nodes, terms, options).run(resume=True)
    nodes[0] = with_copy(nodes[0], newest)
    loop = over(nodes, terms, options)
    loop.run(resume=True)
    assert torch.equal(loop.state.models, expected.state.models)
    for node in nodes:
        assert len(charges(node.state, terms)) == 2, "one release a round, although round 2 was asked for twice"
        node.close()


def broken_off(*args):
    raise PowerCut


def late_once(node, at, arrives=True, then=None):
    """The channel of a node whose reply to request number `at` is late, or which never receives that request.

    Later requests raise the error `then`, if there is one.
    """
    calls = []

    def channel(content):
        calls.append(1)
        if then is not None and len(calls) > at:
            raise then
        if len(calls) != at or arrives:
            reply = node.handle(content)
        if len(calls) == at:
            raise TimeoutError
        return reply

    return channel


@pytest.mark.parametrize("arrives", [True, pytest.param(False, marks=pytest.mark.e2e)])
def test_a_late_node_is_left_out_of_the_round(arrives, tmp_path):
    terms = planned(tmp_path)
    expected = build_loop(configured(tmp_path / "simulated", key=FIXED_KEY))
    expected.traffic.lost = lambda plan: frozenset({1} if plan.round == 1 else ())
    expected.run()
    nodes = nodes_of(tmp_path, terms)
    late = late_once(nodes[1], 2, arrives)  # after hello
    loop = loop_over(configured(tmp_path / "real"), Sites(terms, (nodes[0].handle, late, nodes[2].handle)))
    with pytest.warns(UserNotice, match="^round 1: .* must answer within --node_wait, got nothing from client 1"):
        result = loop.run()
    assert torch.equal(loop.state.models, expected.state.models)
    counted = [one.values.get("train_lost_updates") for one in read(tmp_path / "real" / "metrics.jsonl")]
    assert counted == [1.0, None]
    assert [client["releases"] for client in result.clients] == [2, 1 + arrives, 2]
    paid = [one for node in nodes for one in charges(node.state, terms)]
    assert by_client(read_ledger(tmp_path / "real" / "ledger.jsonl")) == by_client(paid), "the mirror"
    for node in nodes:
        node.close()


@pytest.mark.e2e
@pytest.mark.parametrize("then", [TimeoutError(), ConnectionRefusedError()])
def test_a_late_release_of_a_node_that_never_tells_counts_as_paid(then, tmp_path):
    terms = planned(tmp_path)
    nodes = nodes_of(tmp_path, terms)
    late = late_once(nodes[1], 3, arrives=False, then=then)  # in the last round
    loop = loop_over(configured(tmp_path / "real"), Sites(terms, (nodes[0].handle, late, nodes[2].handle)))
    with pytest.warns(UserNotice, match="client 1 does not answer: its release of round 2 counts as paid"):
        result = loop.run()
    assert result.finished and [client["releases"] for client in result.clients] == [2, 2, 2]
    assert ledger([str(tmp_path / "real")]) == 0
    assert over(nodes, terms, configured(tmp_path / "real")).run(resume=True).finished, "it is no older copy"
    for node in nodes:
        node.close()


@pytest.mark.e2e
def test_a_node_that_is_busy_for_long_is_asked_for_no_more(tmp_path):
    terms = planned(tmp_path, rounds=3)
    nodes = nodes_of(tmp_path, terms)
    late = late_once(nodes[1], 2, then=TimeoutError())
    loop = loop_over(configured(tmp_path / "real", rounds=3), Sites(terms, (nodes[0].handle, late, nodes[2].handle)))
    with pytest.warns(UserNotice, match="its release of round 1 counts as paid"):
        assert loop.run().finished
    assert [len(charges(node.state, terms)) for node in nodes] == [3, 1, 3]
    assert len(read_ledger(tmp_path / "real" / "ledger.jsonl")) == 7
    for node in nodes:
        node.close()


@pytest.mark.e2e
def test_a_node_that_was_late_stays_left_out_of_a_round_that_is_repeated(tmp_path, monkeypatch):
    terms = planned(tmp_path)
    expected = build_loop(configured(tmp_path / "simulated", key=FIXED_KEY))
    expected.traffic.lost = lambda plan: frozenset({1} if plan.round == 1 else ())
    expected.run()
    nodes, options = nodes_of(tmp_path, terms), configured(tmp_path / "real")
    loop = loop_over(options, Sites(terms, (nodes[0].handle, late_once(nodes[1], 2), nodes[2].handle)))
    with (
        monkeypatch.context() as patch,
        pytest.warns(UserNotice, match="must answer within --node_wait"),
        pytest.raises(PowerCut),
    ):
        patch.setattr(Round, "_without_diverged", broken_off)
        loop.run()
    again = over(nodes, terms, options)
    again.run(resume=True)
    assert torch.equal(again.state.models, expected.state.models)
    assert [len(charges(node.state, terms)) for node in nodes] == [2, 2, 2]
    for node in nodes:
        node.close()


@pytest.mark.e2e
def test_a_round_without_any_reply_in_time_ends_the_run_which_resumes(tmp_path):
    terms = planned(tmp_path)
    nodes, options = nodes_of(tmp_path, terms), configured(tmp_path / "real")
    with (
        pytest.warns(UserNotice, match="must answer within --node_wait"),
        pytest.raises(UserError, match=r"`--nodes` must send releases, got none in round 1\. The run was saved"),
    ):
        loop_over(options, Sites(terms, tuple(late_once(node, 2) for node in nodes))).run()
    assert over(nodes, terms, options).run(resume=True).finished
    for node in nodes:
        assert len(charges(node.state, terms)) == 2
        node.close()


def test_a_site_that_leaves_is_left_out_and_the_others_go_on(tmp_path):
    terms = planned(tmp_path)
    nodes = nodes_of(tmp_path, terms, key=None)
    asked = []

    def leaving(content):
        asked.append(1)
        if len(asked) == 3:  # before round 2
            nodes[0].state.withdraw(digest(terms))
        return nodes[0].handle(content)

    loop = loop_over(configured(tmp_path / "real"), Sites(terms, (leaving, nodes[1].handle, nodes[2].handle)))
    result = loop.run()
    assert result.finished and result.guarantee.source.protects
    assert [client["releases"] for client in result.clients] == [1, 2, 2]
    assert [len(charges(node.state, terms)) for node in nodes] == [1, 2, 2]
    for node in nodes:
        node.close()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"key": FIXED_KEY}, "noise_key.*node init"),
        ({"privacy": {"diagnostics": True}}, "privacy.diagnostics"),
        ({"privacy": {"sampling": "shuffle"}}, "privacy.sampling"),
        ({"data": {"name": "digits", "groups": {"name": "rotation", "count": 2}}}, "data.groups.*true groups"),
        ({"data": {"name": "digits", "label_noise": {"name": "records", "share": 0.2}}}, "data.label_noise"),
        ({"clients": {"count": 3, "reported_epsilon": 4.0}}, "clients.reported_epsilon"),
        (
            {"strategies": {"two_stage_selection": {}}, "clients": {"count": 3, "batch_size": None}, "rounds": 20},
            "two_stage_selection.*keep its schedule",
        ),
        (
            {
                "strategies": {"two_stages_as_printed": {"second_loss": "noiseless_step", "warmup_rounds": 4}},
                "clients": {"count": 3, "batch_size": None},
                "rounds": 20,
            },
            "second_loss` must be left out where noise protects records",
        ),
        ({"strategies": {"ifca": {"selection": "paper_argmin"}}}, "strategies.*noisy releases only"),
    ],
)
@pytest.mark.filterwarnings("ignore::dpfl_lightning.errors.UserNotice")
def test_what_no_site_can_accept_is_refused_by_name_before_anything_runs(tmp_path, more, words):
    with pytest.raises(UserError, match=words):
        planned(tmp_path, **more)


def test_the_server_must_run_the_plan_that_the_sites_have_accepted(tmp_path):
    terms = planned(tmp_path)
    nodes = nodes_of(tmp_path, terms)
    for options in (
        configured(tmp_path / "other", privacy={"epsilon": [2, 4, 9]}),
        configured(tmp_path / "other", seed=1),
        configured(tmp_path / "other", strategies={"uniform": {}}),
    ):
        with pytest.raises(UserError, match=r"the plan that the sites have accepted.*got 'other"):
            over(nodes, terms, options).run()
    assert not (tmp_path / "other").exists()
    other = dataclasses.replace(terms, run="0" * 32)
    with pytest.raises(UserError, match="has not accepted a plan with this hash"):
        over(nodes, other, configured(tmp_path / "other"))
    with pytest.raises(UserError, match="be 3, one for each client"):
        over(nodes[:2], terms, configured(tmp_path / "other"))
    with pytest.raises(UserError, match="different clients"):
        over([nodes[0], nodes[0], nodes[1]], terms, configured(tmp_path / "other"))
    with pytest.raises(LostClients, match="must answer"):
        loop_over(configured(tmp_path / "other"), Sites(terms, (SocketConnection(str(tmp_path / "none"), 1.0),) * 3))
    assert not any(charges(node.state, terms) for node in nodes)


def test_a_plan_from_the_facts_of_sites_is_that_of_their_records(tmp_path):
    sites = [read_site(state_of(tmp_path, client).path / "site.json") for client in range(SITES)]
    terms = export(planning_loop(configured(tmp_path / "run"), sites), sites, str(tmp_path / "plan.json"))
    again = read_terms(tmp_path / "plan.json")
    assert digest(again) == digest(terms)
    assert wire.encode(again.sites) == wire.encode(terms.sites) and again.sites[0].inputs.shape == (0, 1, 8, 8)
    simulated = terms_of(build_loop(configured(tmp_path / "run")), sites)
    assert wire.encode(again.plan) == wire.encode(simulated.plan)


def test_two_servers_at_once_are_answered_one_after_the_other(tmp_path):
    terms = planned(tmp_path)
    nodes = nodes_of(tmp_path, terms, key=None)
    loops = [over(nodes, terms, configured(tmp_path / f"real{number}")) for number in range(2)]
    runs = [threading.Thread(target=loop.run) for loop in loops]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    for client, node in enumerate(nodes):
        planned_count = terms.plan.schedule.clients[client].planned[0].count
        assert len(charges(node.state, terms)) <= planned_count
        node.close()


def test_a_loop_of_python_has_no_plan_for_sites(make_loop):
    with pytest.raises(UserError, match="configuration"):
        terms_of(make_loop(), [])


def test_the_sum_of_accepted_plans_stays_within_the_limit(tmp_path):
    first, second = planned(tmp_path), planned(tmp_path, rounds=1)
    state = state_of(tmp_path, 0)
    accept(state, first, 3.0)
    with pytest.raises(UserError, match=r"--epsilon_limit.*at least 4.*got 3\.0"):
        accept(state, second)
    assert list(state.plans()) == [digest(first)]
    accept(state, second, 4.0, 0.01, may_rise=True)
    with pytest.raises(UserError, match="not accepted before"):
        accept(state, second)
    state.withdraw(digest(second))
    assert state.plans()[digest(second)].epsilon == 0, "it has released nothing"


class Noting(Connection):
    """Notes whether it is closed."""

    def __init__(self, node):
        self._node, self.closed = node, False

    def __call__(self, request, most):
        return self._node.handle(request)

    def close(self):
        self.closed = True


def test_connections_are_closed_if_a_run_cannot_begin(tmp_path):
    terms = planned(tmp_path)
    nodes = nodes_of(tmp_path, terms)
    noting = [Noting(nodes[0]), Noting(nodes[1]), Noting(nodes[1])]
    with pytest.raises(UserError, match="two of client"):
        loop_over(configured(tmp_path / "run"), Sites(terms, noting))
    assert all(one.closed for one in noting)
    noting = [Noting(node) for node in nodes]
    with pytest.raises(UserError, match="`--config` must give the plan that the sites have accepted"):
        loop_over(configured(tmp_path / "run", seed=5), Sites(terms, noting)).run()
    assert all(one.closed for one in noting)


@pytest.mark.parametrize(
    ("address", "wait", "words"),
    [
        ("htp://berlin", 1.0, "`--nodes` must be one of unix, got 'htp'"),
        ("socket", 0.0, "`--node_wait` must be a number of seconds above 0"),
        ("socket", float("nan"), "`--node_wait` must be a number of seconds above 0"),
    ],
)
def test_an_address_that_means_no_connection_is_one_clear_error(address, wait, words):
    with pytest.raises(UserError, match=words):
        connection_to(address, wait)
    assert isinstance(connection_to("unix:///run/node", 1.0), SocketConnection)
