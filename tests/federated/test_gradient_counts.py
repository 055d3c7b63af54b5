"""Gradients that are not finite contribute nothing, are counted for their client alone, and shown only on request."""

import dataclasses
import io
import json
import math

import pytest
import torch
from conftest import EVERY_ENGINE, FIXED_KEY, blobs, break_off, small_net
from fakes import Absent
from rich.console import Console

from dpfl_lightning.build import ENGINES
from dpfl_lightning.commands.fit import main as fit
from dpfl_lightning.commands.plan import main as plan
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.channel import send_round
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.messages.jobs import ClassGradients
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import read_guarantees
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.privacy.ledger import verify as ledger_report
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.privacy.sampling import poisson_rows
from dpfl_lightning.reporting.progress import Progress

#: client -> its broken records, and their values
BROKEN = {1: {0: math.nan, 7: math.inf, 30: -math.inf}, 3: {2: math.nan}}
PRIVACY = PrivacyOptions(noise_multiplier=1.0, delta=1e-3, noise_key=FIXED_KEY)
SAMPLED = ClientOptions(count=4, batch_size=16, learning_rate=0.3)
FULL = ClientOptions(count=4, batch_size=None, learning_rate=0.3)  # one step: clients side by side
FULL_TWICE = dataclasses.replace(FULL, local_epochs=2)
BUDGETS = {"epsilon": [4.0, 6.0, 8.0, 10.0], "delta": 1e-3}
SHOWING = PrivacyOptions(**BUDGETS, noise_key=FIXED_KEY, diagnostics=True)
WORDS = (
    "No differential privacy per record: diagnostics: clip fractions and counts of broken gradients were shown without "
    "noise."
)


def with_broken_records() -> Population:
    population = blobs()
    x = population.x.clone()
    for client, records in BROKEN.items():
        for row, value in records.items():
            x[population.train_of[client][row]] = value
    return dataclasses.replace(population, x=x)


def expected(loop) -> list[dict]:
    """From the run's own draws, one broken record after the other."""
    rows = []
    for client, settings in enumerate(loop.config.settings):
        drawn = broken = 0
        for round in range(1, loop.config.rounds + 1):
            generator = loop.clients.engine.streams.generator("sampling", round, client)
            for _ in range(settings.steps):
                batch = poisson_rows(settings.num_records, settings.sample_rate, generator)
                drawn += len(batch)
                broken += sum(int(row) in BROKEN.get(client, {}) for row in batch)
        rows.append({"client": client, "gradients": drawn, "not_finite": broken})
    return rows


def noted(loop) -> list[dict]:
    """What `private.json` says, but for the clipped ones."""
    rows = json.loads((loop.output_dir / "private.json").read_text())["clients"]
    assert all(0 <= row["clipped"] <= row["gradients"] - row["not_finite"] for row in rows)
    return [{name: row[name] for name in ("client", "gradients", "not_finite")} for row in rows]


@pytest.mark.parametrize("clients", [SAMPLED, FULL, FULL_TWICE], ids=["sampled", "one step", "two full steps"])
@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_every_engine_counts_them_and_trains_on(engine, clients, make_loop):
    loop = make_loop(with_broken_records(), engine=ENGINES[engine](), clients=clients, privacy=PRIVACY, rounds=2)
    loop.run()
    assert loop.state.models.isfinite().all()
    due = expected(loop)
    assert noted(loop) == due and [row["not_finite"] > 0 for row in due] == [False, True, False, True]
    if clients is not SAMPLED:
        assert [row["not_finite"] for row in due] == [0, 3 * 2 * clients.local_epochs, 0, 1 * 2 * clients.local_epochs]


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_class_gradients_are_counted_too(engine, make_loop):
    """Groups are classes there, or classes of clients side by side."""
    loop = make_loop(with_broken_records(), engine=ENGINES[engine](), clients=FULL, privacy=PRIVACY)
    loop.plan_schedule()
    channel = loop.clients.channel
    channel.setup(loop.module, HeldClients(loop.population), Streams(bytes(32)), "poisson")
    state = ServerState(loop.module.flat[None], (0,) * 4)
    send_round(channel, loop.view(state).plan(job=ClassGradients(3)), state.models, [0] * 4)
    counts = channel.engine.clients.state_dict()["counts"].T.tolist()
    assert counts[0] == list(loop.population.num_records) and counts[2] == [0, 3, 0, 1]


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_clipped_are_those_whose_norm_exceeds_the_clip_norm(engine, make_loop):
    """One round of one step with all records: each record's gradient by plain autograd at the start."""
    privacy = dataclasses.replace(PRIVACY, clip_norm=4.0)
    loop = make_loop(blobs(), engine=ENGINES[engine](), clients=FULL, privacy=privacy, rounds=1)
    due = []
    for client in range(4):
        x, y = loop.population.records(client, torch.arange(loop.population.num_records[client]))
        net, norms = small_net(), []
        for record, label in zip(x, y, strict=True):
            net.zero_grad()
            torch.nn.functional.cross_entropy(net(record[None]), label[None]).backward()
            norms.append(float(torch.cat([p.grad.flatten() for p in net.parameters()]).norm()))
        due.append([len(norms), sum(norm > 4.0 for norm in norms), 0])
    loop.run()
    assert loop.clients.engine.clients.state_dict()["counts"].tolist() == due
    assert all(0 < clipped < every for every, clipped, _ in due)


