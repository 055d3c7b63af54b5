"""`plan --ledger`: every epsilon again from the ledger alone, equal to the live ones; damage is status 2."""

import json
import math
import shutil
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
from dpfl_lightning.privacy.ledger.results import guarantee_of_each
from dpfl_lightning.privacy.mechanism import ExponentialMechanism
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted

TRAIN = GaussianEvent(0.1, 1.5, 10)


def new_ledger(path, clients=2, **header) -> Ledger:
    usual = {"accountant": "rdp", "adjacency": "add_remove", "sampling": "poisson"}
    usual |= {"delta": (1e-4,) * clients, "epsilon": (2.0,) * clients}
    return Ledger(path, Header(**{**usual, **header}))


def charge(ledger: Ledger, events, purpose="train", round=1) -> None:
    """One event a client."""
    ledger.charge([Charge(client, round, purpose, event) for client, event in enumerate(events)])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def trained(path):
    """Three clients with two charges each, in a ledger that is still open."""
    ledger = new_ledger(path, 3, caveats=("sizes are public",))
    for round in (1, 2):
        charge(ledger, [TRAIN] * 3, round=round)
    return ledger


@pytest.fixture
def report(capsys):
    """`report(*words)`: the text, and the JSON with the entries of the first ledger among the rest."""

    def text_and_json(*words):
        outputs = []
        for more in ([], ["--json"]):
            assert main(["--ledger", *map(str, words), *more]) == 0
            outputs.append(capsys.readouterr().out)
        text, result = outputs[0].rstrip("\n"), json.loads(outputs[1])
        return text, {**result["ledgers"][0], **result}

    return text_and_json


def column(rows, key):
    return [row[key] for row in rows]


# ---- recomputation equals live


class Asks(Strategy, Callback):
    """Rounds of two kinds, a selection by the even clients, and the epsilons of the live run."""

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
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_recomputed_is_live(accountant, make_loop, report):
    asks = Asks()
    budgets = [4.0, 6.0, 8.0, 10.0]
    privacy = PrivacyOptions(epsilon=budgets, delta=1e-3, noise_key=FIXED_KEY, accountant=accountant)
    loop = make_loop(parts=[SizeWeighted(), asks], privacy=privacy)
    loop.run()
    text, computed = report(loop.output_dir)
    result = json.loads((loop.output_dir / "result.json").read_text())
    whole = json.loads((loop.output_dir / "guarantees.json").read_text())
    guarantees = guarantee_of_each(whole)
    for key in ("epsilon_budget", "delta", "steps"):
        assert column(computed["clients"], key) == column(result["clients"], key), key
    epsilons = column(computed["clients"], "epsilon")
    assert epsilons == column(result["clients"], "epsilon_spent") == column(guarantees, "epsilon")
    assert len(set(epsilons)) == 4 and computed["accountant"] == accountant
    assert epsilons == pytest.approx(asks._live, abs=2e-6)
    assert computed["clients"][0]["releases"] == {"first": 1, "select": 2, "train": 2}
    assert computed["clients"][1]["releases"] == {"first": 1, "train": 2}
    assert "1 first, 2 select, 2 train" in text

    head = {key: computed[key] for key in ("run", "lines", "chain")}
    assert head == result["ledger"] == whole["ledger"] and head["lines"] == 1 + 4 * 3 + 2 * 2
    assert computed["guarantee"] == max(guarantees, key=lambda row: row["epsilon"])
    assert result["guarantee"].startswith(computed["guarantee"]["words"]) and "nobody is protected" in text


def test_without_noise_there_is_no_guarantee(make_loop, report):
    loop = make_loop(privacy=None, rounds=1)
    loop.run()
    text, computed = report(loop.clients.folder.ledger_file)
    assert column(computed["clients"], "epsilon") == [None] * 4
    assert "Largest epsilon: No differential privacy" in text and " inf " in text and " none " in text


def test_shuffled_batches_are_named(make_loop, report):
    privacy = PrivacyOptions(epsilon=8.0, delta=1e-3, noise_key=FIXED_KEY, sampling="shuffle")
    loop = make_loop(privacy=privacy, rounds=1)
    words = loop.run().guarantee
    _, computed = report(loop.output_dir)
    assert "NOT proven" in computed["guarantee"]["words"] and words.startswith(computed["guarantee"]["words"])


