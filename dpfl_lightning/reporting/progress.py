"""Progress of a run in the terminal: first the plan, then a live line, finally results and where to find them."""

import atexit
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import rich.progress
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Column as Heading
from rich.table import Table

from dpfl_lightning.federated.messages.evaluation import Diagnostics
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.scores import (
    Column,
    Rows,
    bound,
    client_columns,
    in_words,
    listed,
    remarks,
    rows_of,
    scores_of,
    summarised,
)
from dpfl_lightning.federated.server.summary import noise_multiplier
from dpfl_lightning.federated.server.traffic import BYTES
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.reporting.description import NO_PRIVACY, assumptions
from dpfl_lightning.reporting.products import products_in
from dpfl_lightning.runtime.files import SUFFIX
from dpfl_lightning.runtime.launcher import invocation
from dpfl_lightning.runtime.text import at_most, counted, data_size, duration

_MOST_ROWS = 30  # more clients than this are summarised by smallest, median and largest
_LINE_SECONDS = 10.0  # a log gets a line for an evaluated round at most this often
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
        if self.detail == "full":
            self._introduce(view)
        if self.detail in ("full", "short") and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._start_bar(view)

    def _introduce(self, view: View) -> None:
        run = view.run
        if run.first_round > run.rounds:
            done = f"All {run.rounds} rounds are" if run.rounds > 1 else "The one round is"
            self._print(f"{done} done: nothing to resume.")
            return
        self._print(
            f"{counted(view.facts.num_clients, 'client')}, {counted(run.rounds, 'round')}, "
            f"{counted(run.num_params, 'model parameter')}, engine {run.engine}, device {run.device}, "
            f"estimated time: {duration(run.estimated_seconds)}",
            style="bold",
        )
        if run.task:
            self._print(f"Task: {run.task}")
        named = {"unit": "per ", "delta": "delta ", "noise": "noise "}
        self._print(f"Guarantee: {'; '.join(named.get(key, '') + words for key, words in assumptions(view).items())}")
        if run.account:
            self._print(run.account)
        self._print(f"Output folder: {run.output_dir}")
        if run.first_round > 1:
            self._print(f"Resuming at round {run.first_round} of {run.rounds}.")
        print_table(_plan_columns(view), self.console)
        for words in run.strategy_notes:
            self._print(words)

    def on_round_end(self, view: View, report: RoundReport) -> None:
        if self.detail in ("quiet", "silent"):
            return
        done, left = report.round - self._first + 1, report.rounds - report.round
        run = view.run
        estimate = run.estimated_seconds / (run.rounds - self._first + 1)  # seconds of a round, from random data
        seconds_left = left * ((time.monotonic() - self._begun) / done if run.exact_times else estimate)
        score = listed(scores_of(vars(report), "test_"))
        largest = max(report.epsilon_spent)
        epsilon = f"max epsilon {at_most(largest)}" if math.isfinite(largest) else "no bound on epsilon"
        epsilon += f" per {view.facts.unit}" * view.facts.unit.is_group + " (simulated)" * run.simulated
        units = f"{view.facts.unit}s"
        speed = "" if report.seconds is None else f"{report.records / max(report.seconds, 1e-9):,.0f} {units}/s"
        gradients = _gradients(report.diagnostics)
        if self._bar is not None:
            self._score = score or self._score  # in a round without evaluation, the last score stays
            words = " ".join(filter(None, [self._score, epsilon, gradients, speed.replace("records", "rec")]))
            self._bar.update(self._task, completed=report.round, words=words, ends=time.monotonic() + seconds_left)
            return
        evaluated = report.client_accuracy is not None or report.test_loss is not None
        # Which rounds get a line must not show how long a round took: without exact times the estimate is the clock.
        known = estimate if math.isfinite(estimate) else 20 * _LINE_SECONDS / report.rounds
        now = time.monotonic() if run.exact_times else report.round * known
        if now - self._printed_at >= (_LINE_SECONDS if evaluated else _SILENCE_SECONDS) or not left:
            self._printed_at = now
            progress = f"round {report.round:{len(str(report.rounds))}}/{report.rounds}"
            present, everyone = len(report.participants), view.facts.num_clients
            clients = "" if present == everyone else f"{present} of {everyone} clients"
            ends = f"{duration(seconds_left)} left" if math.isfinite(seconds_left) else ""
            parts = [progress, score, epsilon, gradients, speed, clients, ends]
            self._print(" | ".join(filter(None, parts)))

    def on_fit_end(self, view: View, result: RunResult) -> None:
        self._stop_bar()
        if not result.finished:
            words = f"Stopped after round {result.rounds} of {view.run.rounds}: {result.reason}"
            self._print(words, style="bold yellow")
            return
        if self.detail == "silent":
            return
        if self.detail == "full":
            columns, planned = (
                client_columns([vars(result)]),
                (f"{view.facts.unit}s", "delta"),
            )  # which were shown before
            print_table({name: column for name, column in columns.items() if name not in planned}, self.console)
        self._print(
            f"{in_words(vars(result)) or 'Not evaluated'} after {counted(result.rounds, 'round')} in "
            f"{_times(view, result)}; {result.reason}.",
            style="bold",
        )
        for line in remarks([vars(result)]):
            self._print(line)
        if self.detail == "short":
            return
        for line in filter(None, (_sent(result), _groups(result)) if self.detail == "full" else ()):
            self._print(line)
        words = result.guarantee.words() if view.schedule.has_noise else NO_PRIVACY
        self._print(f"Guarantee: {words}")
        self._print(f"Not covered: {counted(len(result.guarantee.not_covered), 'point')}, listed in guarantee.html.")
        if self.detail == "quiet":
            self._print(f"Output folder: {result.output_dir}")
            return
        folder = Path(result.output_dir)
        self._print(f"Where to look next, in {folder}:")
        for line in _files(folder):
            self._print(f"  {line}")
        self._print("Next commands:")
        for line in (*_commands(folder, view), *self.next_steps):
            self._print(f"  {line}")

    def _print(self, text: str, style: str | None = None) -> None:
        """Print one line. A log file gets it without line breaks and at once."""
        text = f"  {text}" if self.detail == "short" else text
        soft_wrap = not self.console.is_terminal
        self.console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=soft_wrap)
        self.console.file.flush()

    def _start_bar(self, view: View) -> None:
        columns = (
            rich.progress.TextColumn("round {task.completed:.0f}/{task.total:.0f}", table_column=Heading(no_wrap=True)),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.fields[words]}", markup=False, table_column=Heading(no_wrap=True)),
            _TimeLeft(table_column=Heading(no_wrap=True)),
        )
        self._bar = _Line(*columns, console=self.console, refresh_per_second=2, expand=True, transient=True)
        run, ends = view.run, self._begun + view.run.estimated_seconds
        self._task = self._bar.add_task("", total=run.rounds, completed=run.first_round - 1, words="", ends=ends)
        atexit.register(self._stop_bar)  # shows the cursor again after a second Ctrl-C while the run is ending
        self._bar.start()

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


