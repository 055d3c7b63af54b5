"""Numbers by formula: quotas of three clients, noise of a round, calibrations, and fitted constants."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from dpfl_lightning.algorithms.allocation import Vector, allocate_int, positive
from dpfl_lightning.algorithms.cohorts import systematic
from dpfl_lightning.privacy.accounting.gaussian import gaussian_mu
from experiments.papers.selection.estimates import (
    Constants,
    FirstStage,
    fit_constants,
    gaussian_noise,
    laplace_noise,
)
from experiments.papers.selection.random_effects import shares

CLIENTS, COHORT, ROUNDS, DELTAS = 100, 20, 200, (1e-5, 1e-4)
_DRAWS, _COHORTS = 200, 50  # of budgets, and of cohorts for each of them


def noise_only(noise_factor: ArrayLike, total: float, exponent: float = 1.0) -> Vector:
    """Return real quotas `[N]` of least noise, without bounds: `M noise_factor_n^(-1 / exponent) / sum of these`.

    Reference: Ma et al., Proposition 1.
    """
    share = positive(np.asarray(noise_factor, dtype=float)) ** (-1 / exponent)
    return total * share / share.sum()


def objective(
    quota: ArrayLike,
    noise_factor: ArrayLike,
    exponent: ArrayLike = 1.0,
    bias_cost: ArrayLike = 0.0,
    anchor: float = 0.0,
) -> float:
    """Return the cost of quotas `[N]`, in the unit of `noise_factor`."""
    counts, factor = np.asarray(quota, dtype=float), np.asarray(noise_factor, dtype=float)
    takes_part = counts > 0  # avoids 0 * infinity for clients without a budget
    powers = np.broadcast_to(np.asarray(exponent, dtype=float), counts.shape)[takes_part] + 1
    noise = float((factor[takes_part] * counts[takes_part] ** powers).sum())
    return noise + float((np.asarray(bias_cost) * counts).sum()) + anchor * float(((counts - counts.mean()) ** 2).sum())


def three_clients(ratio: float, exponent: float) -> dict[str, float]:
    """Quotas of sum 12 of three clients; `ratio` is the cost of one unit of unlikeness, `exponent` is of the noise."""
    factor, unlike = np.array([1.0, 2.0, 4.0]), np.array([0.5, 0.1, 0.0])
    cost = ratio * unlike

    def at_price(price: float) -> np.ndarray:
        return (np.maximum(price - cost, 0.0) / ((exponent + 1) * factor)) ** (1 / exponent)

    price = brentq(lambda price: at_price(price).sum() - 12, cost.min(), 1e6, xtol=1e-12)
    real = at_price(price)
    whole = allocate_int(factor, 12, exponent, cost)
    quotas = {f"real{client}": float(quota) for client, quota in enumerate(real)}
    quotas |= {f"whole{client}": float(quota) for client, quota in enumerate(whole)}
    return quotas | {"price": price, "cost": objective(whole, factor, exponent, cost)}


def noise_of_a_round(mechanism: str, budgets: Sequence[float]) -> dict[str, float]:
    """Variance of the noise in a round's mean update, as a multiple of that of quotas of least noise."""
    rows = _variances(mechanism, budgets, 1, 1, ROUNDS)
    least = rows.pop("least_noise")
    return {name: float((values / least).mean()) for name, values in rows.items()}


def noise_over_clip(mechanism: str, budgets: Sequence[float], num_params: int, rounds: int) -> dict[str, float]:
    """Length of the noise in a round's mean gradient, over the clip norm; clients have 600 records."""
    rows = _variances(mechanism, budgets, num_params, 600, rounds)
    return {name: float(np.sqrt(values).mean()) for name, values in rows.items()}


