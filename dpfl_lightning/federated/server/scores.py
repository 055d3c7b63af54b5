"""Scores in words and tables, for the terminal, reports and MLflow: the requested metric beside its baseline.

A result is `vars` of a `RunResult`, or has its scores under the same names.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from dpfl_lightning.federated.messages.evaluation import known_values
from dpfl_lightning.models.tasks import MEASURES, Measure
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.privacy.accounting.noise_source import NoiseSource
from dpfl_lightning.runtime.text import at_most, distinct

Result = Mapping[str, Any]
Rows = list[dict[str, str]]

_MOST_NAMES = 5  # of clients in a sentence


class Column(NamedTuple):
    """A column of a table: its heading, its values, None where there is none, and how they are shown."""

    heading: str
    values: Sequence[Any]
    text: Callable[[Any], str] = str

    def cells(self) -> list[str]:
        return ["-" if value is None else self.text(value) for value in self.values]


def rows_of(columns: Sequence[Column]) -> Rows:
    """Return the rows of a table as text. Equal headings are numbered, so that no column replaces another one."""
    headings, cells = distinct([column.heading for column in columns]), [column.cells() for column in columns]
    return [dict(zip(headings, row, strict=True)) for row in zip(*cells, strict=True)]


def summarised(columns: Sequence[Column]) -> Rows:
    """Return the smallest, median and largest value of each column of numbers, separately."""
    kept = [(column, [one for one in column.values if one is not None]) for column in columns]
    numbers = [(column, known) for column, known in kept if known and not isinstance(known[0], str)]
    words = ("smallest", "median", "largest")
    picked = [
        Column(column.heading, [pick(known) for pick in (min, statistics.median_low, max)], column.text)
        for column, known in numbers
    ]
    return rows_of([Column("", words), *picked])


# ---- single scores


def measure_of(result: Result, name: str) -> Measure:
    """Return which values of a score are better, as a result says it; of an unknown score the larger ones."""
    return {**MEASURES, **(result.get("measures") or {})}.get(name, Measure())


def scores_of(result: Result, start: str = "") -> dict[str, float | None]:
    """Return the scores of a result (`start` is `test_`) or of a client by name, the headline first.

    These are the requested metrics (None: not defined) or those of the task, the accuracy and, without both, the loss.

    >>> scores_of({"accuracy": 0.5, "loss": 0.7, "metrics": {"auroc": None}})
    {'auroc': None, 'accuracy': 0.5}
    """
    accuracy, loss = result.get(f"{start}accuracy"), result.get(f"{start}loss")
    scores = {**(result.get(f"{start}metrics") or {}), **({} if accuracy is None else {"accuracy": accuracy})}
    return scores or ({} if loss is None or math.isnan(loss) else {"loss": loss})


def formatted(name: str, value: float | None) -> str:
    """Format a score.

    >>> formatted("accuracy", 0.5), formatted("mae", 0.123456), formatted("auroc", None)
    ('50.00%', '0.1235', 'undefined')
    """
    return "undefined" if value is None else f"{value:.2%}" if name == "accuracy" else f"{value:.4g}"


def spread(name: str, values: Sequence[float], seeds: int | None = None) -> str:
    """Format the mean of a score, and its standard deviation if values differ; undefined without values.

    Of fewer values than `seeds` it says how many seeds define the score.

    >>> spread("accuracy", [0.5]), spread("mae", [1.0, 2.0]), spread("f1", [0.5], 2)
    ('50.00%', '1.5 \N{PLUS-MINUS SIGN} 0.7071', '0.5 (1 of 2 seeds)')
    """
    mean = formatted(name, statistics.fmean(values) if values else None)
    deviation = f" \N{PLUS-MINUS SIGN} {formatted(name, statistics.stdev(values))}" if len(set(values)) > 1 else ""
    defined = f" ({len(values)} of {seeds} seeds)" if values and seeds is not None and len(values) < seeds else ""
    return f"{mean}{deviation}{defined}"


def listed(scores: Mapping[str, float | None]) -> str:
    """Format scores with their names."""
    return ", ".join(f"{name} {formatted(name, value)}" for name, value in scores.items())


def bound(epsilon: float | None) -> str:
    """Format an epsilon or a budget, rounded up; None and infinity are no bound."""
    return "no bound" if epsilon is None or math.isinf(epsilon) else at_most(epsilon)


def stated(guarantee: Guarantee) -> str:
    """Format an epsilon with its delta and unit, and with the badge of a simulation."""
    known = f" at delta {at_most(guarantee.delta)} per {guarantee.unit}"
    return badged(bound(guarantee.epsilon) + known * math.isfinite(guarantee.epsilon), guarantee.source)


def badged(epsilon: str, source: NoiseSource) -> str:
    """Return an epsilon in words with what every mention of it must carry."""
    return f"{epsilon} ({source.badge})" if source.badge else epsilon


def number(epsilon: float | None) -> float:
    """Return an epsilon or a budget as a number; None is infinite."""
    return math.inf if epsilon is None else epsilon


# ---- results in words


def headline(results: Sequence[Result]) -> str:
    """Return the name of the score that stands for results: the first one that one of them defines."""
    return _first([scores_of(result, "test_") for result in results])


def client_scores(results: Sequence[Result]) -> tuple[str, list[list[float]]]:
    """Return the one score that stands for clients on held-out records, and its values in each result.

    A result that does not define the score has no values of it. The name is empty if no score is known.
    """
    rows = [[scores_of(client) for client in result["clients"]] for result in results]
    name = _first([one for of_result in rows for one in of_result])
    values = [[value for one in of_result if (value := one.get(name)) is not None] for of_result in rows]
    return (name, values) if any(values) else ("", values)


def _first(rows: Sequence[Mapping[str, float | None]]) -> str:
    """Return the first score that has a value, or else the first one; empty without scores."""
    known = known_values(rows)
    return next((name for name, values in known.items() if values), next(iter(known), ""))


def with_baseline(result: Result) -> str:
    """Return the test scores, each with its baseline on the same records; empty if nothing was scored."""
    scores, baseline = scores_of(result, "test_"), result.get("baseline") or {}
    beside = {
        name: f" ({measure_of(result, name).constant} {formatted(name, one)})"
        for name, one in baseline.items()
        if one is not None
    }
    return ", ".join(f"{name} {formatted(name, value)}{beside.get(name, '')}" for name, value in scores.items())


def in_words(result: Result) -> str:
    """Return the test scores with their baselines, and on which records they are; empty if nothing was scored."""
    where, scores = "Test " if result["test_set"] else "Mean over clients on held-out records: ", with_baseline(result)
    return f"{where}{scores}" if scores else ""


def remarks(results: Sequence[Result]) -> list[str]:
    """Return sentences on what the scores do not show: those that are no better than a constant prediction, what
    strategies say, scores that the records do not define, and those that real sites would keep to themselves.

    The accuracy is judged only where no other score has a baseline: a useful model for rare events is no more accurate.
    """
    columns, low = known_values([scores_of(one, "test_") for one in results]), []
    constants = known_values([one.get("baseline") or {} for one in results])
    measures = {name: measure_of(results[0], name) for name in constants}
    judged = [
        name for name, values in constants.items() if measures[name].target is None and values and columns.get(name)
    ]
    for name in [one for one in judged if one != "accuracy"] or judged:
        value, constant = statistics.fmean(columns[name]), statistics.fmean(constants[name])
        gain = measures[name].merit(value) - measures[name].merit(constant)
        if gain <= 1e-9 * abs(constant):  # means of equal scores differ by rounding
            low.append(f"{name} {formatted(name, value)} ({measures[name].constant} {formatted(name, constant)})")
    sentences = [f"No better than the baseline: {', '.join(low)}."] if low else []
    sentences += dict.fromkeys(words for result in results for words in result.get("remarks") or ())
    undefined: dict[str, dict[str, None]] = {}  # what to say -> of which clients
    for result in results:
        for metric, words in (result.get("undefined") or {}).items():
            undefined[f"{metric}: the test records {words}."] = {}
        for client in result["clients"]:
            for metric, words in (client.get("undefined") or {}).items():
                sentence = f"{metric}: the held-out records of {{}} {words}."
                undefined.setdefault(sentence, {})[str(client["name"])] = None
    if client_scores(results)[0]:
        sentences.append("Scores of clients on held-out records are shown by simulations only: real sites keep theirs.")
    return sentences + [sentence.format(_listed(list(clients))) for sentence, clients in undefined.items()]


def _listed(names: list[str]) -> str:
    more = [f"{len(names) - _MOST_NAMES} more clients"] * (len(names) > _MOST_NAMES)
    *some, last = [*names[:_MOST_NAMES], *more] or [""]
    return f"{', '.join(some)} and {last}" if some else last


def title(score: str, held_out: bool) -> str:
    """Return the title of a column or of a chart of test scores."""
    words = score.replace("_", " ")
    return f"{words} on held-out records" if held_out else f"test {words}"


# ---- rows of runs and clients


def score_cells(results: Sequence[Result]) -> dict[str, str]:
    """Return the scores of a run, or of one run for several seeds, by title; the baseline follows the headline."""
    name, baselines = headline(results), known_values([one.get("baseline") or {} for one in results])
    held_out = bool(results) and not any(one["test_set"] for one in results)
    cells: dict[str, str] = {}
    for score, values in known_values([scores_of(one, "test_") for one in results]).items():
        cells[title(score, held_out)] = spread(score, values, len(results))
        if score == name and baselines.get(score):
            cells[f"baseline of {title(score, held_out)}"] = spread(score, baselines[score], len(results))
    return cells


def seed_rows(seeds: Sequence[int], results: Sequence[Result], together: str) -> Rows:
    """Return a row for each seed, and one for all, whose largest epsilon `together` is that of all runs composed."""
    each = [
        {"seed": str(seed), **score_cells([one]), "largest epsilon": stated(one["guarantee"])}
        for seed, one in zip(seeds, results, strict=True)
    ]
    return aligned([*each, {"seed": "all", **score_cells(results), "largest epsilon": together}])


def aligned(rows: Rows) -> Rows:
    """Give all rows the same columns, without those that are empty; a cell that a row does not have is empty."""
    filled = {name for row in rows for name, cell in row.items() if cell}
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name in filled]
    return [{name: row.get(name, "") for name in columns} for row in rows]


def client_columns(results: Sequence[Result], planned: bool = True) -> list[Column]:
    """Return the columns of the table of clients; over seeds, the largest epsilon and the mean of each score.

    Without those of the table of `planned` clients that are fixed before a run: numbers of units, and delta.
    """
    clients = list(zip(*(result["clients"] for result in results), strict=False))  # of each client, a row for each seed
    first = [rows[0] for rows in clients]
    spent = [max(number(row["epsilon_spent"]) for row in rows) for rows in clients]
    units = Column(f"{results[0]['guarantee'].unit}s", [row["num_records"] for row in first], "{:,}".format)
    private = [
        Column("noise multiplier", [row["noise_multiplier"] for row in first], "{:.5g}".format),
        Column("epsilon spent", spent, bound),
        Column("budget", [number(row["epsilon_budget"]) for row in first], bound),
        *([Column("delta", [row["delta"] for row in first], at_most)] if planned else []),
    ]
    return [
        Column("client", [str(row["name"]) for row in first]),
        *([units] if planned else []),
        Column("batch size", [row["batch_size"] for row in first], "{:,}".format),
        *(private if any(row["noise_multiplier"] for row in first) else []),
        *score_columns(clients),
        *_released_columns(results),
    ]


def _released_columns(results: Sequence[Result]) -> list[Column]:
    """Return the columns of scores that clients have released with noise: the mean over seeds, and the noise of one."""
    columns: list[Column] = []
    metrics = [result.get("metrics") or {} for result in results]
    for curve in metrics[0]:
        name = curve.removeprefix("released_")
        if name == curve or not all(curve in one for one in metrics):
            continue
        values = zip(*(one[curve] for one in metrics), strict=True)
        noise = metrics[0].get(f"noise_of_{name}") or ()
        rows = [
            None
            if None in known
            else f"{formatted(name, statistics.fmean(known))} \N{PLUS-MINUS SIGN} {formatted(name, std)}"
            for known, std in zip(values, noise, strict=True)
        ]
        columns.append(Column(f"{name.replace('_', ' ')} released", rows))
    return columns


def score_columns(clients: Sequence[Sequence[Result]]) -> list[Column]:
    """Return the columns of the scores of clients, each with a row for each seed."""
    known = [known_values([scores_of(row) for row in rows]) for rows in clients]
    names = dict.fromkeys(name for of_client in known for name, values in of_client.items() if values)
    return [Column(name, [one.get(name) or None for one in known], partial(spread, name)) for name in names]
