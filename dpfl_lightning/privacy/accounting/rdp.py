"""RDP of the mechanisms, vectorised over clients and orders for calibration, and its conversion to epsilon."""

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, logsumexp

# Opacus' default orders (1.1 ... 10.9, 12 ... 63), 11, and a sparse tail, without which no epsilon below 0.066 can be
# certified at delta 1e-4. 1024 is the last round order whose binomials fit a double in Opacus' computation.
_TAIL = (64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
ORDERS: tuple[float, ...] = (*(1 + x / 10 for x in range(1, 100)), *range(11, 64), *_TAIL)


def sampled_gaussian_rdp(
    sample_rate: Sequence[float] | np.ndarray,
    noise_multiplier: Sequence[float] | np.ndarray,
    orders: tuple[float, ...] = ORDERS,
    adjacency: str = "add_remove",
) -> np.ndarray:
    """Return the RDP of one step of Poisson-sampled Gaussians, log(A_alpha) / (alpha - 1), [n, orders] in nats.

    With N(m) a Gaussian of mean m and std z = noise_multiplier [n], and q = sample_rate [n], the worst neighbours
    release (1-q) N(0) + q N(1), and N(0) (add_remove, in the order that costs more) or (1-q) N(0) + q N(-1)
    (replace_one; proof in docs/proof.md). Orders whose quadrature would take too long get the value of the full
    batch, an upper bound; they never give the smallest epsilon.

    Reference: Mironov, Talwar, Zhang (2019), section 3.3, like Opacus' `compute_rdp`. Both agree to 1e-9, or to 1e-12
        in log(A_alpha), where Opacus cuts its series. Replacement: Lebeda et al. (2024).

    >>> sampled_gaussian_rdp([1.0, 0.01], [2.0, 2.5], (2.5, 5)).round(8).tolist()
    [[0.3125, 0.625], [2.171e-05, 4.362e-05]]
    """
    rate = np.asarray(sample_rate, dtype=float)
    noise = np.asarray(noise_multiplier, dtype=float)
    order = np.asarray(orders, dtype=float)
    replaced = adjacency == "replace_one"
    rdp = order * (4 if replaced else 1) / (2 * noise[:, None] ** 2)  # full batches; an upper bound for sampled ones
    integer_orders = (order == np.floor(order)) & (not replaced)
    sampled = np.flatnonzero(rate < 1)
    sampled = sampled[np.argsort(noise[sampled])]  # rows of similar noise need similar numbers of nodes
    for start in range(0, len(sampled), 16):  # small enough for the work arrays to stay in the cache
        rows = sampled[start : start + 16]
        q, z = rate[rows], noise[rows]
        log_excess = np.full((len(rows), len(order)), np.nan)
        log_excess[:, integer_orders] = _log_excess_whole(q, z, tuple(order[integer_orders].astype(int).tolist()))
        for low, high in ((1, 11), (11, 64), (64, math.inf)):  # higher orders need wider grids
            block = ~integer_orders & (low < order) & (order <= high)
            log_excess[:, block] = _log_excess_quadrature(q, z, order[block], replaced)
        with np.errstate(invalid="ignore"):
            exact = np.logaddexp(0.0, log_excess) / (order - 1)  # log(1 + excess) / (alpha - 1)
        rdp[rows] = np.where(np.isnan(exact), rdp[rows], exact)
    return rdp


@functools.lru_cache(maxsize=16)
def _binomial_terms(orders: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the terms k = 2..alpha of all orders, concatenated: k, alpha - k, log binom(alpha, k), and the starts."""
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
    with np.errstate(divide="ignore"):  # expm1 may underflow to 0
        log_expm1 = exponent + np.log(-np.expm1(-exponent))
    terms = log_binomial + k * np.log(q)[:, None] + rest * np.log1p(-q)[:, None] + log_expm1
    top = np.maximum(np.maximum.reduceat(terms, starts, axis=1), -1e300)
    scaled = np.exp(terms - np.repeat(top, np.diff([*starts, len(k)]), axis=1))
    with np.errstate(divide="ignore"):
        return top + np.log(np.add.reduceat(scaled, starts, axis=1))


def _log_excess_quadrature(q: np.ndarray, z: np.ndarray, order: np.ndarray, replaced: bool) -> np.ndarray:
    """log(A - 1) = log E[(1+v)^alpha - 1 - alpha v] where 1 + v is the ratio of the pair's densities, [n, orders].

    E[v] = 0 under the second density, so the subtracted terms do not change the value but keep the digits. The
    integrand is analytic with Gaussian tails, so the trapezium rule converges exponentially (the nearest singularity is
    pi*z off the real axis). The result is nan below z = 0.03, where a step costs an epsilon of hundreds, and where the
    quadrature would take too many nodes.
    """
    log_excess = np.full((len(q), len(order)), np.nan)
    # u extends 9 beyond the lowest bump, at 0 or -1/z, and the highest, at alpha/z or (2 alpha - 1)/z
    reach = (2 * order.max() - 1 if replaced else max(order.max(), 2.0)) if len(order) else 0.0
    width = 18 + (reach + replaced) / z
    nodes = np.ceil(width / np.minimum(0.4, 0.6 * z))
    rows = np.flatnonzero((z >= 0.03) & (not replaced or nodes <= 6000))
    if not len(rows) or not len(order):
        return log_excess
    q, z, alpha, count = q[rows, None], z[rows, None], order[:, None], int(nodes[rows].max())
    u = np.linspace(0, 1, count + 1) * width[rows, None] - 9 - replaced / z
    v, w, log_base = (x[:, None, :] for x in _ratio(q, z, u, replaced))
    with np.errstate(all="ignore"):  # both branches are evaluated everywhere
        small = np.log(np.maximum(np.expm1(np.minimum(alpha * w, 99)) - alpha * v, 0))
        large = alpha * w + np.log1p((alpha - 1) * np.exp(-alpha * w) - alpha * np.exp((1 - alpha) * w))
    log_terms = np.where((w > 1) | (alpha * w > 30), large, small) - (u**2 / 2)[:, None, :] + log_base
    step = width[rows, None] / count
    log_excess[rows] = logsumexp(log_terms, axis=2) + np.log(step / math.sqrt(2 * math.pi))
    return log_excess


def _ratio(q: np.ndarray, z: np.ndarray, u: np.ndarray, replaced: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return v, log(1 + v) and the log of the second density over that of N(0, z^2), at z * u, each [n, nodes]."""
    log_rest, log_q = np.log1p(-q), np.log(q)
    log_first = np.logaddexp(log_rest, log_q + u / z - 0.5 / z**2)
    log_second = np.logaddexp(log_rest, log_q - u / z - 0.5 / z**2) if replaced else np.zeros_like(u)
    log_ratio = log_first - log_second
    with np.errstate(over="ignore"):
        near = np.expm1(np.clip(u / z - 0.5 / z**2, -700, 30)) * q  # the difference of the densities, over N(0, z^2)
        if replaced:
            near = 2 * q * np.exp(-0.5 / z**2) * np.sinh(np.clip(u / z, -30, 30)) / np.exp(np.minimum(log_second, 99))
    far = np.abs(log_ratio) > 0.5
    v = np.where(far, np.expm1(np.minimum(log_ratio, 99)), near)
    return v, np.where(far, log_ratio, np.log1p(np.where(far, 0.0, near))), log_second


def laplace_rdp(noise_multiplier: float | np.ndarray, orders: tuple[float, ...] = ORDERS) -> np.ndarray:
    """Return the RDP of one release with Laplace noise of scale `noise_multiplier` times the L1 sensitivity.

    A column [n, 1] of noise multipliers gives [n, k], one gives [k].

    Reference: Mironov (2017), table II. A shift spread over several coordinates costs less than a shift in one
    coordinate, because the divergence is convex in the shift.
    """
    a, b = np.asarray(orders, dtype=float), noise_multiplier
    left, right = np.log(a / (2 * a - 1)) + (a - 1) / b, np.log((a - 1) / (2 * a - 1)) - a / b
    return np.maximum(np.logaddexp(left, right) / (a - 1), 0.0)


def converted(rdp: np.ndarray, orders: tuple[float, ...], delta: float | np.ndarray) -> np.ndarray:
    """Return epsilon at each order: rdp + log((alpha-1)/alpha) - (log(delta) + log(alpha)) / (alpha-1), at least 0.

    `rdp` [..., k] is composed, and `delta` broadcasts against its leading axes. Each of the values [..., k] is a valid
    epsilon, so the smallest is valid. Reference: Balle et al. (2020), theorem 21, like Opacus' `get_privacy_spent`.
    """
    order = np.asarray(orders, dtype=float)
    with np.errstate(divide="ignore"):  # delta 0 comes with an infinite RDP
        log_delta = np.log(np.asarray(delta, dtype=float))[..., None]
    return np.maximum(rdp + np.log1p(-1 / order) - (log_delta + np.log(order)) / (order - 1), 0.0)


def classically_converted(rdp: np.ndarray, orders: tuple[float, ...], delta: float | np.ndarray) -> np.ndarray:
    """Like `converted`, by the older rule rdp + log(1/delta) / (alpha-1) (Mironov, 2017, proposition 3)."""
    with np.errstate(divide="ignore"):
        log_delta = np.log(np.asarray(delta, dtype=float))[..., None]
    return rdp - log_delta / (np.asarray(orders, dtype=float) - 1)
