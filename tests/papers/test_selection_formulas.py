"""Problem P2 has as many solutions as starts, and quotas that are no whole numbers exceed a budget."""

import math
from fractions import Fraction

import pytest

from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import LaplaceEvent
from experiments.papers.selection.formulas import fitted, spent


@pytest.mark.parametrize(
    ("start", "ratio"),
    [([1.0, 8.0, 1.0, 1.0, 0.1], 8.425), ([1.0, 2.0, 1.0, 3.0, 1.0], 75.0), ([1.0, 8.0, 1.0, 2.0, 0.7], 53.975)],
)
def test_the_ratio_is_that_of_the_start_as_the_distance_alone_fits_the_loss(start, ratio):
    """By hand L + 3/8 mu (gamma + 190), such as 1 + 3/80 * 198."""
    found = fitted(start)
    assert found["residual"] < 1e-6 and found["ratio"] == pytest.approx(ratio, rel=1e-12)
    assert [found[name] for name in ("lr_offset", "smoothness", "strong_convexity")] == [start[1], *start[3:]]
    assert found["relative"] == pytest.approx(ratio / 8.425, rel=1e-12)


@pytest.mark.parametrize("quota", [0.4, 1.3, 2.0, 9.7])
def test_a_quota_spends_what_its_participations_add_up_to(quota):
    found, times = spent(quota), math.ceil(quota)
    assert found == {"up": times, "spent": pytest.approx(float(times / Fraction(str(quota))))}
    each = LaplaceEvent(quota / 3.0)  # scale T_n / epsilon of a budget of 3
    assert get_accountant("pld").epsilon([each.repeated(times)], 0.0) / 3 == pytest.approx(found["spent"], rel=1e-6)
