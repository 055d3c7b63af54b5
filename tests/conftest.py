"""Small federations for every test."""

import dataclasses
import itertools
import os
import shutil
from pathlib import Path

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # tests import mlflow before the package does

import pytest
import torch
from torch import nn

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.local_clients import LocalClients
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.query import ChargedQuery
from dpfl_lightning.federated.messages.requests import Ask
from dpfl_lightning.federated.messages.update import UpdateBuffer
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.transport.threads import Threads
from dpfl_lightning.loop import FederatedLoop
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Released, ToNode

torch.set_num_threads(1)  # tests run side by side
_NUMBERS = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def no_waits_for_the_disk():
    """A short run syncs thirty times, and no test takes away the real power; tests of syncs watch the calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        patch.setattr("dpfl_lightning.privacy.ledger.ledger._sync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def the_state_of_the_tests(tmp_path_factory):
    """What the user's accounts remember is left alone."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        patch.setenv("DPFL_ACCOUNT", str(folder / "account.jsonl"))
        yield folder


@pytest.fixture(autouse=True)
def an_account_of_the_test(the_state_of_the_tests, monkeypatch):
    """Each test has an account of its own."""
    monkeypatch.setenv("DPFL_ACCOUNT", str(the_state_of_the_tests / f"{next(_NUMBERS)}.jsonl"))


def blobs(num_clients: int = 4, records: int = 60, classes: int = 3, features: int = 6, seed: int = 0) -> Population:
    """Well separated classes; clients differ in size (records, records + 10, ...)."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(classes, features, generator=generator)

    def draw(count: int):
        y = torch.randint(classes, (count,), generator=generator)
        return centres[y] + torch.randn(count, features, generator=generator), y

    pairs = [draw(records + 10 * client) for client in range(num_clients)]
    return Population.from_datasets(pairs, test=draw(200), held_out=0.2, num_classes=classes)


#: true groups of the clients of `of_two_kinds`
GROUPS = (0, 1, 0, 1)


def of_two_kinds() -> Population:
    """Four clients; those of group 1 call class y what the others call y + 1."""
    population = blobs()
    y = population.y.clone()
    for client, group in enumerate(GROUPS):
        for rows in (population.train_of[client], population.held_out_of[client]):
            y[rows] = (y[rows] + group) % 3
    return dataclasses.replace(population, y=y, groups=GROUPS, test=None)


def small_net(features: int = 6, classes: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, classes))


def parts_of(parts) -> dict:
    """Strategies and callbacks of a mixed list, as `FederatedLoop` takes them."""
    only_watch = [one for one in parts if not isinstance(one, Strategy)]
    return {"strategies": [one for one in parts if isinstance(one, Strategy)], "callbacks": only_watch}


@pytest.fixture
def in_the_repository(monkeypatch):
    """Commands name configurations by their place there."""
    monkeypatch.chdir(Path(__file__).parents[1])


def small_loop(population=None, module=None, *, parts=(), **options) -> FederatedLoop:
    """A loop on the CPU, by default of one round; `parts` are strategies and callbacks."""
    usual = {
        "rounds": 1,
        "clients": ClientOptions(count=4, batch_size=16),
        "device": "cpu",
        "new_net": lambda seed: small_net(seed=seed),
    }
    population, module = population or blobs(), module or ClientModule(small_net())
    return FederatedLoop(population, module, **{**usual, **parts_of(parts), **options})


class PowerCut(Exception):
    pass


def cut_at(loop, round: int) -> None:
    """The power goes after the charge of `round` is synced and one client has trained."""
    channel = loop.clients.channel
    send = channel.send

    def failing(requests, inbox):
        if requests[0].request.round == round and isinstance(inbox, UpdateBuffer):
            channel.engine.compute(requests[:1])
            raise PowerCut
        send(requests, inbox)

    channel.send = failing


def break_off(loop, round: int, resume: bool = False):
    """Run until the power goes in `round`."""
    cut_at(loop, round)
    with pytest.raises(PowerCut):
        loop.run(resume)
    return loop


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory) -> Path:
    """An SQLite file with MLflow's tables: making them takes seconds, copying it takes none."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def new_store(empty_store):
    """`new_store(folder)`: the address of an empty store there."""

    def make(folder: Path) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{shutil.copy(empty_store, folder / 'mlflow.db')}"

    return make


