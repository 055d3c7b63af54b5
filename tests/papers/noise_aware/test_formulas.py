"""Table 3 and the figures' anchors from formulas alone."""

import math
import time

import numpy as np
import pytest
from reference import paper_noise_multipliers

from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS
from experiments.papers.noise_aware.formulas import (
    noise_multipliers,
    of_sum,
    oracle_weights,
    table3,
)
from experiments.papers.registry import experiments

TABLE3 = experiments()["noise_aware.table3"]
DISTS = list(TABLE3.columns)

#: computed once by an implementation of its own, with an accountant of its own
EXPECTED = {
    "weiavg": (1.025, 1.895, 0.9195, 3.228, 4.585, 27.74, 9.873, 48.07, 34.87),
    "dpfedavg": (1.278, 16.91, 16.19, 26.74, 25.55, 67.13, 18.60, 85.48, 43.17),
    "min_eps": (4.690, 102.93, 102.93, 126.35, 102.93, 1454, 75.03, 232.5, 86.81),
    "oracle": (0.2697, 0.4762, 0.0758, 0.6471, 0.3905, 7.629, 2.275, 13.85, 6.022),
}


def test_every_number_of_table_3_is_as_near_to_the_papers_as_it_should_be():
    """Within 2 %, but for the cells that say why not; in seconds."""
    begun = time.perf_counter()
    for place, dist in enumerate(DISTS):
        for row, ours in table3(dist).items():
            assert ours == pytest.approx(EXPECTED[row][place], rel=0.005), (row, dist)
            assert TABLE3.comparison.holds(row, dist, ours, TABLE3.paper_number(row, dist)), (row, dist)
    assert time.perf_counter() - begun < 60
    special = {" ".join(place): tolerance.within for place, tolerance in TABLE3.comparison.special.items()}
    assert special == {"dpfedavg dist6": 0.06, "min_eps dist6": None, "min_eps dist8": 0.04, "oracle dist3": 0.09}
    cut_off = math.floor(100 * table3("dist3")["oracle"]) / 100
    assert cut_off == TABLE3.paper_number("oracle", "dist3")


def test_noise_multipliers_are_those_of_the_released_code():
    for dist in ("dist1", "dist6"):
        ours = noise_multipliers(EPSILONS[dist][20], BATCH_SIZES[20])
        theirs = paper_noise_multipliers(np.array(EPSILONS[dist][20]), BATCH_SIZES[20], 2400)
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=0.006, err_msg=dist)


def test_no_weights_give_less_noise_than_the_best():
    rng = np.random.default_rng(0)
    variances = rng.uniform(0.1, 10, 20)
    best = of_sum(oracle_weights(variances), variances)
    assert best == pytest.approx(1 / np.sum(1 / variances), rel=1e-12)
    assert all(of_sum(rng.dirichlet(np.ones(20)), variances) >= best for _ in range(1000))
    np.testing.assert_allclose(oracle_weights(7 * variances), oracle_weights(variances), rtol=1e-12)
