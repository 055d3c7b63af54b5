"""The setting of each row of the leaderboard, from the finished cells of `leaderboard.tuning`."""

import math
from collections.abc import Mapping

from experiments.papers import cells
from experiments.papers.cells import Cell, path_of, read
from experiments.papers.experiment import Cells, Experiment, NotYet
from experiments.papers.registry import experiments

TUNING = "leaderboard.tuning"
RECORDS = 2000  # on which each of its cells is scored


def chosen(row: str, column: str, scale: str) -> float:
    """The setting of a row in a column of the leaderboard; NotYet, with a command, if one of its cells is missing."""
    table, kind = experiments()[TUNING], "alike" if column.startswith("dist") else "unlike"
    paths = {
        setting: path_of(cells.RESULTS, Cell(TUNING, name, kind, table.scale(scale), 0))
        for setting, name in candidates(table, row).items()
    }
    if missing := [candidates(table, row)[setting] for setting, path in paths.items() if not path.is_file()]:
        command = f"python -m experiments.papers {TUNING} --rows {','.join(missing)} --columns {kind}"
        raise NotYet(f"the setting of {row} is chosen from cells that are not finished: {command}")
    return smallest_good({setting: read(path)["values"]["accuracy"] for setting, path in paths.items()})


def candidates(table: Experiment, row: str) -> dict[float, str]:
    """Setting -> row of the tuning table, in ascending order."""
    named = {name: name.rpartition("_") for name in table.rows}
    return dict(sorted((float(setting), name) for name, (method, _, setting) in named.items() if method == row))


def smallest_good(accuracy: Mapping[float, float]) -> float:
    """The smallest setting whose accuracy, in %, is within a standard error of the best one's.

    Reference: Breiman et al. (1984), the rule of one standard error.

    >>> smallest_good({0.1: 78.0, 0.2: 79.4, 0.4: 80.0})
    0.2
    """
    best = max(accuracy.values())
    error = math.sqrt(best * (100 - best) / RECORDS)
    return min(setting for setting, value in accuracy.items() if value >= best - error)


def choices(table: Experiment, made: Cells) -> str:
    """The chosen settings of the rows whose cells are finished, and where the best one is an end of the three."""
    whole, paragraphs = experiments()[TUNING], []  # the table may show some rows only
    for column, title in table.columns.items():
        chosen_rows = []
        for row in dict.fromkeys(name.rpartition("_")[0] for name in whole.rows):
            names = candidates(whole, row)
            if all((name, column) in made for name in names.values()):
                accuracy = {one: made[name, column][0]["values"]["accuracy"] for one, name in names.items()}
                best = max(accuracy, key=accuracy.__getitem__)
                end = f" (the best is {best:g}, an end of the three)" if best in (min(names), max(names)) else ""
                chosen_rows.append(f"{whole.rows[names[smallest_good(accuracy)]].title}{end}")
        paragraphs += [f"Chosen for {title.title}: {'; '.join(chosen_rows)}."] if chosen_rows else []
    return "\n\n".join(paragraphs)