def print_table(columns: Mapping[str, Column], console: Console | None = None) -> None:
    """Print one row for each client, or smallest, median and largest value of many."""
    console, count = Console() if console is None else console, len(next(iter(columns.values())).values)
    print_rows(summarised(columns) if count > _MOST_ROWS else rows_of(columns), console)
    if count > _MOST_ROWS:
        console.print(f"Each column is summarised separately, over {count} clients.\n", highlight=False)


def print_rows(rows: Rows, console: Console | None = None) -> None:
    """Print a table."""
    console = Console() if console is None else console
    # heads wrap between words, numbers are never cut, and the names of clients get the remaining width
    widths = [max(len(word) for word in (*head.split(), *(row[head] for row in rows))) for head in rows[0]]
    gaps = 2 * len(widths) - 1  # between columns, and after the last
    widths[0] = min(widths[0], max(10, console.width - sum(widths[1:]) - gaps))
    heads = [
        Heading(head, justify="right", min_width=width, max_width=None if number else width, no_wrap=not number)
        for number, (head, width) in enumerate(zip(rows[0], widths, strict=True))
    ]
    table = Table(*heads, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(escape, row.values()))
    console.print()
    console.print(table, width=max(console.width, sum(widths) + gaps), crop=False, soft_wrap=True)
    console.print()


