"""`dpfl ledger`: every epsilon again from the ledger alone, equal to the live ones; damage is status 2."""

import json
import math
import shutil
import subprocess
import sys

import pytest
from conftest import FIXED_KEY
from fakes import two_phases

from dpfl_lightning.commands.ledger import main
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.federated.messages.query import SelectModel
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import read_guarantees
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, NonPrivateEvent, SelectionEvent
from dpfl_lightning.privacy.ledger.file import Header, head_file
from dpfl_lightning.privacy.ledger.ledger import Charge, Ledger
from dpfl_lightning.privacy.ledger.verify import read
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
            assert main([*map(str, words), *more]) == 0
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
    guarantees = read_guarantees(loop.output_dir)
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
    assert head == result["ledger"] == whole["ledger"] and head["lines"] == 12, "equal charges share a line"
    assert computed["guarantee"] == max(guarantees, key=lambda row: row["epsilon"])
    assert result["guarantee"]["words"].startswith(computed["guarantee"]["words"]) and "nobody is protected" in text


def test_without_noise_there_is_no_guarantee(make_loop, report):
    loop = make_loop(privacy=None, rounds=1)
    loop.run()
    text, computed = report(loop.clients.folder.ledger_file)
    assert column(computed["clients"], "epsilon") == [None] * 4
    assert "Largest epsilon: No differential privacy" in text and " inf " in text and " none " in text


def test_shuffled_batches_are_named(make_loop, report):
    privacy = PrivacyOptions(epsilon=8.0, delta=1e-3, noise_key=FIXED_KEY, sampling="shuffle")
    loop = make_loop(privacy=privacy, rounds=1)
    words = loop.run().guarantee.words()
    _, computed = report(loop.output_dir)
    assert "NOT proven" in computed["guarantee"]["words"] and words.startswith(computed["guarantee"]["words"])


def test_a_client_that_never_trained_has_spent_nothing(path, report):
    new_ledger(path, epsilon=(1.0, math.inf)).charge([Charge(1, 1, "train", TRAIN)])
    idle, trained = report(path)[1]["clients"]
    epsilons = {"epsilon": 0.0, "guaranteed": 0.0, "epsilon_budget": 1.0}
    assert idle == {"client": "0", "releases": {}, "steps": 0, **epsilons, "delta": 1e-4}
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


def composed(tmp_path, report, *ledgers, words=()):
    """The report of ledgers `(header, events of each client)`."""
    for number, (header, events) in enumerate(ledgers):
        (tmp_path / str(number)).mkdir(exist_ok=True)
        ledger = new_ledger(tmp_path / str(number) / "ledger.jsonl", len(events), **header)
        charge(ledger, events, f"run {number}")
        ledger.close()
    return report(*(tmp_path / str(number) for number in range(len(ledgers))), *words)


def test_clients_of_several_runs_are_known_by_name_and_not_by_number(tmp_path, report):
    """As a distillation, and the training that follows it: less than the sum of both, more than each."""
    a, b = GaussianEvent(1.0, 20.0, 1), GaussianEvent(1.0, 30.0, 1)
    first = {"identity": {"names": ["lyon", "oslo"]}, "caveats": ("of the first",), "delta": (1e-6, 1e-4)}
    second = {"identity": {"names": ["oslo", "lyon"]}, "caveats": ("of the second",), "delta": (1e-5, 1e-5)}
    text, both = composed(tmp_path, report, (first, [TRAIN, a]), ({**second, "sampling": "shuffle"}, [b, TRAIN]))
    rdp = get_accountant("rdp")
    assert column(both["clients"], "epsilon") == [rdp.epsilon([TRAIN, TRAIN], 1e-6), rdp.epsilon([a, b], 1e-5)]
    assert column(both["clients"], "delta") == [1e-6, 1e-5], "the smallest"
    assert both["clients"][0]["releases"] == {"run 0": 1, "run 1": 1}
    assert both["clients"][0]["epsilon_budget"] is None, "each was for one run"
    assert both["guarantee"]["caveats"] == ["of the first", "of the second"]
    assert "NOT proven" in both["guarantee"]["words"], "the weaker sampling"
    assert len(both["ledgers"]) == 2 and "clients with the same name" in text
    assert "No client is in several runs." not in text


def test_a_client_of_one_run_only_has_its_own_row(tmp_path, report):
    first, second = ({"identity": {"names": names}} for names in (["lyon", "oslo"], ["oslo"]))
    _, both = composed(tmp_path, report, (first, [TRAIN] * 2), (second, [TRAIN]))
    rdp = get_accountant("rdp")
    assert {row["client"]: row["epsilon"] for row in both["clients"]} == {
        "lyon": rdp.epsilon([TRAIN], 1e-4),
        "oslo": rdp.epsilon([TRAIN, TRAIN], 1e-4),
    }


def test_runs_without_a_common_client_are_named(tmp_path, report):
    text, both = composed(tmp_path, report, *(({"identity": {"names": [name]}}, [TRAIN]) for name in ("lyon", "oslo")))
    assert "No client is in several runs." in text and [row["client"] for row in both["clients"]] == ["lyon", "oslo"]


