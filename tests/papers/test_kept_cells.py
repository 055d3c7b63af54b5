"""Kept cells that formulas and simulations make are what is computed today."""

import pytest

from experiments.papers.cells import RESULTS, finished
from experiments.papers.registry import experiments

pytestmark = pytest.mark.usefixtures("in_the_repository")

#: tables of formulas
FORMULAS = ("noise_aware.table3", "clustered.full_batch_cost", "clustered.selection_cost")


def kept(name: str) -> dict:
    experiment = experiments()[name]
    found = finished(RESULTS, experiment, "paper")
    assert {column for _, column in found} == set(experiment.columns)
    return found


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_give_the_kept_numbers(name):
    compute = experiments()[name].cells["formulas"].compute
    now = {column: compute(column) for column in experiments()[name].columns}
    for (row, column), (cell,) in kept(name).items():
        assert cell["values"] == pytest.approx(now[column], rel=1e-6), (row, column)


@pytest.mark.e2e
def test_simulations_give_the_kept_numbers():
    now = experiments()["noise_aware.signal"].cells["all"].compute("k1_steps_1")
    (cell,) = kept("noise_aware.signal")["rpca", "k1_steps_1"]
    assert cell["values"] == pytest.approx(now, rel=1e-3)
