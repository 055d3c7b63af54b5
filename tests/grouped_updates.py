"""Updates of a first round in known groups: 21 clients of four groups, 3, 6, 6 and 6, in units of their noise."""

import math

import numpy as np
import torch

from dpfl_lightning.algorithms.update_geometry import Updates, centred_gram

TRUE = np.repeat(range(4), [3, 6, 6, 6])
CNN = 28_938  # parameters


def grouped(separation: float, num_params: int, seed: int, nested: bool = False) -> np.ndarray:
    """`[21, P]`: means in random directions, `2 * separation` apart; nested: two pairs, three times as far apart."""
    rng = np.random.default_rng(seed)
    directions = rng.standard_normal((6, num_params))
    directions *= math.sqrt(2) * separation / np.linalg.norm(directions, axis=1, keepdims=True)
    means = directions[:4] + (math.sqrt(8) * directions[[4, 4, 5, 5]] if nested else 0)
    return means[TRUE] + rng.standard_normal((len(TRUE), num_params))


def updates_of(x: np.ndarray, noise: np.ndarray | float = 1.0) -> Updates:
    """Of `x` `[n, P]`."""
    count = len(x)
    gram = centred_gram(torch.from_numpy(x))
    return Updates(gram, np.broadcast_to(noise, count).astype(float), x.shape[1])