def test_a_client_that_never_trained_has_spent_nothing(path, report):
    new_ledger(path, epsilon=(1.0, math.inf)).charge([Charge(1, 1, "train", TRAIN)])
    idle, trained = report(path)[1]["clients"]
    assert idle == {"client": 0, "releases": {}, "steps": 0, "epsilon": 0.0, "epsilon_budget": 1.0, "delta": 1e-4}
    assert (trained["epsilon"], trained["epsilon_budget"]) == (get_accountant("rdp").epsilon([TRAIN], 1e-4), None)


def test_rdp_without_opacus_is_rdp_with_it(path, report):
    """Epsilons that a run certifies with Opacus are computed without it to the last digit."""
    events = [GaussianEvent(rate, noise, 7) for rate in (0.003, 0.05, 0.4, 1.0) for noise in (0.7, 2.0, 9.0)]
    ledger = new_ledger(path, len(events))
    charge(ledger, events)
    charge(ledger, [SelectionEvent(0.3)] * len(events), "select")
    exact = [get_accountant("rdp").bound([event, SelectionEvent(0.3)], 1e-4)[0] for event in events]
    assert column(report(path)[1]["clients"], "epsilon") == exact


def test_a_copy_of_the_ledger_needs_nothing_else_of_the_run(make_loop, report):
    loop = make_loop(clients=ClientOptions(count=4, batch_size=8))
    loop.run()
    copy = loop.output_dir.parent / "copy.jsonl"
    shutil.copy(loop.clients.folder.ledger_file, copy)
    shutil.copy(head_file(loop.clients.folder.ledger_file), copy.with_suffix(".head"))
    computed = report(copy)[1]
    assert computed["clients"] == report(loop.output_dir)[1]["clients"] and computed["head_lines"] == 13


# ---- several runs of the same clients


def test_runs_of_the_same_clients_are_composed_in_one(tmp_path, report):
    """As a distillation, and the training that follows it: less than the sum of both, more than each."""
    other = GaussianEvent(1.0, 20.0, 1)
    files = [str(tmp_path / name / "ledger.jsonl") for name in ("first", "second")]
    for name, event in (("first", TRAIN), ("second", other)):
        (tmp_path / name).mkdir()
        ledger = new_ledger(tmp_path / name / "ledger.jsonl", caveats=(f"of the {name}",))
        charge(ledger, [event] * 2, name)
        ledger.close()
    text, both = report(tmp_path / "first", files[1])
    alone = [report(file)[1]["clients"][0]["epsilon"] for file in files]
    epsilon = get_accountant("rdp").epsilon([TRAIN, other], 1e-4)
    assert column(both["clients"], "epsilon") == [epsilon] * 2 and max(alone) < epsilon < sum(alone)
    assert both["clients"][0]["releases"] == {"first": 1, "second": 1}
    assert both["clients"][0]["epsilon_budget"] is None, "each was for one run"
    assert both["guarantee"]["caveats"] == ["of the first", "of the second"]
    assert column(both["ledgers"], "ledger") == files and all(f"{file}: 3 lines" in text for file in files)
    assert "Together: client 3 of one run is assumed to be client 3 of the others" in text


