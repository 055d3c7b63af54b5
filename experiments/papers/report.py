"""The table of an experiment with our numbers and the paper's, from finished cells."""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from dpfl_lightning.errors import require
from dpfl_lightning.runtime.text import markdown
from experiments.papers.cells import Overrides, finished, missing_cells, required_cells, variant
from experiments.papers.experiment import Cells, Experiment, Tolerance
from experiments.papers.registry import find
from experiments.papers.run import seconds_of

#: the marks of a page: the command writes what is between them
_BLOCK = re.compile(r"(<!-- papers (\S+)(?: (\S+))? -->\n).*?(<!-- /papers -->)", re.DOTALL)

_MOST_NAMED = 8  # rows and columns without finished cells


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
    return [_number(experiment, row, column, cells) for row in experiment.rows for column in experiment.columns]


def _number(experiment: Experiment, row: str, column: str, cells: Cells) -> Number:
    name, paper = experiment.rows[row].value, experiment.paper_number(row, column)
    values = [cell["values"][name] for cell in cells.get((row, column), ()) if name in cell["values"]]
    if not values:
        return Number(row, column, None, None, 0, paper, None, None)
    ours, std = fmean(values), stdev(values) if len(values) > 1 else None
    comparison = experiment.comparison
    if comparison is None or paper is None:
        return Number(row, column, ours, std, len(values), paper, None, None)
    compared = comparison.of(row, column).within is not None
    within = comparison.holds(row, column, ours, paper) if compared else None
    return Number(row, column, ours, std, len(values), paper, comparison.difference(ours, paper), within)


def report(
    experiment: Experiment, scale: str, results: Path, overrides: Overrides = (), page_file: Path | None = None
) -> str:
    """The table as Markdown: our numbers, the paper's, the difference, what is outside the tolerance, notes.

    Args:
        page_file: page that shows it, with a link to the figure; None is the terminal.
    """
    cells = finished(results, experiment, scale, overrides)
    table = numbers(experiment, cells)
    changes = [f"with {key} {text}" for key, text in overrides]
    frame = "; ".join([f"scale {scale}: {experiment.scales[scale]}", *changes])
    parts = [f"**{experiment.name}** {experiment.title}: {experiment.shows} ({frame})."]
    begun = experiment.shown and any(number.ours is not None for number in table)
    if begun:
        parts += [_table(experiment, table), _verdict(experiment, table)]
    if experiment.summary is not None:
        parts.append(experiment.summary(experiment, cells))
    picture = figure_path(experiment, scale, results, overrides)
    if picture.is_file():
        place = None if page_file is None else Path(os.path.relpath(picture, page_file.parent)).as_posix()
        parts.append(f"Figure: {picture}" if place is None else f"![{experiment.name}]({place})")
    required = required_cells(experiment, scale, None, overrides)
    if left := missing_cells(required, results):
        made = f"{len(required) - len(left)} of {len(required)} cells are made."
        parts.append(made + _not_begun(experiment, table) * begun)
    parts += experiment.notes
    return "\n\n".join(filter(None, parts))


def figure_path(experiment: Experiment, scale: str, results: Path, overrides: Overrides = ()) -> Path:
    return results / experiment.name / variant(scale, overrides) / "figure.svg"


def _table(experiment: Experiment, table: Sequence[Number]) -> str:
    """For each row a line of ours, the paper's and the difference; without empty rows and columns."""
    rows, columns = _begun(table)
    lines, decimals = [], experiment.decimals
    for row in (name for name in experiment.rows if name in rows):
        line = [number for number in table if number.row == row and number.column in columns]
        stds = ["" if number.std is None else f" ± {number.std:.{decimals}f}" for number in line]
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
    comparison = experiment.comparison
    compared = [number for number in table if number.within is not None]
    if comparison is None or not any(number.difference is not None for number in table):
        return ""
    digits = ".0%" if comparison.relative else "g"
    near = [number for number in compared if comparison.near(number.row, number.column, number.difference or 0.0)]
    unless = ", unless said otherwise" if comparison.special else ""
    sentences = [
        f"{len(near)} of {len(compared)} numbers are within {comparison.tolerance:{digits}} of the paper's{unless}."
    ]
    titles = {
        (row, column): f"{experiment.rows[row].title}, {experiment.columns[column].title}" for row, column, *_ in table
    }
    for words, fine in (("Better by more", True), ("Outside", False)):
        places = [
            titles[number.row, number.column] for number in compared if number not in near and number.within is fine
        ]
        sentences += [f"{words}: {'; '.join(places)}."] if places else []
    compared_cells = {(number.row, number.column) for number in table if number.difference is not None}
    titles |= {(row, ""): experiment.rows[row].title for row, _ in compared_cells}
    special: dict[Tolerance, list[str]] = {}
    for place, tolerance in comparison.special.items():
        if place in compared_cells or (place[1] == "" and place in titles):
            special.setdefault(tolerance, []).append(titles[place])
    for tolerance, places in special.items():
        special_size = "not compared" if tolerance.within is None else f"within {tolerance.within:{digits}}"
        sentences.append(f"{'; '.join(places)}: {special_size}, because {tolerance.why}.")
    return " ".join([*sentences, *_leaders(experiment, table)])


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
        "missing": len(missing_cells(required_cells(experiment, scale, None, overrides), results)),
    }


def listing(experiments: Sequence[Experiment], results: Path) -> str:
    """Every experiment: what it is, how many of its cells are made, and minutes for the rest."""
    rows = []
    for experiment in experiments:
        counts = {scale: required_cells(experiment, scale, None) for scale in experiment.scales}
        left = {scale: missing_cells(cells, results) for scale, cells in counts.items()}
        made = ", ".join(f"{scale} {len(counts[scale]) - len(left[scale])} of {len(counts[scale])}" for scale in counts)
        seconds = {scale: seconds_of(cells, results) for scale, cells in left.items()}
        minutes = {scale: "unknown" if math.isnan(time) else f"{time / 60:,.0f}" for scale, time in seconds.items()}
        rows.append([experiment.name, made, ", ".join(map(" ".join, minutes.items())), experiment.title])
    return markdown(["name", "cells made", "minutes left", "what"], rows)


# ---- pages


def _on_page(experiment: Experiment, scale: str, results: Path, path: Path) -> str:
    """The report, or one line for a table without finished cells, which `list` shows."""
    if finished(results, experiment, scale):
        return report(experiment, scale, results, page_file=path)
    return f"**{experiment.name}** {experiment.title}: no cell is made yet (scale {scale})."


def page(path: Path, results: Path) -> str:
    """A page with its tables written from the files of finished cells.

    `<!-- papers NAME SCALE -->` asks for a table and `<!-- papers PAPER -->` for the list of a paper; both end with
    `<!-- /papers -->`.

    Raises:
        UserError: there is no such page, it has no marks, or asks for an unknown table.
    """
    require(path.is_file(), "--page", "be a Markdown file", str(path))
    text = path.read_text(encoding="utf-8")
    marks = "hold marks such as <!-- papers noise_aware.table3 paper --> and <!-- /papers -->"
    require(_BLOCK.search(text) is not None, "--page", marks, str(path), "Tables go between them.")

    def filled(block: re.Match[str]) -> str:
        chosen = find([block[2]])
        if block[3] is None:
            return f"{block[1]}{listing(chosen, results)}\n{block[4]}"
        reports = [_on_page(experiment, experiment.scale(block[3]), results, path) for experiment in chosen]
        return f"{block[1]}{chr(10).join(reports)}\n{block[4]}"

    return _BLOCK.sub(filled, text)
