"""Panels of figures from finished cells, as tables ask for them."""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from experiments.papers.experiment import Cells, Experiment, Panel


def panel(
    experiment: Experiment,
    cells: Cells,
    *,
    title: str,
    x: str,
    y: str,
    rows: Sequence[str] | str | None = None,
    columns: Sequence[str] | str | None = None,
    value: str | None = None,
    curve: str | None = None,
    band: str = "",
    kind: str = "lines",
    log: str = "",
) -> Panel:
    """A series for each row over the columns' places, or curves over rounds.

    Args:
        rows: names of rows, or a regular expression of their names; None takes all. `columns` likewise.
        value: value of the cells; None is the row's.
        curve: key of a curve in the cells' files, as in `over_rounds`, instead of one value a cell.
        band: `always`, or `several` for rows with cells of several seeds: points have a band of one standard deviation.
    """
    series: dict[str, list[tuple]] = {}
    for row in _chosen(experiment.rows, rows):
        line = experiment.rows[row]
        points = series.setdefault(line.series or line.title, [])
        names = _chosen(experiment.columns, columns)
        banded = band == "always" or (band and any(len(cells.get((row, column), ())) > 1 for column in names))
        for column in names:
            runs, setting = cells.get((row, column), ()), experiment.columns[column]
            if curve is not None:
                points += over_rounds([_at(run, curve) for run in runs])
            elif (mean := mean_of(runs, value or line.value)) is not None:
                numbers = [run["values"][value or line.value] for run in runs]
                spread = (pstdev(numbers),) if banded else ()
                points.append((setting.title if kind in ("bars", "dots") else setting.x, mean, *spread))
    return Panel(title, x, y, series, kind, log)


def _chosen(known: Mapping[str, Any], asked: Sequence[str] | str | None) -> list[str]:
    if isinstance(asked, str):
        return [name for name in known if re.fullmatch(asked, name)]
    return [name for name in known if asked is None or name in asked]


def _at(run: Mapping[str, Any], path: str) -> Mapping[str, float]:
    for key in path.split("."):
        run = run.get(key, {})
    return run


def over_rounds(curves: Sequence[Mapping[str, float]]) -> list[tuple]:
    """Points (round, mean, standard deviation) over the seeds' curves {round: value}, where all of them have one."""
    rounds = [at for at in (curves[0] if curves else ()) if all(at in curve for curve in curves)]
    numbers = {at: [curve[at] for curve in curves] for at in rounds}
    return [(int(at), fmean(seeds), pstdev(seeds)) for at, seeds in numbers.items()]


def mean_of(runs: Sequence[Mapping[str, Any]], value: str) -> float | None:
    """The mean of a value over the cells that have it."""
    known = [run["values"][value] for run in runs if value in run["values"]]
    return fmean(known) if known else None