@pytest.mark.e2e
def test_a_resumed_run_counts_on(make_loop):
    unbroken = make_loop(with_broken_records(), privacy=PRIVACY)
    unbroken.run()
    broken = make_loop(with_broken_records(), privacy=PRIVACY)
    for round in (2, 3):
        break_off(broken, round, resume=round > 2)
        so_far = noted(broken)
        assert 0 < so_far[1]["not_finite"] < expected(unbroken)[1]["not_finite"], "what the kept rounds came to"
        broken = make_loop(with_broken_records(), privacy=PRIVACY, output_dir=broken.output_dir)
    for again in (broken, make_loop(with_broken_records(), privacy=PRIVACY, output_dir=broken.output_dir)):
        again.run(resume=True)
        assert noted(again) == noted(unbroken) == expected(unbroken)


class Watcher(Callback):
    def __init__(self):
        self._reports, self._before, self._paper = [], [], Console(file=io.StringIO(), width=300)

    def on_fit_start(self, view):
        self._before = [one.epsilon for one in view.guarantees()]

    def on_round_end(self, view, report):
        self._reports.append(report)

    @property
    def _text(self):
        return self._paper.file.getvalue()


def watched(make_loop, *options, **more):
    """A finished run, its result, and what it showed."""
    watcher = Watcher()
    loop = make_loop(*options, parts=[*more.pop("parts", ()), watcher, Progress(watcher._paper)], **more)
    return loop, loop.run(), watcher


def test_counts_stay_with_the_client(make_loop):
    """The file is its owner's alone; what others see is the same whatever the counts are."""
    shown = []
    for population in (with_broken_records(), blobs()):
        loop, result, watcher = watched(make_loop, population, privacy=PRIVACY)
        path = loop.output_dir / "private.json"
        assert path.stat().st_mode & 0o777 == 0o600 and "Do not share" in path.read_text()
        others = [loop.output_dir / name for name in ("result.json", "guarantees.json", "ledger.jsonl", "options.yaml")]
        assert not any("not_finite" in file.read_text() for file in others)
        assert [report.diagnostics for report in watcher._reports] == [None] * 3 and "clipped" not in watcher._text
        assert all(client["epsilon_spent"] > 0 for client in result.clients)
        lines = watcher._text.replace(str(loop.output_dir), "FOLDER").splitlines()
        shown.append([line for line in lines if "finite" in line])
    assert shown[0] == shown[1] and len(shown[0]) == 1 and "private.json: how many" in shown[0][0]


