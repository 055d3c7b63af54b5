"""A run that goes on is the run that began: every change of what it releases is refused, or only makes it shorter."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attack_tools import CutBetweenRounds, cut_after_training, overspent
from conftest import FIXED_KEY, PowerCut, blobs, small_loop, small_net
from torch import nn
from torch.nn import functional as F

from dpfl_lightning.build import ENGINES
from dpfl_lightning.commands.fit import fit, main
from dpfl_lightning.config.load import load
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.config.yaml_text import dump, read_yaml
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.loop import FederatedLoop
from dpfl_lightning.papers.baselines.uniform_selection import UniformSelection
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.strategies.aggregation.fedprox import FedProx
from dpfl_lightning.strategies.aggregation.uniform import Uniform

ROUNDS, DONE = 4, 2
BUDGETS, DELTA = (4.0, 6.0, 8.0, 10.0), 1e-3
CLIENTS = {"count": 4, "batch_size": 16, "learning_rate": 0.3}
PRIVACY = {"epsilon": BUDGETS, "delta": DELTA}

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


def loop_of(folder: Path, **changed: Any) -> FederatedLoop:
    """The run, but for what is changed; `clients` and `privacy` are changes of their own."""
    clients = ClientOptions(**{**CLIENTS, **changed.pop("clients", {})})
    privacy = changed.pop("privacy", {})
    privacy = None if privacy is None else PrivacyOptions(**{**PRIVACY, **privacy})
    return small_loop(**{"rounds": ROUNDS, "clients": clients, "privacy": privacy, "output_dir": folder, **changed})


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """The folder of a run whose power failed in a round, after the clients had trained."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    loop = loop_of(folder)
    cut_after_training(loop, DONE + 1)
    with pytest.raises(PowerCut):
        loop.run()
    return folder


@pytest.fixture(scope="module")
def begun_by_command(tmp_path_factory) -> Path:
    """The same of a configuration, between two rounds."""
    folder = tmp_path_factory.mktemp("begun") / "command"
    argv = ["--config", str(Path(__file__).parents[2] / "conf" / "digits.yaml"), "--rounds", str(ROUNDS)]
    options, _ = load([*argv, "--tracking", "null", "--output_dir", str(folder)])
    with pytest.raises(PowerCut):
        fit(options, more=[CutBetweenRounds(DONE)])
    return folder


def people(change: Callable[[Population, list[torch.Tensor]], None]) -> Population:
    """The clients of the run after `change(population, train_of)`, which writes into both."""
    same = blobs()
    same = dataclasses.replace(same, x=same.x.clone(), y=same.y.clone(), train_of=list(same.train_of))
    change(same, same.train_of)
    return same


def one_feature(people, train_of) -> None:
    people.x[train_of[2][5], 0] += 1e-3


def one_label(people, train_of) -> None:
    people.y[train_of[0][0]] = (people.y[train_of[0][0]] + 1) % 3


def one_record_more(people, train_of) -> None:
    train_of[1] = torch.cat([train_of[1], train_of[0][:1]])


def one_record_less(people, train_of) -> None:
    train_of[3] = train_of[3][1:]


def swapped(people, train_of) -> None:
    """Two records of two clients change places."""
    train_of[0], train_of[1] = train_of[0].clone(), train_of[1].clone()
    train_of[0][0], train_of[1][0] = int(train_of[1][0]), int(train_of[0][0])


def doubled() -> ClientModule:
    return ClientModule(small_net(), loss=lambda output, y: 2 * F.cross_entropy(output, y, reduction="none"))


def frozen() -> ClientModule:
    net = small_net()
    net[0].bias.requires_grad_(False)
    return ClientModule(net)


def wide() -> ClientModule:
    torch.manual_seed(0)
    return ClientModule(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))


def smooth() -> ClientModule:
    torch.manual_seed(0)
    return ClientModule(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))


def personal() -> ClientModule:
    return ClientModule(small_net(), personal=["0.bias"])


