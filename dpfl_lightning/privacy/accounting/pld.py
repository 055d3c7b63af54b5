"""Tight composition of privacy losses, with every rounding on the safe side.

dp_accounting rounds the privacy loss of one release to a grid, so that every hockey-stick divergence is at least the
true one ("connect the dots", Doroshenko et al., 2022). The composition is exact up to floating point: one Fourier
transform of the exponentially tilted losses. Tilting moves the mass to the losses that decide epsilon. Errors of the
transform are then relative to delta; without it, they are about 1e-16 for each step, and too large for small deltas.
They are bounded generously and added; other sums are float64, far more exact than the grid, which errs upwards.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import fft
from scipy.optimize import minimize_scalar
from scipy.special import log_ndtr, ndtr, ndtri

from dpfl_lightning.privacy.accounting.events import Composed
from dpfl_lightning.privacy.accounting.gaussian import gaussian_mu
from dpfl_lightning.runtime.text import at_most

_MOST_EPSILON = 100  # above it exponentials would overflow, and nobody needs a tight value
_NEGLIGIBLE = 1e-5  # mu of sampled batches that count as full ones
_SHARE = 1e-4  # of delta, for each of: truncated losses of single releases, the truncated tail of the sum
_MOST_CELLS = 2**18  # of the loss of one release
_MOST_POINTS = 2**22  # of the Fourier transform: about 200 MB
_CELLS = 24  # least number of grid cells in the range of a selection
_TOGETHER = 100  # selections whose worst adaptive composition is computed; such groups add up, 0.5 % above it


class Loss(NamedTuple):
    """Rounded privacy loss of one release: probability[j] of (lowest + j) * mesh; the rest is an infinite loss."""

    lowest: int
    log_probability: np.ndarray
    infinite: float


class NoPld(Exception):
    """There is no tight value; the message says why."""


def pld_epsilon(releases: Composed, mu: float, delta: float, adjacency: str, rdp_epsilon: float) -> float:
    """Return an upper bound of epsilon: the least that the rounded losses allow, or raise NoPld.

    `mu` >= 0 is that of all full batches together, as one Gaussian mechanism; `rdp_epsilon` is another upper bound. The
    grid is chosen so that rounding increases epsilon by about 0.1 % or 0.003, whichever is less.
    """
    if not rdp_epsilon <= _MOST_EPSILON:
        raise NoPld(f"epsilon is above {_MOST_EPSILON}")
    sensitivity = 2 if adjacency == "replace_one" else 1
    sampled = []
    for rate, noise, steps in releases.gaussian:
        alone = sensitivity * math.sqrt(steps) / noise  # mu without amplification by sampling
        if rate < 1 and alone < _NEGLIGIBLE:
            mu = math.hypot(mu, alone)
        elif rate < 1:
            sampled.append((rate, noise, steps))
    scale = _scale(releases, mu, delta, sensitivity, rdp_epsilon)
    counts = [n for _, _, n in sampled] + [n for _, n in releases.laplace] + [n for _, n in releases.selection]
    tail = float(math.floor(math.log(delta) + math.log(_SHARE / (sum(counts) + 1))))
    reach = max((_reach(rate, sensitivity / noise, tail) for rate, noise, _ in sampled), default=0.0)
    bounded = bool(releases.laplace or releases.selection)  # losses with an end, which the grid rounds up
    mesh = max(_mesh(scale, max(sum(counts) + 1, 500 if bounded else 20), delta), reach / _MOST_CELLS)
    sides: list[list[tuple[Loss, int]]] = [[], []]  # the record is in the first or the second data set
    for rate, noise, steps in sampled:
        for side, loss in zip(sides, _gaussian(rate, noise, adjacency, mesh, tail), strict=True):
            side.append((loss, steps))
    symmetric = [(_gaussian(1.0, 1 / mu, "add_remove", mesh, tail)[0], 1)] if mu else []
    symmetric += [(_laplace(sensitivity / noise, mesh), steps) for noise, steps in releases.laplace]
    for epsilon, count in releases.selection:
        whole, rest = divmod(count, _TOGETHER)
        for size, times in ((_TOGETHER, whole), (rest, 1)):
            symmetric += [(_selections(sensitivity * epsilon, size, mesh, tail), times)] if size * times else []
    one_side = not sampled or adjacency == "replace_one"
    epsilon = max(_epsilon(side + symmetric, mesh, delta) for side in (sides[:1] if one_side else sides))
    if not math.isfinite(epsilon):
        raise NoPld("the numerics failed")
    return epsilon


def _reach(rate: float, mu: float, tail: float) -> float:
    """Return a loss that one release exceeds with a probability of about e^tail."""
    full = min(mu**2 / 2 + mu * math.sqrt(-2 * tail), 700.0)
    return math.log1p(rate * math.expm1(full)) - math.log1p(-rate * -math.expm1(-full))


def _scale(releases: Composed, mu: float, delta: float, sensitivity: int, rdp_epsilon: float) -> float:
    """Return an estimate of the mu of the Gaussian mechanism that costs as much, from RDP or from the variances."""
    of_rdp = float(gaussian_mu(np.array([rdp_epsilon]), np.array([delta]))[0])
    sampled = [(rate, noise / sensitivity, n) for rate, noise, n in releases.gaussian if rate < 1]
    variance = mu**2 + sum(n * rate**2 * math.expm1(min(noise**-2, 100)) for rate, noise, n in sampled)
    variance += sum(n * (sensitivity / noise) ** 2 for noise, n in releases.laplace)
    variance += sum(n * (sensitivity * epsilon) ** 2 / 4 for epsilon, n in releases.selection)
    return min(of_rdp, math.sqrt(variance))


def _mesh(scale: float, count: int, delta: float) -> float:
    """Return a grid's spacing. Rounding adds a variance of about mesh^2 / 4 to each of `count` losses."""
    epsilon = scale * math.sqrt(-2 * math.log(delta))
    mesh = scale * min(0.07, 0.16 / math.sqrt(epsilon)) / math.sqrt(count)
    return 2.0 ** (math.floor(2 * math.log2(mesh)) / 2)  # few distinct spacings, so that losses can be reused


