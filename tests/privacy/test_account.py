"""The account of data holders, under sequences of runs: never less than an independent library composes."""

import dataclasses
import json
import math
import multiprocessing
import shutil
import stat
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import blobs, break_off, small_loop, small_net
from dp_accounting import dp_event, pld
from fakes import pay

from dpfl_lightning.commands.account import main
from dpfl_lightning.commands.ledger import main as ledger_command
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population, load
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.folder import RunFolder
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, LaplaceEvent, NonPrivateEvent, SelectionEvent
from dpfl_lightning.privacy.accounting.units import RECORD, Person, Record, Relation, of_group
from dpfl_lightning.privacy.compose import ANYBODY, Keys, Limit, Line, compose, relation_of_all
from dpfl_lightning.privacy.ledger.account import NAMELESS
from dpfl_lightning.privacy.ledger.account_file import RunRecord
from dpfl_lightning.privacy.ledger.evidence import Evidence, View
from dpfl_lightning.privacy.ledger.file import Charge, Header, chain_of, read_head, read_header, sealed
from dpfl_lightning.privacy.ledger.ledger import Ledger, read_ledger
from dpfl_lightning.privacy.ledger.operator import OperatedAccount
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted
from dpfl_lightning.strategies.selection.early_stopping import EarlyStopping

DELTA = 1e-3


@pytest.fixture
def account(tmp_path, monkeypatch) -> OperatedAccount:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return OperatedAccount(tmp_path / "account.jsonl")


def hospitals(*names: str, seed: int = 0) -> Population:
    """Each client's records follow from its name alone, if it is known in every population of this seed."""
    everyone = ("bergen", "oslo", "aarhus", "lund")
    whole = blobs(4, seed=seed)
    places = [everyone.index(name) for name in names]
    train_of, held_out_of = ([rows[place] for place in places] for rows in (whole.train_of, whole.held_out_of))
    return dataclasses.replace(whole, train_of=train_of, held_out_of=held_out_of, names=names)


class Runs:
    """Runs that are charged to an account, and their ledgers, also of folders that are deleted."""

    def __init__(self, account: OperatedAccount, folder: Path) -> None:
        self.account, self.folder, self.charged = account, folder, []

    def loop(self, population, name="run0", epsilon=2.0, reserve=0, **options):
        options = {"rounds": 2, "clients": ClientOptions(batch_size=16), "output_dir": self.folder / name, **options}
        privacy = {"epsilon": epsilon, "delta": DELTA, "account": str(self.account.path), "reserve_rounds": reserve}
        return small_loop(population, privacy=PrivacyOptions(**privacy), **options)

    def run(self, population, name="run0", resume=False, **options):
        return self.loop(population, name, **options).run(resume)

    def together(self, name: str):
        return next(one.together for one in self.account.holders() if name in one.names)


def composed(folders, name: str) -> float:
    """The epsilon of a client in the ledgers of these runs, by dp_accounting alone."""
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    for folder in folders:
        header = json.loads((folder / "ledger.jsonl").read_text().splitlines()[0])
        names = header["identity"]["names"]
        for charge in read_ledger(folder / "ledger.jsonl"):
            if names[charge.client] == name:
                event = dp_event.PoissonSampledDpEvent(
                    charge.event.sample_rate, dp_event.GaussianDpEvent(charge.event.noise_multiplier)
                )
                accountant.compose(dp_event.SelfComposedDpEvent(event, charge.event.steps))
    return accountant.get_epsilon(DELTA)


def line(keys, released, run=0) -> Line:
    return Line(str(run), 0, frozenset(keys), tuple(released), DELTA, "add_remove", "poisson", "pld")


@pytest.fixture
def runs(account, tmp_path) -> Runs:
    return Runs(account, tmp_path)


@pytest.mark.e2e
def test_runs_with_other_settings_seeds_and_clients_are_composed_by_name(runs, tmp_path):
    first = runs.run(hospitals("bergen", "oslo"))
    assert "No other run on the same records is in the account." in first.guarantee.words()
    runs.run(hospitals("oslo", "aarhus", "bergen"), "run1", epsilon=[1.0, 2.0, 3.0], seed=5)
    last = runs.run(hospitals("bergen", "lund"), "run2", epsilon=1.5)
    folders = [tmp_path / f"run{number}" for number in range(3)]
    for name, number in (("bergen", 3), ("oslo", 2), ("lund", 1)):
        own = composed(folders, name)
        together = runs.together(name)
        assert together.runs == number and own <= together.epsilon <= 1.02 * own + 0.01
    assert last.guarantee.together.runs == 2 and last.guarantee.together.epsilon == runs.together("bergen").epsilon
    assert any("account null" in gap for gap in last.guarantee.not_covered)
    shutil.rmtree(tmp_path / "run0")
    assert OperatedAccount(runs.account.path).holders() == runs.account.holders(), "a deleted folder changes nothing"


def test_an_account_of_a_newer_version_is_one_clear_error(runs, account):
    """It has an event that this version does not know."""
    runs.run(hospitals("bergen"))
    lines = account.path.read_bytes().splitlines(keepends=True)
    last = json.loads(next(one for one in reversed(lines) if b'"charged"' in one))
    del last["chain"]
    for fields in last["lines"]:
        fields["event"]["kind"] = "of_tomorrow"
    account.path.write_bytes(b"".join([*lines, sealed(json.dumps(last).encode()[:-1], chain_of(lines[-1]))]))
    with pytest.raises(
        UserError, match=r"must hold lines that this version knows, in line \d+.*of_tomorrow.*DPFL_ACCOUNT"
    ):
        runs.run(hospitals("bergen"), "run1")


@pytest.mark.e2e
def test_a_copy_of_a_run_and_a_killed_run_count_each_charge(runs, tmp_path):
    population = hospitals("bergen", "oslo")
    break_off(runs.loop(population, reserve=2), 2)
    charges = len(read_ledger(tmp_path / "run0" / "ledger.jsonl"))
    shutil.copytree(tmp_path / "run0", tmp_path / "copy")
    for name in ("run0", "copy"):
        with pytest.warns(UserNotice, match="round 2 was broken off"):
            runs.run(population, name, resume=True, reserve=2)
    own = composed([tmp_path / "run0"], "bergen")
    both = runs.together("bergen").epsilon
    assert charges == 4 and both > 1.1 * own, "round 2 was released three times, and each ledger knows of two"
    released = OperatedAccount(runs.account.path)
    released.holders()
    ((_, paid),) = released._runs.values()
    assert paid[0].total() == 4


