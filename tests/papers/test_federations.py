"""Seven rules in five federations: one rate for all columns, and each rule's largest deficit."""

from pathlib import Path
from statistics import fmean

import pytest
from fake_experiments import held

from experiments.papers import cells
from experiments.papers.cells import Cell, finished, write
from experiments.papers.experiment import NotYet
from experiments.papers.federations.rates import choices, chosen, differences_to_best, largest_deficits
from experiments.papers.registry import experiments
from experiments.papers.tuning import accuracies

TUNING, ACCURACY = experiments()["federations.tuning"], experiments()["federations.accuracy"]


def test_a_rule_has_the_rate_with_the_best_mean_over_all_columns(results):
    for column, of_rates in (("dist1", (70, 80, 90)), ("dist5", (70, 80, 60)), ("groups", (70, 80, 75))):
        with pytest.raises(NotYet, match=r"federations\.tuning --rows local"):
            chosen("local", "dirichlet", "small", TUNING.name)
        for rate, accuracy in zip((0.05, 0.12, 0.3), of_rates, strict=True):
            write(results, Cell(TUNING.name, f"local_{rate}", column, "small", 0), held(accuracy=float(accuracy)))
    assert chosen("local", "dirichlet", "small", TUNING.name) == 0.12
    assert choices(TUNING, finished(results, TUNING, "small")) == "Chosen: local, 0.12."


def test_the_largest_deficit_is_that_to_the_best_rule_of_the_worst_column():
    made = {
        (row, column): [{"seed": seed, "values": {"accuracy": 70.0 + seed}} for seed in (0, 1)]
        for row in ACCURACY.rows
        for column in ("dist1", "groups")
    }
    made["local", "groups"] = [{"seed": seed, "values": {"accuracy": 75.0 + 3 * seed}} for seed in (0, 1)]
    made["mr_mtl", "dist1"] = [{"seed": seed, "values": {"accuracy": 74.0 + seed}} for seed in (0, 1)]
    words = largest_deficits(ACCURACY, made)
    assert "over 2 columns: DPFedAvg, -6.00 ± 1.00 (2) in four groups, beside local;" in words
    assert "local, -4.00 ± 0.00 (2) in Dist1, beside MR-MTL, pull 0.2;" in words
    assert largest_deficits(ACCURACY, {}) == ""


def test_the_leaderboard_shows_the_finished_cells():
    """Means over the seeds that all cells have, the best one of a column in bold, and each rule's largest deficit."""
    made = finished(cells.RESULTS, ACCURACY, "small")
    best, differences = differences_to_best(ACCURACY, made)
    page = (Path(__file__).parents[2] / "docs" / "leaderboard.md").read_text()
    table = page[page.index("| accuracy") :].partition("\n\n")[0].splitlines()
    lines = [line.strip("| ").replace("`", "").split(" | ") for line in table if not line.startswith("|-")]
    shown = {title: numbers for title, *numbers in lines[1:]}
    seeds = set.intersection(*(set(accuracies(ACCURACY, row, of_place)) for (row, _), of_place in made.items()))
    assert list(best) == list(ACCURACY.columns) and shown.keys() == {row.title for row in ACCURACY.rows.values()}
    for row, declared in ACCURACY.rows.items():
        means = [fmean(accuracies(ACCURACY, row, made[row, column])[seed] for seed in seeds) for column in best]
        words = [f"{mean:.1f}" for mean in means]
        expected = [f"**{word}**" if best[column] == row else word for word, column in zip(words, best, strict=True)]
        deficit = f"{max(-fmean(differences[row, column]) for column in best):.1f}"
        assert [*shown[declared.title][:-1], shown[declared.title][-1].strip("*")] == [*expected, deficit]