@pytest.fixture
def blank_figures(monkeypatch):
    """Figures are saved as empty files: drawing one takes half a second."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: Path(path).write_bytes(b""))


@pytest.fixture
def one_noise(monkeypatch):
    """Simulations of every configuration draw the same noise, so that what they do with it can be compared."""
    usual = LocalClients.streams

    def streams(self, plan):
        return Streams(bytes(32)) if self.source.label else usual(self, plan)

    monkeypatch.setattr(LocalClients, "streams", streams)


@pytest.fixture
def over_the_wire(monkeypatch):
    """Every message between a server and its clients in this process crosses as bytes, as it would between machines."""
    begin, change, evaluate = (getattr(LocalClients, name) for name in ("begin", "change", "evaluate"))
    send = Threads.send

    def crossed(message):
        return wire.decode(type(message), wire.encode(message))

    def received(charged):
        request = charged.request
        if isinstance(request, Ask):  # which names the asked client alone
            question = request.question.question
            alone = {charged.client: question.mechanism_of[charged.client]}
            request = dataclasses.replace(request, question=dataclasses.replace(question, mechanism_of=alone))
        request = crossed(ToNode("plan", request)).request
        if isinstance(request, Ask):
            request = dataclasses.replace(request, question=ChargedQuery.of(request.question))
        return dataclasses.replace(charged, request=request)

    def over_the_channel(self, requests, inbox):
        take = inbox.take
        inbox.take = lambda client, released: take(client, crossed(Released(released, ())).value)
        send(self, [received(charged) for charged in requests], inbox)

    monkeypatch.setattr(Threads, "send", over_the_channel)
    monkeypatch.setattr(
        LocalClients, "begin", lambda self, path, plan, *state: begin(self, path, crossed(plan), *state)
    )
    monkeypatch.setattr(LocalClients, "change", lambda self, schedule: change(self, crossed(schedule)))
    monkeypatch.setattr(LocalClients, "evaluate", lambda self, models: crossed(evaluate(self, crossed(models))))


FIXED_KEY = "00112233445566778899aabbccddeeff"
#: names for `parametrize`; the engine trainer trains as serial does, only slower
EVERY_ENGINE = [pytest.param(name, marks=[pytest.mark.e2e] * (name == "trainer")) for name in sorted(ENGINES)]


def private(epsilon=8.0, **options) -> PrivacyOptions:
    return PrivacyOptions(**{"epsilon": epsilon, "delta": 1e-3, "noise_key": FIXED_KEY, **options})


@pytest.fixture
def make_loop(tmp_path):
    """`make_loop(rounds=3, ...)`: a loop over four small clients in its folder; without `privacy` a simulation."""
    made = []

    def make(population=None, module=None, privacy="default", clients=None, parts=(), **options) -> FederatedLoop:
        if privacy == "default":
            privacy = private([4.0, 6.0, 8.0, 10.0])
        made.append(1)
        options.setdefault("output_dir", tmp_path / f"run{len(made)}")
        clients = clients or ClientOptions(count=4, batch_size=16, learning_rate=0.3)
        return small_loop(
            population, module, parts=parts, **{"rounds": 3, "clients": clients, "privacy": privacy, **options}
        )

    return make


@pytest.fixture
def code_was_read(monkeypatch):
    """Take the forward passes and losses of a test for read, as those of listed classes: they may go by rules."""
    monkeypatch.setattr("dpfl_lightning.privacy.clipping.checked.code_of_users", lambda net, sample_loss: "")