def _variances(
    mechanism: str, budgets: Sequence[float], num_params: int, records: int, rounds: int
) -> dict[str, np.ndarray]:
    """`E|Z|^2` of a round's mean update at clip norm 1 for 200 draws of budgets.

    `least_noise` has quotas of least noise and equal weights. Equal quotas are weighted equally (`uniform`), by
    epsilon, by inverse noise, and by shares: `shares` are those of least noise, kept over the run, and `shares2` the
    same with 2 clients in a round. `unbiased` has quotas of least noise and weights that give all clients equal shares.
    """
    draw, rows, (low, high) = np.random.default_rng(10), [], budgets
    slots = COHORT * rounds
    for _ in range(_DRAWS):
        epsilon = draw.uniform(low, high, CLIENTS)
        delta = draw.uniform(*DELTAS, CLIENTS)
        noise = laplace_noise(1, num_params, epsilon, records)
        if mechanism == "gaussian":
            noise = gaussian_noise(1, num_params, epsilon, delta, records)
        quota, equal = noise_only(noise.factor, slots, noise.exponent), np.full(CLIENTS, slots / CLIENTS)
        cohorts = np.array([draw.choice(CLIENTS, COHORT, replace=False) for _ in range(_COHORTS)])
        of_cohort = noise.variance(equal)[cohorts]
        weights = {"uniform": np.ones_like(of_cohort), "weiavg": epsilon[cohorts], "inverse": 1 / of_cohort}
        row = {n: ((w / w.sum(1, keepdims=True)) ** 2 * of_cohort).sum(1).mean() for n, w in weights.items()}
        row["least_noise"] = (quota * noise.variance(quota)).sum() / slots / COHORT
        least = shares(noise.variance(equal), equal, 0.0)
        for name, share, each in (
            ("shares", least, equal),
            ("shares2", least, equal * 2 / COHORT),
            ("unbiased", 1 / CLIENTS, quota),
        ):
            row[name] = (share**2 * noise.variance(each) * rounds / each).sum()
        rows.append(row)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def calibrations(participations: int, epsilon: float = 1.5, delta: float = 5e-5) -> dict[str, float]:
    """Noise over sensitivity of each of so many full batches."""
    mu = float(gaussian_mu(np.array([epsilon]), np.array([delta]))[0])
    return {
        "exact": math.sqrt(participations) / mu,
        "lemma1": math.sqrt(2) * math.sqrt(participations * math.log(1 / delta)) / epsilon,
        "linear": math.sqrt(2 * math.log(1.25 * participations / delta)) * participations / epsilon,
    }


def deciding(gamma: float, smoothness: float, convexity: float) -> dict[str, float]:
    """The value that gamma must have, and the one number that decides quotas, from the paper's constants.

    >>> {name: round(value, 2) for name, value in deciding(0.277, 0.997, 0.239).items()}
    {'offset': 33.37, 'decides': 18.05}
    """
    return {"offset": 8 * smoothness / convexity, "decides": smoothness + 3 / 8 * convexity * (gamma + 190)}


def fitted_constants(start: Sequence[float]) -> dict[str, float]:
    """The paper's constants of one simulated first stage (100 clients, 10 rounds, a mean loss of 2), from `start`."""
    draw = np.random.default_rng(0)
    epsilon, delta = draw.uniform(0.1, 3, CLIENTS), draw.uniform(*DELTAS, CLIENTS)
    noise = gaussian_noise(20.0, 4266, epsilon, delta, 600)
    left = allocate_int(noise.factor, COHORT * ROUNDS, upper=ROUNDS)
    counts = np.zeros(CLIENTS)
    for round in range(9):
        cohort = systematic(left, ROUNDS - round, draw)
        left[cohort] -= 1
        counts[cohort] += 1
    stage = FirstStage(9, COHORT, counts, draw.exponential(0.3, CLIENTS), 1.0, noise, 2.0)
    constants, residual = fit_constants(stage, Constants(*start))
    return {
        "gamma": constants.lr_offset,
        "smoothness": constants.smoothness,
        "convexity": constants.strong_convexity,
        **deciding(constants.lr_offset, constants.smoothness, constants.strong_convexity),
        "residual": residual,
    }
