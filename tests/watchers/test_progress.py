"""The plan, the live line and its plain form, the summary: what a person reads."""

import io
import math
import re

import pytest
from fakes import a_report, a_result, a_view
from rich.console import Console

from dpfl_lightning.reporting.progress import Progress

UNEVALUATED = {"test_accuracy": None, "test_loss": None, "client_accuracy": None}


def printed(console: Console) -> str:
    return console.file.getvalue()


@pytest.fixture
def show(tmp_path):
    """`show(reports, result, ...)`: what a run prints without a terminal, where reports and result change the usual."""

    def run(reports=(), result=None, next_steps=(), view=None, **info) -> str:
        paper = Console(file=io.StringIO(), width=80)
        progress, view = Progress(paper, next_steps=next_steps), view or a_view(tmp_path, **info)
        progress.on_fit_start(view)
        for round, changes in enumerate(reports, 1):
            progress.on_round_end(view, a_report(view, round, **changes))
        if result is not None:
            progress.on_fit_end(view, a_result(view, **result))
        return printed(paper)

    return run


def test_the_plan_comes_first(show, tmp_path):
    text = show(strategy_notes=("2 of 3 clients a round.", "It sends 3 MB."))
    lines = text.splitlines()
    assert lines[0] == (
        "3 clients, 10 rounds, 1,234 model parameters, engine serial, device cpu, estimated time: 3 min 20 s"
    )
    assert lines[1] == (
        "Guarantee: per record; add or remove one record; Poisson sampling; "
        "RDP (Opacus, orders 1.1 to 1024); delta 0.001; noise keyed, not cryptographic"
    )
    rows = [line.split() for line in lines if re.match(r"\s*\d+ ", line)][1:4]
    assert rows == [
        ["0", "100", "10", "10", "1", "0.001", "1.25"],
        ["1", "101", "10", "11", "2", "0.001", "1.25"],
        ["2", "102", "10", "11", "3", "0.001", "1.25"],
    ]
    assert "Resuming" not in text and str(tmp_path) in text
    assert text.endswith("1.25\n\n2 of 3 clients a round.\nIt sends 3 MB.\n")


@pytest.fixture
def now(monkeypatch):
    """A list whose only element is the time, in seconds."""
    time = [1000.0]
    monkeypatch.setattr("dpfl_lightning.reporting.progress.time.monotonic", lambda: time[0])
    return time


def test_plain_lines_where_there_is_no_terminal(show, now):
    text = show([{}, {"clients": (0, 2)}], rounds=2)
    lines = text[len(show(rounds=2)) :].splitlines()
    assert [re.sub(r"(under )?\d+ s left", "T left", line) for line in lines] == [
        "round 1/2 | accuracy 5.00% | max epsilon 0.3 | 2,000 records/s | T left",
        "round 2/2 | accuracy 10.00% | max epsilon 0.6 | 2,000 records/s | 2 of 3 clients | T left",
    ]
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)


@pytest.mark.parametrize(
    ("seconds", "estimate", "changes", "lines"),
    [
        (25.0, None, UNEVALUATED, [1, 4, 7, 10]),
        (0.01, None, {}, [1, 10]),
        (1000.0, 0.1, {}, [1, 10]),  # without exact times the time of a round is not used
    ],
)
def test_a_log_has_a_line_in_ten_seconds(tmp_path, now, seconds, estimate, changes, lines):
    info = {} if estimate is None else {"exact_times": False, "estimated_seconds": estimate}
    paper, view = Console(file=io.StringIO(), width=80), a_view(tmp_path, **info)
    progress = Progress(paper)
    progress.on_fit_start(view)
    for round in range(1, 11):
        now[0] += seconds
        progress.on_round_end(view, a_report(view, round, **changes))
    found = re.findall(r"round +(\d+)/10 \|.*\| (.*) left", printed(paper))
    assert [int(round) for round, _ in found] == lines
    if seconds == 25.0:
        assert [left for _, left in found][:3] == ["3 min 45 s", "2 min 30 s", "1 min 15 s"]


