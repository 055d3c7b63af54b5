"""Privacy losses of single releases, rounded to a grid so that every hockey-stick divergence is at least the true one.

The rounding is dp_accounting's ("connect the dots", Doroshenko et al., 2022). `pld.py` composes the losses.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

_CELLS = 24  # least number of grid cells in the range of a selection


class Loss(NamedTuple):
    """Rounded privacy loss of one release: probability[j] of (lowest + j) * mesh; the rest is an infinite loss."""

    lowest: int
    log_probability: np.ndarray
    infinite: float


class NoPld(Exception):
    """There is no tight value; the message says why."""


def gaussian_reach(rate: float, mu: float, tail: float) -> float:
    """Return a loss that one release exceeds with a probability of about e^tail."""
    full = min(mu**2 / 2 + mu * math.sqrt(-2 * tail), 700.0)
    return math.log1p(rate * math.expm1(full)) - math.log1p(-rate * -math.expm1(-full))


@functools.lru_cache(maxsize=128)
def gaussian_losses(rate: float, noise: float, adjacency: str, mesh: float, tail: float) -> tuple[Loss, Loss]:
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
    return (loss_of(loss._pmf_remove),) * 2  # symmetric


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
    return loss_of(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(mesh, lowest, highest, delta))


@functools.lru_cache(maxsize=128)
def laplace_loss(epsilon: float, mesh: float) -> Loss:
    from dp_accounting.pld import privacy_loss_distribution as pld

    return loss_of(pld.from_laplace_mechanism(1 / epsilon, value_discretization_interval=mesh)._pmf_remove)


@functools.lru_cache(maxsize=128)
def selections_loss(epsilon: float, count: int, mesh: float, tail: float) -> Loss:
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
    return loss_of(pmf)


def loss_of(pmf: Any) -> Loss:
    """Return the loss of a distribution of dp_accounting. Probabilities that rounding made negative count as 0."""
    dense = pmf.to_dense_pmf()
    with np.errstate(divide="ignore"):
        return Loss(dense._lower_loss, np.log(np.maximum(dense._probs, 0.0)), float(dense._infinity_mass))
