"""Sites with shares of scikit-learn's digits, and runs over their nodes in this process or over Unix sockets."""

import dataclasses
import functools
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

from conftest import FIXED_KEY

from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.config.options import Options
from dpfl_lightning.federated.messages.jobs import LocalTraining
from dpfl_lightning.federated.messages.query import Query
from dpfl_lightning.federated.messages.requests import Ask, Evaluate, Train
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import mechanism_of
from dpfl_lightning.runtime.digests import memory_of
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Hello, Reply, Signed, Site, Terms, ToNode
from dpfl_lightning.sites.node.accept import accept, open_study, site_of
from dpfl_lightning.sites.node.records import settings_of, site_population
from dpfl_lightning.sites.node.service import Listener, Node
from dpfl_lightning.sites.node.state import Settings, StateFolder
from dpfl_lightning.sites.server.channel import Sites
from dpfl_lightning.sites.server.deploy import loop_over, planning_loop, terms_of
from dpfl_lightning.sites.wire import digest

SITES = 3
HELD_OUT = {"name": "digits", "held_out_per_client": 0.25}

#: of a run that protects persons, and of its sites
OF_PERSONS = {
    "data": {"name": "digits", "records_per_person": 4},
    "privacy": {"unit": "person", "rows_per_person": 3},
}


def configured(folder: Path, key: str | None = None, strategies=None, **more) -> Options:
    """A short run over three sites with unequal budgets; `key` makes it a simulation of known noise."""
    privacy = {"epsilon": [2, 4, 8], "delta": 1e-3, "accountant": "rdp", "noise_key": key}
    usual = {
        "rounds": 2,
        "data": {"name": "digits"},
        "model": {"name": "logistic"},
        "clients": {"count": SITES, "learning_rate": 0.5, "batch_size": 240},
        "strategies": {"size_weighted": {}} if strategies is None else strategies,
        "tracking": None,
        "output_dir": str(folder),
    }
    return from_mapping({**usual, **more, "privacy": {**privacy, **more.get("privacy", {})}})


def settings_for(client: int, sites: int = SITES, key: str | None = None, persons: bool = False) -> Settings:
    """What the operator decides of a node with share `client` of the digits, whose limits may be of persons."""
    privacy = {"epsilon": 100.0, "delta": 0.01, "noise_key": key, **(OF_PERSONS["privacy"] if persons else {})}
    data = OF_PERSONS["data"] if persons else {"name": "digits"}
    options = {"data": data, "clients": {"count": sites}, "privacy": privacy}
    return settings_of(from_mapping(options), str(client))


def key_of(client: int) -> bytes:
    """The key with which the node of a client signs."""
    return bytes([client]) * 32


@functools.cache
def site(client: int, sites: int = SITES, persons: bool = False) -> Site:
    """What a site with share `client` of the digits tells the server."""
    settings = settings_for(client, sites, persons=persons)
    return site_of(settings, *site_population(settings), key_of(client))


def planned(folder: Path, **more) -> Terms:
    options = configured(folder / "planned", **more)
    persons = options.privacy.unit == "person"
    sites = [site(client, options.clients.count, persons) for client in range(options.clients.count)]
    return terms_of(planning_loop(options, sites), sites)


def state_of(
    folder: Path, client: int, key: str | None = FIXED_KEY, sites: int = SITES, persons: bool = False
) -> StateFolder:
    """The folder of a node with share `client` of the digits."""
    settings, facts = settings_for(client, sites, key, persons), site(client, sites, persons)
    return StateFolder.create(folder / f"site{client}", settings, facts, key_of(client))


def nodes_of(folder: Path, terms: Terms, key: str | None = FIXED_KEY, limit: float = 100.0) -> list[Node]:
    """Nodes that have accepted the plan."""
    sites, persons = len(terms.plan.settings), terms.sites[0].unit.is_group
    states = [state_of(folder, client, key, sites, persons) for client in range(sites)]
    for state in states:
        accept(state, terms, limit)
    nodes = [Node(state, open_study) for state in states]
    for node in nodes:  # before they serve; in threads of one process their checks would silence warnings for good
        assert node.problem(digest(terms)) is None
    return nodes


