"""`experiments/results/accounting.md` says what its JSON says, and its JSON is what the code computes."""

import json

import accounting_grid
import pytest

pytestmark = pytest.mark.e2e

RESULTS = json.loads(accounting_grid.RESULTS.read_text())


def test_the_page_is_written_from_the_results():
    assert accounting_grid.PAGE.read_text() == accounting_grid.page(RESULTS)


def test_every_epsilon_is_tight_and_none_is_below():
    assert len(RESULTS["cells"]) >= 60
    for one in RESULTS["cells"]:
        assert one["tight_lower"] <= one["ours"] <= one["target"], one
        assert accounting_grid.deviation(one) <= 1, one


@pytest.mark.parametrize("number", range(3, len(RESULTS["cells"]), 20))
def test_a_sample_of_the_results_is_computed_again(number):
    kept, now = RESULTS["cells"][number], accounting_grid.cell(*accounting_grid.SETTINGS[number])
    for key in ("noise_multiplier", "noise_multiplier_rdp", "ours", "rdp", "tight"):
        assert now[key] == pytest.approx(kept[key], rel=1e-5), key


def test_published_numbers_are_computed_again():
    for kept, now in zip(RESULTS["published"], accounting_grid.published(), strict=True):
        assert now["ours"] == pytest.approx(kept["ours"], rel=1e-6)
        assert now["ours"] == pytest.approx(
            now["published"], rel=0.003, abs=0.011
        )  # Opacus' PRV is an upper bound within 0.01
