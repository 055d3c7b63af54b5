"""What the tables of the distillation paper compare: equal records, exact accounting, and what is free."""

import itertools
from pathlib import Path

import pytest

from dpfl_lightning import strategies
from dpfl_lightning.privacy.accounting.accountant import EXACT, get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from experiments.papers.cells import Cell, source
from experiments.papers.experiment import Training
from experiments.papers.registry import experiments
from experiments.papers.run import RunnerOptions, options_of

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_the_repository", "tuned")]
TABLES = {name: one for name, one in experiments().items() if name.startswith("distillation.")}


def options(cell: Cell):
    return options_of(cell._replace(seed=0), RunnerOptions(None, Path("results"), Path("runs")))


def cells(name: str, scale: str, rows=()):
    """(row, options) of all cells of a table that are runs or studies."""
    table = TABLES[name]
    for row, column in itertools.product(rows or table.rows, table.columns):
        cell = source(table, row, column, scale)
        if isinstance(TABLES[cell.experiment].cells[cell.row], Training):
            yield row, options(cell)


def test_private_settings_are_chosen_with_the_records_and_the_noise_of_the_private_runs():
    for _, run in cells("distillation.private_tuning", "small"):
        (private,) = {
            (one.data.public_records, one.clients.count)
            for _, one in cells("distillation.one_shot", "small", ["tuned"])
        }
        assert (run.data.public_records, run.clients.count) == private and run.data.use_public
        assert run.data.records_per_client == (60_000 - 12_000) / run.clients.count


def test_sets_of_full_batches_are_accounted_exactly():
    found = 0
    for name, table in TABLES.items():
        for scale in table.scales:
            for row, run in cells(name, scale):
                strategy = next((one for one in ("distillation", "feature_means") if one in run.strategies), None)
                sampling = strategy and (run.strategies[strategy] or {}).get("sampling", "full")
                if run.privacy is None or sampling != "full":
                    continue
                bound = get_accountant(run.privacy.accountant).bound([GaussianEvent(1.0, 2.7, 20)], 1e-5)
                assert bound[1] == EXACT, (name, row, scale)
                found += 1
    assert found > 5


FIGURES = ("table1", "skew", "sizes", "rounds", "participation", "clients", "wrong_labels", "sigma")


@pytest.mark.parametrize("name", FIGURES)
def test_cells_of_figures_have_options_that_strategies_take_and_no_noise_but_sigmas(name):
    seen = set()
    for scale in TABLES[f"distillation.{name}"].scales:
        for row, run in cells(f"distillation.{name}", scale):
            assert len(strategies.build(run.strategies)) == len(run.strategies) <= 2, row
            assert (run.privacy is None) == (name != "sigma"), row
            seen |= {*run.strategies}
    assert seen & {"distillation", "distillation_as_printed"}


def test_rows_of_wrong_labels_differ_in_the_centre_alone():
    rows = ("sum", "client_means", "median", "trimmed_mean")
    found = {}
    for row, run in cells("distillation.wrong_labels", "small", rows):
        own = dict(run.strategies["distillation"])
        assert own.pop("aggregation") == row
        own.pop("trimmed_share", None)
        found.setdefault(str(run.data.label_noise), []).append((own, run.data, run.clients))
    assert len(found) == 7
    assert all(one == many[0] for many in found.values() for one in many) and all(
        len(one) == 4 for one in found.values()
    )


def test_the_papers_numbers_stand_beside_ours_with_both_protocols():
    table = TABLES["distillation.table1"]
    assert table.paper_number("distdd_10", "alpha1") == 82.1 and table.paper_number("distdd_100", "alpha1") == 90.1
    assert table.paper_number("fedavg", "alpha0.1") == 74.3
    assert all("10 clients, 20 rounds, width 32" in row.title for row in table.rows.values())
    assert "50 clients, half of them a round, 500 rounds, width 128" in table.title
