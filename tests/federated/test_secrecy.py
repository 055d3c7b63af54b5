"""What a run leaves behind lets nobody draw its noise again, nor guess its records.

That streams do not depend on the number of ranks is held by `test_ranks.py`: the same bits on one rank and on several.
"""

import json
import os

import pytest
import torch
from conftest import EVERY_ENGINE, FIXED_KEY, break_off, small_net

from dpfl_lightning.build import ENGINES
from dpfl_lightning.commands.evaluate import main as evaluate
from dpfl_lightning.commands.fit import main as fit
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.folder import ClientFolder
from dpfl_lightning.federated.client.identity import data_digests
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.query import SelectModel
from dpfl_lightning.federated.server.run import Run
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.privacy.accounting.events import SelectionEvent
from dpfl_lightning.privacy.accounting.noise_source import KEYED
from dpfl_lightning.privacy.accounting.planned import Planned
from dpfl_lightning.privacy.mechanism import ExponentialMechanism, Mechanism

pytestmark = pytest.mark.e2e

BUDGETS = {"epsilon": [4.0, 6.0, 8.0, 10.0], "delta": 1e-3}
PROTECTED = PrivacyOptions(**BUDGETS)
SIMULATED = PrivacyOptions(**BUDGETS, noise_key=FIXED_KEY)
FULL = ClientOptions(count=4, batch_size=None, learning_rate=0.1)


def holders(folder, key: bytes) -> list[str]:
    """The files below `folder` in which the key stands, in any form we could think of."""
    raw = [key, key[::-1]]
    forms = [form.lower() for form in (*raw, *(one.hex().encode() for one in raw), str(int.from_bytes(key)).encode())]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in files if any(form in path.read_bytes().lower() for form in forms)]


class Asking(Strategy):
    """Asks all clients one question, so many times in every round."""

    def __init__(self, times=1):
        self._times = times

    def plan_run(self, schedule, view):
        line = Planned("select", SelectionEvent(0.5), self._times * (view.run.rounds + schedule.reserve))
        return schedule.replan(lambda _, own: type(own)(own.target_epsilon, own.delta, (*own.planned, line)))

    def plan_round(self, plan, view):
        models = torch.stack([view.state.models[0], torch.zeros_like(view.state.models[0])])
        for _ in range(self._times):
            choice = dict.fromkeys(plan.clients, ExponentialMechanism(0.5))
            answers = view.ask(SelectModel(mechanism_of=choice, models=models, loss_bound=2.0))
            assert sorted(answers) == [0, 1, 2, 3]
        return plan


@pytest.fixture
def keys(monkeypatch):
    """All keys that were asked of the operating system, for noise and sampling, in this process."""
    given, ask = [], os.urandom

    def spy(count):
        given.append(ask(count))
        return given[-1]

    monkeypatch.setattr("dpfl_lightning.privacy.noise.os.urandom", spy)
    return given


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_every_release_has_a_key_of_its_own_that_no_file_holds(engine, keys, make_loop, tmp_path):
    """Two runs of one configuration, one of them broken off in its second round: no two draw the same noise."""
    privacy = PrivacyOptions(**BUDGETS, reserve_rounds=1)
    first, second = (make_loop(engine=ENGINES[engine](), privacy=privacy, parts=[Asking()]) for _ in range(2))
    first.run()
    break_off(second, 2)
    assert make_loop(privacy=privacy, parts=[Asking()], output_dir=second.output_dir).run(resume=True).finished
    keys[:] = [key for key in keys if len(key) == 32]
    each = 2 + 1  # noise and sampling of an update, noise of an answer
    assert len(keys) == len(set(keys)) and len(keys) >= (3 + 1 + 2) * 4 * each
    assert not any(holders(tmp_path, key) for key in keys)
    (tmp_path / "left.bin").write_bytes(keys[0])
    (tmp_path / "left.txt").write_text(keys[1].hex().upper())
    assert [holders(tmp_path, key) for key in keys[:2]] == [["left.bin"], ["left.txt"]], "this test can fail"
    assert not torch.equal(first.state.models, second.state.models)


def test_the_data_key_lives_as_long_as_the_run(make_loop):
    """It is with the client alone, it alone makes the header's digests, and it is gone when they are of no more use."""
    broken = break_off(make_loop(privacy=PROTECTED), 2)
    key = broken.clients.folder.data_key(ended=False)
    assert broken.clients.folder.key_file.stat().st_mode & 0o777 == 0o600
    assert holders(broken.output_dir, key) == ["data_key"], "an interrupted run needs it, and has it there only"
    digests = broken.clients.folder.header().identity["records"]
    assert digests == [one.hex() for one in data_digests(HeldClients(broken.population), key)]
    again = make_loop(privacy=PROTECTED, output_dir=broken.output_dir)
    assert again.run(resume=True).rounds == 2
    assert not again.clients.folder.key_file.exists() and holders(again.output_dir, key) == []


