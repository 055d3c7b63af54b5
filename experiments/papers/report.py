"""The table of an experiment with our numbers and the paper's, from finished cells."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from textwrap import shorten
from typing import Any, NamedTuple

from experiments.pages import markdown, written
from experiments.papers.cells import Overrides, finished, missing_cells, required_cells
from experiments.papers.experiment import Cells, Experiment, Tolerance
from experiments.papers.registry import experiments
from experiments.papers.run import seconds_of

_MOST_NAMED = 8  # rows and columns without finished cells

#: kinds of numbers that differ from the paper's by more than the tolerance
_BETTER, _WORSE = (f"Failed reproductions, {how} than the paper's" for how in ("better", "worse"))


class Number(NamedTuple):
    """One number of a table: the mean of ours over seeds, and the paper's; None if there is none."""

    row: str
    column: str
    ours: float | None
    std: float | None
    seeds: int
    paper: float | None
    difference: float | None
    within: bool | None


def numbers(experiment: Experiment, cells: Cells) -> list[Number]:
    """Every number of a table, row by row."""
    places = itertools.product(experiment.rows, experiment.columns)
    return [_number(experiment, row, column, cells.get((row, column), ())) for row, column in places]


def _number(experiment: Experiment, row: str, column: str, runs: Sequence[Mapping[str, Any]]) -> Number:
    name, paper, comparison = experiment.rows[row].value, experiment.paper_number(row, column), experiment.comparison
    values = [run["values"][name] for run in runs if name in run["values"]]
    ours, std = fmean(values) if values else None, stdev(values) if len(values) > 1 else None
    difference = within = None
    if comparison is not None and paper is not None and ours is not None:
        difference = comparison.difference(ours, paper)
        if comparison.of(row, column).within is not None:
            within = comparison.holds(row, column, ours, paper)
    return Number(row, column, ours, std, len(values), paper, difference, within)


def report(experiment: Experiment, scale: str, results: Path, overrides: Overrides = ()) -> str:
    """The table as Markdown, with a verdict and notes."""
    cells = finished(results, experiment, scale, overrides)
    table = numbers(experiment, cells)
    changes = [f"with {key} {text}" for key, text in overrides]
    frame = "; ".join([f"scale {scale}: {experiment.scales[scale]}", *changes])
    parts = [f"**{experiment.name}** {experiment.title}: {experiment.shows} ({frame})."]
    begun = any(number.ours is not None for number in table)
    if begun:
        untuned = _in_words_not_tuned(experiment, scale, results, overrides)
        parts += [_table(experiment, table), untuned or _verdict(experiment, table), *_paired(experiment, cells)]
    if experiment.summary is not None:
        parts.append(experiment.summary(experiment, cells))
    required = required_cells(experiment, scale, overrides)
    if left := missing_cells(required, results):
        made = f"{len(required) - len(left)} of {len(required)} cells are made."
        parts.append(made + _not_begun(experiment, table) * begun)
    if begun and any(number.std is not None for number in table):
        parts.append("± is the standard error of the mean over seeds.")
    parts += [_accountants(cells), *experiment.notes]
    return "\n\n".join(filter(None, parts))


def _accountants(cells: Cells) -> str:
    """Which accountants computed the epsilons of these runs."""
    names = {run["accountant"] for runs in cells.values() for run in runs if run.get("accountant")}
    return f"Epsilons were computed by {' or by '.join(sorted(names))}." if names else ""


