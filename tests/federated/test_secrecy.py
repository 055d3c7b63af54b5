"""What a run leaves behind lets nobody subtract the noise, keyed or fresh.

That streams do not depend on the number of ranks is held by `test_ranks.py`: the same bits on one rank and on several.
"""

from __future__ import annotations

import json
import re

import pytest
import torch
from conftest import FIXED_KEY, PowerCut, cut_at, small_net

from dpfl_lightning.client import ClientModule
from dpfl_lightning.errors import UserError
from dpfl_lightning.evaluate import main as evaluate
from dpfl_lightning.federated.callback import ServerCallback
from dpfl_lightning.federated.engine import SerialEngine
from dpfl_lightning.federated.query import SelectModel
from dpfl_lightning.federated.setup import ENGINES
from dpfl_lightning.fit import main as fit
from dpfl_lightning.options import ClientOptions, PrivacyOptions
from dpfl_lightning.privacy.events import SelectionEvent
from dpfl_lightning.privacy.ledger import read_ledger
from dpfl_lightning.privacy.schedule import Planned
from dpfl_lightning.privacy.selection import ExponentialMechanism

BUDGETS = {"epsilon": [4.0, 6.0, 8.0, 10.0], "delta": 1e-3}
SECURE = PrivacyOptions(**BUDGETS, secure=True)
OTHER_KEY = FIXED_KEY[::-1]


def holders(folder, key: int) -> list[str]:
    """The files below `folder` in which the key stands, in any form we could think of."""
    raw = [key.to_bytes(16, order) for order in ("big", "little")]
    forms = [*raw, *(one.hex().encode() for one in raw), str(key).encode()]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in files if any(form in path.read_bytes().lower() for form in map(bytes.lower, forms))]


class Kept(ServerCallback):
    """What lies in the folder while the run goes on."""

    def on_run_start(self, view):
        self.mode = (view.run.output_dir / "noise_key").stat().st_mode & 0o777
        self.key = int((view.run.output_dir / "noise_key").read_text().split()[0], 16)


@pytest.mark.parametrize("given", [None, FIXED_KEY])
def test_the_noise_key_lives_as_long_as_the_run(given, make_loop):
    privacy, kept = PrivacyOptions(**BUDGETS, noise_key=given), Kept()
    broken = make_loop(privacy=privacy, callbacks=[kept])
    cut_at(broken, 2)
    with pytest.raises(PowerCut):
        broken.run()
    assert kept.mode == 0o600 and kept.key == broken.folder.noise_key
    assert holders(broken.output_dir, kept.key) == ["noise_key"], "an interrupted run needs it, and has it there only"
    again = make_loop(privacy=privacy, output_dir=broken.output_dir)
    assert again.run(resume=True).finished and again.folder.noise_key == kept.key
    assert (again.output_dir / "noise_key").read_text().split() == ["destroyed", *(["given"] if given else [])]
    assert holders(again.output_dir, kept.key) == []


def test_nothing_of_a_finished_run_holds_the_key(tmp_path, new_store, make_loop):
    from dpfl_lightning.tracking import Tracking

    tracking = Tracking("secrecy", uri=new_store(tmp_path / "store"))
    personal = type("Own", (ClientModule,), {"personal": ("0.bias",)})(small_net())
    loop = make_loop(privacy=PrivacyOptions(**BUDGETS), module=personal, callbacks=[tracking])
    loop.options = {"rounds": 3, "privacy": {"delta": 1e-3}}
    result = loop.run()
    key, left = loop.folder.noise_key, {path.name for path in tmp_path.rglob("*")}
    assert result.finished and left >= {"options.yaml", "ledger.jsonl", "checkpoint.pt", "model.pt", "mlflow.db"}
    assert not {"private.json", "checkpoint.pt"} & {path.name for path in (tmp_path / "store").rglob("*")}
    assert key > 2**64 and holders(tmp_path, key) == []
    (loop.output_dir / "left.bin").write_bytes(key.to_bytes(16, "little"))
    (loop.output_dir / "left.txt").write_text(f"{key:032X}")
    assert sorted(holders(tmp_path, key)) == ["left.bin", "left.txt"], "this test can fail"


def test_what_is_no_release_is_for_its_owner_alone(make_loop):
    loop = make_loop()
    loop.run()
    for name in ("checkpoint.pt", "private.json", "noise_key"):
        assert (loop.output_dir / name).stat().st_mode & 0o777 == 0o600


