"""The plan, the live line and its plain form, the summary: what a person reads."""

from __future__ import annotations

import io
import math
import re

import pytest
from fakes import a_report, a_result, a_view
from rich.console import Console

from dpfl_lightning.federated.server.strategy import register
from dpfl_lightning.reporting.progress import Progress, shown_epsilon
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted


@pytest.fixture
def paper():
    """A console that is no terminal, 80 columns wide."""
    return Console(file=io.StringIO(), width=80)


def printed(console: Console) -> str:
    return console.file.getvalue()


def whole_run(progress: Progress, view, result=None, rounds=(1, 2, 3)) -> None:
    progress.on_fit_start(view)
    for round in rounds:
        progress.on_round_end(view, a_report(view, round))
    progress.on_fit_end(view, a_result(view) if result is None else result)


def test_it_has_no_public_names_but_hooks():
    register([SizeWeighted()], [Progress()])


def test_the_plan_comes_first(paper, tmp_path):
    Progress(paper).on_fit_start(a_view(tmp_path))
    text = printed(paper)
    lines = text.splitlines()
    assert lines[0] == (
        "3 clients, 10 rounds, 1,234 model parameters, engine serial, device cpu, estimated time: 3 min 20 s"
    )
    assert lines[1] == (
        "Guarantee: record level, add or remove one record; Poisson sampling; "
        "RDP (Opacus, orders 1.1 to 1024); delta 0.001; noise keyed, not cryptographic"
    )
    rows = [line.split() for line in lines if re.match(r"\s*\d+ ", line)][1:]
    assert rows == [
        ["0", "100", "10", "10", "1", "0.001", "1.25"],
        ["1", "101", "10", "11", "2", "0.001", "1.25"],
        ["2", "102", "10", "11", "3", "0.001", "1.25"],
    ]
    assert "Resuming" not in text and str(tmp_path) in text


def test_what_strategies_planned_follows_the_clients(paper, tmp_path):
    Progress(paper).on_fit_start(a_view(tmp_path, strategy_notes=("2 of 3 clients a round.", "It sends 3 MB.")))
    assert printed(paper).endswith("1.25\n\n2 of 3 clients a round.\nIt sends 3 MB.\n")


def test_many_clients_are_summed_up(paper, tmp_path):
    progress = Progress(paper)
    view = a_view(tmp_path, num_clients=31)
    whole_run(progress, view)
    text = printed(paper)
    rows = [line.split() for line in text.splitlines() if re.match("(smallest|median|largest) ", line.strip())]
    assert [row[4] for row in rows[:3]] == ["1", "16", "31"]
    assert text.count("smallest") == 2 and "over 31 clients" in text


def test_a_resumed_run_says_where_it_goes_on(paper, tmp_path):
    Progress(paper).on_fit_start(a_view(tmp_path, first_round=4))
    assert "Resuming at round 4 of 10" in printed(paper)


def test_a_finished_run_has_no_round_left(paper, tmp_path):
    Progress(paper).on_fit_start(a_view(tmp_path, first_round=11))
    assert "All rounds are complete." in printed(paper)


def test_an_unknown_time_is_said_to_be_unknown(paper, tmp_path):
    Progress(paper).on_fit_start(a_view(tmp_path, estimated_seconds=math.nan))
    assert "estimated time: unknown" in printed(paper)


def test_budgets_that_a_strategy_lowered_are_shown_beside_the_clients_own(paper, tmp_path):
    Progress(paper).on_fit_start(a_view(tmp_path, budgets=(1.0, 2.0, 9.5)))
    assert "planned" in printed(paper) and re.search(r"9.5 +3 +0.001", printed(paper))


