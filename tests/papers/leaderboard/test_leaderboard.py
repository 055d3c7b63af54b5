"""The leaderboard: settings come from finished cells of the tuning, rows of a column differ in their method alone."""

import itertools

import pytest
from fake_experiments import held

from dpfl_lightning import strategies
from experiments.papers import __main__ as command
from experiments.papers import cells, run
from experiments.papers.cells import Cell, declaration, finished, missing_cells, required_cells, write
from experiments.papers.experiment import NotYet
from experiments.papers.leaderboard import tuning
from experiments.papers.leaderboard.tuning import candidates, choices
from experiments.papers.registry import experiments
from experiments.papers.run import RunnerOptions, options_of
from experiments.papers.tables.leaderboard import TUNED

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_the_repository")]
TUNING = "leaderboard.tuning"
TABLE, ACCURACY = experiments()[TUNING], experiments()["leaderboard.accuracy"]


def tune(results, row: str, accuracies: list[float], column: str = "dist1", seeds=(0,)) -> None:
    for name, accuracy in zip(candidates(TABLE, row).values(), accuracies, strict=False):
        for seed in seeds:
            write(results, Cell(TUNING, name, column, "small", seed), held(accuracy=accuracy))


def chosen(row: str, column: str, scale: str) -> float:
    """As the tables of the leaderboard ask for it."""
    return tuning.chosen(row, column, scale, **TUNED)


def options(cell: Cell):
    return options_of(cell, RunnerOptions(None, cells.RESULTS, cells.RESULTS))


def test_a_setting_has_the_best_mean_over_the_seeds(results):
    tune(results, "dpfedavg", [70.0, 76.1, 76.0])
    assert chosen("dpfedavg", "dist1", "small") == 0.2
    tune(results, "dpfedavg", [70.0, 70.0, 99.0], seeds=[7])
    assert chosen("dpfedavg", "dist1", "small") == 0.2, "nobody declared seed 7"
    tune(results, "weiavg", [72.0, 71.0, 70.0], "dist5", seeds=[0])
    tune(results, "weiavg", [70.0, 72.0, 70.0], "dist5", seeds=[1])
    tune(results, "weiavg", [99.0, 60.0], "dist5", seeds=[2])
    assert chosen("weiavg", "dist5", "small") == 0.2, "the third setting has no seed 2"
    tune(results, "dpfedavg", [50.0, 60.0, 50.0], "groups")
    assert chosen("dpfedavg", "groups", "small") == chosen("dpfedavg", "dirichlet", "small") == 0.2
    alike, unequal, unlike = choices(TABLE, finished(results, TABLE, "small")).split("\n\n")
    assert alike == "Chosen for Dist1: DPFedAvg, 0.2." and unequal == "Chosen for Dist5: WeiAvg, 0.2."
    assert unlike == "Chosen for four groups, Dist1: DPFedAvg, 0.2."
    some = TABLE.restricted(["dpfedavg_0.2"], None)
    assert choices(some, finished(results, some, "small")) == "", "three rows decide, not one"


@pytest.mark.parametrize(
    ("accuracies", "beyond", "setting", "end"),
    [
        ([75.0, 70.0, 75.0], None, None, ""),
        ([75.0, 70.0, 75.0], 74.0, 0.08, ""),
        ([70.0, 75.0, 76.0], 77.0, 1.25, " (an end of the range)"),
    ],
)
def test_beyond_an_end_of_the_range_one_more_setting_is_tried(results, accuracies, beyond, setting, end):
    tune(results, "pfa", accuracies)
    further = Cell(TUNING, "pfa_beyond", "dist1", "small", 0)
    assert further in required_cells(TABLE, "small")
    if beyond is None:
        with pytest.raises(NotYet, match=r"pfa is chosen from .* leaderboard.tuning --rows pfa_beyond --columns dist1"):
            chosen("pfa", "dist1", "small")
        assert options(further).clients.learning_rate == 0.032
        assert choices(TABLE, finished(results, TABLE, "small")) == ""
        return
    write(results, further, held(accuracy=beyond))
    assert chosen("pfa", "dist1", "small") == setting
    assert choices(TABLE, finished(results, TABLE, "small")) == f"Chosen for Dist1: PFA, {setting}{end}."