def test_regression_shows_the_loss_and_nothing_to_evaluate_on_no_score(show, tmp_path):
    clients = tuple({**client, "accuracy": None} for client in a_result(a_view(tmp_path)).clients)
    changes = {"test_accuracy": None, "client_accuracy": (None,) * 3, "test_loss": 0.25}
    text = show([changes], {"test_accuracy": None, "clients": clients})
    assert "| loss 0.25 |" in text and "Test loss 1.5" in text and "accuracy" not in text
    nothing = {"test_accuracy": None, "test_loss": math.nan}
    text = show([nothing], nothing)
    assert "nan" not in text and "Not evaluated after" in text


def test_the_summary(show, tmp_path):
    for name in ("model.safetensors", "distilled.safetensors", "distilled.json"):
        (tmp_path / name).touch()
    built_in_python = " ".join(show([], {}).split())
    assert f"net = dpfl_lightning.load_model('{tmp_path}/model.safetensors', net) (in Python)" in built_in_python
    assert "evaluate" not in built_in_python
    text = show([{}] * 3, {}, next_steps=["mlflow ui [here]"], options={"rounds": 10})
    summary = text[text.index("epsilon spent") :]
    rows = [line.split() for line in summary.splitlines() if re.match(r"\s*\d+ ", line)]
    assert rows[2] == ["2", "10", "1.25", "2.97", "3", "50.20%"]
    words = " ".join(summary.split())
    for part in (
        "Test accuracy 50.00% after 10 rounds in 1 min 01 s, 1 min 00 s of it in rounds (2,000 records/s); all 10 "
        "rounds are done.",
        "Guarantee: (3, 0.001)-differential privacy per record (add or remove one record), Poisson sampling",
        f"--sweep.distilled {tmp_path}: search on the set",
        f"python -m dpfl_lightning evaluate {tmp_path}",
        "mlflow ui [here]",
    ):
        assert part in words, part


def test_runs_and_clients_without_noise_have_no_privacy(show, tmp_path):
    text = show([{}] * 3, {}, view=a_view(tmp_path, noise=0.0))
    assert "without noise, and no epsilon bounds" in text and "no bound on epsilon" in text
    for words in ("budget", "epsilon spent", "delta ", "max epsilon"):
        assert words not in text, words
    text = show([{}], {}, budgets=(1.0, 2.0, math.inf))
    assert "no bound on epsilon" in text and re.search(r"2 +10 +1.25 +no bound +no bound", text)


def test_an_unfinished_run_says_why_and_how_to_resume(show, tmp_path):
    reason = f"RuntimeError: boom; resume with: python -m fit --resume {tmp_path}"
    text = show([{}] * 3, {"finished": False, "rounds": 2, "reason": reason})
    assert f"Stopped after round 2 of 10: {reason}" in text.replace("\n", "")
    assert text.count("--resume") == 1 and "epsilon spent" not in text and "result.json" not in text
    before, view = Console(file=io.StringIO(), width=80), a_view(tmp_path)
    Progress(before).on_fit_end(view, a_result(view, finished=False, reason=reason))  # before it began: no bar to stop
    assert printed(before).count("--resume") == 1


@pytest.mark.parametrize("width", [100, 80])
def test_one_live_line_on_a_terminal_and_the_cursor_comes_back(width, tmp_path):
    screen = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    progress, view = Progress(screen), a_view(tmp_path)
    progress.on_fit_start(view)
    progress.on_round_end(view, a_report(view, 1))
    progress._bar.refresh()
    line = printed(screen).rpartition("\r\x1b[2K")[2]
    assert line.startswith("round 1/10")
    assert len(line + "^C^C") <= width, "a terminal could not erase a line that Ctrl-C makes wrap"
    progress.on_round_end(view, a_report(view, 2, **UNEVALUATED))
    progress._bar.refresh()
    if width == 100:
        bar = printed(screen).rpartition("\r")[2]
        for words in ("round 2/10", "accuracy 5.00%", "max epsilon 0.6", "2,000 rec/s", "left"):
            assert words in bar, words
    progress.on_fit_end(view, a_result(view, finished=False, reason="interrupted"))
    assert progress._bar is None
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert printed(screen).rfind(show) > printed(screen).rfind(hide) >= 0