def _table(experiment: Experiment, table: Sequence[Number]) -> str:
    """For each row a line of ours, the paper's and the difference; without empty rows and columns."""
    rows, columns = _begun(table)
    lines, decimals = [], experiment.decimals
    for row in (name for name in experiment.rows if name in rows):
        line = [number for number in table if number.row == row and number.column in columns]
        errors = [None if n.std is None else n.std / math.sqrt(n.seeds) for n in line]
        stds = ["" if error is None else f" ± {error:.{decimals}f}" for error in errors]
        ours = [_shown(number.ours, decimals) + std for number, std in zip(line, stds, strict=True)]
        lines.append([experiment.rows[row].title, *ours])
        if any(number.paper is not None for number in line):
            lines.append(["the paper's", *(_shown(number.paper, min(decimals, 2)) for number in line)])
        if any(number.difference is not None for number in line):
            lines.append(["difference", *(_difference(number, experiment) for number in line)])
    return markdown(["", *(column.title for name, column in experiment.columns.items() if name in columns)], lines)


def _begun(table: Sequence[Number]) -> tuple[set[str], set[str]]:
    """Rows and columns with a finished cell."""
    made = [number for number in table if number.ours is not None]
    return {number.row for number in made}, {number.column for number in made}


def _not_begun(experiment: Experiment, table: Sequence[Number]) -> str:
    """The rows and columns that are not in the table yet."""
    rows, columns = _begun(table)
    titles = [line.title for name, line in experiment.rows.items() if name not in rows]
    titles += [column.title for name, column in experiment.columns.items() if name not in columns]
    more = [f"and {len(titles) - _MOST_NAMED} more"] if len(titles) > _MOST_NAMED else []
    return f" None yet: {'; '.join(titles[:_MOST_NAMED] + more)}." if titles else ""


