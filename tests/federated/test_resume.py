"""A killed run goes on: the same parameters, and a ledger that never under-reports."""

import json
import shutil

import pytest
import torch
from conftest import PowerCut, break_off, small_net

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.folder import RunFolder
from dpfl_lightning.privacy.ledger.file import Head, chain_of, head_bytes, head_file, read_head
from dpfl_lightning.privacy.ledger.ledger import Ledger, read_ledger

BUDGETS = {"epsilon": [4.0, 6.0, 8.0, 10.0], "delta": 1e-3}
PROTECTED = PrivacyOptions(**BUDGETS, reserve_rounds=2)


def charged_rounds(loop) -> list[int]:
    return [charge.round for charge in read_ledger(loop.clients.folder.ledger_file)]


@pytest.mark.e2e
@pytest.mark.parametrize("engine", ["fast", "serial"])
def test_a_resumed_simulation_equals_the_unbroken_one(engine, make_loop):
    """Bit for bit, and charged once, though it was broken off in its first, a middle and its last round."""
    unbroken = make_loop(engine=ENGINES[engine](), rounds=5)
    unbroken.run()
    broken = make_loop(engine=ENGINES[engine](), rounds=5)
    for round in (1, 4, 5):
        break_off(broken, round, resume=round > 1)
        assert len(read_ledger(broken.clients.folder.ledger_file)) == 4 * round, "what was trained is charged"
        broken = make_loop(engine=ENGINES[engine](), rounds=5, output_dir=broken.output_dir)
    result = broken.run(resume=True)
    assert torch.equal(broken.state.models, unbroken.state.models) and result.rounds == 5
    assert read_ledger(broken.clients.folder.ledger_file) == read_ledger(unbroken.clients.folder.ledger_file)


@pytest.mark.e2e
def test_a_round_that_was_broken_off_is_charged_again_from_the_reserve(make_loop):
    loop = make_loop(privacy=PROTECTED, rounds=5)
    for round in (2, 4):
        break_off(loop, round, resume=round > 2)
        loop = make_loop(privacy=PROTECTED, rounds=5, output_dir=loop.output_dir)
    tries, send = [], loop.clients.channel.send

    def spy(requests, inbox):
        tries.append((requests[0].request.round, [charged.number for charged in requests]))
        send(requests, inbox)

    loop.clients.channel.send = spy
    result = loop.run(resume=True)
    assert result.finished and result.rounds == 5 and tries == [(4, [1] * 4), (5, [0] * 4)]
    assert [charged_rounds(loop).count(round) for round in range(1, 6)] == [4, 8, 4, 8, 4]
    assert all(0.99 < one["epsilon_spent"] / one["epsilon_budget"] <= 1 for one in result.clients)
    steps = [loop.clients.account(client).steps for client in range(4)]
    assert sum(steps) == 7 * sum(own.steps for own in loop.config.settings)
    ledger = loop.clients.folder.ledger_file.read_bytes()
    again = make_loop(privacy=PROTECTED, rounds=5, output_dir=loop.output_dir)
    assert again.run(resume=True).reason == result.reason and loop.clients.folder.ledger_file.read_bytes() == ledger


def test_without_reserve_the_last_round_is_not_paid(make_loop):
    privacy = PrivacyOptions(**BUDGETS)
    loop = break_off(make_loop(privacy=privacy), 2)
    result = make_loop(privacy=privacy, output_dir=loop.output_dir).run(resume=True)
    assert result.rounds == 2 and "spent its budget" in result.reason
    assert all(client["epsilon_spent"] <= client["epsilon_budget"] for client in result.clients)


def test_a_round_that_was_shown_lies_on_disk_and_is_not_trained_again(make_loop):
    class Ending(Callback):
        def on_round_end(self, view, report):
            saved = torch.load(view.run.output_dir / "checkpoint.pt", weights_only=True)
            assert saved["round"] == report.round and torch.equal(saved["models"], view.state.models)
            if report.round == 2:
                raise PowerCut

    loop = make_loop(privacy=PROTECTED, parts=[Ending()])
    with pytest.raises(PowerCut):
        loop.run()
    again = make_loop(privacy=PROTECTED, output_dir=loop.output_dir)
    assert again.run(resume=True).rounds == 3
    assert charged_rounds(again) == [1] * 4 + [2] * 4 + [3] * 4


