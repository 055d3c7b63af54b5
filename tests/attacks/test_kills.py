"""Kills at random moments: nothing is overspent, no noise is used twice, and at most the broken round is lost."""

import itertools
import os
import random
import time
from collections import Counter

import pytest
import torch
from attack_tools import independent, noise_apart, overspent
from conftest import FIXED_KEY
from killed_runs import BUDGETS, DELTA, OTHER, RATE, WRITTEN, Killed, Writer, killed, loop_of, timed_run
from safetensors.torch import load_file
from search.test_two_commands import TRIALS, Command, small_fashion  # noqa: F401

from dpfl_lightning.build import ENGINES
from dpfl_lightning.privacy.ledger.file import read_header
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
    moments, told = random.Random(time.time_ns()), Counter[int]()
    writers = [Writer(tmp_path, number) for number in range(3)]
    for _ in range(KILLS_OF_WRITERS):
        time.sleep(moments.uniform(0.0, 0.03))
        number = moments.randrange(3)
        told[number] = max(told[number], writers[number].kill())
        writers[number] = Writer(tmp_path, number)
    told |= Counter({number: writer.kill() for number, writer in enumerate(writers)})
    account = OperatedAccount(tmp_path / "account.jsonl")
    for number in range(3):
        path = tmp_path / str(number) / "ledger.jsonl"
        header = read_header(path)
        account.add(path)
        ledger = Ledger(path, header, account=account)
        ledger.accept()
        ledger.close()
        charges = read_ledger(path)
        assert [charge.round for charge in charges if charge.client == 0] == [*range(1, len(charges) // 2 + 1)]
        assert len(charges) // 2 in (told[number], told[number] + 1), "at most the charge that was broken off is more"
        _, paid = account._runs[header.run]
        assert paid == {0: {WRITTEN: len(charges) // 2}, 1: {OTHER: len(charges) // 2}}
    assert told.total() > KILLS_OF_WRITERS


KILLS_OF_COMMANDS = int(os.environ.get("DPFL_KILLS_OF_COMMANDS", 1))  # of sweeps; the full count is 15


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:.*experimental")
def test_a_killed_sweep_loses_no_trial(small_fashion, tmp_path):  # noqa: F811
    """The same command again makes the trials that are missing, each of another point of the grid."""
    moments = random.Random(time.time_ns())
    begun = time.monotonic()
    assert len(_points(Command(f"sqlite:///{tmp_path}/unbroken.db", tmp_path / "unbroken", small_fashion))) == TRIALS
    seconds = time.monotonic() - begun
    for number in range(KILLS_OF_COMMANDS):
        url = f"sqlite:///{tmp_path}/{number}.db"
        broken = Command(url, tmp_path / f"broken {number}", small_fashion)
        time.sleep(moments.uniform(0.2 * seconds, seconds))
        broken.process.kill()
        broken.process.wait()
        again = Command(url, tmp_path / f"again {number}", small_fashion)
        assert len(_points(again)) == TRIALS, again.text


def _points(command: Command) -> set[tuple]:
    return {tuple(trial["params"].values()) for trial in command.end() if trial["state"] == "complete"}