def _plan_columns(view: View) -> dict[str, Column]:
    schedules, records = view.schedule.clients, view.facts.num_records
    batches = [schedule.batch_size(n) for schedule, n in zip(schedules, records, strict=True)]
    columns = {
        "client": Column([view.facts.name_of(client) for client in range(len(records))]),
        f"{view.facts.unit}s": Column(records, "{:,}".format),
        "batch size": Column(batches, "{:,}".format),
        "steps a round": Column([schedule.main.steps for schedule in schedules], "{:,}".format),
    }
    if view.schedule.has_noise:
        planned = [schedule.target_epsilon for schedule in schedules]
        columns["budget"] = Column(view.run.budgets, bound)
        if planned != list(view.run.budgets):
            columns["planned"] = Column(planned, bound)
        columns["delta"] = Column([schedule.delta for schedule in schedules], at_most)
        noise = [noise_multiplier(schedule) for schedule in schedules]
        columns["noise multiplier"] = Column(noise, "{:.5g}".format)
    return columns


def _gradients(diagnostics: Diagnostics | None) -> str:
    known = [] if diagnostics is None else [fraction for fraction in diagnostics.clip_fraction if fraction is not None]
    if diagnostics is None or not known:
        return ""
    return f"{min(known):.0%} to {max(known):.0%} clipped, {sum(diagnostics.not_finite)} not finite"


def _groups(result: RunResult) -> str:
    """Describe the accuracy of true groups and how well clusters match them; empty if the groups are not known."""
    accuracy, matched = result.accuracy_of_groups, result.metrics.get("clustering_accuracy")
    if not accuracy:
        return ""
    named = [f"{name} {accuracy[name]:.1%}" for name in ("majority", "minority") if name in accuracy]
    groups = ", ".join(named) or f"{min(accuracy.values()):.1%} to {max(accuracy.values()):.1%}"
    clusters = f"; {matched:.0%} of clients in the right cluster" if isinstance(matched, float) else ""
    clients = f"worst client {result.accuracy_worst:.1%}, best - worst {result.accuracy_gap:.1%}"
    return f"Groups: accuracy {groups}; {clients}{clusters}."


def _times(view: View, result: RunResult) -> str:
    if not view.run.exact_times:
        return f"at most {duration(result.wall_seconds)}"
    training = (
        f"{duration(result.training_seconds)} of it in rounds ({result.records_per_second:,.0f} {view.facts.unit}s/s)"
    )
    return f"{duration(result.wall_seconds)}, {training}"


def _sent(result: RunResult) -> str:
    """Describe the traffic and the time of the simulated network; empty if no round was made."""
    down, up, seconds = (result.metrics.get(name) for name in ("floats_down", "floats_up", "network_seconds"))
    if not (isinstance(down, float) and isinstance(up, float)):
        return ""
    took = f"; {duration(seconds)} on the simulated network" if isinstance(seconds, float) else ""
    return f"Sent in all rounds: {data_size(BYTES * down)} to clients, {data_size(BYTES * up)} to the server{took}."


def _files(folder: Path) -> list[str]:
    """Return what the run's folder contains."""
    models = _models(folder)
    model = f"{models[0]} to {models[-1]}" if len(models) > 1 else "".join(models)
    private = (folder / "private.json").exists()  # not at the server of nodes
    return [
        "guarantee.html: the guarantee of every client, and what it does not cover",
        "result.json: results of every client",
        *([f"{model}: the trained parameters"] if model else []),
        *(one.contents() for one in products_in(folder)),
        *(["receipts.json: how far the ledgers of nodes go, signed"] if (folder / "receipts.json").exists() else []),
        *(["private.json: how many gradients were not finite; only for the clients"] if private else []),
    ]


def _commands(folder: Path, view: View) -> list[str]:
    """Return how to go on; a run without a configuration goes on in Python."""
    first = [str(folder / one) for one in _models(folder)[:1]]
    in_python = [f"net = dpfl_lightning.load_model({one!r}, net)  (in Python)" for one in first]
    return [
        *([f"{invocation('evaluate')} {folder}: score the trained parameters"] if view.run.options else in_python),
        f"{invocation('report')} {folder}: curves and tables on one page",
        *(step for one in products_in(folder) for step in one.next_steps(folder)),
    ]


def _models(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(f"model*{SUFFIX}"))
