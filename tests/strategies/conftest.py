"""Strategies are compared under one noise."""

import pytest

from dpfl_lightning.federated.server.view import ServerState


@pytest.fixture(autouse=True)
def same_noise(one_noise):
    """Of all simulations, whatever strategies they have."""


@pytest.fixture
def view(make_loop):
    loop = make_loop()
    loop.plan_schedule()
    return loop.view(ServerState(loop.module.flat[None], (0,) * 4))
