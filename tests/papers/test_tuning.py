"""Settings come from finished cells of a table that tunes them; rows of a column differ in their method alone."""

import pytest
from fake_experiments import held

from dpfl_lightning import strategies
from experiments.papers import __main__ as command
from experiments.papers import cells, run
from experiments.papers.cells import Cell, declaration, finished, missing_cells, required_cells, write
from experiments.papers.declarations import by_column, entry, lazy, table
from experiments.papers.experiment import NotYet
from experiments.papers.registry import experiments
from experiments.papers.run import RunnerOptions, options_of
from experiments.papers.tuning import candidates, choices, chosen

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_the_repository")]
RATES = (0.08, 0.2, 0.5)
FEDERATIONS = [name for name in experiments() if name.startswith("federations.")]


def tuned() -> list:
    """A table of two rules with three rates each and one beyond, and a table that takes the best of them."""
    rules, columns = ("plain", "other"), [entry(name, name) for name in ("dist1", "dist5")]
    beyond = {"clients.learning_rate": lazy("tuning:beyond", table="fake.tuning")}
    return [
        table(
            "fake.tuning",
            title="Rates",
            shows="accuracy, %",
            rows=[
                *(entry(f"{name}_{rate}", f"{name}, {rate}", _rate(rate)) for name in rules for rate in RATES),
                *(entry(f"{name}_beyond", f"{name}, beyond", beyond) for name in rules),
            ],
            columns=columns,
            options={"data.name": "digits", "privacy.epsilon": by_column({"dist5": 1}, 2)},
            scales={"small": "few"},
            seeds={"small": [0, 1, 2]},
            minutes={"small": 1},
            summary="tuning:choices",
        ),
        table(
            "fake.accuracy",
            title="Accuracy",
            shows="accuracy, %",
            rows=[entry(name, name, _rate(lazy("tuning:chosen", table="fake.tuning"))) for name in rules],
            columns=columns,
            options={"data.name": "digits", "privacy.epsilon": 2},
            scales={"small": "few"},
            minutes={"small": 1},
        ),
    ]


def _rate(value) -> dict:
    return {"clients.learning_rate": value}


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    for one in tuned():
        monkeypatch.setitem(experiments(), one.name, one)
    return experiments()["fake.tuning"], experiments()["fake.accuracy"]


def tune(results, row: str, accuracies: list[float], column: str = "dist1", seeds=(0,)) -> None:
    names = candidates(experiments()["fake.tuning"], row).values()
    for name, accuracy in zip(names, accuracies, strict=False):
        for seed in seeds:
            write(results, Cell("fake.tuning", name, column, "small", seed), held(accuracy=accuracy))


def best(row: str, column: str) -> float:
    return chosen(row, column, "small", "fake.tuning")


def options(cell: Cell):
    return options_of(cell, RunnerOptions(None, cells.RESULTS, cells.RESULTS))


def test_a_setting_has_the_best_mean_over_the_seeds(results, tables):
    tune(results, "plain", [70.0, 76.1, 76.0])
    assert best("plain", "dist1") == 0.2
    tune(results, "plain", [70.0, 70.0, 99.0], seeds=[7])
    assert best("plain", "dist1") == 0.2, "nobody declared seed 7"
    tune(results, "other", [72.0, 71.0, 70.0], "dist5", seeds=[0])
    tune(results, "other", [70.0, 72.0, 70.0], "dist5", seeds=[1])
    tune(results, "other", [99.0, 60.0], "dist5", seeds=[2])
    assert best("other", "dist5_more") == 0.2, "the third setting has no seed 2"
    made = finished(results, tables[0], "small")
    assert choices(tables[0], made) == "Chosen for dist1: plain, 0.2.\n\nChosen for dist5: other, 0.2."
    some = tables[0].restricted(["plain_0.2"], None)
    assert choices(some, finished(results, some, "small")) == "", "three rows decide, not one"