def test_plain_lines_where_there_is_no_terminal(paper, tmp_path):
    progress, view = Progress(paper), a_view(tmp_path)
    progress.on_fit_start(view)
    before = len(printed(paper))
    progress.on_round_end(view, a_report(view, 1))
    progress.on_round_end(view, a_report(view, 2, test_accuracy=None, test_loss=None, client_accuracy=None))
    progress.on_round_end(view, a_report(view, 3, clients=(0, 2)))
    lines = printed(paper)[before:].splitlines()
    assert [re.sub(r"(under )?\d+ s left", "T left", line) for line in lines] == [
        "round  1/10 | accuracy 5.00% | max epsilon 0.3 | 2,000 records/s | T left",
        "round  3/10 | accuracy 15.00% | max epsilon 0.9 | 2,000 records/s | 2 of 3 clients | T left",
    ]
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", printed(paper))


def test_a_log_is_silent_for_a_minute_at_most(paper, tmp_path, monkeypatch):
    progress, view, now = Progress(paper), a_view(tmp_path), [1000.0]
    monkeypatch.setattr("dpfl_lightning.reporting.progress.time.monotonic", lambda: now[0])
    progress.on_fit_start(view)
    unevaluated = {"test_accuracy": None, "test_loss": None, "client_accuracy": None}
    for round in range(1, 10):  # 25 seconds each
        now[0] += 25.0
        progress.on_round_end(view, a_report(view, round, **unevaluated))
    told = re.findall(r"round +(\d+)/10 \|.*\| (.*) left", printed(paper))
    assert told == [("1", "3 min 45 s"), ("4", "2 min 30 s"), ("7", "1 min 15 s")]


def test_regression_shows_the_loss(paper, tmp_path):
    progress, view = Progress(paper), a_view(tmp_path)
    progress.on_fit_start(view)
    progress.on_round_end(view, a_report(view, 4, test_accuracy=None, client_accuracy=(None,) * 3))
    clients = tuple({**client, "accuracy": None} for client in a_result(view).clients)
    progress.on_fit_end(view, a_result(view, test_accuracy=None, clients=clients))
    assert "| loss 0.25 |" in printed(paper) and "Test loss 1.5" in printed(paper)
    assert "accuracy" not in printed(paper)


def test_nothing_to_evaluate_on_is_no_score(paper, tmp_path):
    progress, view = Progress(paper), a_view(tmp_path)
    progress.on_fit_start(view)
    progress.on_round_end(view, a_report(view, 4, test_accuracy=None, test_loss=math.nan))
    progress.on_fit_end(view, a_result(view, test_accuracy=None, test_loss=math.nan))
    assert "nan" not in printed(paper) and "Not evaluated after" in printed(paper)


def test_the_summary(paper, tmp_path):
    (tmp_path / "model.pt").touch()
    whole_run(Progress(paper, next_steps=["mlflow ui [here]"]), a_view(tmp_path))
    text = printed(paper)
    summary = text[text.index("epsilon spent") :]
    rows = [line.split() for line in summary.splitlines() if re.match(r"\s*\d+ ", line)]
    assert rows[2] == ["2", "2.97", "3", "10", "1.25", "50.2%"]
    for words in (
        "Test accuracy 50.00% after 10 rounds in 1 min 01 s, 1 min 00 s of it in rounds (2,000 records/s); all 10 "
        "rounds are done.",
        "Guarantee: (3, 0.001)-differential privacy per record.",
        f"{tmp_path}/result.json",
        f"{tmp_path}/model.pt",
        f"python -m dpfl_lightning.evaluate {tmp_path}",
        "mlflow ui [here]",
    ):
        assert words in summary, words


def test_a_distilled_set_is_named_and_what_it_is_for(paper, tmp_path):
    for name in ("distilled.pt", "distilled.json"):
        (tmp_path / name).touch()
    whole_run(Progress(paper), a_view(tmp_path))
    text = " ".join(printed(paper).split())
    assert f"{tmp_path}/distilled.pt and distilled.json: the distilled set, and how it was made" in text
    assert f"--sweep.distilled {tmp_path}: search on the set" in text


