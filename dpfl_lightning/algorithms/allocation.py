"""Participation quotas that balance the noise of frequent clients and the bias against rare ones.

The update of a client with T_n participations has the noise variance `noise_factor_n T_n^exponent_n`. Quotas of sum M
minimise `sum_n noise_factor_n T_n^(exponent_n + 1) + sum_n bias_cost_n T_n + anchor sum_n (T_n - M / N)^2`. Every term
is convex and depends on one client, so taking the cheapest next participation is exactly optimal. Reference: Ma et al.,
"The Power of Bias", problem P1; not in the paper: integers, bounds, exponents of clients, and the anchor, which
equalises quotas as noise vanishes.
"""

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpfl_lightning.errors import require

Vector = NDArray[np.float64]

_UNNOISED = 1e-12  # noise factor of a client without noise, relative to the median; makes the minimum unique
_FEW = 1000  # number of participations that a heap allocates faster than another pass over all clients


def allocate_int(
    noise_factor: ArrayLike,
    total: int,
    exponent: ArrayLike = 1.0,
    bias_cost: ArrayLike = 0.0,
    upper: ArrayLike = np.inf,
    anchor: float = 0.0,
) -> NDArray[np.int64]:
    """Return the integer quotas `[N]` of sum `total` that cost least; among equally good clients the first get more.

    `noise_factor` `[N]` >= 0 is infinite for a client without a budget, which takes no part, and 0 for one without
    noise. `exponent` > 0 is that of `NoisedEvent.growth`; `bias_cost` and `anchor` >= 0 are in the unit
    of `noise_factor`, and `upper` bounds the quotas: each is `[N]` or one value. UserError if the bounds are too low.
    Arithmetic on public facts.

    >>> allocate_int([1.0, 2.0, 4.0], total=12).tolist(), allocate_int([1.0, 2.0, 4.0], total=12, anchor=1.0).tolist()
    ([7, 3, 2], [6, 4, 2])
    """
    factor = np.asarray(noise_factor, dtype=float)
    high, bias, powers = (
        np.broadcast_to(np.asarray(one, dtype=float), factor.shape) for one in (np.floor(upper), bias_cost, exponent)
    )
    able = np.isfinite(factor)
    high = np.where(able, np.minimum(high, total), 0.0)
    way_out = f"{total:g} participations must be allocated. Change their number, or the bounds."
    require(high.sum() >= total, "upper", f"sum to at least {total:g}", float(high.sum()), way_out)
    quotas = np.zeros(len(factor), dtype=np.int64)
    if able.any():
        factor = positive(factor[able])
        unit = float(np.exp(np.log(factor).mean()))  # factors may span many decades
        costs = _Costs(high[able], factor / unit, bias[able] / unit, anchor / unit, powers[able])
        quota = _below_a_price(costs, float(total))
        _take_cheapest(costs, quota, int(total) - int(quota.sum()))
        quotas[able] = quota
    return quotas


def noise_gain(quota: ArrayLike, noise_factor: ArrayLike, exponent: ArrayLike = 1.0) -> float:
    """Return the noise of a round's mean update under equal quotas / under these, without clients that lack a budget.

    >>> noise_gain([8.0, 2.0], [1.0, 4.0])
    1.5625
    """
    participations, factor = np.asarray(quota, dtype=float), np.asarray(noise_factor, dtype=float)
    able = np.isfinite(factor)
    powers = np.broadcast_to(exponent, factor.shape)[able]
    equal = np.full(int(able.sum()), participations[able].mean())
    noise, of_equal = (float((factor[able] * one ** (powers + 1)).sum()) for one in (participations[able], equal))
    return of_equal / noise if noise > 0 else 1.0


def anchor_strength(num_clients: int, rounds: int, gradient_scale: float, dissimilarity: float = 0.1) -> float:
    """Return the `anchor` for noise factors E|Z_n|^2 of a participation: `N G^2 (1 / rounds + 1 / (8 L / mu))`.

    It bounds the error of a biased mean under strong convexity, without the cross term: a heuristic, not a theorem.
    `gradient_scale` bounds the L2 norm of a record's gradient, `dissimilarity` is G^2 / `gradient_scale`^2 >= 0 (how
    much clients' gradients differ at the optimum), and L / mu is taken as 100.
    """
    return num_clients * dissimilarity * gradient_scale**2 * (1 / rounds + 1 / (8 * 100.0))


@dataclass(frozen=True, eq=False)
class _Costs:
    """Bounds and costs of the clients that have a budget, scaled so that factors are near 1."""

    high: Vector
    factor: Vector
    bias: Vector
    anchor: float
    exponent: Vector

    def price_of_next(self, quota: Any, of: Any = slice(None)) -> Any:
        """Return the cost of one more participation than the integer `quota`."""
        power = self.exponent[of] + 1
        rising = self.factor[of] * ((quota + 1.0) ** power - quota**power)
        return rising + self.anchor * (2 * quota + 1.0) + self.bias[of]


def positive(factor: Vector) -> Vector:
    """Return the factors, with a small positive value for clients without noise."""
    positive = factor[factor > 0]
    return np.where(factor > 0, factor, _UNNOISED * np.median(positive) if len(positive) else 1.0)


def _below_a_price(costs: _Costs, total: float) -> NDArray[np.int64]:
    """Return all participations up to some price, at most `total` and nearly as many (or all below the right price)."""
    taken = np.zeros_like(costs.high)
    low, high = float(costs.bias.min()), float(costs.price_of_next(costs.high).max())
    for _ in range(300):  # floating-point resolution ends the bisection long before
        middle = low + (high - low) / 2
        if total - taken.sum() <= _FEW or not low < middle < high:
            break
        more = _count_up_to(costs, middle)
        if more.sum() <= total:
            low, taken = middle, more
        else:
            high = middle
    return taken.astype(np.int64)


def _count_up_to(costs: _Costs, price: float) -> Vector:
    """Return how many participations of each client cost at most `price` each, within its bounds."""
    fits, too_many = np.zeros_like(costs.high), costs.high + 1
    while (open_ := too_many - fits > 1).any():
        middle = np.floor((fits + too_many) / 2)
        cheap = costs.price_of_next(np.maximum(middle - 1, 0.0)) <= price
        fits, too_many = np.where(open_ & cheap, middle, fits), np.where(open_ & ~cheap, middle, too_many)
    return fits


def _take_cheapest(costs: _Costs, quota: NDArray[np.int64], left: int) -> None:
    """Allocate the last participations in place, each to the client with the lowest cost."""
    if not left:
        return
    prices = np.where(quota < costs.high, costs.price_of_next(quota.astype(float)), np.inf)
    first = np.argpartition(prices, left)[: left + 1] if left < len(prices) else np.arange(len(prices))
    heap = [(float(prices[n]), int(n)) for n in first if np.isfinite(prices[n])]
    heapq.heapify(heap)
    for _ in range(left):
        _, n = heapq.heappop(heap)
        quota[n] += 1
        if quota[n] < costs.high[n]:
            heapq.heappush(heap, (float(costs.price_of_next(float(quota[n]), n)), n))
