"""How unlike the others each client is, estimated from noised losses: a shrunken mean, and the paper's own estimators.

The paper's constants come from one equation with five unknowns (`fit_constants`): the start values decide them.

Reference: Ma et al., "The Power of Bias", equations 8 to 10 and problem P2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar

from dpfl_lightning.algorithms.selection_noise import PAPER_BIAS, NoiseModel

Vector = NDArray[np.float64]


def shrunken_heterogeneity(
    mean_report: ArrayLike, reports: ArrayLike, noise_std: ArrayLike, max_loss: float
) -> tuple[Vector, float]:
    """Each client's mean noised loss, drawn to the mean of all as far as noise explains the differences, `[N]`.

    Losses at the server's model stand in for F_n(w*) - F_n*, with F_n* = 0. Where noise explains all differences the
    estimates are equal, and allocation is that of least noise.

    Args:
        mean_report: `[N]`, mean of a client's noised losses, not clipped; anything for a client without reports.
        reports: `[N]`, how many, >= 0.
        noise_std: `[N]`, of one report, > 0.
        max_loss: estimates are clipped to [0, max_loss].

    Returns:
        Estimates `[N]`, and the variance between clients that is not noise.

    **Privacy** Post-processing of noised reports.

    Reference: DerSimonian and Laird (1986), with a test that the variance is there at all; not in the paper, whose
    minimum of differences (`least_differences`) makes clients that report often look alike.

    >>> estimate, between = shrunken_heterogeneity([0.9, 1.1, 0.0], [4, 4, 0], [1.0, 1.0, 1.0], max_loss=2.3)
    >>> estimate.round(3).tolist(), between
    ([1.0, 1.0, 1.0], 0.0)
    """
    mean, counts, std = (np.asarray(one, dtype=float) for one in (mean_report, reports, noise_std))
    seen = counts > 0
    if not seen.any():
        return np.zeros(len(mean)), 0.0
    own, variance = mean[seen], std[seen] ** 2 / counts[seen]
    weight = 1 / variance
    overall = float((weight * own).sum() / weight.sum())
    spread, degrees = float((weight * (own - overall) ** 2).sum()), len(own) - 1
    between = 0.0
    if spread > degrees + 2 * math.sqrt(2 * degrees):  # two standard deviations above what noise alone gives
        between = (spread - degrees) / float(weight.sum() - (weight**2).sum() / weight.sum())
    estimate = np.full(len(mean), overall)
    estimate[seen] += between / (between + variance) * (own - overall)
    return np.clip(estimate, 0.0, max_loss), between


# ---- the paper's


def least_differences(reports: Sequence[tuple[int, float, float]], num_clients: int) -> Vector:
    """Gamma_n of equation 8: the smallest difference of a client's two losses in a round; the mean of those for others.

    Noise decides it: the more rounds, the smaller the minimum.

    Args:
        reports: (client, loss at the server's model, loss at its own model), noised.

    >>> least_differences([(0, 2.0, 1.5), (0, 2.0, 1.9), (1, 1.0, 1.3)], num_clients=3).round(3).tolist()
    [0.1, 0.3, 0.2]
    """
    least = np.full(num_clients, np.inf)
    for client, before, after in reports:
        least[client] = min(least[client], abs(before - after))
    seen = np.isfinite(least)
    return np.where(seen, least, least[seen].mean() if seen.any() else 0.0)


def estimated_skew(counts: ArrayLike, last_losses: dict[int, float], max_loss: float) -> float:
    """rho_min of equation 9, with F_n* = 0: it may exceed 1, which the true one cannot.

    Args:
        counts: participations before the last round of the first stage, `[N]`.
        last_losses: noised losses of that round's clients at the server's model; clipped to [0, max_loss] here.
    """
    counts = np.asarray(counts, dtype=float)
    known = {client: min(max(loss, 0.0), max_loss) for client, loss in last_losses.items()}
    mean = float(np.mean(list(known.values())))
    losses = np.array([known.get(client, mean) for client in range(len(counts))])
    return float((counts * losses).sum() / (counts.sum() * mean)) if mean > 0 and counts.any() else 1.0


@dataclass(frozen=True)
class Constants:
    """What the paper fits: |w_0 - w*|^2, gamma, sigma^2, L, mu; L > mu."""

    start_distance: float = 1.0
    lr_offset: float = 8.0
    gradient_variance: float = 1.0
    smoothness: float = 1.0
    strong_convexity: float = 0.1


@dataclass(frozen=True)
class FirstStage:
    """What is known after the rounds of the first stage.

    Args:
        rounds: tau, those before its last one, >= 1.
        cohort_size: K.
        counts: participations in them, `[N]`.
        heterogeneity: Gamma_n `[N]`, estimated.
        least_skew: rho_min, estimated.
        noise: of one update.
        loss: mean noised loss of the last round's clients at the server's model.
    """

    rounds: int
    cohort_size: int
    counts: Vector
    heterogeneity: Vector
    least_skew: float
    noise: NoiseModel
    loss: float


def predicted_loss(constants: Constants, stage: FirstStage) -> float:
    """F~ of equation 10, with F* = 0."""
    big, small, late = constants.smoothness, constants.strong_convexity, constants.lr_offset + stage.rounds
    bias = float((stage.counts * stage.heterogeneity).sum()) / stage.rounds
    noise = float((stage.counts ** (stage.noise.exponent + 1) * stage.noise.factor).sum()) / (late * stage.rounds)
    return (
        constants.start_distance * big * constants.lr_offset / (2 * late)
        - PAPER_BIAS * big * stage.least_skew / small * float(stage.heterogeneity.mean())
        + 4 * big * constants.gradient_variance / (late * small**2 * stage.cohort_size)
        + noise * 4 * big * stage.noise.scale / (stage.cohort_size * small) ** 2
        + bias * (4 * big**2 / (late * small**2) + PAPER_BIAS * big / small) / stage.cohort_size
    )


def fit_constants(stage: FirstStage, start: Constants | None = None, cycles: int = 200) -> tuple[Constants, float]:
    """Constants whose predicted loss is the reported one, by one scalar search after the other, and the residual.

    One equation, five unknowns: any start gives another exact solution. A ratio of bias to noise is better given.

    Args:
        start: where to begin; None is 1, 8, 1, 1, 0.1.
        cycles: over all five, at most.

    Reference: Ma et al., problem P2; start values, bounds [1e-6, 1e3] and the stop rule are ours, as it gives none.
    """
    now = start or Constants()

    def residual(constants: Constants) -> float:
        return abs(stage.loss - predicted_loss(constants, stage))

    for _ in range(cycles):
        for name in vars(now):
            low, high = 1e-6, 1e3
            if name == "smoothness":
                low = now.strong_convexity * (1 + 1e-6)
            elif name == "strong_convexity":
                high = now.smoothness * (1 - 1e-6)
            found = minimize_scalar(
                lambda value, name=name: residual(dataclasses.replace(now, **{name: float(value)})),  # noqa: B023
                bounds=(low, max(high, low * (1 + 1e-6))),
                method="bounded",
                options={"xatol": 1e-12},
            )
            better = dataclasses.replace(now, **{name: float(found.x)})
            now = better if residual(better) < residual(now) else now
            if residual(now) < 1e-6:
                return now, residual(now)
    return now, residual(now)
