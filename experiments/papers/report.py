"""Ours beside the paper's: one table for the terminal and the docs, from the files of finished cells alone."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from dpfl_lightning.errors import require
from dpfl_lightning.runtime.text import markdown
from experiments.papers.cells import Departures, finished, missing_files, variant, wanted
from experiments.papers.experiment import Experiment, Found, Tolerance
from experiments.papers.registry import find
from experiments.papers.run import seconds_of

#: the marks of a page: what stands between them is written by the command
_BLOCK = re.compile(r"(<!-- papers (\S+)(?: (\S+))? -->\n).*?(<!-- /papers -->)", re.DOTALL)

_MOST_NAMED = 8  # of the rows and columns that are not begun


class Number(NamedTuple):
    """One number of a table: ours as mean over seeds, None before it is made; the paper's, None where it has none."""

    row: str
    column: str
    ours: float | None
    std: float | None
    seeds: int
    paper: float | None
    difference: float | None
    within: bool | None


def numbers(experiment: Experiment, found: Found) -> list[Number]:
    """Every number of a table, row by row."""
    return [_number(experiment, row, column, found) for row in experiment.rows for column in experiment.columns]


def _number(experiment: Experiment, row: str, column: str, found: Found) -> Number:
    name, paper = experiment.rows[row].value, experiment.reference(row, column)
    values = [held["values"][name] for held in found.get((row, column), ()) if name in held["values"]]
    if not values:
        return Number(row, column, None, None, 0, paper, None, None)
    ours, std = fmean(values), stdev(values) if len(values) > 1 else None
    held_to = experiment.comparison
    if held_to is None or paper is None:
        return Number(row, column, ours, std, len(values), paper, None, None)
    compared = held_to.of(row, column).within is not None
    within = held_to.holds(row, column, ours, paper) if compared else None
    return Number(row, column, ours, std, len(values), paper, held_to.difference(ours, paper), within)


def report(
    experiment: Experiment, scale: str, results: Path, departures: Departures = (), beside: Path | None = None
) -> str:
    """The table in words, as Markdown: ours, the paper's, the difference, what is outside the tolerance, notes.

    Args:
        beside: the page it is for, so that a figure can be shown; None is the terminal.
    """
    found = finished(results, experiment, scale, departures)
    told = numbers(experiment, found)
    otherwise = [f"with {key} {text}" for key, text in departures]
    frame = "; ".join([f"scale {scale}: {experiment.scales[scale]}", *otherwise])
    parts = [f"**{experiment.name}** {experiment.title}: {experiment.shows} ({frame})."]
    begun = experiment.shown and any(one.ours is not None for one in told)
    if begun:
        parts += [_table(experiment, told), _verdict(experiment, told)]
    if experiment.summary is not None:
        parts.append(experiment.summary(found))
    picture = figure_path(experiment, scale, results, departures)
    if picture.is_file():
        parts.append(f"Figure: {picture}" if beside is None else f"![{experiment.name}]({_from(beside, picture)})")
    cells = wanted(experiment, scale, None, departures)
    left = missing_files(cells, results)
    if left:
        parts.append(f"{len(cells) - len(left)} of {len(cells)} cells are made." + (_lacking(experiment, told) * begun))
    parts += experiment.notes
    return "\n\n".join(filter(None, parts))


def figure_path(experiment: Experiment, scale: str, results: Path, departures: Departures = ()) -> Path:
    """Where its figure is kept."""
    return results / experiment.name / variant(scale, departures) / "figure.svg"


def _from(page: Path, path: Path) -> str:
    return Path(os.path.relpath(path, page.parent)).as_posix()


def _table(experiment: Experiment, told: Sequence[Number]) -> str:
    """For each row of the table a line of ours, and where the paper has it its own and the difference.

    Rows and columns of which nothing is made are left out.
    """
    rows, columns = _begun(told)
    lines = []
    for row in (name for name in experiment.rows if name in rows):
        own = [one for one in told if one.row == row and one.column in columns]
        lines.append([experiment.rows[row].title, *(_ours(one, experiment.decimals) for one in own)])
        if any(one.paper is not None for one in own):
            lines.append(["the paper's", *(_shown(one.paper, min(experiment.decimals, 2)) for one in own)])
        if any(one.difference is not None for one in own):
            lines.append(["difference", *(_difference(one, experiment) for one in own)])
    return markdown(["", *(column.title for name, column in experiment.columns.items() if name in columns)], lines)


def _begun(told: Sequence[Number]) -> tuple[set[str], set[str]]:
    """Rows and columns of which something is made."""
    made = [one for one in told if one.ours is not None]
    return {one.row for one in made}, {one.column for one in made}


def _lacking(experiment: Experiment, told: Sequence[Number]) -> str:
    """What is not in the table yet."""
    rows, columns = _begun(told)
    titles = [line.title for name, line in experiment.rows.items() if name not in rows]
    titles += [column.title for name, column in experiment.columns.items() if name not in columns]
    more = [f"and {len(titles) - _MOST_NAMED} more"] if len(titles) > _MOST_NAMED else []
    return f" None yet: {'; '.join(titles[:_MOST_NAMED] + more)}." if titles else ""


def _ours(one: Number, decimals: int) -> str:
    return _shown(one.ours, decimals) + ("" if one.std is None else f" ± {one.std:.{decimals}f}")