@functools.lru_cache(maxsize=128)
def _gaussian(rate: float, noise: float, adjacency: str, mesh: float, tail: float) -> tuple[Loss, Loss]:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    if adjacency == "add_remove":
        return _added_or_removed(rate, noise, 1, mesh, tail), _added_or_removed(rate, noise, -1, mesh, tail)
    loss = pld.from_gaussian_mechanism(
        noise,
        value_discretization_interval=mesh,
        log_mass_truncation_bound=tail,
        sampling_prob=rate,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    )
    return _loss_of(loss._pmf_remove), _loss_of(loss._pmf_add)


def _added_or_removed(rate: float, noise: float, sign: int, mesh: float, tail: float) -> Loss:
    """Return the loss of (1-q) N(0) + q N(-1) beside N(0) (sign 1), or of N(0) beside (1-q) N(0) + q N(1) (sign -1).

    It has the bits of dp_accounting's `from_gaussian_mechanism`, which takes six times as long: it loops over the grid.
    """
    from dp_accounting.pld import pld_pmf

    odds = 1 / rate - 1  # against taking part
    with np.errstate(divide="ignore"):  # rate 1: log(0) is -inf
        log_rest, log_odds = np.log1p(-rate), np.log(odds)

    def loss_at(x: float) -> float:
        full = sign * (-0.5 - sign * x) / noise**2  # the loss of a full batch
        return float(sign * np.logaddexp(sign * full + np.log(rate), log_rest))

    cut = float(ndtri(0.5 * math.exp(tail))) * noise
    lowest = math.floor(loss_at(-cut + (sign < 0)) / mesh)
    highest = math.ceil(loss_at(cut - (sign > 0)) / mesh)
    epsilon = np.arange(lowest, highest + 1) * mesh
    reached = sign * epsilon > log_rest  # elsewhere every output has a larger loss, or none has
    upper = sign * epsilon[reached] + np.log(1 / rate)
    full = sign * (upper + np.log1p(-np.exp(log_odds - upper)))
    full[epsilon[reached] == 0] = sign * np.log(1 / rate - odds)  # 0, with dp_accounting's rounding
    x = (sign < 0) + (-0.5 - full * noise**2)  # an output of at most x has a loss of at least epsilon
    delta = np.maximum(-np.expm1(epsilon), 0.0)
    if sign > 0:
        first = (1 - rate) * ndtr(x / noise) + rate * ndtr((x + 1) / noise)
        log_second = log_ndtr(x / noise)
    else:
        first = ndtr(x / noise)
        log_second = np.logaddexp(log_rest + log_ndtr(x / noise), np.log(rate) + log_ndtr((x - 1) / noise))
    delta[reached] = first - np.exp(epsilon[reached] + log_second)
    delta = np.clip(delta, 0.0, 1.0)
    return _loss_of(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(mesh, lowest, highest, delta))


