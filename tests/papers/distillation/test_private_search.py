"""The table of private searches: its candidates, its shares, and its summary."""

import pytest

from dpfl_lightning.search.space import changes_releases
from experiments.papers.cells import required_cells
from experiments.papers.distillation.private_search import CANDIDATES, SHARE_OF_SET, TRIALS
from experiments.papers.registry import experiments

pytestmark = pytest.mark.usefixtures("in_the_repository")
TABLE = experiments()["distillation.private_search"]


def test_candidates_change_no_release_and_the_default_is_one_of_them():
    assert not any(changes_releases(values, ()) for values in CANDIDATES)
    assert {"model.width": 32, "model.norm": "instance", "model.pooling": "avg"} in CANDIDATES
    assert len(CANDIDATES) == len({tuple(values.values()) for values in CANDIDATES}) == 8 > TRIALS and SHARE_OF_SET < 1


def test_both_budgets_have_every_row_with_three_seeds():
    cells = required_cells(TABLE, "small", None)
    assert len(cells) == 4 * 2 * 3 and {cell.seed for cell in cells} == {0, 1, 2}


def test_the_summary_has_the_correlations_of_each_budget():
    found = {
        ("set", "eps2"): [{"values": {"spearman": one}} for one in (0.2, 0.6)],
        ("default", "eps2"): [{"values": {}}],
    }
    lines = TABLE.summary(TABLE, found).splitlines()
    assert [word.strip() for word in lines[2].split("|")[1:-1]] == ["epsilon 2", "0.40", "0.20 to 0.60", "2"]
    assert len(lines) == 3 and TABLE.summary(TABLE, {}) == ""
