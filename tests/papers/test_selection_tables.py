"""Tables of the selection paper are declared with its settings."""

import pytest

from experiments.papers.cells import RESULTS, required_cells
from experiments.papers.registry import experiments
from experiments.papers.run import RunnerOptions, options_of

pytestmark = pytest.mark.usefixtures("in_the_repository")


@pytest.mark.parametrize(
    ("column", "data", "settings"),
    [("mnist", "mnist", (20, 0.1, 3)), ("fashion_mnist_gaussian", "fashion_mnist", (25, 0.5, 4))],
)
def test_mnist_has_the_papers_model_clip_norm_and_budgets(column, data, settings):
    """Its section 6: a CNN of 4,266 parameters, clip norm 20 and epsilons from 0.1 to 3; Fashion-MNIST has others."""
    table = experiments()["selection.tuning"].restricted(["privatefl_0.02", "privatefl_two_stage_0.02"], [column])
    for cell in required_cells(table, "small"):
        options = options_of(cell, RunnerOptions(None, RESULTS, RESULTS))
        budgets = options.privacy.epsilon
        assert (options.privacy.clip_norm, budgets["low"], budgets["high"]) == settings, cell
        assert (options.data.name, options.model["name"]) == (data, "cnn_tiny")


def test_the_rates_of_mnist_are_tuned_on_mnist():
    methods, tuning = (experiments()[f"selection.{name}"] for name in ("mnist", "tuning"))
    assert list(methods.columns) == ["mnist"] and "mnist" in tuning.columns