def test_the_summary_of_groups(paper, tmp_path):
    view, served = a_view(tmp_path), {"majority": 0.801, "minority": 0.7, "0": 0.7, "1": 0.801}
    told = {"accuracy_of_groups": served, "accuracy_worst": 0.65, "accuracy_gap": 0.2}
    Progress(paper).on_fit_end(view, a_result(view, metrics={"clustering_accuracy": 0.904}, **told))
    text = " ".join(printed(paper).split())
    assert "Groups: accuracy majority 80.1%, minority 70.0%; worst client 65.0%, best - worst 20.0%; 90% of" in text
    told["accuracy_of_groups"] = {"0": 0.7, "1": 0.8}
    Progress(paper).on_fit_end(view, a_result(view, **told))
    text = " ".join(printed(paper).split())
    assert "Groups: accuracy 70.0% to 80.0%; worst client 65.0%, best - worst 20.0%. Guarantee" in text


def test_a_run_without_noise_is_said_to_have_no_privacy(paper, tmp_path):
    whole_run(Progress(paper), a_view(tmp_path, noise=0.0))
    text = printed(paper)
    assert text.count("no privacy") == 5  # plan, three rounds, summary
    for word in ("epsilon budget", "epsilon spent", "delta", "max epsilon"):
        assert word not in text, word


def test_one_client_without_noise_is_infinite(paper, tmp_path):
    progress, view = Progress(paper), a_view(tmp_path, budgets=(1.0, 2.0, math.inf))
    progress.on_fit_start(view)
    progress.on_round_end(view, a_report(view, 1))
    assert "max epsilon inf" in printed(paper)
    clients = a_result(view).clients
    progress.on_fit_end(view, a_result(view, clients=clients))
    assert re.search(r"2 +inf +inf +10", printed(paper))


def test_an_unfinished_run_says_why_and_how_to_go_on(paper, tmp_path):
    reason, view = f"RuntimeError: boom; resume with: python -m fit --resume {tmp_path}", a_view(tmp_path)
    whole_run(Progress(paper), view, a_result(view, finished=False, rounds=2, reason=reason))
    text = printed(paper)
    assert f"Stopped after round 2 of 10: {reason}" in text.replace("\n", "")
    assert text.count("--resume") == 1 and "epsilon spent" not in text and "result.json" not in text
    before = Console(file=io.StringIO(), width=80)
    Progress(before).on_fit_end(view, a_result(view, finished=False, reason=reason))  # before it began: no bar to stop
    assert printed(before).count("--resume") == 1


def test_one_live_line_on_a_terminal_and_the_cursor_comes_back(tmp_path):
    screen = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    progress, view = Progress(screen), a_view(tmp_path)
    progress.on_fit_start(view)
    progress.on_round_end(view, a_report(view, 1))
    progress.on_round_end(view, a_report(view, 2, test_accuracy=None, test_loss=None, client_accuracy=None))
    assert progress._bar is not None
    progress._bar.refresh()
    bar = printed(screen).rpartition("\r")[2]
    for words in ("round 2/10", "accuracy 5.00%", "max epsilon 0.6", "2,000 rec/s", "left"):
        assert words in bar, words
    progress.on_fit_end(view, a_result(view, finished=False, reason="interrupted"))
    assert progress._bar is None
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert printed(screen).rfind(show) > printed(screen).rfind(hide) >= 0


def test_ctrl_c_behind_the_live_line_does_not_make_it_wrap(tmp_path):
    """Else the terminal would keep what it can no longer erase, and show it twice."""
    screen = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    progress, view = Progress(screen), a_view(tmp_path)
    progress.on_fit_start(view)
    progress.on_round_end(view, a_report(view, 1))
    progress._bar.refresh()
    line = printed(screen).rpartition("\r\x1b[2K")[2]
    assert line.startswith("round 1/10") and len(line + "^C^C") <= 80
    progress.on_fit_end(view, a_result(view, finished=False, reason="interrupted"))


@pytest.mark.parametrize("spent, budget", [(0.12341, math.inf), (1.99996, 2.0), (12345.6, math.inf), (3e-5, 1.0)])
def test_a_shown_epsilon_is_never_below_the_spent_one(spent, budget):
    assert spent <= shown_epsilon(spent, budget) <= min(spent * 1.001, budget)


def test_a_budget_that_was_broken_is_not_hidden():
    assert shown_epsilon(2.00001, budget=2.0) == 2.001
