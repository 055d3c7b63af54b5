"""Six questions about two or more runs on the same records: every command that answers one gives the same answer."""

import dataclasses
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import oracle
import pytest
from conftest import blobs, small_loop

from dpfl_lightning import strategies
from dpfl_lightning.commands.account import main as account_command
from dpfl_lightning.commands.fit import composed_over_seeds
from dpfl_lightning.commands.ledger import main as ledger_command
from dpfl_lightning.commands.node import _in_account
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.privacy.accounting.accountant import Rdp, get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, LaplaceEvent, Release
from dpfl_lightning.privacy.accounting.guarantee import FILTER, NOISE_BY_RESULTS
from dpfl_lightning.privacy.accounting.units import Relation
from dpfl_lightning.privacy.compose import Keys, Limit, Line, compose
from dpfl_lightning.privacy.ledger.account import NAMELESS
from dpfl_lightning.privacy.ledger.file import Charge, Header
from dpfl_lightning.privacy.ledger.ledger import Ledger
from dpfl_lightning.privacy.ledger.operator import OperatedAccount
from dpfl_lightning.runtime.text import at_most
from dpfl_lightning.search.costs import Cost, composed_costs

LARGE, SMALL, FULL = GaussianEvent(0.1, 1.5, 20), GaussianEvent(0.05, 2.0, 10), GaussianEvent(1.0, 9.0, 2)
Events = tuple[Release, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: the releases of each client, the clients' names, and what its epsilon depends on."""

    released: tuple[Events, ...]
    names: tuple[str, ...] = ("bergen", "oslo")
    delta: float = 1e-4
    adjacency: str = "add_remove"
    accountant: str = "pld"
    sampling: str = "poisson"
    planned: Events = ()
    bound: Release | None = None


TWO = ((LARGE,), (SMALL,))
#: question -> runs, the worst client's releases in all of them, delta, relation, accountant
QUESTIONS: dict[str, tuple[tuple[Run, ...], Events, float, str, str]] = {
    "two deltas": ((Run(TWO, delta=1e-3), Run(TWO, delta=1e-4)), (LARGE, LARGE), 1e-4, "add_remove", "pld"),
    "a run without delta": (
        (Run(TWO), Run(((LaplaceEvent(40.0, 2),),) * 2, delta=0.0)),
        (LARGE, LaplaceEvent(40.0, 2)),
        1e-4,
        "add_remove",
        "pld",
    ),
    "two relations": ((Run(TWO), Run(TWO, adjacency="replace_one")), (LARGE, LARGE), 1e-4, "replace_one", "pld"),
    "two relations of persons": (
        (Run(TWO, adjacency="add_remove_of_persons"), Run(TWO, adjacency="replace_one_of_persons")),
        (LARGE, LARGE),
        1e-4,
        "replace_one_of_persons",
        "pld",
    ),
    "two units": (
        (Run(TWO), Run(TWO, adjacency="add_remove_of_persons")),
        (LARGE, LARGE),
        1e-4,
        "replace_one",
        "pld",
    ),
    "nameless clients": (
        (Run(TWO, names=()), Run(((SMALL,), (LARGE,), (FULL,)), names=())),
        (LARGE, LARGE),
        1e-4,
        "add_remove",
        "pld",
    ),
    "a run with names and a nameless one": (
        (Run(TWO), Run(((SMALL,), (LARGE,)), names=())),
        (LARGE, LARGE),
        1e-4,
        "add_remove",
        "pld",
    ),
    "parallel runs, of which one may end by its results": (
        (Run(TWO), Run(TWO, planned=(LARGE, LARGE, LARGE))),
        (LARGE,) * 4,
        1e-4,
        "add_remove",
        "pld",
    ),
    "parallel runs, of which one chooses its noise by its results": (
        (Run(TWO), Run(((FULL,), (FULL,)), bound=GaussianEvent(1.0, 3.0, 1))),
        (LARGE, GaussianEvent(1.0, 3.0, 1)),
        1e-4,
        "add_remove",
        "pld",
    ),
    "three seeds": ((Run(((LARGE,), (FULL,)), names=()),) * 3, (LARGE,) * 3, 1e-4, "add_remove", "pld"),
    "two accountants": ((Run(TWO, accountant="rdp"), Run(TWO)), (LARGE, LARGE), 1e-4, "add_remove", "pld"),
    "one other accountant": ((Run(TWO, accountant="rdp"),) * 2, (LARGE, LARGE), 1e-4, "add_remove", "rdp"),
}


def write(folder: Path, run: Run) -> Path:
    """Write the ledger of a run."""
    count, identity = len(run.released), {"names": list(run.names)}
    if run.planned:
        identity["planned"] = {"events": [[one.as_dict() for one in run.planned]], "of": [0] * count}
    if run.bound:
        identity["filter"] = {"events": [run.bound.as_dict()], "of": [0] * count}
    folder.mkdir(parents=True)
    head = Header(run.accountant, run.adjacency, run.sampling, (run.delta,) * count, (9.0,) * count, identity=identity)
    ledger = Ledger(folder / "ledger.jsonl", head)
    charges = [Charge(i, 1, "train", one, n) for i, events in enumerate(run.released) for n, one in enumerate(events)]
    ledger.charge(charges)
    ledger.close()
    return folder


def costs(runs: Sequence[Run]) -> list[Cost]:
    """The same runs as those of trials, which count with all that they plan."""
    return [
        [
            Line(
                "",
                i,
                Keys(run.names[i : i + 1]),
                run.planned or (run.bound and (run.bound,)) or events,
                run.delta,
                Relation.of_key(run.adjacency).adjacency,
                run.sampling,
                run.accountant,
                unit=Relation.of_key(run.adjacency).unit,
            )
            for i, events in enumerate(run.released)
        ]
        for run in runs
    ]


@pytest.fixture
def answers(tmp_path, monkeypatch, capsys):
    """`answers(runs)`: the largest epsilon, delta, neighbouring data sets and accountant, by command."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("DPFL_ACCOUNT", str(tmp_path / "account.jsonl"))

    def told(words: Sequence[object], command) -> dict:
        assert command([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    def all_of(runs: Sequence[Run]) -> dict[str, tuple]:
        folders = [write(tmp_path / "runs" / f"seed_{number}", run) for number, run in enumerate(runs)]
        found, fields = {}, ("epsilon", "delta", "adjacency", "accountant")
        listed = told(folders, ledger_command)
        found["ledger"] = tuple(listed["guarantee"][name] for name in fields)
        account_command(["add", *map(str, folders)])
        capsys.readouterr()
        rows = told([], account_command)["holders"]
        worst = max(rows, key=lambda row: row["epsilon"])
        found["account"] = tuple(worst[name] for name in fields)
        assert ledger_command([*map(str, folders)]) == 0
        text = capsys.readouterr().out
        found["words below the ledger"] = worst if at_most(worst["epsilon"]) in text.splitlines()[-1] else text
        clients = [[{"epsilon_spent": 1.0, "delta": run.delta} for _ in run.released] for run in runs]
        results = [
            {"output_dir": str(folder), "clients": one, "guarantee": SimpleNamespace(together=None)}
            for folder, one in zip(folders, clients, strict=True)
        ]
        found["fit --seeds"] = tuple(getattr(composed_over_seeds(results), name) for name in fields)
        of_trials = max(composed_costs(costs(runs)).values(), key=lambda one: one.epsilon)
        found["sweep"] = tuple(getattr(of_trials, name) for name in fields)
        (status,) = [line for name in worst["holder"] for line in _in_account(name)]
        found["node status"] = worst if f"epsilon {at_most(worst['epsilon'])}, at delta" in status else status
        assert {row["client"]: row["guaranteed"] for row in listed["clients"]} == {
            "any client" if name == NAMELESS else name: row["epsilon"] for row in rows for name in row["holder"]
        }, "each holder has one answer"
        return {name: worst if answer is worst else answer for name, answer in found.items()}

    return all_of


@pytest.mark.e2e
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_command_gives_one_answer(question, answers):
    runs, released, delta, relation, accountant = QUESTIONS[question]
    found = answers(runs)
    assert isinstance(found.pop("words below the ledger"), dict) and isinstance(found.pop("node status"), dict)
    assert len({(*numbers, means.partition(f", {FILTER}")[0]) for *numbers, means in found.values()}) == 1, found
    epsilon, at, *_ = found["ledger"]
    adjacency, _ = Relation.of_key(relation)
    assert at == delta and epsilon == get_accountant(accountant, adjacency).epsilon(released, delta)
    assert epsilon >= oracle.lower_bound(released, delta, adjacency) - 1e-6, "what another library composes"


@pytest.mark.e2e
def test_the_end_of_a_run_its_page_its_plan_and_the_account_give_one_answer(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("DPFL_ACCOUNT", str(tmp_path / "account.jsonl"))
    population = dataclasses.replace(blobs(2), names=("bergen", "oslo"))

    def loop(name: str, delta: float, accountant: str):
        privacy = PrivacyOptions(epsilon=[2.0, 1.0], delta=delta, accountant=accountant)
        options = {"rounds": 2, "clients": ClientOptions(batch_size=16), "output_dir": tmp_path / name}
        return small_loop(population, privacy=privacy, **options)

    loop("first", 1e-3, "rdp").run()
    second = loop("second", 1e-4, "pld")
    second.plan_schedule()
    planned = second.clients.outlook(second.run_plan())
    result = second.run()
    together = result.guarantee.together
    assert ledger_command([str(tmp_path / "first"), str(tmp_path / "second"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["guarantee"]
    (bergen,) = [one.together for one in OperatedAccount(tmp_path / "account.jsonl").holders() if "bergen" in one.names]
    assert listed["epsilon"] == together.epsilon == bergen.epsilon > result.guarantee.epsilon
    assert listed["delta"] == together.delta == bergen.delta == 1e-4
    assert listed["accountant"] == together.accountant == bergen.accountant
    means = f"add or remove one record; Poisson sampling; {bergen.accountant}"
    words = f"epsilon {at_most(bergen.epsilon)}, at delta 0.0001 ({means})"
    page = (tmp_path / "second" / "guarantee.html").read_text()
    assert words in planned and words in page and words in result.guarantee.words()


@pytest.mark.e2e
def test_a_run_that_chooses_its_noise_has_one_answer(tmp_path, monkeypatch, capsys):
    """The second stage of the paper's selection has other noise than was planned: the whole budget counts."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("DPFL_ACCOUNT", str(tmp_path / "account.jsonl"))
    population = dataclasses.replace(blobs(), names=("bergen", "oslo", "lund", "aarhus"))
    (strategy,) = strategies.build({"two_stage_selection": {"warmup_rounds": 2, "clients_per_round": 2}})
    privacy = PrivacyOptions(epsilon=[1.0, 2.0, 3.0, 4.0], delta=1e-3)
    clients = ClientOptions(batch_size=None, learning_rate=0.1)
    loop = small_loop(
        population, parts=[strategy], rounds=5, clients=clients, privacy=privacy, output_dir=tmp_path / "run"
    )
    result = loop.run()
    assert ledger_command([str(tmp_path / "run"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["clients"]
    holders = OperatedAccount(tmp_path / "account.jsonl").holders()
    of_account = {one.names[0]: one.together.epsilon for one in holders}
    of_page = {population.names[i]: one.epsilon for i, one in enumerate(loop.clients.guarantees())}
    assert {row["client"]: row["guaranteed"] for row in rows} == of_account == of_page
    taken = {row["client"]: bool(row["releases"]) for row in rows}
    budgets = dict(zip(population.names, privacy.epsilon, strict=True))
    assert of_page == {name: budgets[name] if taken[name] else 0.0 for name in budgets} and any(taken.values())
    assert result.guarantee.epsilon == max(of_page.values())
    assert all(row["epsilon"] <= 1.001 * row["guaranteed"] for row in rows)
    assert ledger_command([str(tmp_path / "run")]) == 0
    assert NOISE_BY_RESULTS in capsys.readouterr().out


@pytest.mark.e2e
@pytest.mark.parametrize("seed", range(4))
def test_no_holder_costs_more_than_is_said(seed):
    """Of random runs, whoever the clients without names are: by another library."""
    draw = random.Random(seed)
    relation = draw.choice(["add_remove", "replace_one"])
    lines = []
    for run in range(2):
        names = draw.choice([["bergen", "oslo"], ["oslo", "lund"], ["", ""]])
        for client, name in enumerate(names):
            events = (GaussianEvent(draw.choice([0.02, 0.1, 1.0]), draw.choice([2.0, 4.0, 9.0]), 3),)
            delta, means = draw.choice([1e-3, 1e-4]), (relation, "poisson", draw.choice(["rdp", "pld"]))
            lines.append(Line(str(run), client, Keys([name] if name else []), events, delta, *means))
    found = compose(lines)
    assert set(found) == {line.keys for line in lines}
    for keys, total in found.items():
        own = [line for line in lines if line.keys == keys or not line.keys]
        runs = [[line for line in own if line.run == run] for run in sorted({line.run for line in own})]
        for choice in itertools.product(*runs):
            events = tuple(sorted((event for line in choice for event in line.released), key=repr))
            assert total.delta <= min(line.delta for line in choice)
            assert total.epsilon >= oracle.lower_bound(events, total.delta, relation) - 1e-6


def test_who_has_no_name_may_be_each_holder_with_one():
    means = {"delta": 1e-4, "adjacency": "add_remove", "sampling": "poisson", "accountant": "pld"}
    named = [Line("a", i, Keys([name]), (LARGE,) * (2 - i), **means) for i, name in enumerate(("bergen", "oslo"))]
    unknown = [Line("b", i, Keys(), (event,), **means) for i, event in enumerate((SMALL, LARGE))]
    tight = {n: get_accountant("pld").epsilon([LARGE] * n, 1e-4) for n in (1, 2, 3)}
    found = {total.name: total.epsilon for total in compose([*named, *unknown]).values()}
    assert found == {"bergen": tight[3], "oslo": tight[2], "any client": tight[3]}
    found = {total.name: total.epsilon for total in compose([*named, *unknown], of=[Keys(["lund"])]).values()}
    assert found == {"lund": tight[1]}, "it is in no run with names"


def test_clients_that_another_one_covers_are_no_choice():
    """Three seeds of five clients without names compose tightly: in each, one client has the most of everything."""
    means = {"delta": 1e-4, "adjacency": "add_remove", "sampling": "poisson", "accountant": "pld"}
    events = [GaussianEvent(0.1 - client / 100, 1.5 + client, 20 - client) for client in range(5)]
    lines = [Line(str(run), i, Keys(), (event,), **means) for run in range(3) for i, event in enumerate(events)]
    (total,) = compose(lines).values()
    assert (total.epsilon, total.method) == get_accountant("pld").bound(events[:1] * 3, 1e-4)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_what_is_covered_costs_at_most_as_much(relation):
    """At every order, and beside other releases."""
    draw = random.Random(0)
    orders, found = (1.5, 4.0, 32.0), []
    for _ in range(200):
        pair = [
            Line("", 0, Keys(), (GaussianEvent(draw.choice([0.01, 0.1, 1.0]), draw.uniform(1, 4), draw.randint(1, 3)),
                                 LaplaceEvent(draw.uniform(9, 40))), 1e-4, relation, "poisson", "pld")
            for _ in range(2)
        ]  # fmt: skip
        if pair[0].covers(pair[1]):
            larger, smaller = Rdp(relation, orders).curves([(one.counts, 0.5) for one in pair])
            found.append(bool((larger >= smaller * (1 - 1e-9)).all()))
    assert len(found) > 10 and all(found)


def test_the_delta_of_a_limit_is_that_of_the_question(answers, tmp_path, capsys):
    answers(QUESTIONS["two deltas"][0])
    account = OperatedAccount(tmp_path / "account.jsonl")
    account.limit("bergen", Limit(9.0, 1e-5))
    (bergen,) = [one.together for one in account.holders() if "bergen" in one.names]
    folders = [str(folder) for folder in sorted((tmp_path / "runs").iterdir())]
    assert ledger_command([*folders, "--delta", "1e-5", "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)["guarantee"]
    assert (asked["epsilon"], asked["delta"]) == (bergen.epsilon, bergen.delta) == (bergen.epsilon, 1e-5)
    assert 0 < bergen.used < 1
