"""Times can depend on records: by default nobody is shown more than the time of the whole run on a coarse grid."""

import dataclasses
import io
import json
import math
import re
import time

import pytest
from fakes import Recorder, a_report, a_result, a_view
from rich.console import Console

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.server.curves import of_round
from dpfl_lightning.privacy.accounting.guarantee import EXACT_TIMES, NOT_COVERED
from dpfl_lightning.reporting.mlflow.store import metrics
from dpfl_lightning.reporting.progress import Progress
from dpfl_lightning.runtime.text import rounded_up_duration

PRIVACY = PrivacyOptions(epsilon=4.0, delta=1e-3)
SIMULATED = dataclasses.replace(PRIVACY, noise_key="ab" * 16)
TIMES = ("wall_seconds", "training_seconds", "client_seconds")


class Slow(SerialEngine):
    """Takes much longer than usual, by a clock that tests control."""

    def release(self, *args):
        self.clock.offset += 10.7
        return super().release(*args)


class Clock:
    def __init__(self, monkeypatch):
        self.offset, really = 0.0, time.perf_counter
        monkeypatch.setattr(time, "perf_counter", lambda: really() + self.offset)


def on_the_grid(seconds: float) -> bool:
    return seconds >= 1 and math.log2(seconds).is_integer()


def run(make_loop, **options):
    seen = Recorder()
    loop = make_loop(parts=[seen], rounds=2, **{"privacy": PRIVACY, **options})
    result = loop.run()
    return seen.reports, result, json.loads((loop.output_dir / "result.json").read_text())


@pytest.mark.e2e
def test_a_private_run_shows_its_times_on_a_coarse_grid_and_none_of_a_round(make_loop, monkeypatch):
    engine = Slow()
    engine.clock = Clock(monkeypatch)
    reports, result, written = run(make_loop, engine=engine)  # 2 rounds of 4 clients of 10.7 s
    assert all(report.seconds is None for report in reports)
    assert [written[name] for name in TIMES] == [128.0] * 3
    assert EXACT_TIMES not in str(result.guarantee) and "times" in " ".join(NOT_COVERED)


@pytest.mark.parametrize("privacy", [SIMULATED, None], ids=["simulation", "without privacy"])
def test_where_nobody_is_protected_times_are_exact(make_loop, privacy):
    reports, result, written = run(make_loop, privacy=privacy)
    assert all(report.seconds > 0 for report in reports) and EXACT_TIMES not in str(result.guarantee)
    assert 0 < written["client_seconds"] < written["training_seconds"] < written["wall_seconds"]
    assert not on_the_grid(written["wall_seconds"])


def test_exact_times_are_an_option_that_every_guarantee_states(make_loop):
    reports, result, written = run(make_loop, exact_times=True)
    assert all(report.seconds > 0 for report in reports) and not on_the_grid(written["wall_seconds"])
    assert f"Caveat: {EXACT_TIMES}." in str(result.guarantee)


@pytest.mark.e2e
def test_a_resumed_run_cannot_ask_for_exact_times(make_loop):
    loop = make_loop(privacy=PRIVACY, rounds=2)
    loop.run()
    with pytest.raises(UserError, match=r"`evaluation\.exact_times` must stay"):
        make_loop(privacy=PRIVACY, rounds=2, exact_times=True, output_dir=loop.output_dir).run(resume=True)


def test_the_terminal_shows_no_time_of_a_round(tmp_path, monkeypatch):
    """The remaining time follows from a measurement on random data, not from the rounds: 200 s for ten."""
    texts = []
    for pause in (0.0, 1000.0):  # which rounds have a line does not depend on it
        now = [1000.0]
        monkeypatch.setattr("dpfl_lightning.reporting.progress.time.monotonic", lambda now=now: now[0])
        paper, view = Console(file=io.StringIO(), width=80), a_view(tmp_path, exact_times=False)
        progress = Progress(paper)
        progress.on_fit_start(view)
        for round in (1, 2):
            now[0] += pause
            progress.on_round_end(view, a_report(view, round, seconds=None))
        progress.on_fit_end(view, a_result(view, wall_seconds=64.0, training_seconds=32.0))
        texts.append(paper.file.getvalue())
    assert texts[0] == texts[1]
    assert re.findall(r"\| ([^|]* left)", texts[0]) == ["3 min 00 s left", "2 min 40 s left"]
    assert "records/s" not in texts[0] and "in at most 1 min 04 s; all 10" in " ".join(texts[0].split())


def test_mlflow_gets_no_time_of_a_round(tmp_path):
    view = a_view(tmp_path, exact_times=False)
    values = of_round(a_report(view, 1, seconds=None), view.facts).values
    sent = metrics(values, 1)
    assert sent and not [metric.key for metric in sent if "second" in metric.key]
    assert {metric.timestamp % 3_600_000 for metric in sent} == {0}
    assert time.time() * 1000 - metrics(values, 1, exact_times=True)[0].timestamp < 60_000


@pytest.mark.parametrize("seconds, shown", [(0.0, 1.0), (1.0, 1.0), (1.01, 2.0), (64.0, 64.0), (65.0, 128.0)])
def test_durations_are_rounded_up_to_powers_of_two(seconds, shown):
    assert rounded_up_duration(seconds) == shown
