"""Problem P2 has as many solutions as starts, and quotas that are no whole numbers exceed a budget."""

import math
from fractions import Fraction

import pytest

from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import LaplaceEvent
from experiments.papers.selection.formulas import fitted, spent


def test_each_start_of_the_search_fits_the_loss_and_gives_another_ratio():
    found = [fitted(start) for start in ([1.0, 8.0, 1.0, 1.0, 0.1], [5.0, 1.0, 2.0, 4.0, 2.0])]
    assert all(one["residual"] < 1e-6 and one["smoothness"] > one["strong_convexity"] for one in found)
    for one in found:
        by_hand = one["smoothness"] + 3 / 8 * one["strong_convexity"] * (one["lr_offset"] + 190)
        assert one["ratio"] == pytest.approx(by_hand, rel=1e-12)
    assert found[0]["relative"] == 1 and found[1]["relative"] == found[1]["ratio"] / found[0]["ratio"] > 5


@pytest.mark.parametrize("quota", [0.4, 1.3, 2.0, 9.7])
def test_a_quota_spends_what_its_participations_add_up_to(quota):
    found, times = spent(quota), math.ceil(quota)
    assert found == {"up": times, "spent": pytest.approx(float(times / Fraction(str(quota))))}
    each = LaplaceEvent(quota / 3.0)  # scale T_n / epsilon of a budget of 3
    assert get_accountant("pld").epsilon([each.repeated(times)], 0.0) / 3 == pytest.approx(found["spent"], rel=1e-6)
