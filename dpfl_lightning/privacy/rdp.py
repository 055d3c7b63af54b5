"""RDP of the Poisson-sampled Gaussian mechanism, vectorised over clients and orders, and its conversion to epsilon.

Pure arithmetic: what calibration needs thousands of times. `accountant.Rdp` certifies the result with Opacus.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, logsumexp

# Opacus' default orders (1.1 ... 10.9, 12 ... 63), 11, and a sparse tail, without which no epsilon below
# 0.066 can be certified at delta 1e-4. 1024 is the last round order whose binomials still fit a double, as
# Opacus computes them.
_TAIL = (64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
ORDERS: tuple[float, ...] = (*(1 + x / 10 for x in range(1, 100)), *range(11, 64), *_TAIL)


def sampled_gaussian_rdp(
    sample_rate: Sequence[float] | np.ndarray,
    noise_multiplier: Sequence[float] | np.ndarray,
    orders: tuple[float, ...] = ORDERS,
) -> np.ndarray:
    """RDP of one step of the Poisson-sampled Gaussian, log(A_alpha) / (alpha - 1), of many mechanisms.

    A_alpha - 1 is summed directly, so that tiny costs keep their digits: by the binomial form at integer
    orders, by quadrature at fractional ones.

    Args:
        sample_rate: [n], in (0, 1].
        noise_multiplier: [n], > 0.
        orders: [k], > 1.
    Returns:
        [n, k], Renyi divergence in nats; add and remove one record.
    Reference: Mironov, Talwar, Zhang (2019), section 3.3, as Opacus' `compute_rdp`: both agree to 1e-9, or to
        1e-12 in log(A_alpha), which is where Opacus cuts its series.

    >>> sampled_gaussian_rdp([1.0, 0.01], [2.0, 2.5], (2.5, 5)).round(8).tolist()
    [[0.3125, 0.625], [2.171e-05, 4.362e-05]]
    """
    rate = np.asarray(sample_rate, dtype=float)
    noise = np.asarray(noise_multiplier, dtype=float)
    order = np.asarray(orders, dtype=float)
    whole = order == np.floor(order)
    rdp = order / (2 * noise[:, None] ** 2)  # full batches; an upper bound for all others
    sampled = np.flatnonzero(rate < 1)
    sampled = sampled[np.argsort(noise[sampled])]  # rows of similar noise need a like number of nodes
    for start in range(0, len(sampled), 16):  # few enough that the work arrays stay in the cache
        rows = sampled[start : start + 16]
        q, z = rate[rows], noise[rows]
        log_excess = np.full((len(rows), len(order)), np.nan)
        log_excess[:, whole] = _log_excess_whole(q, z, tuple(order[whole].astype(int).tolist()))
        log_excess[:, ~whole] = _log_excess_fractional(q, z, order[~whole])
        with np.errstate(invalid="ignore"):
            exact = np.logaddexp(0.0, log_excess) / (order - 1)  # log(1 + excess) / (alpha - 1)
        rdp[rows] = np.where(np.isnan(exact), rdp[rows], exact)
    return rdp


@functools.lru_cache(maxsize=16)
def _binomial_terms(orders: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Terms k = 2..alpha of all orders, end to end: k, alpha - k, log binom(alpha, k); each order's start."""
    order = np.concatenate([np.full(alpha - 1, float(alpha)) for alpha in orders])
    k = np.concatenate([np.arange(2.0, alpha + 1) for alpha in orders])
    log_binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    starts = np.cumsum([0, *(alpha - 1 for alpha in orders)])[:-1]
    return k, order - k, log_binomial, starts.astype(int)


