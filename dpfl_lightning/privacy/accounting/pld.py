"""Tight composition of privacy losses, with every rounding on the safe side.

The rounded losses of `losses.py` are composed exactly up to floating point: by one Fourier transform of the
exponentially tilted losses. Tilting moves the mass to the losses that decide epsilon. Errors of the
transform are then relative to delta; without it, they are about 1e-16 for each step, and too large for small deltas.
They are bounded generously and added; other sums are float64, far more exact than the grid, which errs upwards.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import fft
from scipy.optimize import minimize_scalar

from dpfl_lightning.privacy.accounting.events import SENSITIVITY, Composed
from dpfl_lightning.privacy.accounting.gaussian import gaussian_mu
from dpfl_lightning.privacy.accounting.losses import Loss, NoPld, gaussian_losses
from dpfl_lightning.runtime.text import at_most

_MOST_EPSILON = 100  # above it exponentials would overflow, and nobody needs a tight value
_NEGLIGIBLE = 1e-5  # mu of sampled batches that count as full ones
_SHARE = 1e-4  # of delta, for each of: truncated losses of single releases, the truncated tail of the sum
_MOST_CELLS = 2**18  # of the loss of one release
_MOST_POINTS = 2**22  # of the Fourier transform: about 200 MB


def pld_epsilon(releases: Composed, delta: float, adjacency: str, rdp_epsilon: float) -> float:
    """Return an upper bound of epsilon: the least that the rounded losses allow, or raise NoPld.

    Full batches of Gaussian noise are one mechanism together; `rdp_epsilon` is another upper bound. The grid is chosen
    so that rounding increases epsilon by about 0.1 % or 0.003, whichever is less.
    """
    if not rdp_epsilon <= _MOST_EPSILON:
        raise NoPld(f"epsilon is above {_MOST_EPSILON}")
    sensitivity = SENSITIVITY[adjacency]
    others, mu = [], releases.mu(sensitivity)
    for release in releases.releases:
        alone = sensitivity * math.sqrt(release.squared_mu())
        if not release.is_gaussian and alone < _NEGLIGIBLE:
            mu = math.hypot(mu, alone)
        elif not release.is_gaussian:
            others.append(release)
    scale = _scale(releases, mu, delta, sensitivity, rdp_epsilon)
    count = sum(release.total for release in others)
    tail = float(math.floor(math.log(delta) + math.log(_SHARE / (count + 1))))
    reaches = [release.reach(sensitivity, tail) for release in others]
    bounded = not all(reaches)  # losses with an end, which the grid rounds up
    mesh = max(_mesh(scale, max(count + 1, 500 if bounded else 20), delta), max(reaches, default=0.0) / _MOST_CELLS)
    pairs = [pair for release in others for pair in release.losses(adjacency, mesh, tail)]
    pairs += [((gaussian_losses(1.0, 1 / mu, "add_remove", mesh, tail)[0],) * 2, 1)] if mu else []
    sides = [[(loss[side], count) for loss, count in pairs] for side in (0, 1)]
    one_side = all(first is second for (first, second), _ in pairs)
    epsilon = max(_epsilon(side, mesh, delta) for side in (sides[:1] if one_side else sides))
    if not math.isfinite(epsilon):
        raise NoPld("the numerics failed")
    return epsilon


def _scale(releases: Composed, mu: float, delta: float, sensitivity: int, rdp_epsilon: float) -> float:
    """Return an estimate of the mu of the Gaussian mechanism that costs as much, from RDP or from the variances."""
    of_rdp = float(gaussian_mu(np.array([rdp_epsilon]), np.array([delta]))[0])
    variance = mu**2 + sum(one.variance(sensitivity) for one in releases.releases if not one.is_gaussian)
    return min(of_rdp, math.sqrt(variance))


def _mesh(scale: float, count: int, delta: float) -> float:
    """Return a grid's spacing. Rounding adds a variance of about mesh^2 / 4 to each of `count` losses."""
    epsilon = scale * math.sqrt(-2 * math.log(delta))
    mesh = scale * min(0.07, 0.16 / math.sqrt(epsilon)) / math.sqrt(count)
    return 2.0 ** (math.floor(2 * math.log2(mesh)) / 2)  # few distinct spacings, so that losses can be reused


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