@functools.lru_cache(maxsize=128)
def _laplace(epsilon: float, mesh: float) -> Loss:
    from dp_accounting.pld import privacy_loss_distribution as pld

    return _loss_of(pld.from_laplace_mechanism(1 / epsilon, value_discretization_interval=mesh)._pmf_remove)


@functools.lru_cache(maxsize=128)
def _selections(epsilon: float, count: int, mesh: float, tail: float) -> Loss:
    """Return the loss of `count` adaptive choices whose log probabilities move within a range of `epsilon`.

    The worst choice has losses t and t - epsilon, with any t in [0, epsilon] that may depend on the choices before
    (Dong, Durfee, Rogers, 2020). The largest divergence of n + 1 choices therefore follows from that of n,

        D(x) <- max over t of p D(x - t) + (1 - p) D(x - t + epsilon), p = (e^epsilon - e^t) / (e^epsilon - 1),

    computed on a grid and connected by chords a + b e^x, which lie above a convex D. Where x - t and x - t + epsilon
    stay between two points, the sum is a constant + A e^t + B e^-t with A, B <= 0, whose maximum has a closed form.
    """
    from dp_accounting.pld import pld_pmf

    cells = max(min(math.ceil(epsilon / mesh), 20 * _CELLS // count), _CELLS)
    reach = min(count * cells, math.ceil(cells * (math.sqrt(-tail * count / 2) + count * epsilon / 2)))
    x = np.arange(-reach, reach + 1) * (epsilon / cells)
    divergence, points = np.maximum(-np.expm1(x), 0.0), np.arange(len(x))[:, None]
    first = points - np.arange(cells) - 1  # the cell of x - t where t is in the j-th cell of [0, epsilon]
    ends = np.exp(np.arange(cells + 1) * (epsilon / cells))
    for _ in range(count):
        slope = np.diff(divergence) / np.diff(np.exp(x))
        intercept = divergence[:-1] - slope * np.exp(x[:-1])
        # left of the grid a chord to the divergence 1 at -infinity, right of it the last value: both lie above
        left, right = (divergence[0] - 1) * math.exp(-x[0]), divergence[-1]
        b = np.concatenate([np.full(cells, left), slope, np.zeros(cells)])
        a = np.concatenate([np.ones(cells), intercept, np.full(cells, right)])
        a1, b1, a2, b2 = a[first + cells], b[first + cells], a[first + 2 * cells], b[first + 2 * cells]
        from_a, from_b = a2 - a1, (b1 - b2) * np.exp(x + epsilon)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            best = np.clip(np.nan_to_num(np.sqrt(from_b / from_a), nan=1.0, posinf=math.inf), ends[:-1], ends[1:])
        shifted = np.exp(x)[:, None] / best
        rest = math.exp(epsilon)
        sums = (rest - best) * (a1 + b1 * shifted) + (best - 1) * (a2 + b2 * rest * shifted)
        divergence = np.clip(sums.max(axis=1) / math.expm1(epsilon), divergence, 1.0)
    lowest, highest = math.ceil(x[0] / mesh), math.ceil(x[-1] / mesh)
    chords = np.interp(np.exp(np.arange(lowest, highest + 1) * mesh), np.exp(x), divergence)
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(mesh, lowest, highest, chords)
    return _loss_of(pmf)


def _loss_of(pmf: Any) -> Loss:
    """Return the loss of a distribution of dp_accounting. Probabilities that rounding made negative count as 0."""
    dense = pmf.to_dense_pmf()
    with np.errstate(divide="ignore"):
        return Loss(dense._lower_loss, np.log(np.maximum(dense._probs, 0.0)), float(dense._infinity_mass))


def _epsilon(losses: Sequence[tuple[Loss, int]], mesh: float, delta: float) -> float:
    """Return the least epsilon >= 0 at which the sum of the losses, each `count` times, costs at most delta."""
    values = [(loss.lowest + np.arange(len(loss.log_probability))) * mesh for loss, _ in losses]

    def tilted(tilt: float) -> tuple[float, list[np.ndarray]]:
        """log E[e^(tilt * sum)] of the finite losses, and the tilted probabilities of each loss."""
        log_moment, probabilities = 0.0, []
        for (loss, count), value in zip(losses, values, strict=True):
            exponent = loss.log_probability + tilt * value
            probability = np.exp(exponent - exponent.max())
            total = float(probability.sum())
            log_moment += count * (math.log(total) + float(exponent.max()))
            probabilities.append(probability / total)
        return log_moment, probabilities

    def chernoff(log_tilt: float, log_mass: float) -> float:
        """A loss that the sum exceeds with at most this probability."""
        return (tilted(math.exp(log_tilt))[0] - log_mass) / math.exp(log_tilt)

    def renyi(log_tilt: float) -> float:
        """An epsilon by Renyi differential privacy of order tilt + 1."""
        tilt = math.exp(log_tilt)
        return chernoff(log_tilt, log_delta + math.log1p(tilt) + tilt * math.log1p(1 / tilt))

    log_delta, counts = math.log(delta), [count for _, count in losses]
    bounds = (-7, -math.log(4 * mesh))  # more would leave only the largest loss
    found = minimize_scalar(renyi, bounds=bounds, method="bounded", options={"xatol": 0.05})
    log_tilt = float(found.x)
    tilt = math.exp(log_tilt)  # moves the mean of the sum to about epsilon
    tail = log_delta + math.log(_SHARE)
    end = min(chernoff(log_tilt + more, tail) for more in (0, 0.25, 0.5, 1, 1.5, 2))
    end = min(end, sum(count * value[-1] for count, value in zip(counts, values, strict=True)))
    log_moment, probabilities = tilted(tilt)
    means = [float(p @ value) for p, value in zip(probabilities, values, strict=True)]
    parts = zip(counts, probabilities, values, means, strict=True)
    deviation = math.sqrt(sum(count * float(p @ (value - mean) ** 2) for count, p, value, mean in parts))
    mean = sum(count * mean for count, mean in zip(counts, means, strict=True))
    missing = -math.expm1(sum(count * math.log1p(-loss.infinite) for loss, count in losses)) + delta * _SHARE
    if missing > delta / 2:
        raise NoPld(f"rounding errors matter at delta {at_most(delta)}")
    for width in (8, 16, 64, 512):
        start = mean - width * deviation - mesh
        loss, log_mass = _tilted_sum(losses, probabilities, start, end, mesh)
        with np.errstate(over="ignore", invalid="ignore"):  # far below epsilon
            mass = np.exp(log_mass + log_moment - tilt * loss)
            above, beside = np.cumsum(mass) + missing, np.cumsum(mass * np.exp(loss[0] - loss))
            costs = above[:-1] - np.exp(loss[1:] - loss[0]) * beside[:-1]  # delta of the next lower loss as epsilon
        if len(over := np.flatnonzero(~(costs <= delta))):
            cell = over[0]
            if not (math.isfinite(costs[cell]) and above[cell] > delta):
                raise NoPld("the numerics failed")
            return max(loss[0] + math.log((above[cell] - delta) / beside[cell]), 0.0)
        if start <= 0:
            return 0.0
    raise NoPld("the losses are too far apart")


def _tilted_sum(
    losses: Sequence[tuple[Loss, int]], tilted: Sequence[np.ndarray], start: float, end: float, mesh: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses from `end` down to at most `start`, and the log of an upper bound of their tilted probability.

    The transform is circular: probability outside of the window is added to losses inside it. From below it can only
    increase the result; what is above `end` is counted by the caller.
    """
    top, lowest = math.ceil(end / mesh), sum(count * loss.lowest for loss, count in losses)
    longest = max(map(len, tilted))
    points = fft.next_fast_len(max(top - math.floor(start / mesh) + 1, longest, 64), real=True)
    if points > _MOST_POINTS:
        raise NoPld(f"{points:,} losses would not fit into memory")
    transform = np.ones(points // 2 + 1, dtype=complex)
    for (_, count), probability in zip(losses, tilted, strict=True):
        transform *= fft.rfft(probability, points) ** count
    total, size = sum(count for _, count in losses), float(np.abs(transform).mean())
    rounding = 2.0**-50 * math.log2(points) * total * size  # an upper bound of the errors of the transforms
    place = top - np.arange(points)
    probability = np.maximum(fft.irfft(transform, points)[(place - lowest) % points], 0.0) + rounding
    return place * mesh, np.log(probability)
