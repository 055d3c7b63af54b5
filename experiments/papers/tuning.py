"""The setting of each row of a table, from the finished cells of a table that tunes it on public records."""

import contextlib
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from dpfl_lightning.errors import require
from experiments.papers import cells
from experiments.papers.cells import Cell, declared_keys, finished, required_cells
from experiments.papers.experiment import Cells, Experiment, NotNeeded, NotYet, Training
from experiments.papers.registry import experiments

BEYOND = "beyond"  # ends the name of a row whose setting follows from the others'

_listeners: list[list[Cell]] = []  # each notes the cells from which settings are chosen


def chosen(row: str, column: str, scale: str, table: str) -> float:
    """The setting of a row in a column of another table; NotYet, with a command, if one of its cells is missing.

    The column of the tuning is the one with whose name that of `column` begins. Where the best is the smallest or
    largest one, and the table has a row `..._beyond`, that is a candidate, too.
    """
    tuning = experiments()[table]
    names = candidates(tuning, row)
    must = f"have rows of its settings in {table}, such as {row}_0.2, so that one can be chosen"
    require(bool(names), f"row {row}", must, None, "Or give it a number in place of the function that chooses.")
    place, scale = _place(tuning, column, scale)
    made = settings_made(tuning, names, row, place, scale)
    if (further := setting_beyond(made)) and f"{row}_{BEYOND}" in tuning.rows:
        made |= settings_made(tuning, {further: f"{row}_{BEYOND}"}, row, place, scale)
    return best_setting(made)


def beyond(row: str, column: str, scale: str, table: str) -> float:
    """The setting of a row `..._beyond`: beyond the best of the others, which must be an end of their range.

    Raises:
        NotNeeded: the best one is no end.
        NotYet: a cell of the others is missing.
    """
    tuning, method = experiments()[table], row.rpartition("_")[0]
    further = setting_beyond(settings_made(tuning, candidates(tuning, method), method, column, scale))
    if further is None:
        raise NotNeeded(f"the best setting of {method} in {column} of {table} is no end of the range")
    return further


def option_of_best(
    row: str, column: str, scale: str, table: str, option: str, rows: str = "", columns: Mapping[str, str] | None = None
) -> Any:
    """The value of an option in the best of another table's rows whose name begins with `rows`; else as `chosen`.

    `columns` is the beginning of a column's name -> the column of the tuning.
    """
    tuning = experiments()[table]
    place, scale = _place(tuning, column, scale, columns)
    names = {name: name for name in tuning.rows if name.startswith(rows)}
    best = best_setting(settings_made(tuning, names, row, place, scale))
    made_by = tuning.cells[best]
    assert isinstance(made_by, Training)
    return declared_keys(made_by, Cell(table, best, place, scale))[option]


