"""Progress of a run in the terminal: first the plan, then a live line, finally results and where to find them."""

import atexit
import math
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import rich.progress
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column as Heading

from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.run import Run
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.reporting import terminal
from dpfl_lightning.runtime.text import duration

_LINE_SECONDS = 10.0  # a log gets a line for an evaluated round at most this often
_BESIDE = 30  # characters of a short bar, the time that is left and the space between
_SILENCE_SECONDS = 60.0  # a log gets a line at least this often, even if no round is evaluated
#: full: plan, rounds and summary; short: a line for each, as for one of several runs; quiet: the final result only;
#: silent: only why a run stopped
Detail = Literal["full", "short", "quiet", "silent"]


class Progress(Callback):
    """Prints the plan, one live line (plain lines if the output is not a terminal), and a summary.

    A log gets a line for the first and the last round, and between them at most one in (estimated) ten seconds.

    Args:
        next_steps: lines at the end of the summary, such as how to open the tracking page.
        detail: "short" prints one line before and one after the rounds; "quiet" prints only the result, the guarantee
            and the output folder; "silent" prints only why a run stopped.

    **Privacy** Shows public facts, the schedule, and accuracies on held-out records, which no guarantee covers.
    """

    def __init__(self, console: Console | None = None, next_steps: Sequence[str] = (), detail: Detail = "full") -> None:
        self.console = Console() if console is None else console
        self.detail = detail
        self.next_steps = tuple(next_steps)
        self._bar: rich.progress.Progress | None = None
        self._score = ""
        self._printed_at = -math.inf  # when the last plain line was written

    def on_fit_start(self, view: View) -> None:
        self._begun, self._first = time.monotonic(), view.run.first_round
        run = Run.begun(view)
        if self.detail == "full":
            headline, *lines = terminal.plan_lines(run)
            self._print(headline, style="bold" if lines else None)
            self._print_each(lines)
            if lines:
                terminal.print_table(terminal.plan_columns(run), self.console)
                self._print_each(view.run.strategy_notes)
        if self.detail in ("full", "short") and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._start_bar(run)

    def on_round_end(self, view: View, report: RoundReport) -> None:
        if self.detail in ("quiet", "silent"):
            return
        run, info, last = Run.after(view, report), view.run, report.curves
        done, left = report.round - self._first + 1, info.rounds - report.round
        estimate = info.estimated_seconds / (info.rounds - self._first + 1)  # seconds of a round, from random data
        seconds_left = left * ((time.monotonic() - self._begun) / done if info.exact_times else estimate)
        score = terminal.score_words(run, last)
        if self._bar is not None:
            self._score = score or self._score  # in a round without evaluation, the last score stays
            speed = terminal.speed_words(run, last).replace("records", "rec")
            parts = [self._score, terminal.epsilon_words(run, last), terminal.gradient_words(run, last), speed]
            words = self._fitting([part for part in parts if part], info.rounds)
            self._bar.update(self._task, completed=report.round, words=words, ends=time.monotonic() + seconds_left)
            return
        # Which rounds get a line must not show how long a round took: without exact times the estimate is the clock.
        known = estimate if math.isfinite(estimate) else 20 * _LINE_SECONDS / info.rounds
        now = time.monotonic() if info.exact_times else report.round * known
        if now - self._printed_at >= (_LINE_SECONDS if score else _SILENCE_SECONDS) or not left:
            self._printed_at = now
            ends = f"{duration(seconds_left)} left" if math.isfinite(seconds_left) else ""
            self._print(terminal.round_words(run, last, ends))

    def on_fit_end(self, view: View, result: RunResult) -> None:
        self._stop_bar()
        run = Run.ended(view, result)
        if run.result is None:
            self._print(terminal.verdict_words(run), style="bold yellow")
            return
        if self.detail == "silent":
            return
        if self.detail == "full":
            terminal.print_table(terminal.end_columns(run), self.console)
        self._print(terminal.verdict_words(run), style="bold")
        self._print_each(terminal.result_lines(run))
        if self.detail == "short":
            return
        if self.detail == "full":
            self._print_each(terminal.detail_lines(run))
        self._print_each(terminal.guarantee_lines(run))
        if self.detail == "quiet":
            self._print(f"Output folder: {run.folder}")
        else:
            self._print_each(terminal.next_lines(run, self.next_steps))

    def _print_each(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._print(line)

    def _print(self, text: str, style: str | None = None) -> None:
        terminal.print_line(f"  {text}" if self.detail == "short" else text, self.console, style)

    def _start_bar(self, run: Run) -> None:
        columns = (
            rich.progress.TextColumn("round {task.completed:.0f}/{task.total:.0f}", table_column=Heading(no_wrap=True)),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.fields[words]}", markup=False, table_column=Heading(no_wrap=True)),
            _TimeLeft(table_column=Heading(no_wrap=True)),
        )
        self._bar = _Line(*columns, console=self.console, refresh_per_second=2, expand=True, transient=True)
        info, ends = run.info, self._begun + run.info.estimated_seconds
        self._task = self._bar.add_task("", total=info.rounds, completed=info.first_round - 1, words="", ends=ends)
        atexit.register(self._stop_bar)  # shows the cursor again after a second Ctrl-C while the run is ending
        self._bar.start()

    def _fitting(self, parts: Sequence[str], rounds: int) -> str:
        """Return as many of the parts as fit beside the round, the bar and the time that is left."""
        room = self.console.width - len(f"round {rounds}/{rounds}") - _BESIDE
        fitting = [n for n in range(1, len(parts) + 1) if len(" ".join(parts[:n])) <= room]
        return " ".join(parts[: max(fitting, default=1)])[: max(room, 0)]

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            atexit.unregister(self._stop_bar)


class _Line(rich.progress.Progress):
    """Stays narrower than the terminal, which prints `^C` after the line; a line that wraps could not be erased."""

    def get_renderable(self) -> RenderableType:
        return _Shortened(super().get_renderable())


class _Shortened(NamedTuple):
    line: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return console.render(self.line, options.update_width(options.max_width - len("^C^C")))


class _TimeLeft(rich.progress.ProgressColumn):
    max_refresh = 0.5

    def render(self, task: rich.progress.Task) -> str:
        seconds = task.fields["ends"] - time.monotonic()
        return f"{duration(max(seconds, 0.0))} left" if math.isfinite(seconds) else ""
