"""`plan --ledger`: every epsilon again from the ledger alone, equal to the live ones; damage is status 2."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time

import pytest
from conftest import FIXED_KEY
from fakes import two_phases

from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.federated.messages.query import SelectModel
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.plan import main
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, NonPrivateEvent, SelectionEvent
from dpfl_lightning.privacy.ledger.file import Header, head_file
from dpfl_lightning.privacy.ledger.ledger import Charge, Ledger
from dpfl_lightning.privacy.mechanism import ExponentialMechanism
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted

TRAIN = GaussianEvent(0.1, 1.5, 10)


def a_ledger(path, clients=3, epsilon=2.0, **header):
    known = {"accountant": "rdp", "adjacency": "add_remove", "sampling": "poisson", "caveats": ("sizes are public",)}
    ledger = Ledger(path, Header(**known | header, delta=(1e-4,) * clients, epsilon=(epsilon,) * clients))
    for round in (1, 2):
        ledger.charge([Charge(client, round, "train", TRAIN) for client in range(clients)])
    return ledger


def header(**changed) -> Header:
    known = {"accountant": "rdp", "adjacency": "add_remove", "sampling": "poisson"}
    return Header(**{**known, "delta": (1e-4,) * 2, "epsilon": (2.0,) * 2, **changed})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def told(capsys, *words):
    """The text, and what `--json` says; what it says of the first ledger stands beside the rest."""
    assert main([*map(str, words), "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    return "\n".join(text), {**found["ledgers"][0], **found}


# ---- recomputation equals live


class Asks(Strategy, Callback):
    """Rounds of two kinds, a selection by the even clients, and what was told live."""

    def plan_run(self, schedule, view):
        return two_phases(schedule, selections=2)

    def plan_round(self, plan, view):
        if view.round == 1:
            return view.plan("first")
        models = view.state.models[0].expand(2, -1)
        choice = dict.fromkeys((0, 2), ExponentialMechanism(0.1))
        view.ask(SelectModel(mechanism_of=choice, models=models, loss_bound=2.0))
        return plan

    def on_round_end(self, view, report):
        self._live = report.epsilon_spent


@pytest.mark.e2e
@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_recomputed_is_live(accountant, make_loop, capsys):
    asks = Asks()
    budgets = [4.0, 6.0, 8.0, 10.0]
    privacy = PrivacyOptions(epsilon=budgets, delta=1e-3, noise_key=FIXED_KEY, accountant=accountant)
    loop = make_loop(parts=[SizeWeighted(), asks], privacy=privacy)
    loop.run()
    text, found = told(capsys, "--ledger", loop.output_dir)
    result = json.loads((loop.output_dir / "result.json").read_text())
    promises = json.loads((loop.output_dir / "guarantees.json").read_text())
    for key in ("epsilon_budget", "delta", "steps"):
        assert [own[key] for own in found["clients"]] == [own[key] for own in result["clients"]], key
    epsilons = [own["epsilon"] for own in found["clients"]]
    assert epsilons == [own["epsilon_spent"] for own in result["clients"]]
    assert epsilons == [own["epsilon"] for own in promises["clients"]]
    assert len(set(epsilons)) == 4 and found["accountant"] == accountant
    if accountant == "rdp":  # between two values PRV's live curve is RDP's where that is lower: at most as tight
        assert epsilons == pytest.approx(asks._live, abs=2e-6)
    assert all(own <= live + 2e-6 for own, live in zip(epsilons, asks._live, strict=True))
    assert found["clients"][0]["releases"] == {"first": 1, "select": 2, "train": 2}
    assert found["clients"][1]["releases"] == {"first": 1, "train": 2}
    assert "1 first, 2 select, 2 train" in text

    head = {key: found[key] for key in ("run", "lines", "chain")}
    assert head == result["ledger"] == promises["ledger"] and head["lines"] == 1 + 4 * 3 + 2 * 2
    weakest = max(promises["clients"], key=lambda one: one["epsilon"])
    assert found["guarantee"] == weakest
    assert result["guarantee"].startswith(found["guarantee"]["words"])
    assert "nobody is protected" in text


def test_without_noise_there_is_no_guarantee(make_loop, capsys):
    loop = make_loop(privacy=None, rounds=1)
    loop.run()
    text, found = told(capsys, "--ledger", loop.clients.folder.ledger_file)
    assert [own["epsilon"] for own in found["clients"]] == [None] * 4
    assert "Largest epsilon: No differential privacy" in text and " inf " in text and " none " in text


def test_shuffled_batches_are_said(make_loop, capsys):
    privacy = PrivacyOptions(epsilon=8.0, delta=1e-3, noise_key=FIXED_KEY, sampling="shuffle")
    loop = make_loop(privacy=privacy, rounds=1)
    result = loop.run()
    _, found = told(capsys, "--ledger", loop.output_dir)
    assert "NOT proven" in found["guarantee"]["words"]
    assert result.guarantee.startswith(found["guarantee"]["words"])


def test_a_client_that_never_trained_has_spent_nothing(path, capsys):
    ledger = Ledger(path, Header("rdp", "add_remove", "poisson", (1e-4,) * 2, (1.0, math.inf)))
    ledger.charge([Charge(1, 1, "train", TRAIN)])
    _, found = told(capsys, "--ledger", path)
    assert found["clients"][0] == {
        "client": 0,
        "releases": {},
        "steps": 0,
        "epsilon": 0.0,
        "epsilon_budget": 1.0,
        "delta": 1e-4,
    }
    assert found["clients"][1]["epsilon"] == get_accountant("rdp").epsilon([TRAIN], 1e-4)
    assert found["clients"][1]["epsilon_budget"] is None


def test_rdp_without_opacus_is_rdp_with_it(path, capsys):
    """What a run certifies with Opacus, the report finds without: events of many kinds, to the last digit."""
    events = [GaussianEvent(rate, noise, 7) for rate in (0.003, 0.05, 0.4, 1.0) for noise in (0.7, 2.0, 9.0)]
    ledger = Ledger(path, Header("rdp", "add_remove", "poisson", (1e-5,) * len(events), (1.0,) * len(events)))
    ledger.charge([Charge(client, 1, "train", event) for client, event in enumerate(events)])
    ledger.charge([Charge(client, 1, "select", SelectionEvent(0.3)) for client in range(len(events))])
    _, found = told(capsys, "--ledger", path)
    exact = [get_accountant("rdp").bound([event, SelectionEvent(0.3)], 1e-5)[0] for event in events]
    assert [own["epsilon"] for own in found["clients"]] == exact


# ---- several runs of the same clients


def test_runs_of_the_same_clients_are_composed_in_one(tmp_path, capsys):
    """As a distillation, and the training that follows it: less than the sum of both, more than each."""
    other = GaussianEvent(1.0, 20.0, 1)
    for name, event in (("first", TRAIN), ("second", other)):
        (tmp_path / name).mkdir()
        ledger = Ledger(tmp_path / name / "ledger.jsonl", header(caveats=(f"of the {name}",)))
        ledger.charge([Charge(client, 1, name, event) for client in range(2)])
        ledger.close()
    text, found = told(capsys, "--ledger", tmp_path / "first", tmp_path / "second" / "ledger.jsonl")
    alone = [told(capsys, "--ledger", tmp_path / name)[1]["clients"][0]["epsilon"] for name in ("first", "second")]
    judge = get_accountant("rdp")
    assert [own["epsilon"] for own in found["clients"]] == [judge.epsilon([TRAIN, other], 1e-4)] * 2
    assert max(alone) < found["clients"][0]["epsilon"] < sum(alone)
    assert found["clients"][0]["releases"] == {"first": 1, "second": 1}
    assert found["clients"][0]["epsilon_budget"] is None, "each was for its own run"
    assert found["guarantee"]["caveats"] == ["of the first", "of the second"]
    assert [one["ledger"] for one in found["ledgers"]] == [
        str(tmp_path / n / "ledger.jsonl") for n in ("first", "second")
    ]
    assert "Together: client 3 of one run is assumed to be client 3 of the others" in text
    assert f"{tmp_path}/first/ledger.jsonl: 3 lines" in text and f"{tmp_path}/second/ledger.jsonl: 3 lines" in text


def test_runs_together_have_the_largest_delta_and_the_weaker_sampling(tmp_path, capsys):
    Ledger(tmp_path / "a", header(delta=(1e-6, 1e-4))).close()
    Ledger(tmp_path / "b", header(delta=(1e-5, 1e-5), sampling="shuffle")).close()
    for order in (["a", "b"], ["b", "a"]):
        _, found = told(capsys, "--ledger", *(tmp_path / name for name in order))
        assert [own["delta"] for own in found["clients"]] == [1e-5, 1e-4]
        assert "NOT proven" in found["guarantee"]["words"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"delta": (1e-4,) * 3, "epsilon": (1.0,) * 3}, "`--ledger` must be of runs with the same clients, got '2, 3'"),
        ({"adjacency": "replace_one"}, "with the same adjacency, got 'add_remove, replace_one'"),
        ({"accountant": "prv"}, "`--accountant` must be given for runs with several accountants, got 'rdp, prv'"),
    ],
)
def test_runs_that_do_not_go_together_are_refused(other, message, tmp_path, capsys):
    Ledger(tmp_path / "a", header()).close()
    Ledger(tmp_path / "b", header(**other)).close()
    assert main(["--ledger", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.out == ""
    if "accountant" in other:
        assert main(["--ledger", str(tmp_path / "a"), str(tmp_path / "b"), "--accountant", "rdp"]) == 0


# ---- what is said


def test_overrides_are_said(path, capsys):
    a_ledger(path).close()
    _, own = told(capsys, "--ledger", path)
    text, found = told(capsys, "--ledger", path, "--accountant", "prv", "--delta", "1e-6")
    assert "Instead of the ledger's accountant: prv." in text and "ledger's delta: 1e-06." in text
    assert found["overrides"] == {"accountant": "prv", "delta": 1e-6} and own["overrides"] == {}
    exact = get_accountant("prv").bound([TRAIN, TRAIN], 1e-6)
    assert (found["guarantee"]["epsilon"], found["guarantee"]["accountant"]) == exact
    assert found["guarantee"]["accountant"].startswith("PRV (Opacus") and found["guarantee"]["delta"] == 1e-6


def test_caveats_of_the_header_and_what_was_shown_are_said(path, capsys):
    ledger = a_ledger(path)
    assert told(capsys, "--ledger", path)[1]["guarantee"]["caveats"] == ["sizes are public"]
    ledger.charge([Charge(0, 3, "shown", NonPrivateEvent("counts of gradients"))])
    text, found = told(capsys, "--ledger", path)
    assert found["guarantee"]["epsilon"] is None and "counts of gradients" in text


def test_an_epsilon_above_its_budget_is_said(path, capsys):
    a_ledger(path, epsilon=0.1).close()
    assert "Above its budget: client 0, 1, 2." in told(capsys, "--ledger", path)[0]


def test_what_was_verified_is_said(path, capsys):
    ledger = a_ledger(path)  # still open: a run is going on
    text, found = told(capsys, "--ledger", path)
    assert f"{path}: 7 lines, run {ledger.head.run}." in text and "Its end agrees with ledger.head" in text
    assert found["chain"] == ledger.head.chain and found["chain"] in text
    assert (found["verified"], found["head_lines"], found["torn_bytes"]) == (True, 7, 0)


def test_a_line_that_is_being_written_is_no_error(path, capsys):
    a_ledger(path)
    before = path.read_bytes()
    path.write_bytes(before + before.splitlines()[-1][:-9])
    text, found = told(capsys, "--ledger", path)
    assert (
        "bytes are an incomplete line: it is being written, or a crash interrupted it" in text
        and found["torn_bytes"] > 0
    )
    assert found["lines"] == 7


def test_a_charge_ahead_of_the_head_is_said(path, capsys):
    ledger = a_ledger(path)
    old = head_file(path).read_bytes()
    ledger.charge([Charge(0, 3, "train", TRAIN)])
    head_file(path).write_bytes(old)
    text, found = told(capsys, "--ledger", path)
    assert "agrees with ledger.head, which counts 1 less" in text and (found["lines"], found["head_lines"]) == (8, 7)


def test_a_missing_head_is_said(path, capsys):
    a_ledger(path).close()
    head_file(path).unlink()
    text, found = told(capsys, "--ledger", path)
    assert "There is no ledger.head beside it, so lines cut off its end cannot be detected." in text
    assert found["head_lines"] is None
    assert not head_file(path).exists()


# ---- damage, and other mistakes


def test_damage_is_status_2_and_said_in_json(path, capsys):
    a_ledger(path).close()
    path.write_bytes(path.read_bytes().replace(b"1.5", b"9.5", 1))
    before = path.read_bytes()
    assert main(["--ledger", str(path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"error: `{path}` must be unchanged, got in line 2 ") and err.count("\n") == 1
    assert json.loads(out) == {"ledgers": [str(path)], "verified": False, "error": err.removeprefix("error: ").strip()}
    assert main([f"--ledger={path}"]) == 2
    assert capsys.readouterr().out == "" and path.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ledger nowhere", "`--ledger` must be a ledger, or the folder of a run, got 'nowhere'"),
        ("--ledger PATH --delta 1", "`--delta` must be in (0, 1), got 1.0"),
        ("--ledger PATH --delta x", "invalid float value: 'x'"),
        ("--ledger PATH --accountant gpd", "`accountant` must be one of"),
        ("--ledger PATH --accountant gdp", "`accountant` must be rdp or prv for a sample rate of 0.1"),
        (
            "--ledger PATH --epsilon 3",
            "`epsilon` must be an option of --ledger (accountant, delta or json), got an unknown",
        ),
        ("--ledger PATH --config=x.yaml", "`config` must be an option of --ledger"),
        ("--ledger PATH more", "`--ledger` must be a ledger, or the folder of a run, got 'more'"),
        ("--ledger PATH PATH", "`--ledger` must name each run once"),
        ("--ledger", "--ledger: expected at least one argument"),
    ],
)
def test_bad_input_is_one_sentence(words, message, path, capsys, monkeypatch):
    monkeypatch.chdir(path.parent)
    a_ledger(path).close()
    assert main([str(path) if word == "PATH" else word for word in words.split()]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and message in said.err and said.err.count("\n") == 1


# ---- quick


def test_it_loads_no_torch(path):
    a_ledger(path).close()
    code = (
        "import sys; from dpfl_lightning.plan import main\n"
        f"assert main(['--ledger', {str(path)!r}]) == 0\n"
        "assert not {'torch', 'lightning', 'opacus', 'mlflow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Largest epsilon: (" in done.stdout


@pytest.mark.e2e
def test_many_equal_clients_are_composed_once(path, capsys):
    clients = 20_000
    ledger = Ledger(path, Header("rdp", "add_remove", "poisson", (1e-4,) * clients, (2.0,) * clients))
    charges = [Charge(client, 1, "train", TRAIN) for client in range(clients)]
    begun = time.process_time()
    ledger.charge(charges)
    assert time.process_time() - begun < 5  # measured: 0.2 s
    begun = time.process_time()
    _, found = told(capsys, "--ledger", path)
    assert time.process_time() - begun < 15  # measured: 1.2 s; 6 s of 100,000 clients
    assert len(found["clients"]) == clients


@pytest.mark.e2e
def test_many_different_clients_are_asked_for_together(path, capsys):
    clients = 2000
    ledger = Ledger(path, Header("rdp", "add_remove", "poisson", (1e-4,) * clients, (2.0,) * clients))
    events = [GaussianEvent(0.1, 1 + client / clients, 10) for client in range(clients)]
    ledger.charge([Charge(client, 1, "train", event) for client, event in enumerate(events)])
    begun = time.process_time()
    _, found = told(capsys, "--ledger", path)
    assert time.process_time() - begun < 30  # measured: 1.5 s
    epsilons = [own["epsilon"] for own in found["clients"]]
    assert epsilons == sorted(epsilons, reverse=True) and len(set(epsilons)) > 1900


def test_the_options_of_clients_are_not_needed(make_loop, capsys):
    """A copy elsewhere, with nothing else of the run beside it."""
    loop = make_loop(clients=ClientOptions(count=4, batch_size=8))
    loop.run()
    alone = loop.output_dir.parent / "copy.jsonl"
    alone.write_bytes(loop.clients.folder.ledger_file.read_bytes())
    alone.with_suffix(".head").write_bytes(head_file(loop.clients.folder.ledger_file).read_bytes())
    _, there = told(capsys, "--ledger", alone)
    _, here = told(capsys, "--ledger", loop.output_dir)
    assert there["clients"] == here["clients"] and there["head_lines"] == 13
