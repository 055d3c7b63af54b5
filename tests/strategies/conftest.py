"""Strategies are compared under one noise."""

import pytest


@pytest.fixture(autouse=True)
def same_noise(one_noise):
    """Of all simulations, whatever strategies they have."""