def test_a_folder_without_a_checkpoint_begins_anew_and_what_it_spent_stays_spent(make_loop):
    loop = break_off(make_loop(privacy=PROTECTED), 2)
    loop.folder.checkpoint.unlink(), loop.folder.before.unlink()
    again = make_loop(privacy=PROTECTED, output_dir=loop.output_dir)
    with pytest.warns(UserNotice, match="so the run starts again; the budget that it has spent remains spent"):
        result = again.run(resume=True)
    assert result.rounds == 3 and len(charged_rounds(again)) == 4 * 5
    assert all(client["epsilon_spent"] <= client["epsilon_budget"] for client in result.clients)


def test_a_run_that_was_killed_before_its_ledger_had_a_header_begins_anew(make_loop, monkeypatch):
    loop = make_loop(privacy=PROTECTED)
    monkeypatch.setattr(RunFolder, "release", lambda folder: None)  # a kill leaves no time for it
    monkeypatch.setattr(loop.clients.engine, "setup", lambda *given: (_ for _ in ()).throw(PowerCut()))
    with pytest.raises(PowerCut):
        loop.run()
    assert not loop.clients.folder.ledger_file.exists()
    again = make_loop(privacy=PROTECTED, output_dir=loop.output_dir)
    assert again.run(resume=True).rounds == 3 and len(charged_rounds(again)) == 4 * 3


@pytest.mark.e2e
def test_fewer_rounds_stop_earlier_and_later_the_run_goes_on_to_its_end(make_loop):
    """The noise is that of the rounds that were planned; callbacks may come and go, personal parameters stay."""

    def a_loop(rounds=4, **options):
        return make_loop(module=ClientModule(small_net(), personal=["0.bias"]), rounds=rounds, **options)

    unbroken = a_loop()
    unbroken.run()
    folder = break_off(a_loop(parts=[Counting()]), 2).output_dir
    break_off(a_loop(3, output_dir=folder), 3, resume=True)
    again = a_loop(output_dir=folder, parts=[Counting(), Counting()])
    assert again.run(resume=True).rounds == 4
    assert torch.equal(again.state.models, unbroken.state.models)
    assert read_ledger(unbroken.clients.folder.ledger_file) == read_ledger(again.clients.folder.ledger_file)
    for client in range(4):
        ours, theirs = (loop.clients.engine.personalised(loop.state.models[0], client) for loop in (again, unbroken))
        assert torch.equal(ours, theirs)


class Counting(Callback):
    rounds = 0

    def on_round_end(self, view, report):
        self.rounds += 1

    def state_dict(self):
        return {"rounds": self.rounds}

    def load_state_dict(self, state):
        self.rounds = state["rounds"]


@pytest.mark.e2e
def test_a_ledger_that_the_checkpoint_does_not_know_is_refused(make_loop):
    """Cut to an earlier round together with its head, or of another run of the same options: nothing is trained."""
    loop, other = make_loop(), make_loop()
    loop.run(), other.run()
    ledger, head = loop.clients.folder.ledger_file, head_file(loop.clients.folder.ledger_file)
    begun = json.loads(head.read_bytes())
    lines = ledger.read_bytes().splitlines(keepends=True)

    ledger.write_bytes(b"".join(lines[:5]))
    head.write_bytes(head_bytes(Head(begun["run"], 5, chain_of(lines[4]))))
    assert len(read_ledger(ledger)) == 4, "in itself it is whole"
    with pytest.raises(UserError, match="must hold the 13 lines that the checkpoint counts, got 5: 8 were cut off"):
        make_loop(output_dir=loop.output_dir).run(resume=True)

    shutil.copy(other.clients.folder.ledger_file, ledger)
    shutil.copy(head_file(other.clients.folder.ledger_file), head)
    with pytest.raises(UserError, match=f"must be the ledger of run {begun['run']}, to which the checkpoint belongs"):
        make_loop(output_dir=loop.output_dir).run(resume=True)

    ledger.unlink(), head.unlink()
    with pytest.raises(UserError, match=r"ledger.jsonl` must lie beside checkpoint.key, got no such file"):
        make_loop(output_dir=loop.output_dir).run(resume=True)


@pytest.mark.e2e
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
    ledger = broken.clients.folder.ledger_file
    assert read_head(ledger).lines == 5 and len(read_ledger(ledger)) == 8
    again = make_loop(output_dir=broken.output_dir)
    result = again.run(resume=True)
    assert torch.equal(again.state.models, unbroken.state.models)
    assert len(read_ledger(ledger)) == 12 and result.ledger == read_head(ledger).as_dict()


def test_nothing_to_resume_is_one_sentence(make_loop, tmp_path):
    with pytest.raises(UserError, match=r"`resume` must be the folder of a run, got .* which has no options.yaml"):
        make_loop(output_dir=tmp_path / "nowhere").run(resume=True)
