"""Random draws of nets and of users' code: the same ones again, and whether there were any."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generator_states(device: torch.device) -> list[object]:
    """Return the states of all generators, which tell whether something drew random numbers."""
    on_device = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else []
    return [torch.get_rng_state().tolist(), on_device, repr(np.random.get_state()), random.getstate()]


@contextmanager
def drawing_alike(device: torch.device) -> Iterator[None]:
    """Set all generators to the same state, and restore them afterwards."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