def federation(folder: Path, strategies=None, count: int = 2) -> tuple[list[Node], Terms, Options]:
    """Nodes with held-out records, which have accepted a plan, the plan, and the options of the server."""
    states, sites = [], []
    for client in range(count):
        privacy = {"epsilon": 9, "delta": 0.01, "noise_key": FIXED_KEY}
        settings = settings_of(
            from_mapping({"data": HELD_OUT, "clients": {"count": count}, "privacy": privacy}), str(client)
        )
        sites.append(site_of(settings, *site_population(settings), key_of(client)))
        states.append(StateFolder.create(folder / f"site{client}", settings, sites[-1], key_of(client)))
    more = {
        "clients": {"count": count, "learning_rate": 0.5, "batch_size": 200},
        "privacy": {"epsilon": [4, 8][:count]},
    }
    options = configured(folder / "run", strategies=strategies, data=HELD_OUT, **more)
    terms = terms_of(planning_loop(options, sites), sites)
    for state in states:
        accept(state, terms)
    return [Node(state, open_study) for state in states], terms, options


@contextmanager
def accepting(folder: Path, terms: Terms):
    """The node of the first site, with fresh noise, which has accepted the plan."""
    state = state_of(folder, 0, key=None)
    accept(state, terms, 2.5)
    node = Node(state, open_study)
    yield node
    node.close()


def asked(node: Node, request) -> Reply:
    return reply_in(node.handle(wire.encode(request)))


def reply_in(content: bytes) -> Reply:
    """The reply in the signed bytes that a node sends."""
    return wire.decode(Reply, memory_of(wire.decode(Signed, content).reply).tobytes())


def over(nodes, terms: Terms, options: Options, parts=()):
    """The loop of the server over nodes in this process, whose messages cross as bytes."""
    return loop_over(options, Sites(terms, tuple(node.handle for node in nodes)), parts)


@contextmanager
def listening(node: Node, path: Path, slot: float = 0.01):
    """The node on a Unix socket, in a thread."""
    listener = Listener(node, path, slot)
    thread = threading.Thread(target=listener.serve)
    thread.start()
    try:
        yield listener
    finally:
        listener.close()
        thread.join()


def with_copy(node: Node, copy: Path) -> Node:
    """The node after its folder was replaced by an older copy of it."""
    node.close()
    shutil.rmtree(node.state.path)
    shutil.copytree(copy, node.state.path)
    return Node(node.state, open_study)


def charges(state: StateFolder, terms: Terms) -> list:
    """The ledger of a plan at a site."""
    ledger = state.plan_folder(digest(terms)) / "ledger.jsonl"
    return read_ledger(ledger) if ledger.is_file() else []


def a_request(terms: Terms, model, client: int = 0, event=None, **changed) -> ToNode:
    """An honest request for the first round of a client; `event` gives another mechanism and number of steps."""
    line, settings = terms.plan.schedule.clients[client].planned[0], terms.plan.settings[client]
    event = event or line.event
    mechanism = mechanism_of(event, settings.clip_norm, settings.num_records)
    honest = Train(1, line.purpose, mechanism, event.steps, LocalTraining(), 0.5, model)
    sent = {name: changed.pop(name) for name in ("plan", "known") if name in changed}
    return dataclasses.replace(ToNode(digest(terms), dataclasses.replace(honest, **changed)), **sent)


def hello(plan: str, nonce: str = "") -> ToNode:
    return ToNode(plan, Hello(nonce))


def a_question(plan: str, round: int, question: Query) -> ToNode:
    return ToNode(plan, Ask(round, question))


def an_evaluation(plan: str, round: int, model) -> ToNode:
    return ToNode(plan, Evaluate(round, model))


def with_lines(terms, *lines, **changed):
    """The plan with these lines for the first client."""
    plan = terms.plan
    first = dataclasses.replace(plan.schedule.clients[0], planned=lines)
    schedule = dataclasses.replace(plan.schedule, clients=(first, *plan.schedule.clients[1:]))
    return dataclasses.replace(terms, plan=dataclasses.replace(plan, schedule=schedule, **changed))