def _shown(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _difference(number: Number, experiment: Experiment) -> str:
    if number.difference is None or experiment.comparison is None:
        return "-"
    digits = ".1%" if experiment.comparison.relative else f".{experiment.decimals}f"
    text = f"{number.difference:+{digits}}"
    return f"**{text}**" if number.within is False else text


def _verdict(experiment: Experiment, table: Sequence[Number]) -> str:
    """The number of cells within the tolerance, those outside or with a special tolerance, and the best rows."""
    comparison, compared = experiment.comparison, [number for number in table if number.within is not None]
    titles = {
        (number.row, number.column): f"{experiment.rows[number.row].title}, {experiment.columns[number.column].title}"
        for number in table
        if number.difference is not None
    }
    if comparison is None or not titles:
        return ""
    digits = ".0%" if comparison.relative else "g"
    near = [number for number in compared if number.within]
    within = f"are within {comparison.tolerance:{digits}} of the paper's"
    unless = ", unless said otherwise" if comparison.special else ""
    sentences = [f"{len(near)} of {len(compared)} numbers {within}{unless}."]
    beyond: dict[str, list[str]] = {_BETTER: [], _WORSE: []}
    for number in (number for number in compared if number not in near):
        better = comparison.improves(number.row, number.difference or 0.0)
        kind = _BETTER if better else _WORSE
        beyond[kind].append(titles[number.row, number.column])
    sentences += [f"{kind}: {'; '.join(places)}." for kind, places in beyond.items() if places]
    titles |= {(row, ""): experiment.rows[row].title for row, _ in titles}
    special: dict[Tolerance, list[str]] = {}
    for place, tolerance in comparison.special.items():
        if place in titles:
            special.setdefault(tolerance, []).append(titles[place])
    for tolerance, places in special.items():
        special_size = "not compared" if tolerance.within is None else f"within {tolerance.within:{digits}}"
        sentences.append(f"{'; '.join(places)}: {special_size}, because {tolerance.why}.")
    return " ".join([*sentences, *_leaders(experiment, table)])


def not_tuned(
    experiment: Experiment, scale: str, results: Path, column: str = "", overrides: Overrides = ()
) -> dict[str, list[str]]:
    """Return upper bound -> the rows above it, in one column or in all; empty if none is. There is no verdict then.

    The bounds are those of the tables whose cells are shown. A column in which a bound has no finished cell is judged
    by all columns. Over common seeds a row is above by more than two standard errors; with fewer than three of them,
    at all.
    """
    columns = [column] if column else list(experiment.columns)
    shown = {experiment.source(row, one)[0]: None for row in experiment.rows for one in columns}
    above: dict[str, list[str]] = {}
    for table in (experiment if name == experiment.name else experiments()[name] for name in shown):
        cells = finished(results, table, table.scale(scale), overrides) if table.upper_bounds else {}
        for bound, others in table.upper_bounds.items():
            places = columns if all((bound, one) in cells for one in columns) else table.columns
            for place, row in itertools.product(places, others):
                pairs = paired(cells.get((row, place), ()), cells.get((bound, place), ()), table.rows[row].value)
                error = stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 2 else 0.0
                if pairs and fmean(pairs) > 2 * error:
                    gap = _mean_and_error(pairs, table.decimals)
                    words = f"{table.rows[row].title} in {table.columns[place].title} ({gap})"
                    above.setdefault(table.rows[bound].title, []).append(words)
    return above


def _in_words_not_tuned(experiment: Experiment, scale: str, results: Path, overrides: Overrides) -> str:
    """Why the table has no verdict; empty if it has one."""
    above = not_tuned(experiment, scale, results, "", overrides)
    if not above:
        return ""
    below = [words for one in above.values() for words in one]
    names = " and ".join(above)
    return f"**Not tuned**, so there is no verdict: {names} must not be below other rows, but is: {'; '.join(below)}."


def _leaders(experiment: Experiment, table: Sequence[Number]) -> list[str]:
    """The best row of each column among the rows that the paper has, where all of them are made."""
    better = "" if experiment.comparison is None else experiment.comparison.better
    best = {"higher": max, "lower": min}.get(better) if isinstance(better, str) else None
    if best is None:
        return []
    sentences = []
    for column, title in experiment.columns.items():
        rivals = [number for number in table if number.column == column and number.paper is not None]
        if len(rivals) > 1 and all(number.ours is not None for number in rivals):
            ours = best(rivals, key=lambda number: number.ours or 0.0)
            paper = best(rivals, key=lambda number: number.paper or 0.0)
            same = "as in the paper" if ours.row == paper.row else f"in the paper {experiment.rows[paper.row].title}"
            sentences.append(f"Best in {title.title}: {experiment.rows[ours.row].title}, {same}.")
    return sentences


def _paired(experiment: Experiment, cells: Cells) -> list[str]:
    """Tables of each row's differences to ours and to the best rival of each column, where these are made."""
    with_ours = experiment.rivals and experiment.ours in experiment.rows
    ours = dict.fromkeys(experiment.columns, experiment.ours) if with_ours else {}
    best = {column: rival for column in experiment.columns if (rival := best_rival(experiment, cells, column))}
    tables = []
    for name, bases in ((experiment.rows[experiment.ours].title if ours else "", ours), ("the best rival", best)):
        columns = [column for column, base in bases.items() if (base, column) in cells]
        lines = [["best rival", *(experiment.rows[best[column]].title for column in columns)]] if bases is best else []
        for row, line in experiment.rows.items():
            pairs = [paired(cells.get((row, one), ()), cells[bases[one], one], line.value) for one in columns]
            if any(pairs) and {row} != {bases[one] for one in columns}:
                lines.append([line.title, *(_mean_and_error(pair, experiment.decimals) for pair in pairs)])
        if columns:
            caption = f"Differences to {name}, paired over common seeds: mean ± standard error (number of seeds)."
            tables += [caption, markdown(["", *(experiment.columns[column].title for column in columns)], lines)]
    return tables


def best_rival(experiment: Experiment, cells: Cells, column: str) -> str | None:
    """The rival of the largest mean over the seeds that all begun rivals of the column have."""
    scores = {
        row: {run["seed"]: run["values"][experiment.rows[row].value] for run in cells[row, column]}
        for row in experiment.rivals
        if (row, column) in cells
    }
    seeds = set.intersection(*map(set, scores.values())) if scores else set()
    return max(scores, key=lambda row: fmean(scores[row][seed] for seed in seeds)) if seeds else None


def paired(runs: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], value: str) -> list[float]:
    """The differences of a value between the runs of two rows with the same seed."""
    of_seed = {run["seed"]: run["values"][value] for run in others if value in run["values"]}
    return [run["values"][value] - of_seed[run["seed"]] for run in runs if run["seed"] in of_seed]


