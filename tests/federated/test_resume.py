"""A killed run goes on: the same parameters, and a ledger that never under-reports."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import FIXED_KEY, PowerCut, cut_at, small_net

from dpfl_lightning.client import ClientModule
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.callback import ServerCallback
from dpfl_lightning.federated.setup import ENGINES
from dpfl_lightning.options import PrivacyOptions
from dpfl_lightning.privacy.ledger import Ledger, read_ledger
from dpfl_lightning.privacy.ledger_file import Head, chain_of, head_bytes, head_file, read_head


@pytest.mark.parametrize("checkpoint_seconds", [0.0, 1000.0])
@pytest.mark.parametrize("engine", ["fast", "serial", "stacked"])
def test_resumed_equals_unbroken(engine, checkpoint_seconds, make_loop):
    unbroken = make_loop(engine=ENGINES[engine](), rounds=5)
    unbroken.run()
    broken = make_loop(engine=ENGINES[engine](), rounds=5, checkpoint_seconds=checkpoint_seconds)
    for round in (2, 4, 5):
        cut_at(broken, round)
        before = broken.output_dir / "ledger.jsonl"
        with pytest.raises(PowerCut):
            broken.run(resume=before.exists())
        assert len(read_ledger(before)) == 4 * round, "what was trained is charged"
        broken = make_loop(engine=ENGINES[engine](), rounds=5, output_dir=broken.output_dir)
    result = broken.run(resume=True)
    assert torch.equal(broken.state.models, unbroken.state.models)
    assert result.rounds == 5
    ours, theirs = (read_ledger(loop.folder.ledger_file) for loop in (broken, unbroken))
    assert [(c.client, c.round, c.event) for c in ours] == [(c.client, c.round, c.event) for c in theirs]


def test_personal_parameters_survive(make_loop):
    kind = type("Own", (ClientModule,), {"personal": ("0.bias",)})
    unbroken = make_loop(module=kind(small_net()), rounds=4)
    unbroken.run()
    broken = make_loop(module=kind(small_net()), rounds=4)
    cut_at(broken, 3)
    with pytest.raises(PowerCut):
        broken.run()
    again = make_loop(module=kind(small_net()), rounds=4, output_dir=broken.output_dir)
    again.run(resume=True)
    for client in range(4):
        ours, theirs = (loop.engine.personalised(loop.state.models[0], client) for loop in (again, unbroken))
        assert torch.equal(ours, theirs)


def test_another_engine_cannot_replay_so_it_is_charged_again_and_gets_other_noise(make_loop):
    privacy = PrivacyOptions(epsilon=[4.0, 6.0, 8.0, 10.0], delta=1e-3, noise_key=FIXED_KEY, reserve_rounds=1)
    loop = make_loop(engine=ENGINES["serial"](), privacy=privacy)
    cut_at(loop, 2)
    with pytest.raises(PowerCut):
        loop.run()
    other = make_loop(engine=ENGINES["fast"](), privacy=privacy, output_dir=loop.output_dir)
    attempts = []
    train = other.engine.train

    def spy(plan, state, tries, say):
        attempts.append((plan.round, tries))
        return train(plan, state, tries, say)

    other.engine.train = spy
    result = other.run(resume=True)
    assert attempts == [(2, [1] * 4), (3, [0] * 4)]
    assert len(read_ledger(other.folder.ledger_file)) == 4 * 4, "round 2 is paid twice, from the reserve"
    assert all(client["epsilon_spent"] <= client["epsilon_budget"] for client in result.clients)


def test_without_reserve_the_last_round_is_not_paid(make_loop):
    loop = make_loop(engine=ENGINES["serial"]())
    cut_at(loop, 2)
    with pytest.raises(PowerCut):
        loop.run()
    result = make_loop(engine=ENGINES["fast"](), output_dir=loop.output_dir).run(resume=True)
    assert result.rounds == 2 and "spent its budget" in result.reason
    assert all(client["epsilon_spent"] <= client["epsilon_budget"] for client in result.clients)


def test_watchers_may_come_and_go(make_loop):
    loop = make_loop(callbacks=[Counting()])
    cut_at(loop, 3)
    with pytest.raises(PowerCut):
        loop.run()
    alone = make_loop(output_dir=loop.output_dir)
    cut_at(alone, 3)
    with pytest.raises(PowerCut):
        alone.run(resume=True)
    counting = Counting()
    loop = make_loop(callbacks=[Counting(), counting], output_dir=alone.output_dir)
    assert loop.run(resume=True).finished


class Counting(ServerCallback):
    rounds = 0

    def on_round_end(self, view, report):
        self.rounds += 1

    def state_dict(self):
        return {"rounds": self.rounds}

    def load_state_dict(self, state):
        self.rounds = state["rounds"]


def test_a_ledger_that_the_checkpoint_does_not_know_is_refused(make_loop):
    """Cut to an earlier round together with its head, or of another run of the same options: nothing is trained."""
    loop, other = make_loop(), make_loop()
    loop.run(), other.run()
    ledger, head = loop.folder.ledger_file, head_file(loop.folder.ledger_file)
    begun = json.loads(head.read_bytes())
    lines = ledger.read_bytes().splitlines(keepends=True)

    ledger.write_bytes(b"".join(lines[:5]))
    head.write_bytes(head_bytes(Head(begun["run"], 5, chain_of(lines[4]))))
    assert len(read_ledger(ledger)) == 4, "in itself it is whole"
    with pytest.raises(UserError, match="must hold the 13 lines that the checkpoint counts, got 5: 8 were cut off"):
        make_loop(output_dir=loop.output_dir).run(resume=True)

    shutil.copy(other.folder.ledger_file, ledger), shutil.copy(head_file(other.folder.ledger_file), head)
    with pytest.raises(UserError, match=f"must be the ledger of run {begun['run']}, which the checkpoint is of"):
        make_loop(output_dir=loop.output_dir).run(resume=True)

    ledger.unlink(), head.unlink()
    with pytest.raises(UserError, match="must hold the 13 lines that the checkpoint counts, got 0"):
        make_loop(output_dir=loop.output_dir).run(resume=True)


@pytest.mark.parametrize("name", ["ledger", "models", "told"])
def test_a_checkpoint_of_another_version_is_one_sentence(make_loop, name):
    loop = make_loop(rounds=1)
    loop.run()
    saved = torch.load(loop.folder.checkpoint, weights_only=True)
    del saved[name]
    torch.save(saved, loop.folder.checkpoint)
    with pytest.raises(UserError, match=f"must hold '{name}', got one from another version"):
        make_loop(rounds=1, output_dir=loop.output_dir).run(resume=True)


def test_a_kill_between_the_ledger_and_its_head(make_loop, monkeypatch):
    """Round 2 is on disk, its charge did not return: it is paid, trained on resume, and not paid twice."""
    unbroken, broken = make_loop(), make_loop()
    unbroken.run()
    charge = Ledger.charge

    def failing(self, charges):
        if charges and charges[0].round == 2:
            monkeypatch.setattr(self, "_write_head", lambda: (_ for _ in ()).throw(PowerCut()))
        return charge(self, charges)

    monkeypatch.setattr(Ledger, "charge", failing)
    with pytest.raises(PowerCut):
        broken.run()
    monkeypatch.undo()
    ledger = broken.folder.ledger_file
    assert read_head(ledger).lines == 5 and len(read_ledger(ledger)) == 8
    again = make_loop(output_dir=broken.output_dir)
    result = again.run(resume=True)
    assert torch.equal(again.state.models, unbroken.state.models)
    assert len(read_ledger(ledger)) == 12 and result.ledger == read_head(ledger).as_dict()


def test_resuming_a_finished_run_changes_nothing(make_loop):
    loop = make_loop()
    first = loop.run()
    ledger = loop.folder.ledger_file.read_bytes()
    again = make_loop(output_dir=loop.output_dir)
    assert again.run(resume=True).test_accuracy == pytest.approx(first.test_accuracy)
    assert loop.folder.ledger_file.read_bytes() == ledger
    assert torch.equal(again.state.models, loop.state.models)


def test_nothing_to_resume_is_one_sentence(make_loop, tmp_path):
    with pytest.raises(UserError, match="`resume` must be the folder of a run with a checkpoint"):
        make_loop(output_dir=tmp_path / "nowhere").run(resume=True)


def fit(*argv: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "dpfl_lightning.fit", *argv], stdout=subprocess.DEVNULL)


def kill_three_times(folder: Path, options: list[str]) -> None:
    """The real command, SIGKILL at random moments, `--resume` to the end."""
    argv = [*options, "--output_dir", str(folder), "--checkpoint_seconds", "0.2"]
    moments = random.Random(time.time_ns())
    for _ in range(3):
        process = fit(*argv)
        while not (folder / "checkpoint.pt").exists():
            time.sleep(0.05)
        charged = _lines(folder)
        while process.poll() is None and _lines(folder) == charged:
            time.sleep(0.02)
        time.sleep(moments.uniform(0.0, 0.7))
        process.send_signal(signal.SIGKILL)
        process.wait()
        argv = ["--resume", str(folder)]
    assert fit(*argv).wait() == 0


@pytest.mark.slow
def test_three_kills_at_random_moments(tmp_path):
    """Bit for bit the unbroken run."""
    options = ["--config", "conf/digits.yaml", "--rounds", "60", "--privacy.noise_key", FIXED_KEY, "--tracking", "null"]
    assert fit(*options, "--output_dir", str(tmp_path / "unbroken")).wait() == 0
    broken = tmp_path / "broken"
    kill_three_times(broken, options)
    ours, theirs = (
        torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (broken, tmp_path / "unbroken")
    )
    assert ours["round"] == theirs["round"] == 60
    assert torch.equal(ours["models"], theirs["models"])
    assert len(read_ledger(broken / "ledger.jsonl")) == len(read_ledger(tmp_path / "unbroken" / "ledger.jsonl"))


@pytest.mark.slow
def test_three_kills_of_a_secure_run_cost_at_most_three_rounds_of_the_reserve(tmp_path):
    secure = ["--privacy.secure", "true", "--privacy.reserve_rounds", "3"]
    kill_three_times(tmp_path, ["--config", "conf/digits.yaml", "--rounds", "60", *secure, "--tracking", "null"])
    result = json.loads((tmp_path / "result.json").read_text())
    rounds = [charge.round for charge in read_ledger(tmp_path / "ledger.jsonl")]
    assert result["rounds"] == 60 and set(rounds) == set(range(1, 61)) and 5 * 60 <= len(rounds) <= 5 * 63
    assert all(client["epsilon_spent"] <= client["epsilon_budget"] for client in result["clients"])


def _lines(folder: Path) -> int:
    ledger = folder / "ledger.jsonl"
    return len(ledger.read_bytes().splitlines()) if ledger.exists() else 0
