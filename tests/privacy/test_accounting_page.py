"""`docs/accounting.md` says what its JSON says, and its JSON is what the code computes."""

import json

import accounting_grid
import pytest

pytestmark = pytest.mark.e2e

RESULTS = json.loads(accounting_grid.RESULTS.read_text())


def test_the_page_is_written_from_the_results():
    assert accounting_grid.PAGE.read_text() == accounting_grid.page(RESULTS)


def test_no_epsilon_is_below_the_tight_one():
    assert len(RESULTS["cells"]) > 200
    assert all(row["below"] == 0 for row in accounting_grid.deviations(RESULTS["cells"]))


@pytest.mark.parametrize("kept", RESULTS["cells"][::40], ids=lambda one: f"{one['adjacency']}")
def test_a_sample_of_the_results_is_computed_again(kept):
    setting = (kept["sample_rate"], kept["noise_multiplier"], kept["steps"], kept["delta"], kept["adjacency"])
    now = accounting_grid.cell(*setting)
    assert now["ours"] == pytest.approx(kept["ours"], abs=2e-6)
    assert now["tight_lower"] == pytest.approx(kept["tight_lower"], abs=1e-6)


def test_published_numbers_are_computed_again():
    for kept, now in zip(RESULTS["published"], accounting_grid.published(), strict=True):
        assert now["ours"] == pytest.approx(kept["ours"], rel=1e-6)
        assert now["ours"] == pytest.approx(now["published"], rel=0.006, abs=0.013)