def _place(tuning: Experiment, column: str, scale: str, columns: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Column and scale of the tuning."""
    places = columns or {name: name for name in tuning.columns}
    return next(to for name, to in places.items() if column.startswith(name)), tuning.scale(scale)


def settings_made(
    tuning: Experiment, names: Mapping[Any, str], row: str, place: str, scale: str
) -> dict[Any, dict[int | None, float]]:
    """Setting -> seed -> accuracy of these settings, which are setting -> row of the tuning table."""
    table = tuning.restricted(list(names.values()), [place])
    for asked in _listeners:
        asked += required_cells(table, scale)
    made = finished(cells.RESULTS, table, scale)
    if missing := [name for name in names.values() if (name, place) not in made]:
        words = f"{tuning.name} --rows {','.join(missing)} --columns {place}{_scale_word(tuning, scale)}"
        command = f"python -m experiments.papers {words}"
        raise NotYet(f"the setting of {row} is chosen from cells that are not finished: {command}")
    return {setting: accuracies(tuning, name, made[name, place]) for setting, name in names.items()}


def accuracies(table: Experiment, row: str, made: Sequence[Mapping[str, Any]]) -> dict[int | None, float]:
    """Seed -> accuracy of a row's cells."""
    return {cell["seed"]: cell["values"][table.rows[row].value] for cell in made}


def _scale_word(table: Experiment, scale: str) -> str:
    return "" if scale == table.scale(None) else f" --scale {scale}"


def candidates(table: Experiment, row: str) -> dict[float, str]:
    """Setting -> row of the tuning table, in ascending order."""
    named = {name: name.rpartition("_") for name in table.rows if not name.endswith(f"_{BEYOND}")}
    return dict(sorted((float(setting), name) for name, (method, _, setting) in named.items() if method == row))


def best_setting(accuracy: Mapping[Any, Mapping[Any, float]]) -> Any:
    """The setting with the best mean over the seeds that all settings have; of equal ones the smallest; else NotYet.

    >>> best_setting({0.1: {0: 78.0, 1: 79.0}, 0.2: {0: 79.4, 1: 79.0}, 0.4: {0: 80.0, 1: 78.0, 2: 90.0}})
    0.2
    """
    if not (common := set.intersection(*map(set, accuracy.values()))):
        raise NotYet(f"no seed has finished cells of all settings {sorted(accuracy)}: make them with the same --seeds")
    return max(sorted(accuracy), key=lambda setting: fmean(accuracy[setting][seed] for seed in common))


def asked_by(cell: Cell) -> list[Cell]:
    """Return the cells from which options of a cell are chosen, finished or not, as far as is known by now."""
    training = experiments()[cell.experiment].cells[cell.row]
    asked = list[Cell]()
    if isinstance(training, Training):
        _listeners.append(asked)
        with contextlib.suppress(NotYet, NotNeeded):
            training.options(cell.row, cell.column, cell.scale)
        _listeners.pop()
    return list(dict.fromkeys(asked))


def setting_beyond(accuracy: Mapping[float, Mapping[Any, float]]) -> float | None:
    """The next setting in the same steps if the best one is the smallest or largest, else None.

    >>> setting_beyond({0.08: {0: 78.0}, 0.2: {0: 77.0}, 0.5: {0: 76.0}})
    0.032
    """
    best, ordered = best_setting(accuracy), sorted(accuracy)
    if best not in (ordered[0], ordered[-1]):
        return None
    inner = ordered[1] if best == ordered[0] else ordered[-2]
    return float(f"{best * best / inner:.3g}")


def choices(table: Experiment, made: Cells) -> str:
    """The chosen settings of the rows whose cells are finished, and where the best one is an end of them."""
    whole, paragraphs = experiments()[table.name], []  # the table may show some rows only
    for column, title in table.columns.items():
        chosen_rows = []
        for row in dict.fromkeys(name.rpartition("_")[0] for name in whole.rows):
            names = candidates(whole, row)
            if not all((name, column) in made for name in names.values()):
                continue
            scores = {one: accuracies(whole, name, made[name, column]) for one, name in names.items()}
            further, last = setting_beyond(scores), f"{row}_{BEYOND}"
            if further and (last, column) in made:
                scores[further] = accuracies(whole, last, made[last, column])
            elif further and last in whole.rows:
                continue  # nothing is chosen without it
            chosen_rows.append(best_in_words(whole, names, scores))
        paragraphs += [f"Chosen for {title.title}: {'; '.join(chosen_rows)}."] if chosen_rows else []
    return "\n\n".join(paragraphs)


def best_in_words(table: Experiment, names: Mapping[float, str], scores: Mapping[float, Mapping[Any, float]]) -> str:
    """The method and its best setting, which may be none of `names`, and whether that is an end of the range."""
    best = best_setting(scores)
    method = table.rows[names[min(names)]].title.rpartition(str(min(names)))[0]
    end = " (an end of the range)" if best in (min(scores), max(scores)) else ""
    return f"{method}{best}{end}"