def test_nothing_of_a_finished_run_that_is_shown_is_for_its_owner_alone(tmp_path, new_store, make_loop, monkeypatch):
    from dpfl_lightning.reporting.mlflow import Tracking

    tracking = Tracking("secrecy", uri=new_store(tmp_path / "store"))
    personal = ClientModule(small_net(), personal=["0.bias"])
    options = {"rounds": 3, "privacy": {"delta": 1e-3}}
    loop = make_loop(privacy=PROTECTED, module=personal, parts=[tracking], options=options)
    keys, data_key = [], ClientFolder.data_key
    monkeypatch.setattr(ClientFolder, "data_key", lambda *args: keys.append(data_key(*args)) or keys[-1])
    assert loop.run().finished
    left = {path.name for path in tmp_path.rglob("*")}
    assert (
        left >= {"options.yaml", "ledger.jsonl", "checkpoint.pt", "model.safetensors", "mlflow.db"}
        and "data_key" not in left
    )
    private = {"private.json", "checkpoint.pt", "checkpoint.before.pt", "checkpoint.key", "data_key"}
    assert not private & {path.name for path in (tmp_path / "store").rglob("*")}
    assert len(keys[0]) == 32 and holders(tmp_path, keys[0]) == []
    for name in private - {"data_key"}:
        assert (loop.output_dir / name).stat().st_mode & 0o777 == 0o600


def test_a_run_that_ended_early_stays_ended_and_asks_and_charges_nothing(make_loop):
    stop = type("Stop", (Strategy,), {"stop": lambda self, view: "enough" if view.round == 3 else None})
    loop = make_loop(parts=[Asking(), stop()], rounds=9)
    first = loop.run()
    assert first.reason == "enough" and first.rounds == 2
    ledger = loop.clients.folder.ledger_file.read_bytes()
    again = make_loop(parts=[Asking(), stop()], rounds=9, output_dir=loop.output_dir)
    assert again.run(resume=True).reason == "enough"
    assert again.clients.budgets.guarantees() == loop.clients.budgets.guarantees()
    assert loop.clients.folder.ledger_file.read_bytes() == ledger and torch.equal(again.state.models, loop.state.models)


def test_the_streams_of_a_simulation_follow_its_configuration_and_not_the_engine(make_loop):
    """`contracts/test_engines.py` holds that noise and sampling are those of the streams."""

    def first_word(key=FIXED_KEY, **options):
        loop = make_loop(**{"privacy": PrivacyOptions(**BUDGETS, noise_key=key), "rounds": 1, **options})
        loop.run()
        return int(loop.clients.engine.streams.generator("noise", 1, 0).words(1)[0])

    same = first_word()
    assert first_word() == first_word(engine=ENGINES["serial"]()) == same
    others = [{"key": FIXED_KEY[::-1]}, {"seed": 1}, {"rounds": 2}, {"clients": ClientOptions(4, 16, 1, 0.2)}]
    others += [{"parts": [Asking()]}, {"privacy": PROTECTED}]
    assert len({same, *(first_word(**other) for other in others)}) == 1 + len(others)


def test_every_guarantee_of_a_simulation_says_that_nobody_is_protected(make_loop):
    for privacy in (SIMULATED, PROTECTED):
        simulated = privacy is SIMULATED
        loop = make_loop(privacy=privacy, rounds=1)
        result = loop.run()
        again = make_loop(privacy=privacy, rounds=1, output_dir=loop.output_dir).run(resume=True)
        guarantees = json.loads((loop.output_dir / "guarantees.json").read_text())
        page = (loop.output_dir / "guarantee.html").read_text()
        words = [
            result.guarantee.words(),
            again.guarantee.words(),
            *(one.words() for one in loop.clients.budgets.guarantees()),
        ]
        assert all(("nobody is protected" in one) == simulated for one in [*words, page, json.dumps(guarantees)])
        assert (result.guarantee.source is KEYED) == (Run.read(loop.output_dir).info.source is KEYED) == simulated
        assert result.noise.startswith("simulated" if simulated else "AES-256")
        assert loop.clients.folder.header().identity["privacy.noise_key"] == (FIXED_KEY if simulated else None)


# ---- the default mode


def test_the_command_protects_unless_a_key_is_given(tmp_path, capsys, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    argv = ["--config", "conf/digits.yaml", "--rounds", "2", "--tracking", "null", "--output_dir"]
    assert fit([*argv, str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "noise AES-256" in out and "simulated" not in out.lower()
    assert fit(["--resume", str(tmp_path / "run")]) == 0 and evaluate([str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert fit([*argv, str(tmp_path / "simulated"), "--privacy.noise_key", FIXED_KEY]) == 0
    out = capsys.readouterr().out
    assert "noise simulated" in out and "Simulated, nobody is protected" in out


@pytest.mark.parametrize("engine", ["fast", "serial"])
def test_dropout_is_as_secret_as_noise(engine, make_loop, monkeypatch):
    """If the draws of a net were known, one record less would change those of all later ones."""
    privatise, sums = Mechanism.privatise, []

    def seen(self, total, *args, **more):
        sums[-1].append(total.clone())
        return privatise(self, total, *args, **more)

    monkeypatch.setattr(Mechanism, "privatise", seen)
    state = torch.get_rng_state()
    for privacy in (PROTECTED, PROTECTED, SIMULATED, SIMULATED):
        sums.append([])
        net = torch.nn.Sequential(torch.nn.Dropout(0.5), *small_net())
        torch.set_rng_state(state)
        make_loop(module=ClientModule(net), privacy=privacy, clients=FULL, rounds=1, engine=engine).run()
    one, other, simulated, again = sums
    assert len(one) == 4 and not any(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert all(torch.equal(*pair) for pair in zip(simulated, again, strict=True)), "a simulation can be repeated"
