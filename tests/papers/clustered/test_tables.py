"""The rows of the comparison of clusters are tuned alike, and the paper's numbers stand beside the paper's forms."""

import pytest
from fake_experiments import held

from dpfl_lightning import strategies
from experiments.papers.cells import RESULTS, required_cells, write
from experiments.papers.experiment import NotYet
from experiments.papers.registry import experiments
from experiments.papers.report import report
from experiments.papers.run import RunnerOptions, options_of

pytestmark = pytest.mark.usefixtures("in_the_repository")


def options(cell):
    return options_of(cell, RunnerOptions(None, RESULTS, RESULTS))


def tune(results, best="0.1"):
    for cell in required_cells(experiments()["clustered.rates"], "small"):
        if not cell.row.endswith("_beyond"):
            write(results, cell, held(accuracy=60.0 if cell.row.endswith(f"_{best}") else 50.0))


@pytest.mark.e2e
def test_all_rows_have_the_same_rates_on_the_same_public_records_in_three_seeds(results):
    rates = experiments()["clustered.rates"]
    of_row: dict[str, set[str]] = {}
    for cell in required_cells(rates, "small"):
        method, _, rate = cell.row.rpartition("_")
        of_row.setdefault(method, set()).add((cell.column, rate, cell.seed))
        if rate != "beyond":
            assert options(cell).data.use_public and options(cell).privacy.reserve_rounds + options(cell).rounds == 60
    paired = {cell.row for cell in required_cells(experiments()["clustered.paired"], "small")}
    assert of_row.keys() == paired and len({frozenset(one) for one in of_row.values()}) == 1
    assert {seed for _, _, seed in of_row["oracle"]} == {0, 1, 2}


@pytest.mark.e2e
def test_rows_of_a_column_differ_in_their_method_alone_and_have_five_seeds(results):
    paired = experiments()["clustered.paired"]
    with pytest.raises(NotYet):
        options(required_cells(paired, "small")[0])
    tune(results)
    cells = required_cells(paired, "small")
    for column in paired.columns:
        runs = [options(cell) for cell in cells if cell.column == column]
        assert len({repr((one.data, one.privacy, one.model, one.clients, one.rounds)) for one in runs}) == 1
        assert all(one.clients.learning_rate == 0.1 and one.evaluation.fairness for one in runs)
        assert {one.data.groups["name"] for one in runs} == {"label_shift" if "labels" in column else "rotation"}
        strategies.build(runs[0].strategies)
    assert {cell.seed for cell in cells if cell.column == "rotation"} == set(range(5))


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["clustered.table5", "clustered.table6", "clustered.paired"])
def test_the_published_number_of_ifca_stands_beside_choices_without_noise_alone(name, results):
    tune(results)
    table = experiments()[name]
    compared = {row for row in table.paper if row.startswith("ifca")}
    assert compared and {table.source(row, "")[1] for row in compared} <= {"ifca_argmin", "ifca_published"}
    assert not any(row.startswith("ours") for row in table.paper)
    if name == "clustered.paired":
        of_row = {cell.row: options(cell).strategies for cell in required_cells(table, "small")}
        assert of_row["ifca_published"]["ifca"]["selection"] == "paper_argmin"
        assert "selection" not in of_row["ifca_private"]["ifca"]
        assert of_row["kmeans_server"]["kmeans_clusters"] == {"models": "of_clusters", "num_clusters": 4}


@pytest.mark.e2e
def test_an_oracle_below_a_method_leaves_no_verdict(results):
    tune(results)
    table = experiments()["clustered.paired"].restricted(None, ["rotation"], [0, 1, 2])

    def shown(more: float) -> str:
        for cell in required_cells(table, "small"):
            accuracy = 75.0 + cell.seed + more * (cell.row == "paper")
            write(results, cell, held(**dict.fromkeys({line.value for line in table.rows.values()}, accuracy)))
        return report(table, "small", results)

    assert "numbers are within" in shown(0.0) and "Differences to RC-DPFL: all clients, paired" in shown(0.0)
    assert "Oracle-CDPFL: all clients must not be below" in shown(0.5)
    assert "RC-DPFL: all clients in rotation, epsilon 5 (+0.50" in shown(0.5) and "numbers are within" not in shown(0.5)
