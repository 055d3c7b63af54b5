"""Estimates for the selection of clients: heterogeneity from noisy losses, and how equally clients take part."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Vector = NDArray[np.float64]


def shrunken_heterogeneity(
    mean_report: ArrayLike, reports: ArrayLike, noise_std: ArrayLike, max_loss: float
) -> tuple[Vector, float]:
    """Shrink each client's mean noisy loss `[N]` towards the mean of all, as far as noise explains the differences.

    `reports` `[N]` >= 0 are numbers of reports (a mean of none may have any value), `noise_std` `[N]` > 0 is that of
    one report; estimates are clipped to [0, max_loss]. Also returned is the variance between clients without noise; if
    it is 0, the estimates are equal. Losses at the server's model replace F_n(w*) - F_n*, with F_n* = 0.
    Post-processing of noisy reports.

    Reference: DerSimonian and Laird (1986), with a test for the presence of that variance; not in the paper.

    >>> estimate, between = shrunken_heterogeneity([0.9, 1.1, 0.0], [4, 4, 0], [1.0, 1.0, 1.0], max_loss=2.3)
    >>> estimate.round(3).tolist(), between
    ([1.0, 1.0, 1.0], 0.0)
    """
    mean, counts, std = (np.asarray(values, dtype=float) for values in (mean_report, reports, noise_std))
    reporting = counts > 0
    if not reporting.any():
        return np.zeros(len(mean)), 0.0
    means, variance = mean[reporting], std[reporting] ** 2 / counts[reporting]
    weight = 1 / variance
    overall = float((weight * means).sum() / weight.sum())
    spread, degrees = float((weight * (means - overall) ** 2).sum()), len(means) - 1
    between_variance = 0.0
    if degrees and spread > degrees + 2 * math.sqrt(
        2 * degrees
    ):  # two standard deviations above the value for noise alone
        between_variance = (spread - degrees) / float(weight.sum() - (weight**2).sum() / weight.sum())
    estimate = np.full(len(mean), overall)
    estimate[reporting] += between_variance / (between_variance + variance) * (means - overall)
    return np.clip(estimate, 0.0, max_loss), between_variance


def jain_index(quota: ArrayLike) -> float:
    """Return how equally clients take part: `(sum T_n)^2 / (N sum T_n^2)`, from 1 (equal quotas) to 1 / N."""
    participations = np.asarray(quota, dtype=float)
    squares = float((participations**2).sum())
    return math.nan if squares == 0 else float(participations.sum() ** 2 / (len(participations) * squares))