def _log_excess_whole(q: np.ndarray, z: np.ndarray, orders: tuple[int, ...]) -> np.ndarray:
    """log(A - 1) = log sum_{k>=2} binom(alpha, k) q^k (1-q)^(alpha-k) expm1(k(k-1) / 2z^2), [n, orders]."""
    if not orders:
        return np.empty((len(q), 0))
    k, rest, log_binomial, starts = _binomial_terms(orders)
    exponent = k * (k - 1) / (2 * z[:, None] ** 2)
    with np.errstate(divide="ignore"):  # expm1 may underflow to 0, whose log is -inf
        log_expm1 = exponent + np.log(-np.expm1(-exponent))
    terms = log_binomial + k * np.log(q)[:, None] + rest * np.log1p(-q)[:, None] + log_expm1
    top = np.maximum(np.maximum.reduceat(terms, starts, axis=1), -1e300)
    scaled = np.exp(terms - np.repeat(top, np.diff([*starts, len(k)]), axis=1))
    with np.errstate(divide="ignore"):
        return top + np.log(np.add.reduceat(scaled, starts, axis=1))


def _log_excess_fractional(q: np.ndarray, z: np.ndarray, order: np.ndarray) -> np.ndarray:
    """log(A - 1) = log E[(1+v)^alpha - 1 - alpha v], v = q expm1(u/z - 1/2z^2), u ~ N(0, 1), [n, orders].

    E[v] = 0, so the subtracted terms change nothing but keep the digits. The integrand is analytic with
    Gaussian tails: the trapezium rule converges exponentially (the nearest singularity is pi*z off the real
    axis). Below z = 0.03, where a step costs an epsilon of hundreds, it would need 100,000 nodes: nan.
    """
    log_excess = np.full((len(q), len(order)), np.nan)
    rows = np.flatnonzero(z >= 0.03)
    if not len(rows) or not len(order):
        return log_excess
    q, z, alpha = q[rows, None], z[rows, None], order[:, None]
    width = 18 + max(order.max(), 2.0) / z  # u runs from -9 to 9 beyond the highest bump, at alpha / z
    nodes = math.ceil(np.max(width / np.minimum(0.4, 0.6 * z)))
    u = np.linspace(0, 1, nodes + 1) * width - 9
    t = u / z - 0.5 / z**2
    v = q * np.expm1(np.minimum(t, 30))
    w = np.where(t > 30, np.logaddexp(np.log1p(-q), np.log(q) + t), np.log1p(v))  # log(1 + v), v may overflow
    v, w = v[:, None, :], w[:, None, :]
    with np.errstate(all="ignore"):  # each branch is evaluated where the other holds, too
        small = np.log(np.maximum(np.expm1(np.minimum(alpha * w, 99)) - alpha * v, 0))
        large = alpha * w + np.log1p((alpha - 1) * np.exp(-alpha * w) - alpha * np.exp((1 - alpha) * w))
    log_terms = np.where(w > 1, large, small) - (u**2 / 2)[:, None, :]
    log_excess[rows] = logsumexp(log_terms, axis=2) + np.log(width / nodes / math.sqrt(2 * math.pi))
    return log_excess


def converted(rdp: np.ndarray, orders: tuple[float, ...], delta: float | np.ndarray) -> np.ndarray:
    """Epsilon at each order: rdp + log((alpha-1)/alpha) - (log(delta) + log(alpha)) / (alpha-1), at least 0.

    Args:
        rdp: [..., k], composed.
        orders: [k].
        delta: one, or [...], broadcast against rdp's leading axes.
    Returns:
        [..., k]; each is valid, so the smallest is.
    Reference: Balle et al. (2020), theorem 21, as Opacus' `get_privacy_spent`.

    >>> round(float(converted(np.array([0.1]), (10.0,), 1e-5)[0]), 6)
    1.018011
    """
    order = np.asarray(orders, dtype=float)
    with np.errstate(divide="ignore"):  # delta 0 comes with an infinite RDP
        log_delta = np.log(np.asarray(delta, dtype=float))[..., None]
    return np.maximum(rdp + np.log1p(-1 / order) - (log_delta + np.log(order)) / (order - 1), 0.0)