@pytest.mark.parametrize(
    ("accuracies", "beyond", "setting", "end"),
    [
        ([75.0, 70.0, 75.0], None, None, ""),
        ([75.0, 70.0, 75.0], 74.0, 0.08, ""),
        ([70.0, 75.0, 76.0], 77.0, 1.25, " (an end of the range)"),
    ],
)
def test_beyond_an_end_of_the_range_one_more_setting_is_tried(results, tables, accuracies, beyond, setting, end):
    tune(results, "plain", accuracies)
    further = Cell("fake.tuning", "plain_beyond", "dist1", "small", 0)
    assert further in required_cells(tables[0], "small")
    if beyond is None:
        with pytest.raises(NotYet, match=r"plain is chosen from .* fake.tuning --rows plain_beyond --columns dist1"):
            best("plain", "dist1")
        assert options(further).clients.learning_rate == 0.032
        assert choices(tables[0], finished(results, tables[0], "small")) == ""
        return
    write(results, further, held(accuracy=beyond))
    assert best("plain", "dist1") == setting
    assert choices(tables[0], finished(results, tables[0], "small")) == f"Chosen for dist1: plain, {setting}{end}."


def test_a_cell_of_another_setting_than_the_chosen_one_is_missing(results, tables):
    cell = Cell("fake.accuracy", "plain", "dist1", "small", 0)
    tune(results, "plain", [70.0, 75.0, 70.0])
    write(results, cell, {**held(accuracy=78.0), "declared": declaration(cell)})
    shown = tables[1].restricted(["plain"], ["dist1"], [0])
    assert missing_cells([cell], results) == [] and finished(results, shown, "small")
    tune(results, "plain", [76.0, 77.0, 80.0])
    write(results, Cell("fake.tuning", "plain_beyond", "dist1", "small", 0), held(accuracy=0.0))
    assert missing_cells([cell], results) == [cell] and not finished(results, shown, "small")


def test_missing_cells_of_the_tuning_are_named_and_nothing_is_made(results, tmp_path, capsys):
    tune(results, "plain", [70.0, 71.0], "dist5")
    words = "fake.tuning --rows plain_0.5 --columns dist5"
    with pytest.raises(NotYet, match=words):
        best("plain", "dist5")
    places = ["--results", str(results), "--runs", str(tmp_path / "runs")]
    argv = ["fake.accuracy", "--rows", "plain", "--columns", "dist5", "--seeds", "0", *places]
    assert command.main(argv) == 1
    assert (
        f"1 of 1 cells cannot be made, because the setting of plain is chosen from cells that are not finished: "
        f"python -m experiments.papers {words}" in capsys.readouterr().err
    )
    assert not (tmp_path / "runs").exists()


def test_one_command_makes_the_tuning_before_the_columns_that_wait_for_it(results, monkeypatch):
    made = []

    def make(some, runner):
        for cell in some:
            write(runner.results, cell, held(accuracy=60.0 if cell.row.endswith("_0.12") else 50.0))
        made.extend(some)
        return []

    monkeypatch.setattr(command, "make", make)
    monkeypatch.setattr(run, "_lacks", lambda *data: False)
    assert command.main(["federations", "--results", str(results)]) == 0
    names = [cell.experiment for cell in made]
    count = {name: len(required_cells(experiments()[name], "small")) for name in FEDERATIONS}
    assert {name: names.count(name) for name in count} == count and len(set(made)) == len(made)
    assert "federations.tuning" not in names[names.index("federations.accuracy") :]
    of_rules = [cell for cell in made if cell.experiment in FEDERATIONS[:2]]
    assert len({repr(run.declared_options(cell)) for cell in of_rules}) == len(of_rules), "no run is made twice"
    for cell in made:
        strategies.build(options(cell).strategies)


def test_rows_of_a_column_differ_in_their_method_alone(results):
    tuning, accuracy = experiments()["federations.tuning"], experiments()["federations.accuracy"]
    for cell in required_cells(tuning, "small"):
        write(results, cell, held(accuracy=60.0 if cell.row.endswith("_0.12") else 50.0))
        data = options(cell).data
        assert data.use_public and data.public_records == 12_000 and data.test_per_client == 2000
        assert (data.groups is None) == (cell.column != "groups")
    for column in accuracy.columns:
        runs = [options(cell) for cell in required_cells(accuracy.restricted(None, [column], [200]), "small")]
        assert len({repr((one.data, one.privacy, one.seed, one.model, one.clients)) for one in runs}) == 1
        assert all(one.privacy.accountant == "pld" and one.clients.learning_rate == 0.12 for one in runs)