def test_runs_together_have_the_largest_delta_and_the_weaker_sampling(tmp_path, report):
    new_ledger(tmp_path / "a", delta=(1e-6, 1e-4)).close()
    new_ledger(tmp_path / "b", delta=(1e-5, 1e-5), sampling="shuffle").close()
    for order in (["a", "b"], ["b", "a"]):
        _, both = report(*(tmp_path / name for name in order))
        assert column(both["clients"], "delta") == [1e-5, 1e-4] and "NOT proven" in both["guarantee"]["words"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"delta": (1e-4,) * 3, "epsilon": (1.0,) * 3}, "`--ledger` must be of runs with the same clients, got '2, 3'"),
        ({"adjacency": "replace_one"}, "with the same adjacency, got 'add_remove, replace_one'"),
        ({"accountant": "pld"}, "`--accountant` must be given for runs with several accountants, got 'rdp, pld'"),
    ],
)
def test_runs_that_cannot_be_composed_are_refused(other, message, tmp_path, capsys):
    new_ledger(tmp_path / "a").close()
    new_ledger(tmp_path / "b", **other).close()
    words = ["--ledger", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(words) == 2
    output = capsys.readouterr()
    assert message in output.err and output.out == ""
    if "accountant" in other:
        assert main([*words, "--accountant", "rdp"]) == 0


# ---- what the report says


def test_overrides_are_named(path, trained, report):
    text, computed = report(path, "--accountant", "pld", "--delta", "1e-6")
    assert "Instead of the ledger's accountant: pld." in text and "ledger's delta: 1e-06." in text
    assert computed["overrides"] == {"accountant": "pld", "delta": 1e-6} and report(path)[1]["overrides"] == {}
    guarantee = computed["guarantee"]
    exact = get_accountant("pld").bound([TRAIN, TRAIN], 1e-6)
    assert (guarantee["epsilon"], guarantee["accountant"]) == exact and guarantee["delta"] == 1e-6
    assert guarantee["accountant"].startswith("PLD (dp_accounting")


def test_caveats_and_what_was_shown_without_noise_are_named(path, trained, report):
    assert report(path)[1]["guarantee"]["caveats"] == ["sizes are public"]
    trained.charge([Charge(0, 3, "shown", NonPrivateEvent("counts of gradients"))])
    text, computed = report(path)
    assert computed["guarantee"]["epsilon"] is None and "counts of gradients" in text


def test_an_epsilon_above_its_budget_is_named(path, report):
    charge(new_ledger(path, epsilon=(0.1, 2.0)), [TRAIN] * 2)
    assert "Above its budget: client 0." in report(path)[0]


def test_the_verified_lines_are_counted(path, trained, report):
    text, computed = report(path)
    assert f"{path}: 7 lines, run {trained.head.run}." in text and "Its end agrees with ledger.head" in text
    assert computed["chain"] == trained.head.chain and computed["chain"] in text
    assert (computed["verified"], computed["head_lines"], computed["torn_bytes"]) == (True, 7, 0)

    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:-9])
    text, computed = report(path)
    assert "bytes are an incomplete line: it is being written, or a crash interrupted it" in text
    assert computed["torn_bytes"] > 0 and computed["lines"] == 7
    path.write_bytes(whole)

    head = head_file(path).read_bytes()
    trained.charge([Charge(0, 3, "train", TRAIN)])
    head_file(path).write_bytes(head)
    text, computed = report(path)
    assert "agrees with ledger.head, which counts 1 less" in text
    assert (computed["lines"], computed["head_lines"]) == (8, 7)


# ---- damage, and other mistakes


def test_damage_is_status_2_and_an_error_in_json(path, trained, capsys):
    trained.close()
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
        ("nowhere", "`--ledger` must be a ledger, or the folder of a run, got 'nowhere'"),
        ("PATH --delta 1", "`--delta` must be in (0, 1), got 1.0"),
        ("PATH --delta x", "`--delta` must be a number, got 'x'."),
        ("PATH --accountant gpd", "`accountant` must be one of"),
        ("PATH --accountant gdp", "`accountant` must be one of pld, rdp, paper_ma, got 'gdp'"),
        ("PATH --epsilon 3", "`epsilon` must be an option of --ledger (accountant, delta, public_keys, export or"),
        ("PATH --config=x.yaml", "`config` must be an option of --ledger"),
        ("PATH more", "`--ledger` must be a ledger, or the folder of a run, got 'more'"),
        ("PATH PATH", "`--ledger` must name each run once"),
        ("", "`--ledger` must be followed by a value."),
    ],
)
def test_a_mistake_is_one_sentence(words, message, path, trained, capsys, monkeypatch):
    monkeypatch.chdir(path.parent)
    assert main(["--ledger", *(str(path) if word == "PATH" else word for word in words.split())]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("error: ") and message in output.err
    assert output.err.count("\n") == 1


# ---- quick


def test_the_report_loads_no_torch(path, trained):
    code = (
        "import sys; from dpfl_lightning.plan import main\n"
        f"assert main(['--ledger', {str(path)!r}]) == 0\n"
        "assert not {'torch', 'lightning', 'opacus', 'mlflow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Largest epsilon: (" in done.stdout, done.stderr


@pytest.mark.e2e
def test_many_clients_are_composed_together(path, report):
    equal, different = [TRAIN] * 20_000, [GaussianEvent(0.1, 1 + client / 2000, 10) for client in range(2000)]
    seconds = {}
    for kind, events in (("equal", equal), ("different", different)):
        file = path.with_name(kind)
        ledger, start = new_ledger(file, len(events)), time.process_time()
        charge(ledger, events)
        charged = time.process_time()
        epsilons = column(report(file)[1]["clients"], "epsilon")
        seconds[kind] = (charged - start, time.process_time() - charged)
        assert epsilons == sorted(epsilons, reverse=True) and len(epsilons) == len(events)
    assert len(set(epsilons)) > 1900
    assert seconds["equal"][0] < 5 and seconds["equal"][1] < 15  # measured: 0.2 s and 1.2 s
    assert seconds["different"][1] < 30  # measured: 1.5 s
