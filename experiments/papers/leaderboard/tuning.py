"""The setting of each row of the leaderboard, from the finished cells of `leaderboard.tuning`."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from experiments.papers import cells
from experiments.papers.cells import Cell, path_of, read
from experiments.papers.experiment import Cells, Experiment, NotYet
from experiments.papers.registry import experiments

TUNING = "leaderboard.tuning"


def chosen(row: str, column: str, scale: str) -> float:
    """The setting of a row in a column of the leaderboard; NotYet, with a command, if one of its cells is missing."""
    table, kind = experiments()[TUNING], "alike" if column.startswith("dist") else "unlike"
    paths = {
        (name, seed): path_of(cells.RESULTS, Cell(TUNING, name, kind, table.scale(scale), seed))
        for name in candidates(table, row).values()
        for seed in table.seeds[table.scale(scale)]
    }
    if missing := [place for place, path in paths.items() if not path.is_file()]:
        rows, seeds = (",".join(map(str, dict.fromkeys(one))) for one in zip(*missing, strict=True))
        command = f"python -m experiments.papers {TUNING} --rows {rows} --columns {kind} --seeds {seeds}"
        raise NotYet(f"the setting of {row} is chosen from cells that are not finished: {command}")
    accuracy = {place: read(path)["values"]["accuracy"] for place, path in paths.items()}
    return best_setting(
        {
            setting: [value for (one, _), value in accuracy.items() if one == name]
            for setting, name in candidates(table, row).items()
        }
    )


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
    """The chosen settings of the rows whose cells are finished, and where the best one is an end of the three."""
    whole, paragraphs = experiments()[TUNING], []  # the table may show some rows only
    for column, title in table.columns.items():
        chosen_rows = []
        for row in dict.fromkeys(name.rpartition("_")[0] for name in whole.rows):
            names = candidates(whole, row)
            made_of = {setting: made.get((name, column), []) for setting, name in names.items()}
            if all(len(one) == len(table.seeds["small"]) for one in made_of.values()):
                best = best_setting({one: [cell["values"]["accuracy"] for cell in its] for one, its in made_of.items()})
                end = " (an end of the three)" if best in (min(names), max(names)) else ""
                chosen_rows.append(f"{whole.rows[names[best]].title}{end}")
        paragraphs += [f"Chosen for {title.title}: {'; '.join(chosen_rows)}."] if chosen_rows else []
    return "\n\n".join(paragraphs)
