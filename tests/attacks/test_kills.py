"""Kills at random moments: nothing is overspent, no noise is used twice, and at most the broken round is lost."""

import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from attack_tools import independent, noise_apart, overspent
from conftest import FIXED_KEY
from killed_commands import KILLED, Command
from killed_nodes import charged, ledger_lines
from killed_runs import BUDGETS, DELTA, OTHER, RATE, WRITTEN, Killed, Writer, killed, loop_of, timed_run
from safetensors.torch import load_file

from dpfl_lightning.build import ENGINES
from dpfl_lightning.privacy.ledger.file import is_begun, read_header
from dpfl_lightning.privacy.ledger.ledger import Ledger, read_ledger
from dpfl_lightning.privacy.ledger.operator import OperatedAccount
from dpfl_lightning.strategies import STRATEGIES

pytestmark = pytest.mark.e2e

KILLS = [pytest.param(2, 8, marks=pytest.mark.e2e), pytest.param(60, 300, marks=pytest.mark.slow)]  # and rounds


@pytest.mark.parametrize("kills, rounds", KILLS)
def test_kills_never_overspend_and_never_repeat_a_noise(kills, rounds, tmp_path):
    found = killed(tmp_path, kills, rounds, key=None)
    ledger = found.folder / "ledger.jsonl"
    assert not overspent(ledger, BUDGETS, DELTA)
    charges = read_ledger(ledger)
    assert {charge.round for charge in charges} == set(range(1, rounds + 1)), "the reserve pays for what broke off"
    assert len(charges) <= 4 * (rounds + kills)
    released = {round for _, round in found.releases}
    assert all(sum(one.round == round for one in charges) % 4 == 0 for round in released)
    loop = loop_of(tmp_path / "planned", rounds, kills, None)
    noise = [client.main.noise_multiplier for client in loop.plan_schedule().clients]
    for round, first, second in found.again():
        for client in range(4):
            std = RATE * noise[client] / loop.config.settings[client].num_records
            apart = noise_apart(first[client], second[client], std)
            assert independent(apart), f"round {round}: the noise of two releases differs by {apart:.2g}"
    lost_at_most_the_broken_round(found)


@pytest.mark.parametrize("kills, rounds", KILLS)
def test_a_killed_simulation_is_the_unbroken_one(kills, rounds, tmp_path):
    found = killed(tmp_path, kills, rounds, key=FIXED_KEY)
    unbroken = killed(tmp_path / "unbroken", 0, rounds, key=FIXED_KEY, reserve=kills)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (found.folder, unbroken.folder))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    lost_at_most_the_broken_round(found)


KILLS_AT_THE_START = int(os.environ.get("DPFL_KILLS", 2))  # the full count is 20


@pytest.mark.e2e
def test_a_run_killed_before_its_first_checkpoint_has_no_dead_end(tmp_path):
    """The same start again, or with `resume` as soon as there are options, until one is left alone."""
    for number in range(KILLS_AT_THE_START):
        found = killed(
            tmp_path / str(number), 3, 4, key=FIXED_KEY, reserve=0, latest=0.05 * number / KILLS_AT_THE_START
        )
        unbroken = killed(tmp_path / f"unbroken {number}", 0, 4, key=FIXED_KEY, reserve=0)
        ours, theirs = (load_file(one.folder / "model.safetensors") for one in (found, unbroken))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


KILLS_OF_VARIANTS = int(os.environ.get("DPFL_KILLS", 2))  # the full count is 180


@pytest.mark.e2e
def test_a_killed_run_of_any_strategy_and_engine_is_the_unbroken_one(tmp_path):
    """Each is killed once, at a random moment of its run, and resumed."""
    moments = random.Random(time.time_ns())
    variants = [(name, engine) for engine in sorted(ENGINES) for name in sorted(STRATEGIES)]
    random.Random(0).shuffle(variants)
    for number, (name, engine) in enumerate(itertools.islice(itertools.cycle(variants), KILLS_OF_VARIANTS)):
        unbroken = tmp_path / f"unbroken {number}"
        latest, attempts = timed_run(unbroken, name, engine, None), itertools.count()
        while (broken := tmp_path / f"broken {number} {next(attempts)}") and latest > 1e-3:
            timed_run(broken, name, engine, moments.uniform(0.0, latest))
            if not (broken / "result.json").is_file():
                break
            latest /= 2  # it was quicker than the unbroken run: kill another one earlier
        assert not (broken / "result.json").is_file(), (name, engine)
        timed_run(broken, name, engine, None)
        models = sorted(unbroken.glob("model*.safetensors"))
        assert models and [one.name for one in models] == [
            one.name for one in sorted(broken.glob("model*.safetensors"))
        ]
        for model in models:
            ours, theirs = (load_file(folder / model.name) for folder in (broken, unbroken))
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs), (name, engine)
        assert read_ledger(broken / "ledger.jsonl") == read_ledger(unbroken / "ledger.jsonl"), (name, engine)


def lost_at_most_the_broken_round(found: Killed) -> None:
    """A round whose end was told is never trained again."""
    for start, round in found.told:
        again = [later for later, same in found.releases if later > start and same == round]
        assert not again, f"round {round} was complete at start {start}, and is trained again at start {again[0]}"


KILLS_OF_WRITERS = int(os.environ.get("DPFL_KILLS", 10))  # the full count is 200