@pytest.mark.parametrize("names", [[], ["lyon", "oslo"]])
def test_clients_that_nobody_can_recognise_get_the_worst_combination(names, tmp_path, report):
    """Records have equal digests by chance only, because every run has its own key."""
    small, headers = (
        GaussianEvent(1.0, 90.0, 1),
        [{"identity": {"records": ["a", "b"], "names": one}} for one in ([], names)],
    )
    text, both = composed(tmp_path, report, (headers[0], [TRAIN, small]), (headers[1], [small, TRAIN]))
    rdp = get_accountant("rdp")
    pairs = {"lyon": [TRAIN, small], "oslo": [TRAIN, TRAIN], "any client": [TRAIN, TRAIN]}
    expected = {name: rdp.epsilon(pair, 1e-4) for name, pair in pairs.items() if name in (*names, "any client")}
    assert {row["client"]: row["epsilon"] for row in both["clients"]} == expected
    assert both["matched"] == "nothing" and "worst combination" in text
    assert "not all runs name their clients" in text
    known = read([tmp_path / number / "ledger.jsonl" for number in "01"], one_population=True)
    if names:
        assert known.matched == "nothing", "these are not the clients of one population"
    else:
        assert [one.epsilon for one in known.paid] == [get_accountant("rdp").epsilon([TRAIN, small], 1e-4)] * 2


def test_a_folder_above_runs_names_them(tmp_path, capsys):
    search = tmp_path / "search"
    for name in ("final", "trials/s/0", "trials/s/1", "trials/s/2"):
        (search / name).mkdir(parents=True)
        new_ledger(search / name / "ledger.jsonl").close()
    assert main([str(search)]) == 2
    error = capsys.readouterr().err
    assert f"got '{search}'. Name the folders of its runs: {search}/final, {search}/trials/s/0, " in error


@pytest.mark.parametrize(
    ("other", "composed_by"),
    [({"adjacency": "replace_one"}, ("rdp", "replace_one")), ({"accountant": "pld"}, ("pld", "add_remove"))],
)
def test_runs_of_several_adjacencies_or_accountants_are_composed(other, composed_by, tmp_path, report):
    text, both = composed(tmp_path, report, ({}, [TRAIN]), (other, [TRAIN]))
    assert column(both["clients"], "epsilon") == [get_accountant(*composed_by).epsilon([TRAIN, TRAIN], 1e-4)]
    assert "Accountant {}, adjacency {}, sampling: Poisson".format(*composed_by) in text
    assert report(*(tmp_path / number for number in "01"), "--accountant", "rdp")[1]["accountant"] == "rdp"


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
    assert f"{path}: 3 lines, run {trained.head.run}." in text and "Its ledger.head agrees" in text
    assert computed["chain"] == trained.head.chain and computed["chain"] in text
    assert (computed["verified"], computed["head_lines"], computed["torn_bytes"]) == (True, 3, 0)

    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:-9])
    text, computed = report(path)
    assert "bytes are an incomplete line: it is being written, or a crash interrupted it" in text
    assert computed["torn_bytes"] > 0 and computed["lines"] == 3
    path.write_bytes(whole)

    head = head_file(path).read_bytes()
    trained.charge([Charge(0, 3, "train", TRAIN)])
    head_file(path).write_bytes(head)
    text, computed = report(path)
    assert "ledger.head counts 1 lines less" in text
    assert (computed["lines"], computed["head_lines"]) == (4, 3)


# ---- damage, and other mistakes


def test_damage_is_status_2_and_an_error_in_json(path, trained, capsys):
    trained.close()
    path.write_bytes(path.read_bytes().replace(b"1.5", b"9.5", 1))
    before = path.read_bytes()
    assert main([str(path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"error: `{path}` must be unchanged, got in line 2 ") and err.count("\n") == 1
    assert json.loads(out) == {"ledgers": [str(path)], "verified": False, "error": err.removeprefix("error: ").strip()}
    assert main([str(path)]) == 2
    assert capsys.readouterr().out == "" and path.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere", "`RUN` must be a ledger, or the folder of a run, got 'nowhere'"),
        ("PATH --delta 1", "`--delta` must be in (0, 1), got 1.0"),
        ("PATH --accountant gdp", "`accountant` must be one of pld, rdp, paper_ma, got 'gdp'"),
        ("PATH more", "`RUN` must be a ledger, or the folder of a run, got 'more'"),
        ("PATH PATH", "`RUN` must name each run once"),
    ],
)
def test_a_mistake_is_one_sentence(words, message, path, trained, capsys, monkeypatch):
    monkeypatch.chdir(path.parent)
    assert main([*(str(path) if word == "PATH" else word for word in words.split())]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("error: ") and message in output.err
    assert output.err.count("\n") == 1


# ---- quick


def test_the_report_loads_no_torch(path, trained):
    code = (
        "import sys; from dpfl_lightning.commands.ledger import main\n"
        f"assert main([{str(path)!r}]) == 0\n"
        "assert not {'torch', 'lightning', 'opacus', 'mlflow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Largest epsilon: (" in done.stdout, done.stderr
