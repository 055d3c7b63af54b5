"""What the selection paper's second stage is computed from.

Reference: Ma et al., "The Power of Bias", equations 7 to 10, problem P2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar

Vector = NDArray[np.float64]

#: c in the bias term `c L / mu` as printed. The proof supports only 2: one step uses an inequality in the wrong
#: direction if the selected clients' losses are below those at the optimum, which is what biased means.
PAPER_BIAS = 1.5


def least_differences(reports: Sequence[tuple[int, float, float]], num_clients: int) -> Vector:
    """Return Gamma_n of equation 8: the smallest difference of a client's two losses in a round, else their mean.

    `reports` are (client, loss at the server's model, loss at the client's model), noised. Noise dominates the minimum,
    which makes clients that report often look similar.

    >>> least_differences([(0, 2.0, 1.5), (0, 2.0, 1.9), (1, 1.0, 1.3)], num_clients=3).round(3).tolist()
    [0.1, 0.3, 0.2]
    """
    least = np.full(num_clients, np.inf)
    for client, before, after in reports:
        least[client] = min(least[client], abs(before - after))
    seen = np.isfinite(least)
    return np.where(seen, least, least[seen].mean() if seen.any() else 0.0)


def estimated_skew(counts: ArrayLike, last_losses: dict[int, float], max_loss: float) -> float:
    """Return rho_min of equation 9, with F_n* = 0; it may exceed 1, which the true value cannot.

    `counts` `[N]` are participations before the last round of the first stage, `last_losses` the noisy losses of that
    round's clients at the server's model, clipped to [0, max_loss] here.
    """
    counts = np.asarray(counts, dtype=float)
    known = {client: min(max(loss, 0.0), max_loss) for client, loss in last_losses.items()}
    mean = float(np.mean(list(known.values())))
    losses = np.array([known.get(client, mean) for client in range(len(counts))])
    return float((counts * losses).sum() / (counts.sum() * mean)) if mean > 0 and counts.any() else 1.0


@dataclass(frozen=True)
class Constants:
    """The fitted constants of the paper: |w_0 - w*|^2, gamma, sigma^2, L, mu; L > mu."""

    start_distance: float = 1.0
    lr_offset: float = 8.0
    gradient_variance: float = 1.0
    smoothness: float = 1.0
    strong_convexity: float = 0.1


@dataclass(frozen=True)
class FirstStage:
    """Known values after the first stage, whose rounds before the last one are counted.

    Args:
        rounds: tau, >= 1.
        cohort_size: K.
        counts: participations, `[N]`.
        heterogeneity: estimated Gamma_n, `[N]`.
        least_skew: estimated rho_min.
        loss: mean noisy loss of the last round's clients at the server's model.
    """

    rounds: int
    cohort_size: int
    counts: Vector
    heterogeneity: Vector
    least_skew: float
    noise: NoiseModel
    loss: float


def predicted_loss(constants: Constants, stage: FirstStage) -> float:
    """Return F~ of equation 10, with F* = 0."""
    smooth, mu, last = constants.smoothness, constants.strong_convexity, constants.lr_offset + stage.rounds
    bias = float((stage.counts * stage.heterogeneity).sum()) / stage.rounds
    noise = float((stage.counts ** (stage.noise.exponent + 1) * stage.noise.factor).sum()) / (last * stage.rounds)
    return (
        constants.start_distance * smooth * constants.lr_offset / (2 * last)
        - PAPER_BIAS * smooth * stage.least_skew / mu * float(stage.heterogeneity.mean())
        + 4 * smooth * constants.gradient_variance / (last * mu**2 * stage.cohort_size)
        + noise * 4 * smooth * stage.noise.scale / (stage.cohort_size * mu) ** 2
        + bias * (4 * smooth**2 / (last * mu**2) + PAPER_BIAS * smooth / mu) / stage.cohort_size
    )


def fit_constants(stage: FirstStage, start: Constants | None = None) -> tuple[Constants, float]:
    """Fit constants whose predicted loss equals the reported one, by cyclic scalar searches; also return the residual.

    One equation has five unknowns, so any start gives another exact solution. Give the ratio of bias to noise if you
    can.

    Reference: Ma et al., problem P2. The start values, the bounds [1e-6, 1e3] and the stop rule are ours.
    """
    constants = start or Constants()

    def residual(constants: Constants) -> float:
        return abs(stage.loss - predicted_loss(constants, stage))

    for _ in range(200):
        for name in vars(constants):
            low, high = 1e-6, 1e3
            if name == "smoothness":
                low = constants.strong_convexity * (1 + 1e-6)
            elif name == "strong_convexity":
                high = constants.smoothness * (1 - 1e-6)
            solution = minimize_scalar(
                lambda value, name=name: residual(dataclasses.replace(constants, **{name: float(value)})),  # noqa: B023
                bounds=(low, max(high, low * (1 + 1e-6))),
                method="bounded",
                options={"xatol": 1e-12},
            )
            candidate = dataclasses.replace(constants, **{name: float(solution.x)})
            constants = candidate if residual(candidate) < residual(constants) else constants
            if residual(constants) < 1e-6:
                return constants, residual(constants)
    return constants, residual(constants)


def bias_noise_ratio(constants: Constants, rounds: int, cohort_size: int) -> float:
    """Return `K (L + c mu (gamma + T) / 4)`, the one number that determines P1: bias over noise, times Lambda.

    >>> round(bias_noise_ratio(Constants(lr_offset=0.277, smoothness=0.997, strong_convexity=0.239), 190, 20) / 20, 1)
    18.1
    """
    last = constants.lr_offset + rounds
    return cohort_size * (constants.smoothness + PAPER_BIAS / 4 * constants.strong_convexity * last)


@dataclass(frozen=True)
class NoiseModel:
    """`E|Z_n|^2 = scale learning_rate^2 T_n^exponent factor_n`: noise of one update if T_n updates share the budget.

    Args:
        scale: Lambda, the factor common to all clients, > 0.
        exponent: z, with which the noise of an update grows with participations: `growth` of its event.
        factor: Phi, the factor of each client, `[N]`, >= 0.
    """

    scale: float
    exponent: float
    factor: Vector
