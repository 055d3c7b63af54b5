"""Checkpoints are sealed: a changed one is never used, and the one before it takes its place."""

import os
import random
import warnings

import pytest
import torch
from conftest import break_off, private

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.privacy.ledger import ledger as ledger_module
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.strategies.aggregation.uniform import Uniform

FLIPS = int(os.environ.get("DPFL_FLIPS", 40))  # the full count is 1000


@pytest.fixture
def begun(make_loop):
    """A simulation that was broken off in round 3, after two checkpoints of rounds."""
    return break_off(make_loop(), 3)


def flip(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def test_no_flipped_bit_of_a_checkpoint_is_used(begun):
    folder, rng, cpu = begun.folder, random.Random(0), torch.device("cpu")
    files = {path: path.read_bytes() for path in (folder.checkpoint, folder.before)}
    before = torch.load(folder.before, weights_only=True)
    for _ in range(FLIPS):
        flip(folder.checkpoint, rng)
        with pytest.warns(UserNotice, match=r"checkpoint.before.pt is used, the one before it, after round 1"):
            used = folder.load_checkpoint(cpu, begun._seal)
        assert used["round"] == 1 and torch.equal(used["models"], before["models"])
        flip(folder.before, rng)
        with pytest.raises(UserError, match="must be a checkpoint that this run has sealed, got a damaged file"):
            folder.load_checkpoint(cpu, begun._seal)
        for path, content in files.items():
            path.write_bytes(content)


@pytest.mark.e2e
@pytest.mark.parametrize("damage", [b"", b"x", None])
def test_a_run_with_a_damaged_checkpoint_ends_as_the_unbroken_one(damage, begun, make_loop):
    """Cut, overwritten or removed: the round is repeated, in a simulation bit for bit."""
    unbroken = make_loop()
    unbroken.run()
    begun.folder.checkpoint.unlink()
    if damage is not None:
        begun.folder.checkpoint.write_bytes(damage)
    again = make_loop(output_dir=begun.output_dir)
    with pytest.warns(UserNotice, match="is damaged or missing"):
        assert again.run(resume=True).rounds == 3
    assert torch.equal(again.state.models, unbroken.state.models)
    ledgers = [read_ledger(loop.clients.folder.ledger_file) for loop in (again, unbroken)]
    assert ledgers[0] == ledgers[1]


@pytest.mark.e2e
def test_what_the_copy_before_repeats_is_paid_with_fresh_noise_within_the_budget(make_loop):
    privacy = PrivacyOptions(epsilon=4.0, delta=1e-3, reserve_rounds=2)
    loop = break_off(make_loop(privacy=privacy), 3)
    loop.folder.checkpoint.write_bytes(b"damaged")
    again = make_loop(privacy=privacy, output_dir=loop.output_dir)
    with pytest.warns(UserNotice, match="is damaged or missing"):
        result = again.run(resume=True)
    rounds = [charge.round for charge in read_ledger(again.clients.folder.ledger_file)]
    assert [rounds.count(round) for round in (1, 2, 3)] == [4, 8, 8]
    assert result.rounds == 3 and all(row["epsilon_spent"] <= row["epsilon_budget"] for row in result.clients)


@pytest.mark.e2e
def test_a_checkpoint_of_another_run_is_refused_and_so_is_one_without_a_key(begun, make_loop):
    other = break_off(make_loop(privacy=private(2.0)), 2)
    begun.folder.checkpoint.write_bytes(other.folder.checkpoint.read_bytes())
    begun.folder.before.unlink()
    again = make_loop(output_dir=begun.output_dir)
    with pytest.raises(UserError, match="must be a checkpoint that this run has sealed"):
        again.run(resume=True)
    key = begun.output_dir / "checkpoint.key"
    for content in (b"", b"\xff\x00", b"abcd"):
        key.write_bytes(content)
        with pytest.raises(UserError, match=r"checkpoint.key` must hold 64 hexadecimal digits, got others"):
            again.run(resume=True)
    key.unlink()
    with pytest.raises(UserError, match=r"checkpoint.key` must lie beside checkpoint.pt, got no such file"):
        again.run(resume=True)


@pytest.mark.e2e
@pytest.mark.parametrize("others", [[], ["ledger.head", "checkpoint.pt", "checkpoint.before.pt"]])
def test_a_run_whose_ledger_is_gone_does_not_begin_anew(others, begun, make_loop):
    for name in ("ledger.jsonl", *others):
        (begun.output_dir / name).unlink()
    with pytest.raises(UserError, match=r"ledger.jsonl` must lie beside checkpoint.key, got no such file"):
        make_loop(output_dir=begun.output_dir).run(resume=True)
    assert not (begun.output_dir / "ledger.jsonl").exists()


def full(*args):
    raise OSError(28, "No space left on device")


def test_a_failed_write_keeps_the_file_and_leaves_nothing(begun, monkeypatch):
    """As on a full disk: the checkpoint stays what it was, and no part of a new one is left."""
    content, files = begun.folder.checkpoint.read_bytes(), sorted(begun.output_dir.iterdir())
    with monkeypatch.context() as patch, warnings.catch_warnings(), pytest.raises(OSError) as error:
        patch.setattr(os, "fsync", full)
        begun.folder.save_checkpoint(begun.snapshot, begun._seal)
    assert error.value.filename == str(begun.folder.checkpoint)
    assert begun.folder.checkpoint.read_bytes() == content and sorted(begun.output_dir.iterdir()) == files


@pytest.mark.e2e
@pytest.mark.parametrize("where, file", [("checkpoint", "private.json"), ("ledger", "ledger.jsonl")])
def test_on_a_full_disk_the_error_names_the_file_and_how_to_resume(where, file, make_loop, monkeypatch):
    class Fills(Callback):
        def on_round_start(self, view):
            if view.round == 2:
                target = (os, "fsync") if where == "checkpoint" else (ledger_module, "_sync")
                monkeypatch.setattr(*target, full)

    loop = make_loop(parts=[Uniform(), Fills()], rounds=3)
    with pytest.raises(OSError) as caught:
        loop.run()
    assert caught.value.filename == str(loop.output_dir / file)
    assert "up to its last checkpoint. When you have fixed the cause, resume with" in caught.value.__notes__[-1]
    monkeypatch.undo()
    assert make_loop(parts=[Uniform()], rounds=3, output_dir=loop.output_dir).run(resume=True).rounds == 3