def test_a_given_key_is_told_of_after_it_was_destroyed(make_loop):
    loop = make_loop(privacy=PrivacyOptions(**BUDGETS, noise_key=FIXED_KEY))
    words = loop.run().guarantee
    again = make_loop(privacy=PrivacyOptions(**BUDGETS), output_dir=loop.output_dir).run(resume=True)
    assert "noise key was given" in words and again.guarantee == words


class Asking(ServerCallback):
    """Asks one question in every round, and cannot go on without all answers."""

    def plan_run(self, schedule, view):
        line = Planned("select", SelectionEvent(0.5), view.run.rounds)
        return schedule.replan(lambda _, own: type(own)(own.target_epsilon, own.delta, (*own.planned, line)))

    def plan_round(self, plan, view):
        models = torch.stack([view.state.models[0], torch.zeros_like(view.state.models[0])])
        choice = dict.fromkeys(plan.clients, ExponentialMechanism(0.5))
        answers = view.ask(SelectModel(mechanism_of=choice, models=models, loss_bound=2.0))
        assert sorted(answers) == [0, 1, 2, 3]
        return plan


def test_a_run_that_ended_early_stays_ended(make_loop):
    """Its key is gone, so nothing could be asked again: resuming asks nothing."""
    stop = type("Stop", (ServerCallback,), {"stop": lambda self, view: "enough" if view.round == 3 else None})
    loop = make_loop(callbacks=[Asking(), stop()], rounds=9)
    first = loop.run()
    assert first.reason == "enough" and first.rounds == 2
    ledger = loop.folder.ledger_file.read_bytes()
    again = make_loop(callbacks=[Asking()], rounds=9, output_dir=loop.output_dir)
    assert again.run(resume=True).reason == "enough" and again.budgets.guarantees() == loop.budgets.guarantees()
    assert loop.folder.ledger_file.read_bytes() == ledger and torch.equal(again.state.models, loop.state.models)


def draws_of(loop) -> tuple[list, list]:
    """What every client of the first round draws: its rows, and its noise."""
    rows, noise = [], []
    local_task = SerialEngine.local_task

    def spy(self, plan, row, state, attempt):
        task, start, batches = local_task(self, plan, row, state, attempt)
        if plan.round == 1:
            copy = self.streams.generator("noise", plan.round, plan.clients[row], attempt)
            assert copy.bit_generator.state == task.noise.bit_generator.state
            rows.append((plan.clients[row], [one.tolist() for one in batches.draws]))
            noise.append((plan.clients[row], copy.standard_normal(5).tolist()))
        return task, start, batches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SerialEngine, "local_task", spy)
        loop.run()
    return sorted(rows), sorted(noise)


def test_noise_and_sampling_follow_the_noise_key_alone(make_loop):
    def run(seed, key, **options):
        loop = make_loop(seed=seed, privacy=PrivacyOptions(**BUDGETS, noise_key=key), rounds=2, **options)
        return (*draws_of(loop), loop.state.models)

    rows, noise, models = run(seed=0, key=FIXED_KEY)
    for other in (run(seed=1, key=FIXED_KEY), run(seed=0, key=FIXED_KEY, engine=ENGINES["serial"]())):
        assert other[:2] == (rows, noise)
    assert torch.equal(run(seed=1, key=FIXED_KEY)[2], models)
    other_rows, other_noise, other_models = run(seed=0, key=OTHER_KEY)
    for ours, theirs in ((rows, other_rows), (noise, other_noise)):
        assert all(mine != yours for mine, yours in zip(ours, theirs, strict=True))
    assert not torch.equal(other_models, models)


# -- secure mode


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_a_secure_run_learns_without_a_key_and_never_repeats(engine, make_loop):
    first, second = (make_loop(engine=ENGINES[engine](), privacy=SECURE) for _ in range(2))
    results = [loop.run() for loop in (first, second)]
    assert not (first.output_dir / "noise_key").exists()
    assert not torch.equal(first.state.models, second.state.models)
    for loop, result in zip((first, second), results, strict=True):
        assert result.noise.startswith("cryptographic") and result.test_accuracy > 0.5
        assert all(0.99 < one["epsilon_spent"] / one["epsilon_budget"] <= 1 for one in result.clients)
        assert json.loads((loop.output_dir / "result.json").read_text())["noise"] == result.noise
    releases = [charge.release for loop in (first, second) for charge in read_ledger(loop.folder.ledger_file)]
    assert len(set(releases)) == len(releases) == 2 * 4 * 3
    assert make_loop().run().noise.startswith("keyed, not cryptographic")


