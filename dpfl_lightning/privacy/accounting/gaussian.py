"""Exact composition of Gaussian mechanisms: together they are one, whose mu^2 is the sum of theirs.

Reference: Dong, Roth, Su (2022); the divergence is that of Balle and Wang (2018), theorem 8.
"""

import numpy as np
from scipy.special import log_ndtr


def gaussian_epsilon(mu: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return the smallest epsilon with gaussian_delta(epsilon, mu) <= delta, from above, [n].

    `mu` [n] >= 0 is sensitivity / noise std of each Gaussian mechanism, inf without noise; `delta` [n] is in (0, 1).
    """
    finite = np.isfinite(mu) & (mu > 0)
    safe, delta = np.where(finite, mu, 1.0), np.where(finite, delta, 0.5)  # the others are set below
    low, high = (np.zeros_like(safe), safe**2 / 2 + safe * np.sqrt(-2 * np.log(delta)))  # Phi(-x) <= exp(-x^2 / 2)
    for _ in range(60):
        middle = (low + high) / 2
        fits = gaussian_delta(middle, safe) <= delta
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    high = np.where(gaussian_delta(np.zeros_like(safe), safe) <= delta, 0.0, high)
    return np.where(finite, high, np.where(mu > 0, np.inf, 0.0))


def gaussian_delta(epsilon: np.ndarray, mu: np.ndarray) -> np.ndarray:
    """delta(epsilon; mu) = Phi(-eps/mu + mu/2) - exp(eps) Phi(-eps/mu - mu/2), [n]; epsilon >= 0, 0 < mu < inf."""
    minus = np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))  # this form does not overflow
    return np.exp(log_ndtr(mu / 2 - epsilon / mu)) - minus


def gaussian_mu(epsilon: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return the largest mu with gaussian_delta(epsilon, mu) <= delta, by bisection, never rounded up, [n].

    `epsilon` [n] is >= 0 and allows any mu if it is infinite; `delta` [n] is in (0, 1).
    """
    bounded = np.isfinite(epsilon)
    epsilon, low = np.where(bounded, epsilon, 1.0), np.full(np.shape(epsilon), 1e-6)
    high = np.ones_like(low)
    while (more := gaussian_delta(epsilon, high) <= delta).any():
        high = np.where(more, 2 * high, high)
    while (less := gaussian_delta(epsilon, low) > delta).any():
        low = np.where(less, low / 2, low)
    for _ in range(100):
        middle = (low + high) / 2
        fits = gaussian_delta(epsilon, middle) <= delta
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return np.where(bounded, low, np.inf)
