"""Random draws of models and of users' code: the same ones again, and whether there were any."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generator_states(device: torch.device) -> list[object]:
    """Return the states of all generators, which tell whether something drew random numbers."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    name, keys, *rest = np.random.get_state()
    return [*(one.numpy().tobytes() for one in states), name, np.asarray(keys).tobytes(), rest, random.getstate()]


@contextmanager
def fixed_rng(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Set all generators to the state of a seed of up to 64 bits, and restore them afterwards."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would format a traceback for each kind of device
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
