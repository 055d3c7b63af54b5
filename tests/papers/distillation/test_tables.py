"""What the tables of the distillation paper compare: equal records, exact accounting, and what is free."""

import itertools
import math
from pathlib import Path

import pytest

from dpfl_lightning.privacy.accounting.accountant import EXACT, get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.strategies.distillation.distillation import loops, participants
from experiments.papers.cells import Cell, path_of, source
from experiments.papers.experiment import NotYet, Training
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


def records_of_a_gradient(run) -> int:
    """The largest number of records of a class in one class gradient, of all clients of a round together."""
    set_options = run.strategies["distillation"]
    fraction = set_options.get("participation_fraction", 1.0)
    return set_options["records_per_class"] * participants(run.clients.count, fraction)


@pytest.mark.parametrize(
    ("table", "rivals", "reference"),
    [
        ("baselines", ["centralised"], ("baselines", "tuned")),
        ("default", ["gm"], ("default", "distdd")),
        ("figure3", ["gm"], ("default", "distdd")),
        ("figure10", ["gm"], ("default", "distdd")),
        ("table1_centralised", ["gm"], ("table1", "distdd_100")),
    ],
)
def test_centralised_gradients_are_of_as_many_records_as_federated_ones(table, rivals, reference):
    scale = TABLES[f"distillation.{table}"].scale(None)
    (federated,) = {
        records_of_a_gradient(run) for _, run in cells(f"distillation.{reference[0]}", scale, [reference[1]])
    }
    for row, run in cells(f"distillation.{table}", scale, rivals):
        assert records_of_a_gradient(run) == federated, row


def test_image_steps_are_those_that_the_tuning_chooses():
    rows = {
        "baselines": "tuned",
        "sizes": "tuned",
        "published": "tuned",
        "figure6": "sum",
        "rounds": "tuned",
    }
    for name, row in rows.items():
        for _, run in cells(f"distillation.{name}", TABLES[f"distillation.{name}"].scale(None), [row]):
            found = run.strategies["distillation"]
            assert (found["image_steps"], found["image_learning_rate"]) == (30, 1060), name


def test_all_missing_cells_of_a_tuning_are_named(results):
    for row in ("lr318_steps10", "lr3180_steps30"):
        path_of(results, Cell("distillation.tuning", row, "public", "small", 0)).unlink()
    with pytest.raises(NotYet, match=r"distillation\.tuning --rows lr318_steps10,lr3180_steps30 --columns public$"):
        options(Cell("distillation.rounds", "tuned", "r5", "small"))


def test_private_rows_have_the_rounds_and_rates_that_their_tuning_chooses():
    for row, column, expected in (
        ("tuned", "eps0.5_ipc10", (5, 318, 1)),
        ("tuned", "eps1_ipc50", (5, 318, 1)),
        ("tuned", "eps4_ipc10", (20, 318, 5)),
        ("dpfedavg", "eps2_ipc10", (5, 0.25, None)),
        ("dpfedavg", "eps8_ipc50", (5, 0.05, None)),
    ):
        run = options(source(TABLES["distillation.one_shot"], row, column, "small"))
        found = run.strategies.get("distillation")
        rate = run.clients.learning_rate if found is None else found["image_learning_rate"]
        assert (run.rounds, rate, found and found["reinit_every"]) == expected, (row, column)
        assert run.evaluation.every == run.rounds


def test_private_settings_are_chosen_with_the_records_and_the_noise_of_the_private_runs():
    for _, run in cells("distillation.private_tuning", "small"):
        (private,) = {
            (one.data.public_records, one.clients.count)
            for _, one in cells("distillation.one_shot", "small", ["tuned"])
        }
        assert (run.data.public_records, run.clients.count) == private and run.data.use_public
        assert run.data.records_per_client == (60_000 - 12_000) / run.clients.count


def test_sets_of_all_sizes_are_made_with_as_many_nets():
    """Null would be one net for 50 images in 20 rounds, and twenty for one image."""
    for name, row in (("sizes", "tuned"), ("one_shot", "tuned"), ("published", "tuned")):
        nets = {}
        for _, run in cells(f"distillation.{name}", TABLES[f"distillation.{name}"].scale(None), [row]):
            budget, found = run.privacy and run.privacy.epsilon > 2, run.strategies["distillation"]
            every = found.get("reinit_every", loops(found["images_per_class"])[0])
            nets.setdefault(budget, set()).add(math.ceil(run.rounds / every))
        assert all(len(numbers) == 1 and min(numbers) > 1 for numbers in nets.values()), (name, nets)


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


@pytest.mark.parametrize("name", ["baselines", "one_shot", "nas", "hpo"])
def test_what_public_records_give_for_nothing_stands_beside_sets(name):
    table = TABLES[f"distillation.{name}"]
    assert "public" in (table.rows if name in ("baselines", "one_shot") else table.columns)
