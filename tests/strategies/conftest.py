"""Strategies are compared under one noise."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def same_noise(one_noise):
    """Of all simulations, whatever strategies they have."""