def test_a_cell_of_another_setting_than_the_chosen_one_is_missing(results):
    cell = Cell(ACCURACY.name, "dpfedavg", "dist1", "small", 0)
    tune(results, "dpfedavg", [70.0, 75.0, 70.0])
    write(results, cell, {**held(accuracy=78.0), "declared": declaration(cell)})
    table = ACCURACY.restricted(["dpfedavg"], ["dist1"], [0])
    assert missing_cells([cell], results) == [] and finished(results, table, "small")
    tune(results, "dpfedavg", [76.0, 77.0, 80.0])
    write(results, Cell(TUNING, "dpfedavg_beyond", "dist1", "small", 0), held(accuracy=0.0))
    assert missing_cells([cell], results) == [cell] and not finished(results, table, "small")


def test_missing_cells_of_the_tuning_are_named_and_nothing_is_made(results, tmp_path, capsys):
    tune(results, "mr_mtl", [70.0, 71.0], "dist5")
    words = "leaderboard.tuning --rows mr_mtl_1.25 --columns dist5"
    with pytest.raises(NotYet, match=words):
        chosen("mr_mtl", "dist5", "small")
    places = ["--results", str(results), "--runs", str(tmp_path / "runs")]
    argv = ["leaderboard.accuracy", "--rows", "mr_mtl", "--columns", "dist5", "--seeds", "0", *places]
    assert command.main(argv) == 1
    assert (
        f"1 of 1 cells cannot be made, because the setting of mr_mtl is chosen from cells that are not finished: "
        f"python -m experiments.papers {words}" in capsys.readouterr().err
    )
    assert not (tmp_path / "runs").exists()


def test_one_command_makes_the_tuning_before_the_columns_that_wait_for_it(results, monkeypatch):
    made = []

    def make(some, runner):
        for cell in some:
            write(runner.results, cell, held(accuracy=60.0 if cell.row.endswith("_0.2") else 50.0))
        made.extend(some)
        return []

    monkeypatch.setattr(command, "make", make)
    monkeypatch.setattr(run, "_lacks", lambda *data: False)
    argv = ["leaderboard", "--results", str(results)]
    assert command.main(argv) == 0
    names = [cell.experiment for cell in made]
    count = {table.name: len(required_cells(table, "small")) for table in (TABLE, ACCURACY)}
    assert names == [name for name in count for _ in range(count[name])] and len(set(made)) == len(made)
    runs = {repr(run.declared_options(cell)): cell for cell in made}
    assert len(runs) == len(made), "no run is made twice"
    for cell in made:
        strategies.build(options(cell).strategies)


def test_the_tuning_sees_public_records_only_and_has_three_settings_a_row():
    for row in ACCURACY.rows:
        settings = list(candidates(TABLE, row))
        assert len(settings) == (0 if row == "uniform" else 3), row
        ratios = [larger / smaller for smaller, larger in itertools.pairwise(settings)]
        assert all(ratio == pytest.approx(ratios[0]) and ratio > 1.9 for ratio in ratios), row
    for cell in required_cells(TABLE, "small"):
        if cell.row.endswith("_beyond"):
            continue  # the same options with another setting
        data, rounds = options(cell).data, options(cell).rounds
        assert data.use_public and data.public_records == 12_000 and data.test_per_client == 2000 and rounds == 10
        assert (data.groups is None) == (cell.column != "groups")


def test_rows_of_a_column_differ_in_their_method_alone(results):
    for row in ACCURACY.rows:
        for column in TABLE.columns:
            tune(results, row, [50.0, 60.0, 50.0], column)
    for column in ACCURACY.columns:
        made = [
            cell for cell in required_cells(ACCURACY.restricted(None, [column], [1]), "small") if cell.row != "fedavg"
        ]
        runs = [options(cell) for cell in made]
        assert len({repr((one.data, one.privacy, one.seed, one.model, one.clients.batch_size)) for one in runs}) == 1
        assert all(one.privacy.accountant == "pld" and one.rounds == 30 for one in runs)
    assert options(Cell(ACCURACY.name, "fedavg", "dist1", "small", 0)).privacy is None
    assert options(Cell(ACCURACY.name, "fedadam", "dist1", "small", 0)).strategies["fedadam"] == {"learning_rate": 0.01}
    assert options(Cell(ACCURACY.name, "mr_mtl", "groups", "small", 0)).strategies["mr_mtl"] == {"pull": 0.5}
