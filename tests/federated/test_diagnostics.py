"""`privacy.diagnostics`: what became of the gradients is shown, and then no epsilon is claimed anywhere."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import pytest
import torch
from conftest import FIXED_KEY, PowerCut, blobs, cut_at
from rich.console import Console

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.fit import main as fit
from dpfl_lightning.plan import main as plan
from dpfl_lightning.privacy.ledger import verify as ledger_report
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.reporting.progress import Progress

BUDGETS = {"epsilon": [4.0, 6.0, 8.0, 10.0], "delta": 1e-3}
SHOWING = PrivacyOptions(**BUDGETS, noise_key=FIXED_KEY, diagnostics=True)
WORDS = (
    "No differential privacy per record: diagnostics: clip fractions and counts of broken gradients were shown without "
    "noise."
)


def with_broken_records():
    """The first two records of client 1, and one of client 2."""
    population = blobs()
    x = population.x.clone()
    x[population.train_of[1][:2]], x[population.train_of[2][5]] = math.nan, math.inf
    return dataclasses.replace(population, x=x)


class Watcher(Callback):
    def __init__(self):
        self._reports, self._before = [], []

    def on_fit_start(self, view):
        self._before = [one.epsilon for one in view.guarantees()]

    def on_round_end(self, view, report):
        self._reports.append(report)


class Without3(Strategy):
    def plan_round(self, plan, view):
        return plan.only(lambda client: client != 3)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_each_round_shows_what_the_clients_counted(engine, make_loop):
    watcher = Watcher()
    loop = make_loop(with_broken_records(), engine=ENGINES[engine](), privacy=SHOWING, parts=[Without3(), watcher])
    loop.run()
    shown = [report.diagnostics for report in watcher._reports]
    counted = json.loads((loop.output_dir / "private.json").read_text())["clients"]
    for client in range(3):
        assert sum(one.not_finite[client] for one in shown) == counted[client]["not_finite"]
        fractions = [one.clip_fraction[client] for one in shown]
        overall = counted[client]["clipped"] / counted[client]["gradients"]
        assert 0 < min(fractions) <= overall <= max(fractions) <= 1 and min(fractions) < 1
    assert [counted[client]["not_finite"] > 0 for client in range(4)] == [False, True, True, False]
    assert all(one.clip_fraction[3] is None and one.not_finite[3] == 0 for one in shown)


@pytest.mark.usefixtures("one_noise")
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_the_training_is_the_same_bit_for_bit(engine, make_loop):
    shown, quiet = (
        make_loop(engine=ENGINES[engine](), privacy=dataclasses.replace(SHOWING, diagnostics=diagnostics))
        for diagnostics in (True, False)
    )
    shown.run(), quiet.run()
    assert torch.equal(shown.state.models, quiet.state.models)
    assert [own.planned for own in shown.schedule.clients] == [own.planned for own in quiet.schedule.clients]


def test_no_epsilon_is_claimed_anywhere(make_loop):
    watcher, paper = Watcher(), Console(file=io.StringIO(), width=300)
    loop = make_loop(privacy=SHOWING, parts=[watcher, Progress(paper)])
    result = loop.run()
    assert watcher._before == [math.inf] * 4, "before anything is shown, too"
    assert all(report.epsilon_spent == (math.inf,) * 4 for report in watcher._reports)
    assert all(client["epsilon_spent"] is None for client in result.clients) and result.guarantee.startswith(WORDS)
    saved = json.loads((loop.output_dir / "guarantees.json").read_text())["clients"]
    assert all(one["epsilon"] is None and one["words"].startswith(WORDS) for one in saved)
    told = ledger_report.read([loop.clients.folder.ledger_file])  # from the file alone
    assert all(math.isinf(account.epsilon) for account in told.accounts) and told.weakest.words().startswith(WORDS)
    text = paper.file.getvalue()
    assert text.count(f"Guarantee: {WORDS}") == 2 and "max epsilon" not in text and "% clipped, 0 not finite" in text


def test_without_it_nothing_is_shown(make_loop):
    watcher, paper = Watcher(), Console(file=io.StringIO(), width=300)
    loop = make_loop(with_broken_records(), parts=[watcher, Progress(paper)])
    result = loop.run()
    assert [report.diagnostics for report in watcher._reports] == [None] * 3 and "clipped" not in paper.file.getvalue()
    assert all(client["epsilon_spent"] > 0 for client in result.clients)


@pytest.mark.parametrize("key", [FIXED_KEY, None])
def test_a_resumed_run_says_so_once(key, make_loop):
    privacy = PrivacyOptions(**BUDGETS, diagnostics=True, noise_key=key, reserve_rounds=1)
    loop, watcher = make_loop(privacy=privacy), Watcher()
    cut_at(loop, 2)
    with pytest.raises(PowerCut):
        loop.run()
    again = make_loop(privacy=privacy, output_dir=loop.output_dir, parts=[watcher])
    result = again.run(resume=True)
    purposes = [charge.purpose for charge in read_ledger(loop.clients.folder.ledger_file)]
    assert purposes.count("shown") == 4 and purposes.count("train") == 4 * (3 if key else 4)
    assert result.guarantee.startswith(WORDS) and result.rounds == 3
    assert [report.round for report in watcher._reports] == [2, 3]
    assert all(fraction is not None for report in watcher._reports for fraction in report.diagnostics.clip_fraction)


@pytest.mark.e2e
def test_the_commands_say_so_before_and_after(tmp_path, capsys, monkeypatch, new_store, request):
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(request.config.rootpath)
    argv = ["--config", "conf/digits.yaml", "--rounds", "2", "--privacy.diagnostics", "true"]
    assert plan([*argv, "--json"]) == 0
    printed = capsys.readouterr().out
    assert WORDS in printed
    assert all(client["epsilon"] is None for client in json.loads(printed.splitlines()[-1])["clients"])
    uri = new_store(tmp_path)
    assert fit([*argv, "--tracking.uri", uri, "--output_dir", str(tmp_path / "run")]) == 0
    assert WORDS in capsys.readouterr().out
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.data.tags["guarantee"].startswith(WORDS) and "overall/epsilon_max" not in run.data.metrics
    curves = [client.get_metric_history(run.info.run_id, f"per_client_clip_fraction/0{i}") for i in range(5)]
    assert all([point.step for point in curve] == [1, 2] and 0 < curve[0].value <= 1 for curve in curves)
    assert run.data.metrics["per_client_gradients_not_finite/04"] == 0