#: what is changed, and what the refusal must name (one of these words)
BY_CODE: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "more rounds": (lambda: {"rounds": 8}, ("rounds",)),
    "far more rounds": (lambda: {"rounds": 400}, ("rounds",)),
    "a smaller batch": (lambda: {"clients": {"batch_size": 8}}, ("batch_size",)),
    "a larger batch": (lambda: {"clients": {"batch_size": 40}}, ("batch_size",)),
    "full batches": (lambda: {"clients": {"batch_size": None}}, ("batch_size",)),
    "more epochs": (lambda: {"clients": {"local_epochs": 3}}, ("local_epochs",)),
    "another learning rate": (lambda: {"clients": {"learning_rate": 0.1}}, ("learning_rate",)),
    "larger budgets": (lambda: {"privacy": {"epsilon": 50.0}}, ("epsilon",)),
    "smaller budgets": (lambda: {"privacy": {"epsilon": 1.0}}, ("epsilon",)),
    "one larger budget": (lambda: {"privacy": {"epsilon": (4.0, 6.0, 8.0, 30.0)}}, ("epsilon",)),
    "no budget, less noise": (lambda: {"privacy": {"epsilon": None, "noise_multiplier": 0.3}}, ("epsilon", "noise")),
    "less noise in the same budget": (lambda: {"privacy": {"noise_multiplier": 0.5}}, ("noise",)),
    "a larger delta": (lambda: {"privacy": {"delta": 0.01}}, ("delta",)),
    "another clip norm": (lambda: {"privacy": {"clip_norm": 10.0}}, ("clip_norm",)),
    "another accountant": (lambda: {"privacy": {"accountant": "paper_ma"}}, ("accountant",)),
    "another adjacency": (lambda: {"privacy": {"adjacency": "replace_one"}}, ("adjacency",)),
    "shuffled batches": (lambda: {"privacy": {"sampling": "shuffle"}}, ("sampling",)),
    "a reserve": (lambda: {"privacy": {"reserve_rounds": 3}}, ("reserve_rounds",)),
    "diagnostics": (lambda: {"privacy": {"diagnostics": True}}, ("diagnostics",)),
    "a given key": (lambda: {"privacy": {"noise_key": FIXED_KEY}}, ("noise_key",)),
    "no privacy": (lambda: {"privacy": None}, ("privacy",)),
    "another seed": (lambda: {"seed": 1}, ("seed",)),
    "one feature of one record": (lambda: {"population": people(one_feature)}, ("data", "records")),
    "one label": (lambda: {"population": people(one_label)}, ("data", "records")),
    "one record more": (lambda: {"population": people(one_record_more)}, ("data", "records")),
    "one record less": (lambda: {"population": people(one_record_less)}, ("data", "records")),
    "records of two clients swapped": (lambda: {"population": people(swapped)}, ("data", "records")),
    "other data": (lambda: {"population": blobs(seed=1)}, ("data", "records")),
    "another loss": (lambda: {"module": doubled()}, ("module",)),
    "another activation": (lambda: {"module": smooth()}, ("module",)),
    "a wider net": (lambda: {"module": wide()}, ("module", "model")),
    "a frozen parameter": (lambda: {"module": frozen()}, ("module", "model")),
    "a personal parameter": (lambda: {"module": personal()}, ("module",)),
    "another aggregation rule": (lambda: {"strategies": [Uniform()]}, ("strategies", "strateg")),
    "a pull": (lambda: {"strategies": [FedProx(0.5)]}, ("strategies", "strateg")),
    "a selection": (lambda: {"strategies": [UniformSelection(clients_per_round=2)]}, ("strategies", "strateg")),
}
#: what changes no release, or only makes the run shorter
ALLOWED: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": lambda: {},
    "a round less": lambda: {"rounds": 3},
    "no more rounds": lambda: {"rounds": DONE},
    "fewer rounds than are done": lambda: {"rounds": 1},
    "another engine": lambda: {"engine": ENGINES["serial"]()},
    "fewer evaluations": lambda: {"evaluate_every": 2},
    "a watcher": lambda: {"strategies": [Strategy()]},
}


@pytest.mark.parametrize("way", BY_CODE)
def test_what_changes_a_release_is_refused(way, begun, tmp_path):
    changed, words = BY_CODE[way]
    folder = shutil.copytree(begun, tmp_path / "run")
    refused(lambda: loop_of(folder, **changed()).run(resume=True), words, folder)


@pytest.mark.parametrize("way", ALLOWED)
def test_what_is_allowed_stays_within_the_budgets(way, begun, tmp_path):
    changed = ALLOWED[way]()
    folder = shutil.copytree(begun, tmp_path / "run")
    planned = {(charge.client, charge.event) for charge in read_ledger(folder / "ledger.jsonl")}
    result = loop_of(folder, **changed).run(resume=True)
    assert result.finished and result.rounds <= max(DONE, changed.get("rounds", ROUNDS))
    charges = read_ledger(folder / "ledger.jsonl")
    assert {(charge.client, charge.event) for charge in charges} == planned, "noise and steps are as they were planned"
    assert not overspent(folder / "ledger.jsonl", BUDGETS, DELTA)
    assert all(sum(one.client == client for one in charges) <= ROUNDS for client in range(4))