@pytest.mark.e2e
def test_account_and_ledgers_of_killed_writers_say_the_same(tmp_path):
    """Three runs charge one account at once, and are killed within their writes: each charge that was told is there.

    Every charge is in the account once, and after the end in the ledger of its run, too.
    """
    moments, told, broken_off = random.Random(time.time_ns()), Counter[int](), Counter[int]()
    writers = [Writer(tmp_path, number) for number in range(3)]

    def kill(number: int) -> None:
        last = writers[number].kill()
        broken_off[number] = 1 if last > told[number] else broken_off[number] + 1  # since a charge was told
        told[number] = max(told[number], last)

    for _ in range(KILLS_OF_WRITERS):
        time.sleep(moments.uniform(0.0, 0.03))
        number = moments.randrange(3)
        kill(number)
        writers[number] = Writer(tmp_path, number)
    account = OperatedAccount(tmp_path / "account.jsonl")
    for number in range(3):
        kill(number)
        path = tmp_path / str(number) / "ledger.jsonl"
        header = read_header(path)
        account.add(path)
        ledger = Ledger(path, header, account=account)
        ledger.accept()
        ledger.close()
        charges = read_ledger(path)
        assert [charge.round for charge in charges if charge.client == 0] == [*range(1, len(charges) // 2 + 1)]
        assert 0 <= len(charges) // 2 - told[number] <= broken_off[number], "each kill breaks off at most one charge"
        _, paid = account._runs[header.run]
        assert paid == {0: {WRITTEN: len(charges) // 2}, 1: {OTHER: len(charges) // 2}}
    assert told.total() > KILLS_OF_WRITERS


KILLS_OF_COMMANDS = int(os.environ.get("DPFL_KILLS_OF_COMMANDS", 1))  # of sweeps; the full count is 60
RATES, OPERATIONS = (0.1, 0.3, 1.0), 600  # a trial for each rate; about as many operations has a sweep


@pytest.mark.e2e
def test_a_killed_sweep_loses_no_trial_and_no_charge(tmp_path, monkeypatch):
    """The same command again makes the trials that are missing; what killed trials have charged stays charged."""
    moments, kills = random.Random(seed := time.time_ns()), 0
    for number in itertools.count():
        if kills >= KILLS_OF_COMMANDS:
            break
        folder = tmp_path / str(number)
        words, environment = private_sweep(folder)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for _ in range(min(3, KILLS_OF_COMMANDS - kills)):  # a trial that dies once more is given up
            at_an_operation = moments.random() < 0.7
            dies_at = moments.randrange(OPERATIONS) if at_an_operation else None
            command = Command(words, folder / "output.txt", environment, dies_at)
            command.process.join(None if at_an_operation else moments.uniform(0.0, 4.0))
            command.kill()
            assert command.status in (0, KILLED), command.text
            kills += command.status == KILLED
            check_charges_of_sweep(folder)
        last = Command(words, folder / "output.txt", environment)
        last.process.join()
        assert last.status == 0, last.text
        result = json.loads((folder / "out" / "result.json").read_text())
        complete = [one["params"]["clients.learning_rate"] for one in result["trials"] if one["state"] == "complete"]
        assert sorted(complete) == sorted(RATES), last.text
        check_charges_of_sweep(folder, result["cost"])
    print(f"{kills} kills in {number} sweeps, moments of seed {seed}")


def private_sweep(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The words of a search whose trials train on the records of two wards, and the environment of its account."""
    folder.mkdir()
    ages = [("north" if one % 2 else "south", 30.5 + 0.7 * one) for one in range(120)]
    rows = [f"{ward},{age:.1f},{'yes' if age > 60 else 'no'}" for ward, age in ages]
    (folder / "table.csv").write_text("\n".join(["ward,age,ill", *rows]))
    table = {"df": str(folder / "table.csv"), "client": "ward", "label": "ill", "classes": ["no", "yes"]}
    options = {
        "rounds": 2,
        "data": {
            "class_path": "dpfl_lightning.Population.from_dataframe",
            "init_args": table | {"columns": {"age": {"scale": [60, 20]}}},
        },
        "model": {"name": "logistic"},
        "clients": {"batch_size": 20},
        "privacy": {"epsilon": 2, "delta": DELTA},
        "tracking": None,
        "sweep": {
            "objective": "private",
            "space": {"clients.learning_rate": {"choices": list(RATES)}},
            "sampler": {"name": "grid"},
            "trials": len(RATES),
            "heartbeat_seconds": 1,
            "storage": f"sqlite:///{folder}/study.db",
        },
    }
    (folder / "search.yaml").write_text(yaml.safe_dump(options))
    environment = {"DPFL_ACCOUNT": str(folder / "account.jsonl"), "XDG_STATE_HOME": str(folder / "remembered")}
    return ["sweep", "--config", str(folder / "search.yaml"), "--output_dir", str(folder / "out")], environment


def check_charges_of_sweep(folder: Path, cost: Mapping[str, Any] | None = None) -> None:
    """The account has each line of each trial's ledger once, and at most one charge more, of both clients.

    The `cost` covers all of it.
    """
    account = charged(folder / "account.jsonl")
    ledgers = [file for file in folder.rglob("ledger.jsonl") if is_begun(file)]
    of_runs = {read_header(file).run: ledger_lines(file) for file in ledgers}
    assert account.keys() <= of_runs.keys()
    for run, lines in of_runs.items():
        assert account[run][: len(lines)] == lines and len(account[run]) - len(lines) in (0, 1, 2)
    if cost is not None:
        of_names = dict(zip(cost["names"], cost["epsilon"], strict=True))
        for holder in OperatedAccount(folder / "account.jsonl").holders():
            assert holder.together.epsilon <= of_names[holder.names[0]]
            assert holder.together.runs <= cost["runs"]
