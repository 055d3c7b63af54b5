"""Noise multipliers and prices from formulas alone."""

import pytest

from experiments.papers.clustered.formulas import noise_multiplier, selection_cost


def test_a_first_round_of_all_records_and_private_choices_cost_noise():
    assert noise_multiplier(5.0, first_batch=None) == pytest.approx(1.078, rel=5e-3)
    assert noise_multiplier(5.0) == pytest.approx(1.310, rel=5e-3)
    cost = selection_cost(5.0)
    assert cost["free"] == noise_multiplier(5.0) < cost["joint"] < cost["every_round"]
