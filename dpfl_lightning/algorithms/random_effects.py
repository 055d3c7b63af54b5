"""The random-effects mean of noisy updates (DerSimonian and Laird, 1986): weights, and what they need to know.

An update per unit step is `x_i = m + e_i + z_i`: the mean gradient of all clients, what client i has alone, and noise,
with `E|e_i|^2 = g^2` and `E|z_i|^2 = v_i`. All functions read released updates alone: post-processing.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Vector = NDArray[np.float64]

_LEAST = 1e-3  # noise counts as at least this share of the median, so that weights are finite
_SIGMAS = 4.0  # standard deviations of noise that count as noise
_LONGEST = 3.0  # a signal may be this many times as long as the median one


def spread_of_rounds(now: Tensor, before: Tensor, noise: Vector) -> tuple[float, float]:
    """Return a spread between clients without noise, and its weight: their ratio of sums over rounds estimates `g^2`.

    Products of different rounds have independent noise, so that none has to be subtracted.

    Args:
        now: x of this round, `[C, P]`.
        before: mean x of each client's earlier rounds, `[C, P]`.
        noise: v, `[C]` >= 0. Contrasts between clients are weighted by its inverse.

    >>> spread_of_rounds(torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [4.0]]), np.ones(2))
    (2.0, 0.5)
    """
    weight = 1 / at_least(noise) if noise.all() else np.ones(len(noise))
    weight = weight / weight.sum()
    share = torch.from_numpy(weight).to(now)
    both = ((now - share @ now) * (before - share @ before)).sum(dim=1, dtype=torch.float64).cpu().numpy()
    return float(weight @ both), float(1 - weight @ weight)


def at_least(noise: Vector) -> Vector:
    """Return noise variances `[C]`, raised to a thousandth of the median positive one.

    >>> at_least(np.array([0.0, 1.0, 2.0, 1e9])).tolist()
    [0.002, 1.0, 2.0, 1000000000.0]
    """
    return np.maximum(noise, _LEAST * np.median(noise[noise > 0])) if noise.any() else noise


def excess(squares: Vector, noise: Vector, num_params: int) -> Vector:
    """Return by how much squared lengths `|x|^2` exceed what noise and three times the median signal explain, `[C]`.

    >>> excess(np.array([2.0, 2.0, 102.0]), np.ones(3), num_params=10**12).round(2).tolist()
    [0.0, 0.0, 92.0]
    """
    signal = np.median(np.maximum(squares - noise, 0.0))
    allowed = noise * (1 + _deviation(num_params)) + _LONGEST**2 * signal
    return np.maximum(squares - allowed, 0.0)


def opposed(gram: Vector, num_params: int) -> NDArray[np.bool_]:
    """Return which updates clearly point away from most others by their products `[C, C]`: `[C]`.

    If these are more than a third, none is: honest updates may be like that.
    """
    count, length = len(gram), np.sqrt(np.maximum(np.diag(gram), 1e-300))
    if count < 3:
        return np.zeros(count, dtype=bool)
    cosines = gram / length / length[:, None]
    agreement = np.median(cosines[~np.eye(count, dtype=bool)].reshape(count, count - 1), axis=1)
    # of a median of independent cosines, and of the client's noise along what the others share
    variance = math.pi / 2 / (count - 1) + max(float(np.median(agreement)), 0.0)
    found = agreement < -_SIGMAS * math.sqrt(variance / max(num_params, 1))
    return found & (3 * found.sum() <= count)


def _deviation(num_params: int) -> float:
    """Return how far the squared length of noise in so many numbers may be from its mean, as a share."""
    return _SIGMAS * math.sqrt(2 / max(num_params, 1))


def alignments(gram: Vector, num_params: int, length: Vector) -> tuple[Vector, Vector]:
    """Return the product of each update with a mean of the others, and its variance by noise, `[C]` each.

    Args:
        gram: products of the updates `[C, C]`.
        length: relative lengths of their signals, as far as they are known, `[C]` > 0. The products then are the
            lengths times one number.
    """
    squares = np.maximum(np.diag(gram), 1e-300)
    reference = limited_shares(1 / np.maximum(squares, 1e-2 * np.median(squares)), most_influence(len(gram)))
    others = np.maximum(reference @ length - reference * length, 1e-300)
    products = (gram @ reference - squares * reference) / others
    variance = (reference**2 @ squares - reference**2 * squares) / others**2
    return products, squares * variance / max(num_params, 1)


def lengths_of_signals(products: Vector, variance: Vector) -> Vector:
    """Return the lengths of the clients' signals by `alignments`, of mean 1, `[C]` > 0; at most three times the median.

    They are shrunk as far as noise explains their differences; all are 1 if noise hides what clients share.

    >>> lengths_of_signals(np.array([1.0, 2.0, 3.0]), np.full(3, 1e-6)).round(2).tolist()
    [0.5, 1.0, 1.5]
    >>> lengths_of_signals(np.array([1.0, 2.0, 3.0]), np.full(3, 100.0)).tolist()
    [1.0, 1.0, 1.0]
    """
    weight = 1 / np.maximum(variance, 1e-300)
    mean = weight @ products / weight.sum()
    if mean <= 2 / math.sqrt(weight.sum()):
        return np.ones(len(products))
    beyond = weight @ (products - mean) ** 2 - (len(products) - 1)
    between = max(beyond / (weight.sum() - weight @ weight / weight.sum()), 0.0)
    precision = 1 / np.maximum(between + variance, 1e-300)
    mean = precision @ products / precision.sum()
    length = np.maximum(mean + between * precision * (products - mean), _LEAST * abs(mean))
    length = np.minimum(length, _LONGEST * np.median(length))
    return length / length.mean()


def shares(error: Vector, bias: float, target: Vector, largest: float | None = None) -> Vector:
    """Return the shares q of least `sum q_i^2 error_i - 2 bias q_i target_i`: `[C]`, of sum 1.

    These are `~ 1 / error` without bias, and the target where bias is all of the error.

    Args:
        error: of each update by noise and bias, `[C]` >= bias.
        bias: that of a share by its distance to the target, >= 0.
        target: shares without noise, `[C]`, of sum 1; who has none gets none.
        largest: bound on a share; None: `most_influence`, or the client's target where that is more.

    >>> shares(np.array([4.0, 9.0]), bias=1.0, target=np.array([0.5, 0.5]), largest=1.0).round(3).tolist()
    [0.692, 0.308]
    """
    counted, share = target > 0, target
    if least := _LEAST * np.median(error[counted]):
        weight = np.where(counted, 1 / np.maximum(error, least), 0.0)
        share = bias * target * weight
        share = share + weight * max(1 - share.sum(), 0.0) / weight.sum()
    return limited_shares(share, np.maximum(most_influence(len(error)), target) if largest is None else largest)


def most_influence(num_clients: int) -> float:
    """Return the default bound on one client's share: a quarter, or twice an equal share, but at most two thirds.

    >>> [round(most_influence(count), 2) for count in (1, 2, 5, 20)]
    [0.67, 0.67, 0.4, 0.25]
    """
    return max(1 / 4, min(2 / 3, 2 / num_clients))


def limited_shares(share: Vector, largest: float | Vector) -> Vector:
    """Scale shares `[C]` >= 0 to sum 1; those above `largest` become it, and the others grow in proportion.

    Fewer than 1 / largest positive shares become equal.

    >>> limited_shares(np.array([8.0, 1.0, 1.0, 0.0]), 0.4).round(2).tolist()
    [0.4, 0.3, 0.3, 0.0]
    """
    positive = share > 0
    bound = np.maximum(largest, 1 / max(positive.sum(), 1)) * np.ones(len(share))
    share = share / share.sum() if positive.any() else np.full(len(share), 1 / max(len(share), 1))
    limited = np.zeros(len(share), dtype=bool)
    while (above := (share > bound * (1 + 1e-12)) & ~limited).any():
        limited |= above
        rest = share[~limited].sum()
        others = share * (1 - bound[limited].sum()) / rest if rest > 0 else share
        share = np.where(limited, bound, others)
    return share
