"""docs/features.md names everything that a configuration can name, and nothing else, in the row where it belongs."""

import re
from pathlib import Path

import pytest

from dpfl_lightning.build import ENGINES
from dpfl_lightning.data import datasets
from dpfl_lightning.data.groups import GROUPS
from dpfl_lightning.data.partition import PARTITIONS
from dpfl_lightning.federated.client.fairness import FAIRNESS
from dpfl_lightning.federated.client.metrics import METRICS
from dpfl_lightning.models import MODELS
from dpfl_lightning.models.learning_rates import SCHEDULES
from dpfl_lightning.models.optimizers import OPTIMIZERS
from dpfl_lightning.models.tasks import TASKS
from dpfl_lightning.privacy.accounting.accountant import ACCOUNTANTS
from dpfl_lightning.strategies import STRATEGIES

TEXT = (Path(__file__).parents[1] / "docs" / "features.md").read_text()
ROWS = dict(re.findall(r"^\| ([^|]+?) \| (.+) \|$", TEXT, flags=re.MULTILINE))
#: rows whose strategies are listed
OF_STRATEGIES = (
    *("aggregation rules", "distilled sets", "several models", "selection of clients"),
    *("robust rules and masks", "further strategies"),
)


def words(*rows: str) -> set[str]:
    """The names in these rows, by the beginning of their heads, without what stands in parentheses."""
    texts = [text for head, text in ROWS.items() if head.startswith(rows)]
    assert len(texts) == len(rows), rows
    return set(re.findall(r"\w+", re.sub(r"\([^)]*\)", "", " ".join(texts))))


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ("public data", {*datasets.SOURCES, *datasets.BUILT_IN, *datasets.READERS}),
        ("simulated clients", {*PARTITIONS, *GROUPS}),
        ("models", MODELS),
        ("tasks", TASKS),
        ("metrics", METRICS),
        ("fairness", FAIRNESS),
        ("local training", {*OPTIMIZERS, *SCHEDULES}),
        ("privacy", ACCOUNTANTS),
        ("engines", ENGINES),
    ],
)
def test_a_row_names_all_that_there_is(row, names):
    assert not set(names) - words(row)


def test_rows_of_strategies_name_each_one_once():
    listed = [name for row in OF_STRATEGIES for name in STRATEGIES if name in words(row)]
    assert sorted(listed) == sorted(STRATEGIES)
    names = {one for row in OF_STRATEGIES for one in words(row) if "_" in one}
    assert not names - set(STRATEGIES), "no strategy of this name"


def test_only_the_gaps_are_said_to_need_the_option():
    """The worst client stands in the result of every run with held-out records."""
    always, _, simulated = ROWS["fairness"].partition("in simulations")
    assert "worst client" in always and "evaluation.fairness" not in always
    assert "central_models" in simulated and "`evaluation.fairness`" in simulated
