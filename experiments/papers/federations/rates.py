"""One learning rate of a rule for all columns, by public records, and each rule's largest deficit."""

import math
from statistics import fmean, stdev

from experiments.papers.experiment import Cells, Experiment
from experiments.papers.leaderboard.tuning import accuracies, best_setting, candidates, settings_made
from experiments.papers.registry import experiments


def chosen(row: str, column: str, scale: str, table: str) -> float:
    """The rate with the best mean over all columns of the tuning; NotYet, with a command, if a cell is missing."""
    tuning = experiments()[table]
    names = candidates(tuning, row)
    found: dict[float, dict[tuple[str, int | None], float]] = {}
    for place in tuning.columns:
        for setting, of_seed in settings_made(tuning, names, row, place, tuning.scale(scale)).items():
            found.setdefault(setting, {}).update({(place, seed): value for seed, value in of_seed.items()})
    return best_setting(found)


def choices(table: Experiment, made: Cells) -> str:
    """The chosen rates of the rules whose cells are finished."""
    whole, words = experiments()[table.name], []
    for row in dict.fromkeys(name.rpartition("_")[0] for name in whole.rows):
        names = candidates(whole, row)
        if all((name, column) in made for name in names.values() for column in whole.columns):
            scores = {
                rate: {
                    (column, seed): value
                    for column in whole.columns
                    for seed, value in accuracies(whole, name, made[name, column]).items()
                }
                for rate, name in names.items()
            }
            best = best_setting(scores)
            end = " (an end of the range)" if best in (min(scores), max(scores)) else ""
            words.append(f"{whole.rows[names[best]].title.rpartition(',')[0]}, {best}{end}")
    return f"Chosen: {'; '.join(words)}." if words else ""


def largest_deficits(table: Experiment, made: Cells) -> str:
    """Each rule's largest paired difference to the best rule of a column, over the columns that all rules have."""
    columns = [column for column in table.columns if all((row, column) in made for row in table.rows)]
    if not columns:
        return ""
    scores = {(row, column): accuracies(table, row, made[row, column]) for row in table.rows for column in columns}
    lines = []
    for row, shown in table.rows.items():
        worst = (math.inf, "", "", 0.0, 0)
        for column in columns:
            best = max(table.rows, key=lambda one: fmean(scores[one, column].values()))
            seeds = scores[row, column].keys() & scores[best, column].keys()
            differences = [scores[row, column][seed] - scores[best, column][seed] for seed in seeds]
            error = stdev(differences) / math.sqrt(len(seeds)) if len(seeds) > 1 else math.nan
            worst = min(worst, (fmean(differences), table.columns[column].title, best, error, len(seeds)))
        mean, title, best, error, count = worst
        lines.append(f"{shown.title}, {mean:+.2f} ± {error:.2f} ({count}) in {title}, beside {table.rows[best].title}")
    return f"Largest deficit to the best rule of a column, over {len(columns)} columns: {'; '.join(lines)}."
