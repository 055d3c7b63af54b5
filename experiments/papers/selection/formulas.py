"""What needs arithmetic alone: quotas of three clients, noise of a round, calibrations, and fitted constants."""

from __future__ import annotations

import numpy as np

from dpfl_lightning.algorithms.allocation import allocate_int, allocate_real, noise_only, objective
from dpfl_lightning.algorithms.cohorts import systematic
from dpfl_lightning.algorithms.selection_estimates import Constants, FirstStage, fit_constants
from dpfl_lightning.algorithms.selection_noise import gaussian_noise, laplace_noise, noise_multiplier
from experiments.papers.selection.paper import deciding

CLIENTS, COHORT, ROUNDS, DELTAS = 100, 20, 200, (1e-5, 1e-4)
_DRAWS, _COHORTS = 200, 50  # of budgets, and of cohorts for each of them


def three_clients(ratio: float, exponent: float) -> dict[str, float]:
    """Quotas of sum 12 of a client with little noise, one most like the others, and one with most noise.

    Args:
        ratio: cost of one unit of unlikeness.
        exponent: 1 for Gaussian noise, 2 for Laplace noise.
    """
    factor, unlike = np.array([1.0, 2.0, 4.0]), np.array([0.5, 0.1, 0.0])
    cost = ratio * unlike
    real, price = allocate_real(factor, 12, exponent, cost)
    whole = allocate_int(factor, 12, exponent, cost)
    told = {f"real{client}": float(one) for client, one in enumerate(real)}
    told |= {f"whole{client}": float(one) for client, one in enumerate(whole)}
    return told | {"price": price, "cost": objective(whole, factor, exponent, cost)}


def noise_of_a_round(low: float, high: float, mechanism: str) -> dict[str, float]:
    """Noise in a round's mean update, as a multiple of that of quotas of least noise, equal numbers of records.

    Mean of 200 draws of budgets, each with 50 cohorts.

    Returns:
        `uniform`, `weiavg` and `inverse`: equal quotas, weighted equally, by epsilon and by inverse noise.
    """
    draw, rows = np.random.default_rng(10), []
    slots = COHORT * ROUNDS
    for _ in range(_DRAWS):
        epsilon = draw.uniform(low, high, CLIENTS)
        delta = draw.uniform(*DELTAS, CLIENTS)
        noise = gaussian_noise(1, 1, epsilon, delta, 1) if mechanism == "gaussian" else laplace_noise(1, 1, epsilon, 1)
        quota = noise_only(noise.factor, slots, noise.exponent)
        ours = (quota * noise.variance(quota)).sum() / slots / COHORT
        cohorts = np.array([draw.choice(CLIENTS, COHORT, replace=False) for _ in range(_COHORTS)])
        of_cohort = noise.variance(slots / CLIENTS)[cohorts]
        weights = {"uniform": np.ones_like(of_cohort), "weiavg": epsilon[cohorts], "inverse": 1 / of_cohort}
        rows.append([((w / w.sum(1, keepdims=True)) ** 2 * of_cohort).sum(1).mean() / ours for w in weights.values()])
    return dict(zip(("uniform", "weiavg", "inverse"), np.mean(rows, axis=0).tolist(), strict=True))


def calibrations(participations: int, epsilon: float = 1.5, delta: float = 5e-5) -> dict[str, float]:
    """Noise over sensitivity of each of so many full batches."""
    return {name: noise_multiplier(epsilon, delta, participations, name) for name in ("exact", "lemma1", "linear")}


#: where the search for the paper's constants begins: |w_0 - w*|^2, gamma, sigma^2, L, mu
STARTS = {
    "usual": Constants(),
    "far": Constants(5.0, 20.0, 0.1, 4.0, 1.0),
    "flat": Constants(0.1, 1.0, 3.0, 0.5, 0.3),
    "steep": Constants(2.0, 100.0, 1.0, 9.0, 2.0),
}


def fitted_constants(start: str) -> dict[str, float]:
    """The paper's constants of one and the same made-up first stage (100 clients, 10 rounds, a mean loss of 2).

    Returns:
        `gamma`, `smoothness`, `convexity`, `offset` (8 L / mu, which gamma must be), `decides` (L + 3/8 mu (gamma +
        190), to which the ratio of bias to noise is proportional) and `residual`.
    """
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
    found, residual = fit_constants(stage, STARTS[start])
    return {
        "gamma": found.lr_offset,
        "smoothness": found.smoothness,
        "convexity": found.strong_convexity,
        **deciding(found.lr_offset, found.smoothness, found.strong_convexity),
        "residual": residual,
    }