def _shown(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _difference(one: Number, experiment: Experiment) -> str:
    assert experiment.comparison is not None
    if one.difference is None:
        return "-"
    number = (
        f"{one.difference:+.1%}" if experiment.comparison.relative else f"{one.difference:+.{experiment.decimals}f}"
    )
    return f"**{number}**" if one.within is False else number


def _verdict(experiment: Experiment, told: Sequence[Number]) -> str:
    """How many cells are within the tolerance, which are not or have one of their own, and who leads."""
    held_to = experiment.comparison
    compared = [one for one in told if one.within is not None]
    if held_to is None or not any(one.difference is not None for one in told):
        return ""
    size = f"{held_to.tolerance:.0%}" if held_to.relative else f"{held_to.tolerance:g}"
    near = [one for one in compared if one.difference is not None and held_to.near(one.row, one.column, one.difference)]
    unless = ", unless said otherwise" if held_to.special else ""
    sentences = [f"{len(near)} of {len(compared)} numbers are within {size} of the paper's{unless}."]
    titles = {
        (row, column): f"{experiment.rows[row].title}, {experiment.columns[column].title}" for row, column, *_ in told
    }
    for words, fine in (("Better by more", True), ("Outside", False)):
        places = [titles[one.row, one.column] for one in compared if one not in near and one.within is fine]
        sentences += [f"{words}: {'; '.join(places)}."] if places else []
    there = {(one.row, one.column) for one in told if one.difference is not None}
    titles |= {(row, ""): experiment.rows[row].title for row, _ in there}
    special: dict[Tolerance, list[str]] = {}
    for place, own in held_to.special.items():
        if place in there or (place[1] == "" and place in titles):
            special.setdefault(own, []).append(titles[place])
    for own, places in special.items():
        sentences.append(f"{'; '.join(places)}: {_special(own, held_to.relative)}, because {own.why}.")
    return " ".join([*sentences, *_leaders(experiment, told)])


def _special(own: Tolerance, relative: bool) -> str:
    if own.within is None:
        return "not compared"
    return f"within {own.within:.0%}" if relative else f"within {own.within:g}"


def _leaders(experiment: Experiment, told: Sequence[Number]) -> list[str]:
    """Who is best in each column among the rows that the paper has, where all of them are made."""
    assert experiment.comparison is not None
    better = experiment.comparison.better
    best = {"higher": max, "lower": min}.get(better) if isinstance(better, str) else None
    if best is None:
        return []
    sentences = []
    for column, title in experiment.columns.items():
        own = [one for one in told if one.column == column and one.paper is not None]
        if len(own) > 1 and all(one.ours is not None for one in own):
            ours = best(own, key=lambda one: one.ours or 0.0)
            paper = best(own, key=lambda one: one.paper or 0.0)
            same = "as in the paper" if ours.row == paper.row else f"in the paper {experiment.rows[paper.row].title}"
            sentences.append(f"Best in {title.title}: {experiment.rows[ours.row].title}, {same}.")
    return sentences


def as_dict(experiment: Experiment, scale: str, results: Path, departures: Departures = ()) -> dict[str, Any]:
    """The table for programs."""
    told = numbers(experiment, finished(results, experiment, scale, departures))
    return {
        "name": experiment.name,
        "title": experiment.title,
        "shows": experiment.shows,
        "scale": scale,
        "departures": dict(departures),
        "numbers": [one._asdict() for one in told],
        "missing": len(missing_files(wanted(experiment, scale, None, departures), results)),
    }


def listing(experiments: Sequence[Experiment], results: Path) -> str:
    """Every experiment: what it is, how many of its cells are made, and minutes for the rest."""
    rows = []
    for one in experiments:
        counts = {scale: wanted(one, scale, None) for scale in one.scales}
        left = {scale: missing_files(cells, results) for scale, cells in counts.items()}
        made = ", ".join(f"{scale} {len(counts[scale]) - len(left[scale])} of {len(counts[scale])}" for scale in counts)
        minutes = ", ".join(f"{scale} {_minutes(seconds_of(left[scale], results))}" for scale in counts)
        rows.append([one.name, made, minutes, one.title])
    return markdown(["name", "cells made", "minutes left", "what"], rows)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.0f}" if seconds == seconds else "unknown"


# ---- pages


def page(path: Path, results: Path) -> str:
    """A page with its tables written anew, from the files of finished cells.

    It asks for a table by `<!-- papers NAME SCALE -->` and for a paper's list by `<!-- papers PAPER -->`, which
    end with `<!-- /papers -->`.

    Raises:
        UserError: there is no such page, it has no marks, or asks for what there is not.
    """
    require(path.is_file(), "--page", "be a Markdown file", str(path))
    text = path.read_text(encoding="utf-8")
    marks = "hold marks such as <!-- papers noise_aware.table3 paper --> and <!-- /papers -->"
    require(_BLOCK.search(text) is not None, "--page", marks, str(path), "Tables go between them.")

    def filled(block: re.Match[str]) -> str:
        chosen = find([block[2]])
        if block[3] is None:
            return f"{block[1]}{listing(chosen, results)}\n{block[4]}"
        told = [report(one, one.scale(block[3]), results, beside=path) for one in chosen]
        return f"{block[1]}{chr(10).join(told)}\n{block[4]}"

    return _BLOCK.sub(filled, text)
