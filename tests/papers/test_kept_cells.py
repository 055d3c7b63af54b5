"""Kept cells that formulas make are what is computed today."""

import pytest

from experiments.papers.cells import RESULTS, finished
from experiments.papers.registry import experiments

pytestmark = pytest.mark.usefixtures("in_the_repository")

#: tables of formulas
FORMULAS = (
    "noise_aware.table3",
    "clustered.full_batch_cost",
    "clustered.selection_cost",
    "clustered.lemma41",
    "selection.p2",
    "selection.quotas",
)


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_give_the_kept_numbers(name):
    experiment = experiments()[name]
    now = {column: experiment.cells["formulas"].compute(column) for column in experiment.columns}
    found = finished(RESULTS, experiment, "paper")
    assert {column for _, column in found} == set(experiment.columns)
    for (row, column), (cell,) in found.items():
        assert cell["values"] == pytest.approx(now[column], rel=1e-6), (row, column)