def test_a_secure_round_that_was_broken_off_is_charged_again_from_the_reserve(make_loop):
    privacy = PrivacyOptions(**BUDGETS, secure=True, reserve_rounds=2)
    loop = make_loop(privacy=privacy, rounds=5, checkpoint_seconds=1000.0)
    for round in (2, 4):
        cut_at(loop, round)
        with pytest.raises(PowerCut):
            loop.run(resume=round > 2)
        loop = make_loop(privacy=privacy, rounds=5, output_dir=loop.output_dir, checkpoint_seconds=1000.0)
    result = loop.run(resume=True)
    assert result.finished and result.rounds == 5
    charged = read_ledger(loop.folder.ledger_file)
    assert [sum(one.round == round for one in charged) for round in range(1, 6)] == [4, 8, 4, 8, 4]
    assert all(0.99 < one["epsilon_spent"] / one["epsilon_budget"] <= 1 for one in result.clients)
    assert sum(loop.budgets.steps(client) for client in range(4)) == 7 * sum(own.steps for own in loop.settings)
    ledger = loop.folder.ledger_file.read_bytes()
    again = make_loop(privacy=privacy, rounds=5, output_dir=loop.output_dir)
    assert again.run(resume=True).reason == result.reason and loop.folder.ledger_file.read_bytes() == ledger


def test_without_reserve_a_broken_secure_run_loses_a_round_and_no_budget(make_loop):
    loop = make_loop(privacy=SECURE)
    cut_at(loop, 2)
    with pytest.raises(PowerCut):
        loop.run()
    result = make_loop(privacy=SECURE, output_dir=loop.output_dir).run(resume=True)
    assert result.rounds == 2 and "spent its budget" in result.reason
    assert all(one["epsilon_spent"] <= one["epsilon_budget"] for one in result.clients)


def test_a_question_asked_twice_in_secure_mode_is_two_releases(make_loop):
    class Twice(Asking):
        def plan_round(self, plan, view):
            models = torch.stack([view.state.models[0]] * 2)
            for clients in ([0, 1, 2, 3], [0, 1, 2, 3], []):
                choice = dict.fromkeys(plan.clients, ExponentialMechanism(0.5))
                query = SelectModel(mechanism_of=choice, models=models, loss_bound=2.0)
                assert sorted(view.ask(query)) == clients
            return plan

        def plan_run(self, schedule, view):
            line = Planned("select", SelectionEvent(0.5), 2)
            return schedule.replan(lambda _, own: type(own)(own.target_epsilon, own.delta, (*own.planned, line)))

    make_loop(privacy=SECURE, rounds=1, callbacks=[Twice()]).run()


def test_secure_and_keyed_do_not_mix(make_loop):
    with pytest.raises(UserError, match=r"`privacy.secure` must be false with a privacy.noise_key, got True"):
        PrivacyOptions(**BUDGETS, secure=True, noise_key=FIXED_KEY)
    for first, then in ((SECURE, PrivacyOptions(**BUDGETS)), (PrivacyOptions(**BUDGETS), SECURE)):
        loop = make_loop(privacy=first, rounds=1)
        loop.run()
        with pytest.raises(UserError, match=r"`privacy.secure` must stay what the run in .* began with"):
            make_loop(privacy=then, rounds=1, output_dir=loop.output_dir).run(resume=True)


def test_the_command_in_secure_mode(tmp_path, capsys, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    argv = ["--config", "conf/digits.yaml", "--rounds", "2", "--tracking", "null", "--privacy.secure", "true"]
    assert fit([*argv, "--privacy.noise_key", FIXED_KEY, "--output_dir", str(tmp_path / "run")]) == 2
    assert FIXED_KEY not in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert fit([*argv, "--output_dir", str(tmp_path / "run")]) == 0
    assert re.search("noise cryptographic", capsys.readouterr().out)
    assert fit(["--resume", str(tmp_path / "run")]) == 0 and evaluate([str(tmp_path / "run")]) == 0


def test_full_batches_and_many_steps_in_secure_mode(make_loop):
    """Groups of clients that take one step, and the exact sum of steps, without a key."""
    clients = ClientOptions(count=4, batch_size=[48, 56, 64, 72], learning_rate=0.3)
    privacy = PrivacyOptions(noise_multiplier=1.0, delta=1e-3, secure=True)
    result = make_loop(clients=clients, privacy=privacy, rounds=2).run()
    assert [one["steps"] for one in result.clients] == [2] * 4