def _mean_and_error(differences: Sequence[float], decimals: int) -> str:
    """Format paired differences.

    >>> _mean_and_error([1.0, 2.0, 3.0], 2), _mean_and_error([1.0], 1), _mean_and_error([], 1)
    ('+2.00 ± 0.58 (3)', '+1.0 (1)', '-')
    """
    count = len(differences)
    error = f" ± {stdev(differences) / math.sqrt(count):.{decimals}f}" if count > 1 else ""
    return f"{fmean(differences):+.{decimals}f}{error} ({count})" if count else "-"


def as_dict(experiment: Experiment, scale: str, results: Path, overrides: Overrides = ()) -> dict[str, Any]:
    """The table for programs."""
    table = numbers(experiment, finished(results, experiment, scale, overrides))
    return {
        "name": experiment.name,
        "title": experiment.title,
        "shows": experiment.shows,
        "scale": scale,
        "overrides": dict(overrides),
        "numbers": [number._asdict() for number in table],
        "missing": len(missing_cells(required_cells(experiment, scale, overrides), results)),
    }


def overview(experiments: Sequence[Experiment], results: Path, width: int = 100) -> str:
    """The listing for a terminal: at most `width` columns, with the time left for each scale."""
    rows, scales = [], [*dict.fromkeys(("small", "paper", *(scale for one in experiments for scale in one.scales)))]
    for experiment in experiments:
        cells = dict.fromkeys(scales, "")
        for scale in experiment.scales:
            done, count, seconds = _progress(experiment, scale, results)
            cells[scale] = f"{done}/{count}" + (f", {_roughly(seconds)}" if done < count else "")
        rows.append([experiment.name, *cells.values()])
    heads = ["name", *scales]
    sizes = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    titles = ["what", *(experiment.title for experiment in experiments)]
    lines = []
    for row, title in zip([heads, *rows], titles, strict=True):
        start = "  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True))
        lines.append(f"{start}  {shorten(title, width - len(start) - 2, placeholder='...')}")
    missing = [
        f"No finished cell was found, because there is no folder {results} here.",
        "Run this in the root of a checkout, or pass --results DIR.",
    ]
    named = " and ".join([", ".join(scales[:-1]), scales[-1]])
    words = f"{named} are scales: cells made of all cells, and the time for the rest."
    return "\n".join([*lines, "", words, *([] if results.is_dir() else missing)])


def _progress(experiment: Experiment, scale: str, results: Path) -> tuple[int, int, float]:
    """Number of cells made and of all cells, and estimated seconds for the rest (nan if unknown)."""
    required = required_cells(experiment, scale)
    left = missing_cells(required, results)
    return len(required) - len(left), len(required), seconds_of(left, results)


def _roughly(seconds: float) -> str:
    """Format a long duration.

    >>> _roughly(600), _roughly(6 * 3600), _roughly(1e7), _roughly(math.nan)
    ('10 min', '6 h', '116 days', 'unknown')
    """
    if math.isnan(seconds):
        return "unknown"
    units = {"days": 86_400, "h": 3600, "min": 60}
    unit = next((unit for unit, size in units.items() if seconds >= 2 * size), "min")
    return f"{math.ceil(seconds / units[unit])} {unit}"


# ---- files


def page(paper: str, results: Path) -> str:
    """All tables of a paper that have finished cells."""
    tables = [
        report(table, scale, results)
        for table in experiments().values()
        for scale in table.scales
        if table.name.startswith(f"{paper}.") and finished(results, table, scale)
    ]
    return written(f"Tables: {paper}", f"python -m experiments.papers {paper} --show --page", *tables)
