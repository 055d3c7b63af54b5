"""The setting of each row of a table, from the finished cells of a table that tunes it on public records."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from experiments.papers import cells
from experiments.papers.cells import path_of, read, source
from experiments.papers.experiment import Cells, Experiment, NotYet
from experiments.papers.registry import experiments


def chosen(row: str, column: str, scale: str, table: str, columns: Mapping[str, str] | None = None) -> float:
    """The setting of a row in a column of another table; NotYet, with a command, if one of its cells is missing.

    `columns` is the beginning of a column's name -> the column of the tuning; None: the one whose name it begins with.
    """
    tuning = experiments()[table]
    places = columns or {name: name for name in tuning.columns}
    place, scale = next(to for name, to in places.items() if column.startswith(name)), tuning.scale(scale)
    sources = {
        (name, seed): source(tuning, name, place, scale)._replace(seed=seed)
        for name in candidates(tuning, row).values()
        for seed in tuning.seeds[scale]
    }
    paths = {key: path_of(cells.RESULTS, cell) for key, cell in sources.items()}
    if missing := [key for key, path in paths.items() if not path.is_file()]:
        rows, seeds = (",".join(map(str, dict.fromkeys(one))) for one in zip(*missing, strict=True))
        words = f"{table} --rows {rows} --columns {place} --seeds {seeds}{_scale_word(tuning, scale)}"
        command = f"python -m experiments.papers {words}"
        raise NotYet(f"the setting of {row} is chosen from cells that are not finished: {command}")
    scores = {key: read(path)["values"][tuning.rows[key[0]].value] for key, path in paths.items()}
    return best_setting(
        {
            setting: [value for (one, _), value in scores.items() if one == name]
            for setting, name in candidates(tuning, row).items()
        }
    )


def _scale_word(table: Experiment, scale: str) -> str:
    return "" if scale == table.scale(None) else f" --scale {scale}"


def candidates(table: Experiment, row: str) -> dict[float, str]:
    """Setting -> row of the tuning table, in ascending order."""
    named = {name: name.rpartition("_") for name in table.rows}
    return dict(sorted((float(setting), name) for name, (method, _, setting) in named.items() if method == row))


def best_setting(accuracy: Mapping[float, Sequence[float]]) -> float:
    """The setting with the best mean accuracy over seeds; of equal ones the smallest.

    >>> best_setting({0.1: [78.0, 79.0], 0.2: [79.4, 79.0], 0.4: [80.0, 78.0]})
    0.2
    """
    return max(sorted(accuracy), key=lambda setting: fmean(accuracy[setting]))


def choices(table: Experiment, made: Cells) -> str:
    """The chosen settings of the rows whose cells are finished, and where the best one is an end of them."""
    whole, paragraphs = experiments()[table.name], []  # the table may show some rows only
    for column, title in table.columns.items():
        chosen_rows = []
        for row in dict.fromkeys(name.rpartition("_")[0] for name in whole.rows):
            names = candidates(whole, row)
            made_of = {setting: made.get((name, column), []) for setting, name in names.items()}
            if all(len(one) >= min(map(len, table.seeds.values())) for one in made_of.values()):
                value = whole.rows[names[min(names)]].value
                best = best_setting({one: [cell["values"][value] for cell in its] for one, its in made_of.items()})
                end = " (an end of the range)" if best in (min(names), max(names)) else ""
                chosen_rows.append(f"{whole.rows[names[best]].title}{end}")
        paragraphs += [f"Chosen for {title.title}: {'; '.join(chosen_rows)}."] if chosen_rows else []
    return "\n\n".join(paragraphs)
