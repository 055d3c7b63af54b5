"""The noise of one update by the number of participations that share a client's budget, in the selection paper.

Reference: Ma et al., "The Power of Bias", Lemmas 1 and 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpfl_lightning.privacy.accounting.accountant import gaussian_mu

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class NoiseModel:
    """`E|Z_n|^2 = scale learning_rate^2 T_n^exponent factor_n`: noise of one update if T_n updates share the budget.

    Args:
        scale: Lambda, the factor common to all clients, > 0.
        exponent: z, 1 for Gaussian noise, 2 for Laplace noise.
        factor: Phi, the factor of each client, `[N]`, >= 0.
    """

    scale: float
    exponent: float
    factor: Vector

    def variance(self, quota: ArrayLike, learning_rate: float = 1.0) -> Vector:
        """Return `E|Z_n|^2`, `[N]`."""
        return self.scale * learning_rate**2 * np.asarray(quota, dtype=float) ** self.exponent * self.factor


def gaussian_noise(
    clip_norm: float, num_params: int, epsilon: ArrayLike, delta: ArrayLike, num_records: ArrayLike
) -> NoiseModel:
    """Return the model of full batches with Gaussian noise under replacement of one record, composed exactly.

    Gradients are clipped in L2; epsilon, delta and num_records are `[N]` or one value.

    >>> model = gaussian_noise(clip_norm=1.0, num_params=10, epsilon=[1.0], delta=1e-5, num_records=100)
    >>> round(float(model.variance(40)[0]), 4)  # 4 d 40 (3.7306 / 100)^2
    2.2268
    """
    epsilon, delta, records = np.broadcast_arrays(*(np.asarray(v, dtype=float) for v in (epsilon, delta, num_records)))
    return NoiseModel(4 * clip_norm**2 * num_params, 1, 1 / (gaussian_mu(epsilon, delta) * records) ** 2)


def laplace_noise(clip_norm: float, num_params: int, epsilon: ArrayLike, num_records: ArrayLike) -> NoiseModel:
    """Return the model of full batches with Laplace noise of scale `2 clip_norm T_n / (num_records epsilon)` (Lemma 2).

    Gradients are clipped in L1.

    >>> laplace_noise(clip_norm=1.0, num_params=10, epsilon=[1.0], num_records=100).variance(40).tolist()
    [12.8]
    """
    epsilon, records = np.broadcast_arrays(np.asarray(epsilon, dtype=float), np.asarray(num_records, dtype=float))
    return NoiseModel(8 * num_params * clip_norm**2, 2, 1 / (records * epsilon) ** 2)


def jain_index(quota: ArrayLike) -> float:
    """Return how equally clients take part: `(sum T_n)^2 / (N sum T_n^2)`, from 1 (equal quotas) to 1 / N."""
    participations = np.asarray(quota, dtype=float)
    squares = float((participations**2).sum())
    return math.nan if squares == 0 else float(participations.sum() ** 2 / (len(participations) * squares))
