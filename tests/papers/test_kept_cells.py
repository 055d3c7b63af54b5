"""Kept cells that formulas and simulations make are what is computed today."""

import pytest

from experiments.papers.cells import RESULTS, finished
from experiments.papers.registry import experiments

pytestmark = pytest.mark.usefixtures("in_the_repository")

#: experiment -> how many numbers the paper leaves out
FORMULAS = dict.fromkeys(
    [f"noise_aware.{name}" for name in ("table3", "figure2", "figure8", "figure11", "figure12", "figure13")], 0
) | dict.fromkeys(
    [
        f"clustered.{name}"
        for name in ("full_batch_cost", "selection_cost", "figure5", "revised_figure3", "revised_figure8")
    ],
    3,
)
#: the quick cells of experiments whose others were made by the same code, and a relative tolerance
SIMULATED = """
clustered.simulation all p2000_s0 1e-3, clustered.recovery ours_2000 equal1 1e-3,
selection.noise formulas laplace_1 1e-6,
selection.calibration formulas t40 1e-6, selection.figure1 formulas gaussian_r60 1e-6,
selection.identifiability fit far 1e-6
"""


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_give_the_kept_numbers(name):
    experiment, compared = experiments()[name], 0
    compute = experiment.cells["formulas"].compute
    now = {column: compute(column, {}) for column in experiment.columns}
    for (row, column), cells in finished(RESULTS, experiment, "paper").items():
        if cells[0]["row"] == "formulas":
            key = experiment.rows[row].value
            assert (key in cells[0]["values"]) == (key in now[column]), (row, column)
            if key in now[column]:
                assert cells[0]["values"][key] == pytest.approx(now[column][key], rel=1e-6), (row, column)
                compared += 1
    rows = sum(line.cell == "formulas" for line in experiment.rows.values())
    assert compared >= rows * len(experiment.columns) - FORMULAS[name] > 0


@pytest.mark.e2e
def test_simulations_give_the_kept_numbers():
    for case in SIMULATED.split(","):
        name, cell, column, tolerance = case.split()
        experiment = experiments()[name]
        found = finished(RESULTS, experiment, "paper")
        assert {column for _, column in found} == set(experiment.columns), name
        row = next(row for row, line in experiment.rows.items() if line.cell == cell)
        now = dict(experiment.cells[cell].compute(column, {}))
        assert found[row, column][0]["values"] == pytest.approx(now, rel=float(tolerance), abs=1e-6), case
