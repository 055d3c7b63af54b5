"""Noise multipliers, variances and prices from formulas alone."""

import pytest

from experiments.papers.clustered.formulas import (
    RECORDS,
    noise_multiplier,
    update_variance,
)

#: later batch -> z, variance of the first round, variance of a later one
BY_LATER_BATCH = {
    16: (1.132, 7.40e-7, 52.0),
    32: (1.310, 9.92e-7, 8.70),
    64: (1.588, 1.46e-6, 1.60),
    128: (2.010, 2.33e-6, 0.320),
    256: (2.645, 4.04e-6, 0.0692),
    512: (3.583, 7.42e-6, 0.0159),
    1024: (5.122, 1.52e-5, 4.06e-3),
    2048: (7.628, 3.36e-5, 1.12e-3),
    6600: (12.14, 8.51e-5, 8.51e-5),
}


def test_noise_by_the_batch_of_later_rounds():
    for later, (z, of_first, of_later) in BY_LATER_BATCH.items():
        ours = noise_multiplier(5.0, RECORDS, later)
        assert ours == pytest.approx(z, rel=5e-3), later
        assert update_variance(RECORDS, ours) == pytest.approx(of_first, rel=0.01), later
        assert update_variance(later, ours) == pytest.approx(of_later, rel=0.01), later
