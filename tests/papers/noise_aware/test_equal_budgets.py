"""Table 20 is declared with the paper's split."""

import pytest

from experiments.papers.cells import RESULTS, required_cells
from experiments.papers.registry import experiments
from experiments.papers.run import RunnerOptions, options_of


@pytest.mark.usefixtures("in_the_repository")
def test_all_clients_have_one_budget_and_one_batch_size_and_records_by_dirichlet_1(monkeypatch):
    """Its section G.3: Dirichlet(1), 20 clients, batch size 32."""
    monkeypatch.setattr("experiments.papers.tuning.chosen", lambda *given, **named: 0.1)
    for cell in required_cells(experiments()["noise_aware.equal"], "small"):
        options = options_of(cell, RunnerOptions(None, RESULTS, RESULTS))
        assert options.clients.batch_size == 32 and options.clients.count == 20
        assert options.privacy.epsilon == pytest.approx(3 * float(cell.column.removeprefix("dist1_eps")))
        assert (options.data.partition["name"], options.data.partition["alpha"]) == ("dirichlet", 1)
