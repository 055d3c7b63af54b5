"""One learning rate of a rule for all columns, by public records, and how far each rule is below the best one."""

import math
from statistics import fmean, stdev

from experiments.papers.experiment import Cells, Experiment
from experiments.papers.registry import experiments
from experiments.papers.tuning import accuracies, best_in_words, best_setting, candidates, settings_made


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
            words.append(best_in_words(whole, names, scores))
    return f"Chosen: {'; '.join(words)}." if words else ""


def differences_to_best(table: Experiment, made: Cells) -> tuple[dict[str, str], dict[tuple[str, str], list[float]]]:
    """Column -> its best rule, and (rule, column) -> paired differences to that rule, in the order of the seeds.

    These are the columns that all rules have, and the seeds that all rules have in all these columns.
    """
    columns = [column for column in table.columns if all((row, column) in made for row in table.rows)]
    scores = {(row, column): accuracies(table, row, made[row, column]) for row in table.rows for column in columns}
    seeds = sorted(set.intersection(*map(set, scores.values())), key=str) if scores else []
    if not seeds:
        return {}, {}
    sums = {place: math.fsum(of_seed[seed] for seed in seeds) for place, of_seed in scores.items()}
    best = {column: max(table.rows, key=lambda row: sums[row, column]) for column in columns}
    return best, {
        (row, column): [scores[row, column][seed] - scores[best[column], column][seed] for seed in seeds]
        for row, column in scores
    }


def largest_deficits(table: Experiment, made: Cells) -> str:
    """Each rule's largest paired difference to the best rule of a column."""
    best, differences = differences_to_best(table, made)
    if not best:
        return ""
    lines = []
    for row, shown in table.rows.items():
        column = min(best, key=lambda one: fmean(differences[row, one]))
        of_seed = differences[row, column]
        error = f" ± {stdev(of_seed) / math.sqrt(len(of_seed)):.2f}" if len(of_seed) > 1 else ""
        words = f"{fmean(of_seed):+.2f}{error} ({len(of_seed)}) in {table.columns[column].title}"
        lines.append(f"{shown.title}, {words}, beside {table.rows[best[column]].title}")
    return f"Largest deficit to the best rule of a column, over {len(best)} columns: {'; '.join(lines)}."