def refused(attempt: Callable[[], object], words: tuple[str, ...], folder: Path) -> None:
    """The attempt ends in a UserError that names what was changed, and nothing is charged."""
    ledger = folder / "ledger.jsonl"
    before = ledger.read_bytes()
    try:
        attempt()
    except UserError as error:
        assert any(word in str(error) for word in words), str(error)
    else:
        pytest.fail(f"it went on; {overspent(ledger, BUDGETS, DELTA) or 'within the budgets'}")
    assert ledger.read_bytes() == before, "nothing is charged"


def test_an_attempt_that_was_refused_does_no_harm(begun, tmp_path):
    folder = shutil.copytree(begun, tmp_path / "run")
    for way in ("larger budgets", "one label", "another loss"):
        with pytest.raises(UserError):
            loop_of(folder, **BY_CODE[way][0]()).run(resume=True)
    assert loop_of(folder).run(resume=True).finished
    assert not overspent(folder / "ledger.jsonl", BUDGETS, DELTA)


def edited(folder: Path, key: str, value: Any) -> list[str]:
    """`options.yaml` with another value of a dotted key; the command line that goes on with it."""
    options = read_yaml(folder / "options.yaml")
    *sections, name = key.split(".")
    inner = options
    for section in sections:
        inner = inner[section]
    inner[name] = value
    (folder / "options.yaml").write_text(dump(options))
    return ["--resume", str(folder)]


def overridden(folder: Path, key: str, value: Any) -> list[str]:
    return ["--resume", str(folder), f"--{key}", "null" if value is None else str(value)]


EDITS: list[tuple[str, Any]] = [
    ("rounds", 9),
    ("seed", 7),
    ("clients.batch_size", 8),
    ("clients.local_epochs", 2),
    ("clients.learning_rate", 0.05),
    ("privacy.epsilon", [20, 20, 20, 20, 20]),
    ("privacy.delta", 1e-2),
    ("privacy.clip_norm", 30.0),
    ("privacy.noise_multiplier", 0.4),
    ("privacy.reserve_rounds", 5),
    ("privacy", None),
    ("data.partition", {"name": "dirichlet", "alpha": 0.3}),
    ("data.records_per_client", 200),
    ("data.label_noise", {"name": "records", "share": 0.5}),
    ("model", {"name": "cnn_tiny"}),
    ("strategies", {"uniform": {}}),
]


#: keys of which both ways are tried by default, and of which the file is edited; all ways are tried by the slow tests
QUICK = ("seed", "clients.batch_size", "privacy.noise_multiplier", "privacy", "data.records_per_client")
BOTH = ("rounds", "privacy.epsilon", "strategies")
CASES = [
    pytest.param(how, *edit, id=f"{edit[0]} {how.__name__}", marks=[] if often else pytest.mark.slow)
    for edit in EDITS
    for how in (edited, overridden)
    for often in (edit[0] in BOTH or (how is edited and edit[0] in QUICK),)
]


@pytest.mark.parametrize("how, key, value", CASES)
def test_a_configuration_that_was_edited_is_refused(how, key, value, begun_by_command, tmp_path, capsys):
    folder = shutil.copytree(begun_by_command, tmp_path / "run")
    before = (folder / "ledger.jsonl").read_bytes()
    status = main(how(folder, key, value))
    *progress, said = capsys.readouterr().err.splitlines()
    assert all(line.startswith("solving noise") for line in progress), "shown on a busy machine only"
    assert status == 2 and said.startswith("error: "), said
    assert key.partition(".")[0] in said
    assert (folder / "ledger.jsonl").read_bytes() == before, "nothing is charged"


@pytest.mark.parametrize("how", [edited, overridden], ids=lambda how: how.__name__)
def test_a_run_may_be_cut_short(how, begun_by_command, tmp_path):
    folder = shutil.copytree(begun_by_command, tmp_path / "run")
    assert main(how(folder, "rounds", 3)) == 0
    charges = read_ledger(folder / "ledger.jsonl")
    assert max(charge.round for charge in charges) == 3
    assert not overspent(folder / "ledger.jsonl", (2, 4, 8, 8, 16), DELTA)
