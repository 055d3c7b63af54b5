"""The random-effects mean of simulated updates with known noise, after DerSimonian and Laird (1986)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Vector = NDArray[np.float64]

_LEAST = 1e-3  # noise counts as at least this share of the mean (of errors: of the least), so that weights are finite


def excess_spread(updates: Tensor, noise: Vector) -> tuple[float, float]:
    """Return the spread of updates `[C, P]` beyond that of their noise, and its weight; post-processing.

    The ratio of the sums of both over rounds estimates the variance between clients, over all P coordinates.

    Args:
        noise: `E|Z_n|^2` of each update, `[C]`, >= 0. Updates are weighted by its inverse, equally without noise.

    >>> excess_spread(torch.tensor([[0.0], [2.0]]), np.zeros(2))  # a sample variance of 2
    (2.0, 1.0)
    """
    weight = 1 / (noise + _LEAST * noise.mean()) if noise.any() else np.ones(len(noise))
    total = float(weight.sum())
    mean = torch.from_numpy(weight / total).to(updates) @ updates
    squares, square = (torch.linalg.vector_norm(one, dim=-1, dtype=torch.float64).cpu() ** 2 for one in (updates, mean))
    spread = float(weight @ squares.numpy()) - total * float(square)
    return spread - float(weight @ noise - weight**2 @ noise / total), float(total - weight @ weight / total)


def shares(noise: Vector, rounds: Vector, between: float) -> Vector:
    """Return the shares `[N]` of clients with the least squared error of a run's mean: `~ 1 / (v_n / T_n + G^2)`.

    Args:
        noise: v_n, `E|Z_n|^2` of one update, `[N]`, >= 0.
        rounds: T_n, in how many rounds the client trains, `[N]`; 0 gives share 0.
        between: G^2, the variance between clients, >= 0.

    >>> shares(np.array([3.0, 8.0, 1.0]), np.array([1.0, 1.0, 0.0]), between=1.0).round(3).tolist()
    [0.692, 0.308, 0.0]
    """
    error = noise / np.maximum(rounds, 1) + between
    least = error[error > 0].min() if error.any() else 1.0
    share = np.where(rounds > 0, 1 / np.maximum(error / least, _LEAST), 0.0)
    return share / max(share.sum(), _LEAST)
