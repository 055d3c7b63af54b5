"""The setting of each row of a table, from the finished cells of a table that tunes it on public records."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from dpfl_lightning.errors import require
from experiments.papers import cells
from experiments.papers.cells import finished
from experiments.papers.experiment import Cells, Experiment, NotYet, Training
from experiments.papers.registry import experiments


def chosen(row: str, column: str, scale: str, table: str, columns: Mapping[str, str] | None = None) -> float:
    """The setting of a row in a column of another table; NotYet, with a command, if one of its cells is missing.

    `columns` is the beginning of a column's name -> the column of the tuning; None: the one whose name it begins with.
    """
    rows = candidates(experiments()[table], row)
    must = f"have rows of its settings in {table}, such as {row}_0.2, so that one can be chosen"
    require(bool(rows), f"row {row}", must, None, "Or give it a number in place of the function that chooses.")
    return _best(rows, row, column, scale, table, columns)[0]


def option_of_best(
    row: str, column: str, scale: str, table: str, option: str, rows: str = "", columns: Mapping[str, str] | None = None
) -> Any:
    """The value of an option in the best of another table's rows whose name begins with `rows`; else as `chosen`."""
    names = {name: name for name in experiments()[table].rows if name.startswith(rows)}
    best, place, scale = _best(names, row, column, scale, table, columns)
    made_by = experiments()[table].cells[best]
    assert isinstance(made_by, Training)
    return made_by.options(best, place, scale)[option]


def _best(
    names: Mapping[Any, str], row: str, column: str, scale: str, table: str, columns: Mapping[str, str] | None
) -> tuple[Any, str, str]:
    """The best of these settings, which are setting -> row of the tuning table, with the tuning's column and scale."""
    tuning = experiments()[table]
    places = columns or {name: name for name in tuning.columns}
    place, scale = next(to for name, to in places.items() if column.startswith(name)), tuning.scale(scale)
    made = {setting: _finished(tuning, name, place, scale) for setting, name in names.items()}
    if missing := [names[setting] for setting, some in made.items() if not some]:
        words = f"{table} --rows {','.join(missing)} --columns {place}{_scale_word(tuning, scale)}"
        command = f"python -m experiments.papers {words}"
        raise NotYet(f"the setting of {row} is chosen from cells that are not finished: {command}")
    accuracy = {
        setting: {cell["seed"]: cell["values"][tuning.rows[names[setting]].value] for cell in some}
        for setting, some in made.items()
    }
    return best_setting(accuracy), place, scale


def _finished(tuning: Experiment, row: str, column: str, scale: str) -> list[dict[str, Any]]:
    return finished(cells.RESULTS, tuning.restricted([row], [column]), scale).get((row, column), [])


def _scale_word(table: Experiment, scale: str) -> str:
    return "" if scale == table.scale(None) else f" --scale {scale}"


def candidates(table: Experiment, row: str) -> dict[float, str]:
    """Setting -> row of the tuning table, in ascending order."""
    named = {name: name.rpartition("_") for name in table.rows}
    return dict(sorted((float(setting), name) for name, (method, _, setting) in named.items() if method == row))


def best_setting(accuracy: Mapping[Any, Mapping[Any, float]]) -> Any:
    """The setting with the best mean over the seeds that all settings have; of equal ones the smallest.

    >>> best_setting({0.1: {0: 78.0, 1: 79.0}, 0.2: {0: 79.4, 1: 79.0}, 0.4: {0: 80.0, 1: 78.0, 2: 90.0}})
    0.2
    """
    common = set.intersection(*map(set, accuracy.values()))
    return max(sorted(accuracy), key=lambda setting: fmean(accuracy[setting][seed] for seed in common))


def choices(table: Experiment, made: Cells) -> str:
    """The chosen settings of the rows whose cells are finished, and where the best one is an end of them."""
    whole, paragraphs = experiments()[table.name], []  # the table may show some rows only
    for column, title in table.columns.items():
        chosen_rows = []
        for row in dict.fromkeys(name.rpartition("_")[0] for name in whole.rows):
            names = candidates(whole, row)
            made_of = {setting: made.get((name, column), []) for setting, name in names.items()}
            if all(made_of.values()):
                value = whole.rows[names[min(names)]].value
                scores = {one: {cell["seed"]: cell["values"][value] for cell in its} for one, its in made_of.items()}
                best = best_setting(scores)
                end = " (an end of the range)" if best in (min(names), max(names)) else ""
                chosen_rows.append(f"{whole.rows[names[best]].title}{end}")
        paragraphs += [f"Chosen for {title.title}: {'; '.join(chosen_rows)}."] if chosen_rows else []
    return "\n\n".join(paragraphs)