@pytest.mark.e2e
def test_a_name_decides_and_common_records_join_names(runs, tmp_path):
    population = hospitals("bergen", "oslo")
    runs.run(population)
    changed = dataclasses.replace(population, x=2 * population.x)  # another scale, and one record less
    changed.train_of[0] = changed.train_of[0][1:]
    runs.run(changed, "run1")
    assert runs.together("bergen").runs == 2, "a rescaled column starts no new account"
    renamed = dataclasses.replace(hospitals("bergen", "oslo"), names=("Bergen hospital", "oslo"))
    with pytest.warns(UserNotice, match="Bergen hospital has records of bergen: their accounts are one"):
        runs.run(renamed, "run2")
    assert runs.together("Bergen hospital") == runs.together("bergen") and runs.together("bergen").runs == 3
    swapped = dataclasses.replace(hospitals("aarhus", "oslo"), names=("oslo", "aarhus"))
    with pytest.warns(UserNotice, match="aarhus has records of oslo"):
        runs.run(swapped, "run3")
    assert runs.together("aarhus").runs == 4


@pytest.mark.e2e
def test_clients_without_names_are_one_holder_and_the_worst_counts(runs, tmp_path):
    """Any of them may be any in another run, so the epsilon is at least that of every pair."""
    for number, epsilon in enumerate(([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0])):
        runs.run(blobs(4, seed=number), f"run{number}", epsilon=epsilon)
    together, events = runs.together(NAMELESS), []
    for folder in (tmp_path / "run0", tmp_path / "run1"):
        charges = read_ledger(folder / "ledger.jsonl")
        events.append([[one.event for one in charges if one.client == client] for client in range(4)])
    pairs = [one + other for one in events[0] for other in events[1]]
    exact = max(get_accountant("pld").epsilon(pair, DELTA) for pair in pairs)
    assert exact == together.epsilon
    four = [[tuple(one) for one in run] for run in events * 2]
    (total,) = compose(line(ANYBODY, one, number) for number, run in enumerate(four) for one in run).values()
    epsilon, method = total.epsilon, total.method
    largest = [max(run, key=lambda one: get_accountant("pld").epsilon(one, DELTA)) for run in four]
    tight = get_accountant("pld").epsilon([event for released in largest for event in released], DELTA)
    assert tight <= epsilon <= 1.25 * tight and "worst client" in method


@pytest.mark.e2e
def test_public_data_simulations_and_null_are_not_charged(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFL_ACCOUNT", str(tmp_path / "users.jsonl"))
    own = PrivacyOptions(epsilon=2.0, delta=DELTA)
    public = dataclasses.replace(blobs(), origin={"name": "digits"})
    for number, (population, change) in enumerate(
        [(public, {}), (blobs(), {"noise_key": "0" * 32}), (blobs(), {"account": None})]
    ):
        result = small_loop(
            population, privacy=dataclasses.replace(own, **change), output_dir=tmp_path / f"run{number}"
        ).run()
        assert result.guarantee.together is None and not (tmp_path / "users.jsonl").exists()
    small_loop(blobs(), privacy=own, output_dir=tmp_path / "own").run()
    file = tmp_path / "users.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for path in (tmp_path / "own").iterdir():
        assert b"evidence" not in path.read_bytes(), "no run folder holds the account"


def test_own_files_under_a_public_name_are_charged(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFL_ACCOUNT", str(tmp_path / "users.jsonl"))
    for part, count in (("train", 60), ("t10k", 8)):
        pixels = np.random.default_rng(0).integers(0, 256, count * 28 * 28, dtype=np.uint8).tobytes()
        header = struct.pack(">HBBIII", 0, 8, 3, count, 28, 28)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(header + pixels)
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, count) + bytes(count))
    with pytest.warns(UserNotice, match="charged to the account"):
        data = load("mnist", str(tmp_path))
    new_net = lambda seed: torch.nn.Sequential(torch.nn.Flatten(), small_net(784, 10, seed))  # noqa: E731
    options = {"new_net": new_net, "output_dir": tmp_path / "run", "clients": ClientOptions(batch_size=16)}
    options["privacy"] = PrivacyOptions(epsilon=2.0, delta=DELTA)
    population = Population.partitioned(data, num_clients=2)
    loop = small_loop(population, ClientModule(new_net(0)), **options)
    assert loop.run().guarantee.together.epsilon > 0
    assert [one.names for one in OperatedAccount(tmp_path / "users.jsonl").holders()] == [(NAMELESS,)]


@pytest.mark.e2e
def test_a_limit_refuses_a_run_before_it_begins_and_a_charge_before_it_is_made(runs, tmp_path):
    population = hospitals("bergen", "oslo")
    for name in ("bergen", "oslo", "lund"):
        runs.account.limit(name, Limit(5.0 if name == "bergen" else 50.0, DELTA))
    runs.run(population)
    with pytest.raises(UserError, match=r"limit of bergen, epsilon 5 at delta 0.001 \(add .*, got '1[0-9]{2}.*smaller"):
        runs.run(population, "run1", epsilon=4.5)
    assert not (tmp_path / "run1" / "ledger.jsonl").exists() and not (tmp_path / "run1" / "data_key").exists()
    assert runs.together("bergen").runs == 1
    loop, fits = runs.loop(population, epsilon=4.5), runs.loop(population, epsilon=1.0)
    for one in (loop, fits):
        one.plan_schedule()
    with pytest.raises(UserError, match="keep the limit of bergen"):
        loop.clients.outlook(loop.run_plan())
    assert "With 1 other run on the same records: epsilon 2" in fits.clients.outlook(fits.run_plan())
    assert runs.together("bergen").runs == 1, "a plan is not charged"
    loop = runs.loop(population, "run2")
    begun = loop.clients.begin

    def begin_and_another_charges(*arguments):
        begun(*arguments)
        other = OperatedAccount(runs.account.path)
        other.limit("bergen", Limit(2.5, DELTA))

    loop.clients.begin = begin_and_another_charges
    with pytest.raises(UserError, match=r"keep the limit of bergen, epsilon 2\.5"):
        loop.run()
    assert read_ledger(tmp_path / "run2" / "ledger.jsonl") == []
    runs.run(hospitals("oslo", "lund"), "run3", epsilon=8.0)


