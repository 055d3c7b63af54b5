"""What a terminal shows of a run: functions of the `Run`, the same while it goes on and from its files afterwards."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column as Heading
from rich.table import Table

from dpfl_lightning.federated.server.curves import score_curves
from dpfl_lightning.federated.server.history import Round
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.run import Run
from dpfl_lightning.federated.server.scores import (
    Column,
    Rows,
    bound,
    client_columns,
    formatted,
    in_words,
    listed,
    remarks,
    rows_of,
    scores_of,
    summarised,
)
from dpfl_lightning.federated.server.traffic import BYTES
from dpfl_lightning.models.tasks import MEASURES
from dpfl_lightning.privacy.accounting.units import RECORD
from dpfl_lightning.reporting.products import products_in
from dpfl_lightning.runtime.files import SUFFIX
from dpfl_lightning.runtime.launcher import invocation
from dpfl_lightning.runtime.text import at_most, counted, data_size, duration

_MOST_ROWS = 30  # more clients than this are summarised by smallest, median and largest
_NAMED = {"unit": "per ", "delta": "delta ", "noise": "noise "}  # what stands before an assumption
Columns = list[Column]


# ---- before the first round


def plan_lines(run: Run) -> list[str]:
    """Return what is said before the table of clients; the first line is the headline."""
    info = run.info
    if info.first_round > info.rounds:
        done = f"All {info.rounds} rounds are" if info.rounds > 1 else "The one round is"
        return [f"{done} done: nothing to resume."]
    assert info.clients is not None, "the run is planned"
    headline = (
        f"{counted(len(info.clients.name), 'client')}, {counted(info.rounds, 'round')}, "
        f"{counted(info.num_params, 'model parameter')}, engine {info.engine}, device {info.device}, "
        f"estimated time: {duration(info.estimated_seconds)}"
    )
    assumed = "; ".join(_NAMED.get(key, "") + words for key, words in info.assumptions.items())
    lines = [
        headline,
        f"Task: {info.task}" * bool(info.task),
        f"Guarantee: {assumed}",
        info.account,
        f"Output folder: {info.output_dir}",
        f"Resuming at round {info.first_round} of {info.rounds}." * (info.first_round > 1),
    ]
    return [line for line in lines if line]


def plan_columns(run: Run) -> Columns:
    """Return the table of what is planned for each client."""
    clients = run.info.clients
    assert clients is not None, "the run is planned"
    private = [
        Column("budget", clients.budget, bound),
        *([Column("planned", clients.planned, bound)] if clients.planned != clients.budget else []),
        Column("delta", clients.delta, at_most),
        Column("noise multiplier", clients.noise_multiplier, "{:.5g}".format),
    ]
    return [
        Column("client", clients.name),
        Column(f"{run.info.unit}s", clients.num_records, "{:,}".format),
        Column("batch size", clients.batch_size, "{:,}".format),
        Column("steps a round", clients.steps, "{:,}".format),
        *(private if run.info.has_noise else []),
    ]


# ---- after a round


def score_words(run: Run, last: Round) -> str:
    """Return the scores of a round on the test set, or else on held-out records; empty without an evaluation."""
    curves = score_curves(last.values, run.info.measures)
    known = {score: last.values[curve] for score, curve in curves.items()}
    if all(value is None for value in known.values()):
        return ""
    metrics = {score: value for score, value in known.items() if score not in MEASURES}
    return listed(scores_of({"metrics": metrics, "accuracy": known.get("accuracy"), "loss": known.get("loss")}))


def epsilon_words(run: Run, last: Round) -> str:
    """Return the largest epsilon that was spent so far."""
    largest = last.values.get("train_epsilon_max")
    words = "no bound on epsilon" if largest is None else f"max epsilon {at_most(largest)}"
    return (
        words
        + f" per {run.info.unit}" * (run.info.unit != RECORD.name)
        + (f" ({label})" if (label := run.info.source.label) else "")
    )


def speed_words(run: Run, last: Round) -> str:
    """Return how many records were processed in a second, where times are shown."""
    speed = last.values.get("train_records_per_second")
    return "" if speed is None else f"{speed:,.0f} {run.info.unit}s/s"


def gradient_words(run: Run, last: Round) -> str:
    """Return which part of the gradients was clipped, and how many were not finite, where that is shown."""
    least, most = (last.values.get(f"train_clip_fraction_{end}") for end in ("min", "max"))
    if least is None or most is None:
        return ""
    broken = (last.values.get("train_gradients_not_finite_mean") or 0.0) * _num_clients(run)
    return f"{least:.0%} to {most:.0%} clipped, {broken:.0f} not finite"


def round_words(run: Run, last: Round, left: str) -> str:
    """Return the line of a round; `left` is the time that the others take, in words."""
    present, everyone = last.values.get("train_participants") or 0, _num_clients(run)
    parts = [
        f"round {last.round:{len(str(run.info.rounds))}}/{run.info.rounds}",
        score_words(run, last),
        epsilon_words(run, last),
        gradient_words(run, last),
        speed_words(run, last),
        "" if present == everyone else f"{present:.0f} of {everyone} clients",
        left,
    ]
    return " | ".join(filter(None, parts))


def _num_clients(run: Run) -> int:
    return 0 if run.info.clients is None else len(run.info.clients.name)


# ---- after the last round


def end_columns(run: Run) -> Columns:
    """Return the table of what each client of a finished run has spent, and of its scores."""
    assert run.result is not None, "the run has finished"
    return client_columns([vars(run.result)], planned=False)


def verdict_words(run: Run) -> str:
    """Return how a run ended: a finished one with its scores and times."""
    if run.result is None:
        return run.ending
    scores = in_words(vars(run.result)) or "Not evaluated"
    return f"{scores} after {counted(run.done, 'round')} in {_times(run, run.result)}; {run.ending}."


def result_lines(run: Run) -> list[str]:
    """Return what is remarkable about a result: baselines, undefined scores, and what strategies say."""
    return [] if run.result is None else remarks([vars(run.result)])


def detail_lines(run: Run) -> list[str]:
    """Return the traffic of a finished run, and the accuracy of true groups."""
    return [] if run.result is None else [line for line in (_sent(run.result), _groups(run.result)) if line]


def guarantee_lines(run: Run) -> list[str]:
    """Return the guarantee of a finished run."""
    assert run.result is not None, "the run has finished"
    guarantee = run.result.guarantee
    return [
        f"Guarantee: {guarantee.words()}",
        f"Not covered: {counted(len(guarantee.not_covered), 'point')}, listed in guarantee.html.",
    ]


def next_lines(run: Run, next_steps: Sequence[str] = ()) -> list[str]:
    """Return what the folder of a finished run holds, and which commands go on from there."""
    return [
        f"Where to look next, in {run.folder}:",
        *(f"  {line}" for line in _files(run.folder)),
        "Next commands:",
        *(f"  {line}" for line in (*_commands(run), *next_steps)),
    ]


def print_ended(run: Run, console: Console | None = None) -> None:
    """Print how a run ended, as `fit` does."""
    console = Console() if console is None else console
    if run.result is not None:
        print_table(end_columns(run), console)
    lines = [*result_lines(run), *detail_lines(run), *(guarantee_lines(run) if run.result is not None else ())]
    print_line(verdict_words(run), console, "bold")
    for line in lines:
        print_line(line, console)


def print_line(text: str, console: Console, style: str | None = None) -> None:
    """Print one line. A log file gets it without line breaks and at once."""
    soft_wrap = not console.is_terminal
    console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=soft_wrap)
    console.file.flush()


def _groups(result: RunResult) -> str:
    """Describe the accuracy of true groups and how well clusters match them; empty if the groups are not known."""
    accuracy, matched = result.accuracy_of_groups, result.metrics.get("clustering_accuracy")
    if not accuracy:
        return ""
    named = [f"{name} {accuracy[name]:.1%}" for name in ("majority", "minority") if name in accuracy]
    groups = ", ".join(named) or f"{min(accuracy.values()):.1%} to {max(accuracy.values()):.1%}"
    clusters = f"; {matched:.0%} of clients in the right cluster" if isinstance(matched, float) else ""
    worst, gap = (formatted(result.headline, one) for one in (result.headline_worst, result.headline_gap))
    clients = f"worst client {result.headline} {worst}, best - worst {gap}"
    gaps = f"; {listed(result.fairness)}" if result.fairness else ""
    return f"Groups: accuracy {groups}; {clients}{clusters}{gaps}."


def _times(run: Run, result: RunResult) -> str:
    if not run.info.exact_times:
        return f"at most {duration(result.wall_seconds)}"
    speed = f"{result.records_per_second:,.0f} {run.info.unit}s/s"
    training = f"{duration(result.training_seconds)} of it in rounds ({speed})"
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
        "guarantee.html: what is promised to every client, and what is not",
        "result.json: results of every client",
        *([f"{model}: the trained parameters"] if model else []),
        *(one.contents() for one in products_in(folder)),
        *(["receipts.json: how far the ledgers of nodes go, signed"] if (folder / "receipts.json").exists() else []),
        *(["private.json: how many gradients were not finite; only for the clients"] if private else []),
    ]


def _commands(run: Run) -> list[str]:
    """Return how to go on; a run without a configuration goes on in Python."""
    folder = run.folder
    first = [str(folder / one) for one in _models(folder)[:1]]
    in_python = [f"net = dpfl_lightning.load_model({one!r}, net)  (in Python)" for one in first]
    return [
        *([f"{invocation('evaluate')} {folder}: score the trained parameters"] if run.info.options else in_python),
        f"{invocation('report')} {folder}: curves and tables on one page",
        *(step for one in products_in(folder) for step in one.next_steps(folder)),
    ]


def _models(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(f"model*{SUFFIX}"))


# ---- tables


def print_table(columns: Sequence[Column], console: Console | None = None) -> None:
    """Print one row for each client, or smallest, median and largest value of many."""
    console, count = Console() if console is None else console, len(columns[0].values)
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
