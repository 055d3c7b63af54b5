"""The selection paper's analysis term by term: noise, bias, the error bound and its coefficients.

No strategy needs this module: experiments and tests check the paper's claims against it.

Reference: Ma et al., "The Power of Bias", Lemmas 1 and 2, Theorem 5, problem P1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpfl_lightning.errors import require
from dpfl_lightning.privacy.accounting.accountant import gaussian_mu

Vector = NDArray[np.float64]

#: c in the bias term `c L / mu`: the printed value, and what the proof supports. One step of the proof uses an
#: inequality in the wrong direction if the selected clients' losses are below those at the optimum, which is what
#: biased means.
PAPER_BIAS, SOUND_BIAS = 1.5, 2.0


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
    clip_norm: float,
    num_params: int,
    epsilon: ArrayLike,
    delta: ArrayLike,
    num_records: ArrayLike,
    c2: float | None = None,
) -> NoiseModel:
    """Return the noise model of full batches with Gaussian noise under replacement of one record.

    Args:
        clip_norm: L2 bound of a record's gradient, > 0.
        num_params: P.
        epsilon, delta, num_records: `[N]` or one value.
        c2: None is the exact composition (mu-Gaussian privacy). A number is the paper's Lemma 1 with this constant, for
            which the paper gives no value: sqrt(2) is enough up to epsilon 7.5 at delta 1e-4.

    Raises:
        UserError: the constant is below what the lemma needs for one of these clients.

    >>> model = gaussian_noise(clip_norm=1.0, num_params=10, epsilon=[1.0], delta=1e-5, num_records=100)
    >>> round(float(model.variance(40)[0]), 4)  # 4 d 40 (3.7306 / 100)^2
    2.2268
    """
    epsilon, delta, records = np.broadcast_arrays(*(np.asarray(v, dtype=float) for v in (epsilon, delta, num_records)))
    if c2 is None:
        return NoiseModel(4 * clip_norm**2 * num_params, 1, 1 / (gaussian_mu(epsilon, delta) * records) ** 2)
    _check_c2(c2, epsilon, delta)
    return NoiseModel(4 * clip_norm**2 * num_params * c2**2, 1, np.log(1 / delta) / (records * epsilon) ** 2)


def smallest_c2(epsilon: ArrayLike, delta: ArrayLike) -> Vector:
    """Return the smallest constant for which Lemma 1 holds, `[N]`; a smaller one overspends the client's budget.

    >>> smallest_c2(10.0, 1e-5).round(4).tolist()
    1.4733
    """
    epsilon, delta = np.broadcast_arrays(np.asarray(epsilon, dtype=float), np.asarray(delta, dtype=float))
    return epsilon / (gaussian_mu(epsilon, delta) * np.sqrt(np.log(1 / delta)))


def _check_c2(c2: float, epsilon: Vector, delta: Vector) -> None:
    smallest = float(np.max(smallest_c2(epsilon, delta)))
    way_out = "A smaller value overspends a budget."
    require(c2 >= smallest, "c2", f"be at least {math.ceil(1e4 * smallest) / 1e4:g} for these budgets", c2, way_out)


#: ways to split a budget among a client's participations
CALIBRATIONS = ("exact", "lemma1", "linear")


def noise_multiplier(
    epsilon: float, delta: float, participations: int, calibration: str = "exact", c2: float = math.sqrt(2)
) -> float:
    """Return noise std / sensitivity of each of T full batches with Gaussian noise that share a budget.

    Runs use `exact`, which needs the least noise; the others are the paper's, for comparison.

    Args:
        epsilon, delta: budget of all participations together.
        participations: T, >= 1.
        calibration: exact (`sqrt(T) / mu`), lemma1 (`c2 sqrt(T log(1 / delta)) / epsilon`) or linear (Algorithm 2
            literally: each participation has epsilon / T and delta / T; its variance then grows as T^2 log T instead of
            T, so that quotas would need exponent 2).
        c2: constant of lemma1.

    Raises:
        UserError: the calibration is unknown, the constant is below what the lemma needs, or epsilon / T is 1 or more,
            for which the theorem behind linear does not hold.

    Reference: Ma et al., Theorem 1, Lemma 1 and Algorithm 2.

    >>> [round(noise_multiplier(1.5, 5e-5, 40, name), 1) for name in CALIBRATIONS]
    [14.8, 18.8, 140.2]
    """
    require(calibration in CALIBRATIONS, "calibration", f"be one of {', '.join(CALIBRATIONS)}", calibration)
    require(participations >= 1, "participations", "be >= 1", participations)
    if calibration == "exact":
        return math.sqrt(participations) / float(gaussian_mu(np.array([epsilon]), np.array([delta]))[0])
    if calibration == "lemma1":
        _check_c2(c2, np.array([epsilon]), np.array([delta]))
        return c2 * math.sqrt(participations * math.log(1 / delta)) / epsilon
    must = f"be below the {participations} participations, because the share of each must be below 1"
    require(epsilon < participations, "epsilon", must, epsilon, "The exact calibration supports any value.")
    return math.sqrt(2 * math.log(1.25 * participations / delta)) * participations / epsilon


def laplace_noise(clip_norm: float, num_params: int, epsilon: ArrayLike, num_records: ArrayLike) -> NoiseModel:
    """Return the model of full batches with Laplace noise of scale `2 clip_norm T_n / (num_records epsilon)` (Lemma 2).

    Gradients are clipped in L1.

    >>> laplace_noise(clip_norm=1.0, num_params=10, epsilon=[1.0], num_records=100).variance(40).tolist()
    [12.8]
    """
    epsilon, records = np.broadcast_arrays(np.asarray(epsilon, dtype=float), np.asarray(num_records, dtype=float))
    return NoiseModel(8 * num_params * clip_norm**2, 2, 1 / (records * epsilon) ** 2)


@dataclass(frozen=True)
class Curvature:
    """Smoothness and strong convexity of every client's objective.

    Args:
        smoothness: L, > 0.
        strong_convexity: mu, in (0, L].
        lr_offset: gamma of the learning rate `2 / (mu (t + gamma))`; None is `8 L / mu`, as the bound requires.
    """

    smoothness: float
    strong_convexity: float
    lr_offset: float | None = None

    def __post_init__(self) -> None:
        must = f"be in (0, smoothness = {self.smoothness}]"
        require(0 < self.strong_convexity <= self.smoothness, "strong_convexity", must, self.strong_convexity)

    @property
    def offset(self) -> float:
        """gamma."""
        return 8 * self.smoothness / self.strong_convexity if self.lr_offset is None else self.lr_offset

    def learning_rate(self, round: int) -> float:
        """Return the learning rate of round t >= 1."""
        return 2 / (self.strong_convexity * (round + self.offset))


def linear_model_curvature(loss: str, feature_norm: float, weight_decay: float) -> Curvature:
    """Return the curvature of a linear model for features of norm at most `feature_norm` (including a constant one).

    It follows from the class of models alone; no record is read.

    Args:
        loss: softmax, binary (logistic) or squared (error).
        feature_norm: R, > 0.
        weight_decay: > 0; without it there is no strong convexity.

    >>> linear_model_curvature("squared", feature_norm=1.0, weight_decay=0.5)
    Curvature(smoothness=2.5, strong_convexity=0.5, lr_offset=None)
    """
    curvatures = {"softmax": 0.5, "binary": 0.25, "squared": 2.0}
    require(loss in curvatures, "loss", f"be one of {', '.join(curvatures)}", loss)
    require(weight_decay > 0, "weight_decay", "be above 0", weight_decay, "Strong convexity requires it.")
    return Curvature(curvatures[loss] * feature_norm**2 + weight_decay, weight_decay)


@dataclass(frozen=True)
class Bound:
    """Terms of Theorem 5; their `total` bounds `E F(w_T) - F*`."""

    start: float
    sampled_gradients: float
    heterogeneity: float
    selection: float
    noise: float

    @property
    def total(self) -> float:
        return self.start + self.sampled_gradients + self.heterogeneity + self.selection + self.noise


def convergence_bound(
    quota: ArrayLike,
    rounds: int,
    cohort_size: int,
    noise: NoiseModel,
    heterogeneity: ArrayLike,
    curvature: Curvature,
    start_distance: float,
    gradient_variance: float = 0.0,
    least_skew: float = 0.0,
    bias_constant: float = SOUND_BIAS,
) -> Bound:
    """Return the paper's bound of the error after T rounds, with the learning rate `curvature.learning_rate`.

    Args:
        quota: T_n `[N]`, of sum K T.
        rounds: T.
        cohort_size: K.
        noise: noise model of one update.
        heterogeneity: Gamma_n = F_n(w*) - F_n*, `[N]`, >= 0.
        curvature: L and mu.
        start_distance: |w_0 - w*|^2.
        gradient_variance: variance of sampled gradients; 0 for full batches.
        least_skew: rho_min; 0 is always valid, and 1 is the largest possible value (equal quotas give 1).
        bias_constant: `SOUND_BIAS`, or `PAPER_BIAS`.

    Returns:
        The five terms of the bound. It is hundreds of times above the actual error on quadratics: its values say
        little, but allocation minimises its shape.
    """
    quota, gamma_n = np.asarray(quota, dtype=float), np.asarray(heterogeneity, dtype=float)
    smooth, mu, offset = curvature.smoothness, curvature.strong_convexity, curvature.offset
    last, slots = offset + rounds, cohort_size * rounds
    return Bound(
        start=smooth * offset * start_distance / (2 * last),
        sampled_gradients=4 * smooth * gradient_variance / (mu**2 * cohort_size * last),
        heterogeneity=4 * smooth**2 * float((quota * gamma_n).sum()) / (last * slots * mu**2),
        selection=bias_constant * smooth / mu * float(((quota / slots - least_skew / len(quota)) * gamma_n).sum()),
        noise=4 * smooth * float((quota * noise.variance(quota)).sum()) / (last * slots * cohort_size * mu**2),
    )


def objective_coefficients(
    rounds: int, cohort_size: int, noise_scale: float, curvature: Curvature, bias_constant: float = SOUND_BIAS
) -> tuple[float, float]:
    """Return Omega_A and Omega_B of P1: the coefficients of `sum T_n^(z + 1) Phi_n` and `sum T_n Gamma_n`."""
    smooth, mu, last = curvature.smoothness, curvature.strong_convexity, curvature.offset + rounds
    per_slot, slots = 4 * smooth / (last * rounds * cohort_size * mu**2), rounds * cohort_size
    return per_slot * noise_scale / cohort_size, per_slot * smooth + bias_constant * smooth / (slots * mu)


def bias_noise_ratio(
    rounds: int, cohort_size: int, noise_scale: float, curvature: Curvature, bias_constant: float = SOUND_BIAS
) -> float:
    """Return r = Omega_B / Omega_A, the one number that determines P1: `K / Lambda (L + c mu (gamma + T) / 4)`.

    >>> round(bias_noise_ratio(190, 20, 1.0, Curvature(0.997, 0.239, 0.277), PAPER_BIAS) / 20, 1)
    18.1
    """
    last = curvature.offset + rounds
    return cohort_size / noise_scale * (curvature.smoothness + bias_constant / 4 * curvature.strong_convexity * last)


def selection_skew(quota: ArrayLike, losses: ArrayLike, least_losses: ArrayLike) -> float:
    """Return rho: the selected clients' excess loss over that of all clients; 1 for equal quotas.

    Args:
        quota: `[N]`, in any unit.
        losses: F_n(w), `[N]`.
        least_losses: F_n*, `[N]`, each at most the loss.

    >>> selection_skew([3, 1], [1.0, 3.0], [0.0, 0.0])
    0.75
    """
    share = np.asarray(quota, dtype=float) / np.sum(quota)
    excess = np.asarray(losses, dtype=float) - np.asarray(least_losses, dtype=float)
    return float((share * excess).sum() / excess.mean())


def jain_index(quota: ArrayLike) -> float:
    """Return how equally clients take part: `(sum T_n)^2 / (N sum T_n^2)`, from 1 (equal quotas) to 1 / N (one client).

    >>> jain_index([2, 2]), jain_index([4, 0])
    (1.0, 0.5)
    """
    participations = np.asarray(quota, dtype=float)
    squares = float((participations**2).sum())
    return math.nan if squares == 0 else float(participations.sum() ** 2 / (len(participations) * squares))