@pytest.mark.e2e
@pytest.mark.parametrize("seed", range(20))
def test_a_filter_is_never_exceeded(account, seed):
    """Random releases, chosen one after the other until one is refused, cost at most the limit by PLD."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: low + (high - low) * torch.rand((), generator=generator).item()  # noqa: E731
    epsilon, delta = draw(0.5, 8), 10 ** -draw(2, 7)
    account.limit("bergen", Limit(epsilon, delta))
    account.enter(entry("a" * 32, ("bergen",)))
    paid = []
    for _ in range(60):
        kind = int(draw(0, 3))
        event = [
            GaussianEvent(draw(0.001, 1.0), draw(0.8, 8.0), int(draw(1, 50))),
            LaplaceEvent(draw(2, 40), 2),
            SelectionEvent(draw(0.01, 0.4), 2),
        ][kind]
        try:
            pay(account, [(0, event)])
        except UserError:
            continue
        paid.append(event)
    ((only,),) = [[one for one in account.holders()]]
    assert get_accountant("pld").epsilon(paid, delta) <= epsilon and only.together.used <= 1
    assert only.together.epsilon <= epsilon
    with pytest.raises(UserError, match="keep the limit"):
        pay(account, [(0, NonPrivateEvent("everything"))])


def test_two_runs_that_do_not_know_of_each_other_stay_within_a_limit(account):
    """Each plan fits alone, and the charges of both do not: as if a run on another machine had no lock here."""
    event = GaussianEvent(0.2, 1.5, 10)
    account.limit("bergen", Limit(1.2 * get_accountant("rdp").epsilon([event] * 5, DELTA), DELTA))
    others = [account, OperatedAccount(account.path)]
    for letter, one in zip("ab", others, strict=True):
        one.enter(entry(letter * 32, ("bergen",), ((event, 5),)))
    paid = 0
    for one in (*others[1:] * 3, *others[:1] * 5, *others[1:] * 2):
        try:
            pay(one, [(0, event)])
            paid += 1
        except UserError:
            break
    (only,) = account.holders()
    assert 5 <= paid < 10 and only.together.used <= 1 and only.together.epsilon <= only.together.limit


def entry(run: str, names, planned=(), evidence=None, delta=DELTA, adjacency="add_remove", **rest) -> RunRecord:
    """A run of these clients, which plan the same."""
    each = {"delta": delta, "planned": planned, "rows": rest.get("rows"), "filters": rest.get("bound")}
    same = {name: (value,) * len(names) for name, value in each.items()}
    evidence = evidence or (Evidence(),) * len(names)
    holders, whole = dict(enumerate(names)), rest.get("whole", False)
    return RunRecord(run, "none", adjacency, "poisson", "pld", holders, evidence=evidence, whole=whole, **same)


EVENT, TIGHT = GaussianEvent(0.2, 1.5, 10), get_accountant("pld")


def records(*numbers: int) -> Evidence:
    """Evidence of 16 records for each number, from this one on, of a population in which no two agree by chance."""
    digests = sorted({one + place for one in numbers for place in range(16)})
    packed = b"".join(one.to_bytes(8, "big") for one in digests)
    return Evidence((View(packed, len(digests), True, 1e-12, packed.hex(), 1.0),))


def test_of_joined_limits_each_is_kept(account):
    account.limit("bergen", Limit(8.0, 1e-9))
    account.limit("oslo", Limit(7.9, 1e-2))
    account.join("bergen", "oslo")
    account.enter(entry("a" * 32, ("oslo",)))
    paid = 0
    with pytest.raises(UserError, match=r"keep the limit of bergen or oslo, epsilon 8 at delta 1e-09"):
        while paid < 100:
            pay(account, [(0, EVENT)])
            paid += 1
    (only,) = account.holders()
    assert paid > 1 and TIGHT.epsilon([EVENT] * paid, 1e-9) <= 8 and only.together.limit == 8


@pytest.mark.e2e
def test_copies_that_went_on_without_the_account_count_each_line(runs, tmp_path):
    population = hospitals("bergen", "oslo")
    null = PrivacyOptions(epsilon=2.0, delta=DELTA, account=None, reserve_rounds=2)
    options = {"rounds": 2, "clients": ClientOptions(batch_size=16), "privacy": null}
    break_off(small_loop(population, output_dir=tmp_path / "run0", **options), 2)
    shutil.copytree(tmp_path / "run0", tmp_path / "copy")
    for name in ("run0", "copy"):
        with pytest.warns(UserNotice, match="round 2 was broken off"):
            small_loop(population, output_dir=tmp_path / name, **options).run(resume=True)
    ledgers = [tmp_path / name / "ledger.jsonl" for name in ("run0", "copy")]
    assert [runs.account.add(path) for path in (*ledgers, *ledgers)] == [6, 2, 0, 0]
    (event,) = {charge.event for charge in read_ledger(ledgers[0]) if charge.client == 0}
    assert runs.together("bergen").epsilon == TIGHT.epsilon([event] * 4, DELTA)


@pytest.mark.e2e
def test_a_copy_that_went_on_without_the_account_is_told_apart(runs, tmp_path):
    population = hospitals("bergen", "oslo")
    break_off(runs.loop(population, reserve=2), 2)
    shutil.copytree(tmp_path / "run0", tmp_path / "copy")
    with pytest.warns(UserNotice, match="round 2 was broken off"):
        runs.run(population, resume=True, reserve=2)
        null = PrivacyOptions(epsilon=2.0, delta=DELTA, account=None, reserve_rounds=2)
        options = {"rounds": 2, "clients": ClientOptions(batch_size=16), "privacy": null}
        small_loop(population, output_dir=tmp_path / "copy", **options).run(resume=True)
    assert runs.account.add(tmp_path / "copy" / "ledger.jsonl") == 2
    runs.account.limit("bergen", Limit(0.9, DELTA))
    assert runs.run(population, resume=True, reserve=2).finished, "it releases nothing more"


def test_clients_of_a_first_run_with_the_same_records_are_one_holder(account):
    with pytest.warns(UserNotice, match="ward 2 has records of ward 1"):
        account.enter(entry("a" * 32, ("ward 1", "ward 2", "oslo"), evidence=(records(0), records(4), records(50))))
    pay(account, [(0, EVENT), (1, EVENT), (2, EVENT)])
    oslo, wards = sorted(account.holders(), key=lambda one: one.names)
    assert oslo.names == ("oslo",) and oslo.together.epsilon == TIGHT.epsilon([EVENT], DELTA)
    assert wards.together.epsilon == TIGHT.epsilon([EVENT] * 2, DELTA)


def test_records_that_moved_to_a_known_client_join_it(account):
    """Also if its own records are as before."""
    account.enter(entry("a" * 32, ("bergen", "lund"), evidence=(records(0), records(50))))
    pay(account, [(0, EVENT), (1, EVENT)])
    with pytest.warns(UserNotice, match="bergen has records of lund"):
        account.enter(entry("b" * 32, ("bergen",), evidence=(records(0, 50),)))
    pay(account, [(0, EVENT)])
    (only,) = account.holders()
    assert only.together.runs == 2 and only.together.epsilon == TIGHT.epsilon([EVENT] * 2, DELTA)


def test_names_that_the_operator_joins_count_together_in_each_run(account):
    """Who joins two clients says that their records are of one holder, whatever their digests are."""
    account.enter(entry("a" * 32, ("ward 1", "ward 2"), evidence=(records(0), records(50))))
    pay(account, [(0, EVENT), (1, EVENT)])
    account.join("ward 1", "ward 2")
    for opened in (account, OperatedAccount(account.path)):
        (only,) = opened.holders()
        assert only.together.epsilon == TIGHT.epsilon([EVENT] * 2, DELTA)


@pytest.mark.e2e
def test_two_names_in_turn_do_not_pass_a_limit(runs, tmp_path):
    """What a refused run says of who is who is kept."""
    runs.account.limit("bergen", Limit(1.0, DELTA))
    spelt = {name: dataclasses.replace(hospitals("bergen"), names=(name,)) for name in ("haukeland", "bergen")}
    for number, name in enumerate(["bergen", "haukeland"] * 2):
        with pytest.raises(UserError, match=r"keep the limit of bergen( or haukeland)?, epsilon 1"):
            runs.run(spelt[name], f"run{number}", epsilon=8.0)
    (only,) = runs.account.holders()
    assert only.names == ("bergen", "haukeland") and only.together.epsilon == 0.0
    assert not [*tmp_path.glob("run*/ledger.jsonl")]


def test_a_refused_run_keeps_what_it_says_of_names(account):
    """So does a refused plan. It is written down once, and nothing else that counts."""
    account.limit("bergen", Limit(1.1 * get_accountant("rdp").epsilon([EVENT], DELTA), DELTA))
    account.enter(entry("a" * 32, ("bergen",), evidence=(records(0),)))
    pay(account, [(0, EVENT)])
    refused = entry("b" * 32, ("lund",), ((EVENT, 5),), evidence=(records(4),))
    for request in (account.projected_cost, account.enter):
        before = account.path.read_bytes()
        with pytest.raises(UserError, match="keep the limit of bergen or lund"):
            request(refused)
        assert (account.path.read_bytes() == before) == (request == account.enter), "nothing new is learnt"
    again = OperatedAccount(account.path)
    with pytest.raises(UserError, match="keep the limit of bergen or lund"):
        again.enter(entry("c" * 32, ("lund",), ((EVENT, 1),), evidence=(records(90),)))
    ((only,), (run,)) = again.holders(), again._runs
    assert only.names == ("bergen", "lund") and only.together.epsilon == TIGHT.epsilon([EVENT], DELTA)
    assert run == "a" * 32


def test_clients_without_names_count_for_every_limit(account):
    """Any of them may be a holder that has a limit."""
    one = get_accountant("rdp").epsilon([EVENT], DELTA)
    account.limit("bergen", Limit(1.9 * one, DELTA))
    account.limit(NAMELESS, Limit(9 * one, DELTA))
    account.enter(entry("a" * 32, ("bergen",)))
    pay(account, [(0, EVENT)])
    account.enter(entry("b" * 32, (NAMELESS, NAMELESS)))
    pay(account, [(0, GaussianEvent(0.02, 5.0, 1))])
    unnamed, bergen = account.holders()
    with pytest.raises(UserError, match="keep the limit of bergen"):
        pay(account, [(1, event) for event in [EVENT] * 3])
    assert {holder.names for holder in (unnamed, bergen)} == {("bergen",), (NAMELESS,)}
    assert unnamed.together.epsilon == bergen.together.epsilon > TIGHT.epsilon([EVENT], DELTA)


@pytest.mark.e2e
def test_a_resumed_run_keeps_its_data_holders(account, tmp_path):
    """Else a refused resume with other records would give what was released to their holder."""
    runs = Runs(account, tmp_path)
    runs.run(hospitals("bergen"), epsilon=0.5)
    before = account.path.read_bytes()
    for others in (hospitals("lund"), dataclasses.replace(hospitals("bergen"), names=("lund",))):
        with pytest.raises(UserError, match=r"must stay .* with which the run in .* began"):
            runs.run(others, resume=True, epsilon=0.5)
    assert account.path.read_bytes() == before
    run = read_header(tmp_path / "run0" / "ledger.jsonl").run
    for names in (("lund",), ()):
        with pytest.raises(UserError, match=r"`privacy.account` must name bergen for client 0"):
            account.enter(entry(run, names))
    assert account.path.read_bytes() == before
    (only,) = account.holders()
    assert only.names == ("bergen",) and only.together.epsilon > 0.4


def test_an_unknown_name_is_refused_where_there_is_a_limit(account, capsys):
    """Every row may have been changed, so that no digest is equal; who it is can be said."""
    account.enter(entry("a" * 32, ("oslo",)))
    account.limit("bergen", Limit(8.0, DELTA))
    again = entry("b" * 32, ("oslo", "haukeland", NAMELESS), evidence=(records(0), records(50), records(100)))
    for request in (account.projected_cost, account.enter, account.enter):
        with pytest.raises(UserError, match="a limit on bergen, got 'clients without names, haukeland'") as refused:
            request(again)
        for words in (f"new '{NAMELESS}'", f"join '{NAMELESS}' bergen"):
            assert f"`dpfl account {words} --file {account.path}`" in str(refused.value)
    with pytest.warns(UserNotice, match="aarhus has records of oslo"):
        account.enter(entry("c" * 32, ("aarhus",), evidence=(records(0),)))
    file = ["--file", str(account.path)]
    assert main(["join", "haukeland", "bergen", *file]) == main(["new", NAMELESS, *file]) == 0
    account.enter(again)
    pay(account, [(1, EVENT)])
    (bergen,) = [one for one in account.holders() if "bergen" in one.names]
    assert bergen.names == ("bergen", "haukeland") and bergen.together.used > 0


def test_a_copy_of_a_killed_run_counts_before_the_run_goes_on(runs, tmp_path):
    population = hospitals("bergen", "oslo")
    break_off(runs.loop(population, reserve=2), 2)
    shutil.copytree(tmp_path / "run0", tmp_path / "copy")
    with pytest.warns(UserNotice, match="round 2 was broken off"):
        break_off(runs.loop(population, reserve=2), 2, resume=True)
        null = PrivacyOptions(epsilon=2.0, delta=DELTA, account=None, reserve_rounds=2)
        options = {"rounds": 2, "clients": ClientOptions(batch_size=16), "privacy": null}
        small_loop(population, output_dir=tmp_path / "copy", **options).run(resume=True)
    assert runs.account.add(tmp_path / "copy" / "ledger.jsonl") == 2


def test_runs_without_delta_compose_at_the_delta_of_the_others(account):
    account.enter(entry("a" * 32, ("bergen",), delta=1e-5))
    pay(account, [(0, EVENT)])
    laplace = LaplaceEvent(50.0, 1)
    account.enter(entry("b" * 32, ("bergen",), ((laplace, 1),), delta=0.0))
    pay(account, [(0, laplace)])
    assert account.together()[0].epsilon == TIGHT.epsilon([EVENT, laplace], 1e-5)
    account.enter(entry("c" * 32, ("oslo",), ((laplace, 1),), delta=0.0))
    pay(account, [(0, laplace)])
    assert account.together()[0].delta == 0 and account.together()[0].epsilon == pytest.approx(1 / 50, abs=1e-6)


def test_copies_that_charged_other_clients_count_for_each(account, tmp_path):
    names = {"names": ["bergen", "oslo", "lund"]}
    header = Header("pld", "add_remove", "poisson", (DELTA,) * 3, (1.0,) * 3, identity=names)
    ledger = Ledger(tmp_path / "ledger.jsonl", header)
    ledger.charge([Charge(0, 1, "train", EVENT)])
    ledger.close()
    shutil.copytree(tmp_path, tmp_path / "copy")
    for folder, other in ((tmp_path, 1), (tmp_path / "copy", 2)):
        copy = Ledger(folder / "ledger.jsonl", read_header(folder / "ledger.jsonl"), read_head(folder / "ledger.jsonl"))
        copy.charge([Charge(other, 2, "train", EVENT)])
        account.add(copy.path)
    account.add(ledger.path)
    one = TIGHT.epsilon([EVENT], DELTA)
    assert {name: each.together.epsilon for each in account.holders() for name in each.names} == {
        "bergen": one,
        "oslo": one,
        "lund": one,
    }


@pytest.fixture
def begun(account, tmp_path):
    """A run of bergen that has entered the account, and opens its ledger in a folder, the first one or a copy."""
    names = {"names": ["bergen"]}
    header = Header("pld", "add_remove", "poisson", (DELTA,), (1.0,), identity=names)
    account.enter(entry(header.run, ("bergen",)))

    def opened(name: str) -> Ledger:
        path = tmp_path / name / "ledger.jsonl"
        path.parent.mkdir(exist_ok=True)
        now = header if not path.exists() else read_header(path)
        return Ledger(path, now, account=account)

    return opened


def charge_in(round: int, number: int = 0) -> list[Charge]:
    return [Charge(0, round, "train", EVENT, number)]


def test_a_kill_between_account_and_ledger_is_paid_in_both_and_said(begun, account, monkeypatch, capsys):
    monkeypatch.setenv("DPFL_ACCOUNT", str(account.path))
    ledger = begun("run")
    ledger.charge(charge_in(1))
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_append", lambda self, lines: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ledger.charge(charge_in(2))
    assert len(read_ledger(ledger.path)) == 1
    more = f"The account counts 1 line more of run {ledger.head.run[:12]} than its ledger has"
    assert ledger_command([str(ledger.path)]) == 0 and more in capsys.readouterr().out
    again = begun("run")
    assert ledger_command([str(ledger.path)]) == 0 and more not in capsys.readouterr().out
    assert again.used(0, "train") == 2 and read_ledger(ledger.path) == charge_in(1) + charge_in(2)
    again.accept()
    again.charge(charge_in(3))
    again.close()
    assert account.holders()[0].together.epsilon == TIGHT.epsilon([EVENT] * 3, DELTA)


def test_a_kill_before_the_ledger_begins_leaves_no_second_run(runs, monkeypatch):
    """The account hears of a run first; the same start again is the same run, whose whole plan counts once."""
    population, options = hospitals("bergen"), {"parts": [SizeWeighted(), EarlyStopping(patience=9)]}
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_begin", lambda self, header: 1 / 0)
        patch.setattr(RunFolder, "release", lambda self: None)  # who is killed leaves everything as it is
        with pytest.raises(ZeroDivisionError):
            runs.run(population, **options)
    assert runs.together("bergen").runs == 1
    promise = runs.run(population, resume=True, **options).guarantee
    assert runs.together("bergen").runs == 1 and runs.together("bergen").epsilon == promise.epsilon


def test_a_copy_knows_what_the_other_one_spends(begun, account, tmp_path):
    """Copies that go on one after the other share the budget of the run; at the same time, each charge counts."""
    ledger = begun("run")
    ledger.charge(charge_in(1))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    ledger.charge(charge_in(2))
    copy = begun("copy")
    assert copy.used(0, "train") == 2 and read_ledger(copy.path) == read_ledger(ledger.path)
    copy.accept()
    ledger.charge(charge_in(3))
    copy.charge(charge_in(3))
    ledger.close(), copy.close()
    assert begun("run").used(0, "train") == begun("copy").used(0, "train") == 3, "each is a fork of the other"
    assert account.holders()[0].together.epsilon == TIGHT.epsilon([EVENT] * 4, DELTA)


def test_an_account_gets_what_only_the_ledger_has_once(begun, account, tmp_path):
    """As from another machine, or after an older account was restored."""
    ledger = begun("run")
    older = account.path.read_bytes()
    ledger.charge(charge_in(1))
    ledger.close()
    account.path.write_bytes(older)
    account.accept()
    with pytest.warns(UserNotice, match="lacked 1 release of this run, which it counts from now on"):
        begun("run").close()
    begun("run").close()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert account.add(tmp_path / "copy" / "ledger.jsonl") == 0
    assert account.holders()[0].together.epsilon == TIGHT.epsilon([EVENT], DELTA)


def test_two_ends_of_one_account_are_merged_and_both_count(begun, account, tmp_path, capsys):
    """As after a backup was restored on a second machine: what both have counts once."""
    ledger = begun("run")
    ledger.charge(charge_in(1))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.copy(account.path, tmp_path / "other.jsonl")
    ledger.charge(charge_in(2))
    ledger.close()
    other = OperatedAccount(tmp_path / "other.jsonl")
    copy = tmp_path / "copy" / "ledger.jsonl"
    other.enter(entry(read_header(copy).run, ("bergen",)))
    there = Ledger(copy, read_header(copy), account=other)
    for round in (2, 3):
        there.charge(charge_in(round))
    there.close()
    other.enter(entry("b" * 32, ("haukeland",), evidence=(records(0),)))
    pay(other, [(0, EVENT)])
    other.join("haukeland", "bergen")
    words = ["add", str(other.path), "--file", str(account.path)]
    assert main(words) == 0 and "other.jsonl: 3 releases added" in capsys.readouterr().out
    assert main(words) == 0 and "other.jsonl: 0 releases added" in capsys.readouterr().out
    (bergen,) = account.holders()
    assert bergen.names == ("bergen", "haukeland") and bergen.together.runs == 2
    assert bergen.together.epsilon == TIGHT.epsilon([EVENT] * 5, DELTA)
    with pytest.warns(UserNotice, match="lund has records of haukeland"):
        account.enter(entry("c" * 32, ("lund",), evidence=(records(0),)))


def test_a_merge_of_one_key_keeps_what_records_have_joined(account, tmp_path):
    """Names that records have joined do not become names that the operator has joined: disjoint clients stay so."""
    shutil.copy(account.path, tmp_path / "other.jsonl") if account.path.exists() else account.key
    shutil.copy(account.path, tmp_path / "other.jsonl")
    other = OperatedAccount(tmp_path / "other.jsonl")
    with pytest.warns(UserNotice, match="ward 1, ward 2 have records of bergen"):
        for one, names in (("a", ("bergen",)), ("b", ("ward 1", "ward 2"))):
            found = (records(0, 200),) if one == "a" else (records(0), records(200))
            other.enter(entry(one * 32, names, evidence=found))
            pay(other, [(client, EVENT) for client in range(len(names))])
    before = [one.together.epsilon for one in other.holders()]
    assert account.merge(other.path) == 3 and [one.together.epsilon for one in account.holders()] == before


def test_a_ledger_that_cannot_be_composed_is_not_added(account, tmp_path):
    """Its chain proves nothing: anybody can write one."""
    account.enter(entry("a" * 32, ("bergen",)))
    pay(account, [(0, EVENT)])
    before = account.path.read_bytes()
    for number, (event, changes) in enumerate(
        [
            (GaussianEvent(5.0, 1.0, 1), {}),
            (EVENT, {"accountant": "mine"}),
            (EVENT, {"adjacency": "add"}),
            (EVENT, {"delta": (0.0,)}),
            (SelectionEvent(-1.0, 1), {}),
        ]
    ):
        names = {"names": ["bergen"]}
        header = Header("pld", "add_remove", "poisson", (DELTA,), (1.0,), identity=names)
        ledger = Ledger(tmp_path / str(number), dataclasses.replace(header, **changes))
        ledger.charge([Charge(0, 1, "train", event)])
        ledger.close()
        with pytest.raises(UserError):
            account.add(ledger.path)
        assert account.path.read_bytes() == before


def test_a_torn_line_of_a_killed_run_is_not_added(begun, account, tmp_path):
    ledger = begun("run")
    ledger.charge(charge_in(1))
    ledger.close()
    for torn in (b'{"round": 6, "numb', b"\0" * 40):
        shutil.copytree(tmp_path / "run", tmp_path / "torn", dirs_exist_ok=True)
        with (tmp_path / "torn" / "ledger.jsonl").open("ab") as file:
            file.write(torn)
        other = OperatedAccount(tmp_path / "other.jsonl")
        assert other.add(tmp_path / "torn" / "ledger.jsonl") in (0, 1)
        assert other.holders()[0].together.epsilon == TIGHT.epsilon([EVENT], DELTA)


def test_what_is_no_account_or_name_is_refused(account, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_bytes(b'{"account": 3, "key": 5}\n')
    for words in (["add", str(tmp_path / "bad.jsonl")], ["limit", "\udcff", "8", "1e-5"], ["new", "../x"]):
        assert main([*words, "--file", str(account.path)]) == 2
        assert "must" in capsys.readouterr().err
    assert main(["--file", "/dev/null"]) == 2 and "be a regular file" in capsys.readouterr().err
    assert account.holders() == []


def test_a_limit_can_be_removed(account, capsys):
    file = ["--file", str(account.path)]
    assert main(["unlimit", "bergen", *file]) == 2 and "be one of no holder" in capsys.readouterr().err
    assert main(["limit", "bergen", "1", "1e-5", *file]) == main(["unlimit", "Bergen", *file]) == 0
    account.enter(entry("a" * 32, ("lund",)))


def test_an_account_of_another_key_is_merged_without_its_digests(account, tmp_path):
    other = OperatedAccount(tmp_path / "other.jsonl")
    for one, run, name in ((account, "a", "bergen"), (other, "b", "oslo")):
        one.enter(entry(run * 32, (name,), evidence=(records(0),)))
        pay(one, [(0, EVENT)])
    changed = other.path.read_bytes()
    assert account.merge(other.path) == 1 and [one.names for one in account.holders()] == [("bergen",), ("oslo",)]
    other.path.write_bytes(changed.replace(b"oslo", b"Oslo"))
    with pytest.raises(UserError, match="must be unchanged, got a line"):
        account.merge(other.path)


def test_a_refused_charge_leaves_ledger_and_account_as_they_were(begun, account):
    ledger = begun("run")
    ledger.charge(charge_in(1))
    account.limit("bergen", Limit(1.1 * get_accountant("rdp").epsilon([EVENT], DELTA), DELTA))
    before = account.path.read_bytes(), ledger.path.read_bytes()
    with pytest.raises(UserError, match="keep the limit of bergen"):
        ledger.charge(charge_in(2))
    assert before == (account.path.read_bytes(), ledger.path.read_bytes()) and ledger.used(0, "train") == 1


def test_a_run_that_was_added_and_goes_on_is_joined(account):
    account.enter(entry("a" * 32, ("bergen",), evidence=(records(0),)))
    pay(account, [(0, EVENT)])
    account.enter(entry("b" * 32, ("lund",)))
    with pytest.warns(UserNotice, match="lund has records of bergen"):
        account.enter(entry("b" * 32, ("lund",), evidence=(records(0),)))


def test_many_clients_with_the_same_records_are_joined_within_seconds(account):
    names = tuple(f"ward {number}" for number in range(400))
    began = time.process_time()
    with pytest.warns(UserNotice) as warned:
        account.enter(entry("a" * 32, names, evidence=(records(0),) * 400))
    assert len(warned) == 1 and len(account.holders()) == 1 and time.process_time() - began < 5


def test_a_ledger_that_is_added_again_brings_new_clients(account, tmp_path):
    header = Header("pld", "add_remove", "poisson", (DELTA, DELTA), (1.0, 1.0), identity={"names": ["bergen", "oslo"]})
    ledger = Ledger(tmp_path / "ledger.jsonl", header)
    for client in (0, 1):
        ledger.charge([Charge(client, 1, "train", EVENT)])
        assert account.add(ledger.path) == 1
    assert [one.together.epsilon for one in account.holders()] == [TIGHT.epsilon([EVENT], DELTA)] * 2


def test_what_is_planned_counts_where_the_end_follows_from_results(account):
    account.enter(entry("a" * 32, ("bergen",), ((EVENT, 10),), whole=True))
    pay(account, [(0, EVENT)])
    assert account.together()[0].epsilon == TIGHT.epsilon([EVENT] * 10, DELTA)


def test_a_filter_counts_instead_of_what_it_bounds(account):
    """The budget of a run whose noise follows from its results, once and as soon as anything is released."""
    bound, small = GaussianEvent(1.0, 2.0, 1), GaussianEvent(1.0, 20.0, 1)
    account.enter(entry("a" * 32, ("bergen",), ((small, 3),), bound=bound))
    assert account.together()[0].epsilon == 0 < account.together(planned=True)[0].epsilon
    pay(account, [(0, small), (0, GaussianEvent(1.0, 9.0, 1))])
    assert account.together()[0].epsilon == account.together(planned=True)[0].epsilon == TIGHT.epsilon([bound], DELTA)
    account.enter(entry("b" * 32, ("bergen", "ward 1"), ((small, 3),), evidence=(records(0), records(0)), bound=bound))
    pay(account, [(0, small), (1, small)])
    assert account.together()[0].epsilon == TIGHT.epsilon([bound] * 3, DELTA), "two clients with the same records"


def test_clients_of_a_run_that_share_records_count_together(account):
    """Wards of one hospital, and not clients that only have a joined name; the least delta of the holder counts."""
    account.enter(entry("a" * 32, ("bergen", "lund"), evidence=(records(0), records(99)), delta=1e-4))
    pay(account, [(0, EVENT), (1, EVENT)])
    with pytest.warns(UserNotice, match="ward 1, ward 2 have records of bergen"):
        account.enter(entry("b" * 32, ("ward 1", "ward 2"), evidence=(records(0), records(4))))
    pay(account, [(0, EVENT), (1, EVENT)])
    account.enter(entry("c" * 32, ("oslo", "lund"), evidence=(records(200), records(99))))
    pay(account, [(0, EVENT), (1, EVENT)])
    bergen, lund, oslo = sorted(account.holders(), key=lambda one: one.names)
    assert bergen.together.epsilon == TIGHT.epsilon([EVENT] * 3, 1e-4)
    assert (oslo.together.delta, lund.together.delta) == (DELTA, 1e-4)


def test_clients_without_names_count_for_everybody_and_are_nobody_in_particular(account):
    account.enter(entry("a" * 32, ("bergen",), evidence=(records(0),)))
    pay(account, [(0, EVENT)])
    account.enter(entry("b" * 32, (NAMELESS,), evidence=(records(50),)))
    pay(account, [(0, EVENT)])
    account.enter(entry("c" * 32, (NAMELESS, NAMELESS), evidence=(records(50), records(0))))
    pay(account, [(0, EVENT), (1, EVENT)])
    (bergen,) = [one for one in account.holders() if "bergen" in one.names]
    assert bergen.names == ("bergen",) and bergen.together.runs == 3
    assert bergen.together.epsilon == TIGHT.epsilon([EVENT] * 3, DELTA)


def test_a_refusal_names_another_adjacency(account):
    account.limit("bergen", Limit(1.1 * get_accountant("rdp").epsilon([EVENT], DELTA), DELTA))
    account.enter(entry("a" * 32, ("bergen",), ((EVENT, 1),)))
    pay(account, [(0, EVENT)])
    small = ((GaussianEvent(0.001, 20.0, 1), 1),)
    account.enter(entry("b" * 32, ("bergen",), small))
    with pytest.raises(UserError, match=r"other one, so all runs count as replacement: keep add remove\."):
        account.enter(entry("c" * 32, ("bergen",), small, adjacency="replace_one"))


def test_what_the_state_folder_or_a_typo_spoils_is_said(account, monkeypatch, tmp_path):
    account.enter(entry("a" * 32, ("bergen",)))
    with pytest.warns(UserNotice, match="no run of bergn is in the account yet; its data holders are bergen"):
        account.limit("bergn", Limit(8.0, 1e-5))
    account.path.chmod(0o644)
    account.holders()
    assert stat.S_IMODE(account.path.stat().st_mode) == 0o600
    account.state_file.write_text("{")
    with pytest.raises(UserError, match="account accept"):
        OperatedAccount(account.path).holders()
    assert account.accept() == 3 and OperatedAccount(account.path).holders()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "in"))
    with pytest.raises(UserError, match="XDG_STATE_HOME"):
        OperatedAccount(account.path).holders()


def test_a_limit_for_persons_counts_rows_by_group_privacy(account):
    """A run about records costs a person with four rows what group privacy says: also what was charged before."""
    own = of_group(EVENT, 4)
    one, four = (get_accountant("rdp").epsilon([event], DELTA) for event in (EVENT, own))
    account.enter(entry("a" * 32, ("bergen",), ((EVENT, 1),), rows=4))
    pay(account, [(0, EVENT)])
    account.limit("bergen", Limit(1.5 * one, DELTA))
    (bergen,) = account.holders()
    assert bergen.together.used < 1 and bergen.together.epsilon == TIGHT.epsilon([EVENT], DELTA)
    account.limit("bergen", Limit(1.5 * four, DELTA, unit=Person()))
    (bergen,) = account.holders()
    assert bergen.together.epsilon == get_accountant("pld").epsilon([own], DELTA)
    assert bergen.together.adjacency == bergen.together.limit_adjacency == "add or remove one person of one client"
    of_persons = entry("b" * 32, ("bergen",), ((EVENT, 1),), adjacency="add_remove_of_persons")
    account.enter(of_persons)
    pay(account, [(0, EVENT)])
    (bergen,) = account.holders()
    both = get_accountant("pld").epsilon([own, EVENT], DELTA)
    assert bergen.together.epsilon == both and one < both
    with pytest.raises(UserError, match=r"add or remove one person of one client\), got '1[0-9]{2}\.[0-9]% of it"):
        account.enter(entry("c" * 32, ("bergen",), ((EVENT, 1),), rows=4))


def test_a_limit_for_persons_refuses_records_of_unknown_persons(account):
    limit = Limit(500.0, DELTA, unit=Person())
    account.limit("bergen", limit)
    account.enter(entry("a" * 32, ("bergen",), ((EVENT, 1),), rows=1))
    silent = entry("b" * 32, ("bergen",), ((EVENT, 1),))
    for request in (account.projected_cost, account.enter):
        with pytest.raises(UserError, match=r"nobody says how many rows they have'. Set privacy.unit to person, or"):
            request(silent)
    account.limit("bergen", dataclasses.replace(limit, unit=Person(4)))
    account.enter(silent)
    pay(account, [(0, EVENT)])
    own = of_group(EVENT, 4)
    assert account.together()[0].epsilon == get_accountant("pld").epsilon([own], DELTA)
    account.limit("bergen", limit)
    assert math.isinf(account.together()[0].epsilon) and account.together()[0].used == math.inf


@pytest.mark.parametrize(("rows", "counted"), [(None, 3), (2, 3)])
def test_rows_of_persons_are_counted_in_the_records(runs, rows, counted):
    """A table that names persons says itself how many rows they have, whatever the operator says."""
    population = dataclasses.replace(hospitals("bergen"), unit_ids=torch.arange(len(blobs().y)) // 3)
    population.train_of[0] = torch.arange(0, 60)
    population.held_out_of[0] = torch.arange(60, 75)
    options = {"rows_per_person": rows}
    privacy = PrivacyOptions(epsilon=2.0, delta=DELTA, account=str(runs.account.path), **options)
    small_loop(population, privacy=privacy, rounds=1, output_dir=runs.folder / "run").run()
    runs.account.holders()
    ((record, _),) = runs.account._runs.values()
    assert record.rows == (counted,)


def test_a_limit_for_persons_takes_the_most_rows_that_anything_says(account):
    """Neither a run that states fewer, nor a table without its column of persons, makes a person smaller."""
    account.limit("bergen", Limit(500.0, DELTA, unit=Person(3)))
    account.enter(entry("a" * 32, ("bergen",), rows=4))
    pay(account, [(0, EVENT)])
    account.enter(entry("b" * 32, ("bergen",), rows=1))
    pay(account, [(0, EVENT)])
    four, three = [of_group(EVENT, 4)], [of_group(EVENT, 3)]
    of_persons = get_accountant("pld")
    assert account.together()[0].epsilon == of_persons.epsilon(four * 2, DELTA)
    account.enter(entry("c" * 32, ("bergen",)))
    pay(account, [(0, EVENT)])
    assert account.together()[0].epsilon == of_persons.epsilon([*four * 2, *three], DELTA)


def test_a_limit_under_replacement_counts_all_runs_so(account):
    account.limit("bergen", Limit(50.0, DELTA, "replace_one"))
    account.enter(entry("a" * 32, ("bergen",)))
    pay(account, [(0, EVENT)])
    together = account.together()[0]
    replaced = Limit(50.0, DELTA, "replace_one").used([[[line("a", [EVENT])]]])
    assert together.epsilon == get_accountant("pld", "replace_one").epsilon([EVENT], DELTA)
    assert together.adjacency == "replace one record"
    assert together.used == replaced > Limit(50.0, DELTA).used([[[line("a", [EVENT])]]])
    assert together.limit_adjacency == "replace one record"


def test_limits_that_cannot_be_are_refused(account, capsys):
    for wrong in (("add", RECORD), ("add_remove", Record(4)), ("add_remove", Person(0))):
        with pytest.raises(UserError, match="must be"):
            Limit(2.0, 1e-5, *wrong)
    file = ["--file", str(account.path)]
    assert main(["--unit", "person", *file]) == 2 and "`--unit` must come with `limit`" in capsys.readouterr().err
    words = ["limit", "lund", "8", "1e-5", "--unit", "person", "--rows_per_person", "4"]
    assert main([*words, *file]) == 0 and "8, add or remove one person of one client" in capsys.readouterr().out
    account.holders()
    assert account._limits == {"lund": Limit(8.0, 1e-5, "add_remove", Person(4))}


def test_filter_has_the_order_of_gaussian_noise_and_refuses_what_it_cannot_keep():
    one = Limit(2.0, 1e-5)
    noises = [8.0 + step / 100 for step in range(300)]
    within = [noise for noise in noises if one.used([[[line("a", [GaussianEvent(1.0, noise, 4)])]]]) <= 1]
    least = min(noise for noise in noises if get_accountant("rdp").epsilon([GaussianEvent(1.0, noise, 4)], 1e-5) <= 2)
    assert min(within) <= least + 0.01, "the best order of one Gaussian release loses nothing"
    for epsilon, delta in ((1e-3, 1e-5), (float("inf"), 1e-5), (1.0, 0.0), (1.0, 1.0)):
        with pytest.raises(UserError, match="must be"):
            Limit(epsilon, delta)


@pytest.mark.parametrize(
    ("relations", "all_of"),
    [
        (["add_remove"] * 2, "add_remove"),
        (["add_remove", "replace_one"], "replace_one"),
        (["add_remove_of_persons", "replace_one_of_persons"], "replace_one_of_persons"),
        (["add_remove", "add_remove_of_persons"], "replace_one"),
    ],
)
def test_runs_of_several_adjacencies_compose_under_replacement(account, relations, all_of):
    composed = relation_of_all([Relation.of_key(one) for one in relations])
    assert composed.key == all_of
    event = GaussianEvent(0.1, 2.0, 20)
    for number, relation in enumerate(relations):
        account.enter(entry(str(number) * 32, ("bergen",), adjacency=relation))
        pay(account, [(0, event)])
    (only,) = account.holders()
    assert only.together.epsilon == get_accountant("pld", composed.adjacency).epsilon([event, event], DELTA)
    assert ("by another one of the same person; Poisson sampling; PLD" in only.together.cost()) == (
        relations[0] + "_of_persons" == relations[1]
    )


@pytest.mark.e2e
def test_many_runs_are_composed_within_seconds():
    """Up to 200 different mechanisms of a holder are composed tightly, more by RDP: whoever else is asked about."""
    noises = {name: [3.0 + number / 10 for number in range(count)] for name, count in (("a", 100), ("b", 201))}
    events = {name: [GaussianEvent(0.05, noise, 300) for noise in own] for name, own in noises.items()}
    lines = [line([name], [event], run) for name, own in events.items() for run, event in enumerate(own)]
    few, many = compose(lines).values()
    assert "PLD" in few.method and "RDP" in many.method
    for total, own in ((few, events["a"]), (many, events["b"][:150])):
        assert total.epsilon >= get_accountant("pld").epsilon(own, DELTA)
    assert compose(lines[:100]) == {Keys("a"): few} and compose(lines[100:]) == {Keys("b"): many}


@pytest.mark.e2e
def test_an_older_a_changed_and_a_missing_file_are_refused_until_accepted(runs, capsys):
    file, population = runs.account.path, hospitals("bergen", "oslo")
    runs.run(population)
    older = file.read_bytes()
    runs.run(population, "run1")
    for content in (older, older[:-40] + b"1" + older[-39:], None):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(
            UserError,
            match=r"must hold the 8 lines that were written to it.*account accept|must be unchanged, got a line",
        ):
            runs.run(population, "run2")
    assert not (runs.folder / "run2" / "ledger.jsonl").exists()
    file.write_bytes(older)
    assert main(["accept", "--file", str(file)]) == 0 and runs.together("bergen").runs == 1
    assert main(["add", str(runs.folder / "run0"), str(runs.folder / "run1"), "--file", str(file)]) == 0
    assert "run0/ledger.jsonl: 0 releases added" in (out := capsys.readouterr().out)
    assert "run1/ledger.jsonl: 4 releases added" in out and runs.together("bergen").runs == 2


def test_a_line_that_a_crash_interrupted_is_cut_off(account):
    account.enter(entry("a" * 32, ("bergen",)))
    with account.path.open("ab") as file:
        file.write(b'{"charged": "aaaa')
    again = OperatedAccount(account.path)
    again.enter(entry("b" * 32, ("bergen",)))
    pay(again, [(0, GaussianEvent(0.1, 2.0, 20))])
    assert [one.together.runs for one in OperatedAccount(account.path).holders()] == [1]


def _charge_often(path: Path, run: str) -> None:
    account = OperatedAccount(path)
    account.enter(entry(run, ("bergen",)))
    for _ in range(25):
        pay(account, [(0, GaussianEvent(0.1, 2.0, 1))])


def test_two_at_once_lose_no_charge(account):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_charge_often, args=(account.path, letter * 32)) for letter in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    (only,) = account.holders()
    assert only.together.epsilon == get_accountant("pld").epsilon([GaussianEvent(0.1, 2.0, 50)], DELTA)


def test_the_command_shows_limits_and_joins(runs, capsys):
    file = str(runs.account.path)
    runs.run(hospitals("bergen", "oslo"))
    for words in (["limit", "oslo", "6", "1e-4"], ["join", "oslo", "bergen"], []):
        assert main([*words, "--file", file]) == 0
    out = capsys.readouterr().out
    assert "bergen = oslo" in out and "limit used" in out and "Renyi" in out
    assert main(["--json", "--file", file]) == 0
    (row,) = json.loads(capsys.readouterr().out)["holders"]
    assert (row["limit"], row["delta"], row["holder"]) == (6.0, 1e-4, ["bergen", "oslo"])
    assert main(["join", "oslo", "turku", "--file", file]) == 2 and "turku" in capsys.readouterr().err