# ---- `privacy.diagnostics`


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_diagnostics_show_in_each_round_what_the_clients_counted(engine, make_loop):
    options = {"engine": ENGINES[engine](), "privacy": SHOWING, "parts": [Absent(dict.fromkeys((1, 2, 3), (2,)))]}
    loop, _, watcher = watched(make_loop, with_broken_records(), **options)
    shown = [report.diagnostics for report in watcher._reports]
    counted = json.loads((loop.output_dir / "private.json").read_text())["clients"]
    for client in (0, 1, 3):
        assert sum(one.not_finite[client] for one in shown) == counted[client]["not_finite"]
        fractions = [one.clip_fraction[client] for one in shown]
        overall = counted[client]["clipped"] / counted[client]["gradients"]
        assert 0 < min(fractions) <= overall <= max(fractions) <= 1 and min(fractions) < 1
    assert [counted[client]["not_finite"] > 0 for client in range(4)] == [False, True, False, True]
    assert all(one.clip_fraction[2] is None and one.not_finite[2] == 0 for one in shown)


@pytest.mark.e2e
@pytest.mark.usefixtures("one_noise")
@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_diagnostics_change_no_bit_of_the_training_and_engines_agree_on_counts(engine, make_loop):
    quiet = dataclasses.replace(SHOWING, diagnostics=False)
    runs = [(engine, SHOWING), (engine, quiet), ("serial", quiet)]
    shown, plain, serial = (
        make_loop(with_broken_records(), engine=ENGINES[name](), privacy=privacy) for name, privacy in runs
    )
    for loop in (shown, plain, serial):
        loop.run()
    assert torch.equal(shown.state.models, plain.state.models)
    assert [one.planned for one in shown.schedule.clients] == [one.planned for one in plain.schedule.clients]
    torch.testing.assert_close(plain.state.models, serial.state.models, rtol=1e-4, atol=1e-5)
    counts = plain.clients.engine.clients.state_dict()["counts"]
    assert torch.equal(counts, serial.clients.engine.clients.state_dict()["counts"])
    assert ((counts[:, 1] > 0) & (counts[:, 1] < counts[:, 0])).all()


def test_with_diagnostics_no_epsilon_is_claimed_anywhere(make_loop):
    loop, result, watcher = watched(make_loop, privacy=SHOWING)
    assert watcher._before == [math.inf] * 4, "before anything is shown, too"
    assert all(report.epsilon_spent == (math.inf,) * 4 for report in watcher._reports)
    assert all(client["epsilon_spent"] is None for client in result.clients) and result.guarantee.words().startswith(
        WORDS
    )
    saved = read_guarantees(loop.output_dir)
    assert all(one["epsilon"] is None and one["words"].startswith(WORDS) for one in saved)
    report = ledger_report.read([loop.clients.folder.ledger_file])  # from the file alone
    assert all(math.isinf(account.epsilon) for account in report.paid) and report.weakest.words().startswith(WORDS)
    text = watcher._text
    assert text.count(f"Guarantee: {WORDS}") == 2 and "max epsilon" not in text and "% clipped, 0 not finite" in text


@pytest.mark.parametrize("key", [FIXED_KEY, None])
def test_a_resumed_run_with_diagnostics_charges_them_once(key, make_loop):
    privacy = PrivacyOptions(**BUDGETS, diagnostics=True, noise_key=key, reserve_rounds=1)
    loop = make_loop(privacy=privacy)
    break_off(loop, 2)
    watcher = Watcher()
    result = make_loop(privacy=privacy, output_dir=loop.output_dir, parts=[watcher]).run(resume=True)
    purposes = [charge.purpose for charge in read_ledger(loop.clients.folder.ledger_file)]
    assert purposes.count("shown") == 4 and purposes.count("train") == 4 * (3 if key else 4)
    assert result.guarantee.words().startswith(WORDS) and result.rounds == 3
    assert [report.round for report in watcher._reports] == [2, 3]
    assert all(fraction is not None for report in watcher._reports for fraction in report.diagnostics.clip_fraction)


@pytest.mark.e2e
def test_the_commands_say_so_before_and_after(tmp_path, capsys, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    argv = ["--config", "conf/digits.yaml", "--rounds", "2", "--privacy.diagnostics", "true"]
    assert plan([*argv, "--json"]) == 0
    printed = capsys.readouterr().out
    assert WORDS in printed
    assert all(client["epsilon"] is None for client in json.loads(printed)["clients"])
    assert fit([*argv, "--tracking", "null", "--output_dir", str(tmp_path / "run")]) == 0
    assert WORDS in capsys.readouterr().out
