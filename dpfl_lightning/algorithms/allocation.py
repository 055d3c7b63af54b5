"""Participation quotas that balance the noise of frequent clients and the bias against rare ones.

A client with T_n participations splits its budget among them: the noise of one update has the variance
`noise_factor_n T_n^exponent`. Quotas of sum M minimise

    sum_n noise_factor_n T_n^(exponent + 1) + sum_n bias_cost_n T_n + anchor sum_n (T_n - M / N)^2.

Every term is convex and depends on one client, so one multiplier, the price of one more participation, determines all
quotas, and integers chosen by the cheapest next participation are exactly optimal.

Reference: Ma et al., "The Power of Bias", problem P1 and Proposition 1. Bounds, integers and the anchor are not in the
paper. Without an upper bound a client may have to take part twice in a round; real quotas overspend, because 0.2 of a
participation is a whole one; and without the anchor quotas do not become equal as noise vanishes.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpfl_lightning.errors import require

Vector = NDArray[np.float64]

_UNNOISED = 1e-12  # noise factor of a client without noise, relative to the median; makes the minimum unique
_HALVINGS = 300  # upper limit; floating-point resolution ends the bisection long before
_FEW = 1000  # number of participations that a heap allocates faster than another pass over all clients


def allocate_real(
    noise_factor: ArrayLike,
    total: float,
    exponent: float = 1.0,
    bias_cost: ArrayLike = 0.0,
    lower: ArrayLike = 0.0,
    upper: ArrayLike = np.inf,
    anchor: float = 0.0,
) -> tuple[Vector, float]:
    """Return the optimal real quotas, and the price of one more participation.

    It sweeps over breakpoints if the exponent is 1 (exact, N log N), and otherwise bisects.

    Args:
        noise_factor: `[N]`, >= 0; infinite for a client without a budget, which takes no part; 0 for one without noise.
        total: M, the sum of all quotas, >= 0.
        exponent: > 0; 1 for Gaussian noise, 2 for Laplace noise.
        bias_cost: `[N]` or one value, in the unit of `noise_factor`.
        lower: lower bound of the quotas, `[N]` or one value, >= 0.
        upper: upper bound, `[N]` or one value; at most the rounds left, because a client takes part once in a round.
        anchor: >= 0, in the unit of `noise_factor`; if it is not 0, `exponent` must be 1 or 2.

    Returns:
        Quotas `[N]`, >= 0, of sum `total` up to rounding, and the multiplier in the unit of `noise_factor`.

    **Privacy** Arithmetic on public facts.

    Raises:
        UserError: no quotas of this sum satisfy the bounds, or a number is out of range.

    >>> quota, price = allocate_real([1.0, 2.0, 4.0], total=12)
    >>> quota.round(3).tolist(), round(price, 3)
    ([6.857, 3.429, 1.714], 13.714)
    >>> allocate_real([1.0, 2.0, 4.0], total=12, upper=5)[0].round(3).tolist()
    [5.0, 4.667, 2.333]
    """
    costs = _Costs(noise_factor, total, exponent, bias_cost, lower, upper, anchor)
    closed = anchor == 0 or exponent in (1, 2)
    require(closed, "exponent", "be 1 or 2 with an anchor", exponent, "allocate_int supports any exponent.")
    if not costs.able.any():
        return np.zeros(len(costs.able)), 0.0
    quota, price = _swept(costs) if exponent == 1 else _bisected(costs)
    return costs.of_everyone(quota), price * costs.unit


def allocate_int(
    noise_factor: ArrayLike,
    total: int,
    exponent: float = 1.0,
    bias_cost: ArrayLike = 0.0,
    lower: ArrayLike = 0,
    upper: ArrayLike = np.inf,
    anchor: float = 0.0,
) -> NDArray[np.int64]:
    """Return the optimal integer quotas, which are used to plan clients.

    All participations below a price are allocated at once, and the few others by a heap.

    Args: those of `allocate_real`; bounds are rounded inwards, and `exponent` may be any number above 0 with an anchor.

    Returns:
        Quotas `[N]`, >= 0, of sum `total` exactly. Among equally good clients the first ones get more.

    **Guarantees** Optimal: no other integer quotas within the bounds cost less (up to rounding of the costs).

    **Privacy** Arithmetic on public facts.

    Raises:
        UserError: as `allocate_real`.

    >>> allocate_int([1.0, 2.0, 4.0], total=12).tolist(), allocate_int([1.0, 2.0, 4.0], total=12, anchor=1.0).tolist()
    ([7, 3, 2], [6, 4, 2])
    """
    inside = np.ceil(np.asarray(lower, dtype=float)), np.floor(np.asarray(upper, dtype=float))
    require(int(total) == total, "total", "be a whole number", total)
    costs = _Costs(noise_factor, total, exponent, bias_cost, *inside, anchor)
    if not costs.able.any():
        return np.zeros(len(costs.able), dtype=np.int64)
    quota = _below_a_price(costs)
    _take_cheapest(costs, quota, int(total) - int(quota.sum()))
    return costs.of_everyone(quota)


def noise_only(noise_factor: ArrayLike, total: float, exponent: float = 1.0) -> Vector:
    """Return quotas of least noise, without bounds: `M noise_factor_n^(-1 / exponent) / sum of these`, `[N]`.

    Reference: Ma et al., Proposition 1.

    >>> noise_only([1.0, 4.0], total=10).tolist(), noise_only([1.0, 4.0], total=9, exponent=2.0).tolist()
    ([8.0, 2.0], [6.0, 3.0])
    """
    share = _unit(np.asarray(noise_factor, dtype=float)) ** (-1 / exponent)
    return total * share / share.sum()


def objective(
    quota: ArrayLike, noise_factor: ArrayLike, exponent: float = 1.0, bias_cost: ArrayLike = 0.0, anchor: float = 0.0
) -> float:
    """Return the cost of quotas `[N]`, in the unit of `noise_factor`."""
    counts, factor = np.asarray(quota, dtype=float), np.asarray(noise_factor, dtype=float)
    takes_part = counts > 0  # avoids 0 * infinity for clients without a budget
    noise = float((factor[takes_part] * counts[takes_part] ** (exponent + 1)).sum())
    return noise + float((np.asarray(bias_cost) * counts).sum()) + anchor * float(((counts - counts.mean()) ** 2).sum())


def noise_gain(quota: ArrayLike, noise_factor: ArrayLike, exponent: float = 1.0) -> float:
    """Return the noise of equal quotas / that of these quotas, in the mean update of a round.

    A value above 1 means that these quotas have less noise. Clients without a budget are left out on both sides.

    >>> noise_gain(noise_only([1.0, 4.0], total=10), [1.0, 4.0])
    1.5625
    """
    participations, factor = np.asarray(quota, dtype=float), np.asarray(noise_factor, dtype=float)
    able = np.isfinite(factor)
    equal = np.full(int(able.sum()), participations[able].mean())
    noise = objective(participations[able], factor[able], exponent)
    return objective(equal, factor[able], exponent) / noise if noise > 0 else 1.0


def anchor_strength(
    num_clients: int, rounds: int, gradient_scale: float, dissimilarity: float = 0.1, condition_number: float = 100.0
) -> float:
    """Return the cost of unequal quotas relative to noise: `N G^2 (1 / H + 1 / (8 L / mu))`.

    It is an upper bound of the error of a biased mean (strong convexity; G^2 measures how much clients' gradients
    differ at the optimum), over the factor of the noise in the bound of the error. The cross term is left out: this is
    a heuristic with one scale to tune, not a theorem.

    Args:
        num_clients: N, >= 1.
        rounds: planned rounds H, >= 1.
        gradient_scale: upper bound of the L2 norm of a record's gradient; the clip norm if that is an L2 bound.
        dissimilarity: G^2 / `gradient_scale`^2, >= 0; 0 means no anchor.
        condition_number: L / mu, > 0.

    Returns:
        The `anchor` of `allocate_real`, if noise factors are E|Z_n|^2 of one participation's mean gradient.

    >>> anchor_strength(100, 200, gradient_scale=1.0, dissimilarity=0.1)
    0.0625
    """
    return num_clients * dissimilarity * gradient_scale**2 * (1 / rounds + 1 / (8 * condition_number))


class _Costs:
    """Objective of one allocation, scaled so that factors are near 1, without clients that have no budget."""

    def __init__(
        self,
        noise_factor: ArrayLike,
        total: float,
        exponent: float,
        bias_cost: ArrayLike,
        lower: ArrayLike,
        upper: ArrayLike,
        anchor: float,
    ) -> None:
        factor = np.asarray(noise_factor, dtype=float)
        require(factor.ndim == 1 and len(factor) > 0, "noise_factor", "hold one number for each client", factor.shape)
        require(bool((factor >= 0).all()), "noise_factor", "be >= 0", float(factor.min()))
        require(0 <= total < np.inf, "total", "be >= 0 and finite", total)
        require(0 < exponent < np.inf, "exponent", "be above 0 and finite", exponent)
        require(0 <= anchor < np.inf, "anchor", "be >= 0 and finite", anchor)
        self.able = np.isfinite(factor)
        low, high, bias = (
            np.broadcast_to(np.asarray(values, dtype=float), factor.shape) for values in (lower, upper, bias_cost)
        )
        high = np.where(self.able, np.minimum(high, total), 0.0)
        _check_bounds(low, high, total)
        require(bool(np.isfinite(bias).all()), "bias_cost", "be finite", float(bias.max()))
        self.low, self.high = low[self.able], high[self.able]
        self.factor = _unit(factor[self.able])
        self.unit = _scale(self.factor)
        self.factor, self.bias, self.anchor = self.factor / self.unit, bias[self.able] / self.unit, anchor / self.unit
        self.total, self.exponent = float(total), float(exponent)

    def price(self, quota: Any, of: Any = slice(None)) -> Any:
        """Return the derivative of the cost at a real quota, without M / N in the anchor's term, which is constant."""
        rising = (self.exponent + 1) * self.factor[of] * quota**self.exponent
        return rising + 2 * self.anchor * quota + self.bias[of]

    def price_of_next(self, quota: Any, of: Any = slice(None)) -> Any:
        """Return the cost of one more participation than the integer `quota`."""
        power = self.exponent + 1
        rising = self.factor[of] * ((quota + 1.0) ** power - quota**power)
        return rising + self.anchor * (2 * quota + 1.0) + self.bias[of]

    def of_everyone(self, quota: NDArray) -> NDArray:
        """Return quotas `[N]` from those of the able clients; the others have none."""
        everyone = np.zeros(len(self.able), dtype=quota.dtype)
        everyone[self.able] = quota
        return everyone


def _check_bounds(low: Vector, high: Vector, total: float) -> None:
    wrong = np.flatnonzero(~((low >= 0) & (low <= high * (1 + 1e-12))))
    if len(wrong):
        must = f"be from 0 to the upper bound, {high[wrong[0]]:g} for client {wrong[0]}"
        require(False, "lower", must, float(low[wrong[0]]), "A client without a budget can only have 0.")
    way_out = f"{total:g} participations must be allocated. Change their number, or the bounds."
    require(low.sum() <= total * (1 + 1e-12), "lower", f"sum to at most {total:g}", float(low.sum()), way_out)
    require(high.sum() >= total * (1 - 1e-12), "upper", f"sum to at least {total:g}", float(high.sum()), way_out)


def _unit(factor: Vector) -> Vector:
    """Return the factors, with a small positive value for clients without noise."""
    positive = factor[factor > 0]
    return np.where(factor > 0, factor, _UNNOISED * np.median(positive) if len(positive) else 1.0)


def _scale(factor: Vector) -> float:
    """Return the geometric mean, because factors may span many decades."""
    return float(np.exp(np.log(factor).mean())) if len(factor) else 1.0


# ---- real quotas


def _swept(costs: _Costs) -> tuple[Vector, float]:
    """Solve exponent 1: each quota is piecewise linear in the price, and so is their sum, which is inverted."""
    slope = 1 / (2 * (costs.factor + costs.anchor))  # derivative of a quota by the price
    leaves, arrives = (costs.price(bound) for bound in (costs.low, costs.high))
    bends = np.concatenate([leaves, arrives])
    order = np.argsort(bends, kind="stable")
    bends, slopes = bends[order], np.cumsum(np.concatenate([slope, -slope])[order])
    gained = np.concatenate([[0.0], np.cumsum(np.maximum(slopes[:-1], 0.0) * np.diff(bends))])  # above `low`, by bend
    extra = costs.total - costs.low.sum()
    segment = min(max(int(np.searchsorted(gained, extra)) - 1, 0), len(bends) - 1)
    rest = extra - gained[segment]
    price = bends[segment] + (rest / slopes[segment] if rest > 0 and slopes[segment] > 0 else 0.0)
    return np.clip((price - costs.bias) * slope, costs.low, costs.high), float(price)


def _bisected(costs: _Costs) -> tuple[Vector, float]:
    """Solve any exponent: the sum of quotas grows with the price; find the smallest price at which it suffices."""
    z, factor, anchor = costs.exponent, costs.factor, costs.anchor

    def quota_at(price: float) -> Vector:
        above = np.maximum(price - costs.bias, 0.0)
        if anchor and z == 2:  # the usual root of the quadratic cancels for large anchors
            quota = above / (anchor + np.sqrt(anchor**2 + 3 * factor * above))
        else:
            quota = (above / ((z + 1) * factor + 2 * anchor * (z == 1))) ** (1 / z)
        return np.clip(quota, costs.low, costs.high)

    low, high = _price_range(costs)
    for _ in range(_HALVINGS):
        middle = low + (high - low) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if quota_at(middle).sum() < costs.total else (low, middle)
    few, many = quota_at(low), quota_at(high)  # neighbouring prices, between which steep quotas jump
    gap = many.sum() - few.sum()
    share = np.clip((costs.total - few.sum()) / gap, 0.0, 1.0) if gap > 0 else 1.0
    return few + share * (many - few), high


def _price_range(costs: _Costs) -> tuple[float, float]:
    """Return a price at which quotas are at their lower bounds, and one at which they are at the upper ones."""
    return float(costs.bias.min()), float(costs.price_of_next(costs.high).max())


# ---- integer quotas


def _below_a_price(costs: _Costs) -> NDArray[np.int64]:
    """Return all participations up to some price, at most `total` and nearly as many (or all below the right price)."""

    def taken_at(price: float) -> Vector:
        return np.clip(_count_up_to(costs, price), costs.low, costs.high)

    taken = costs.low
    low, high = _price_range(costs)
    for _ in range(_HALVINGS):
        middle = low + (high - low) / 2
        if costs.total - taken.sum() <= _FEW or not low < middle < high:
            break
        more = taken_at(middle)
        if more.sum() <= costs.total:
            low, taken = middle, more
        else:
            high = middle
    return taken.astype(np.int64)


def _count_up_to(costs: _Costs, price: float) -> Vector:
    """Return how many participations of each client cost at most `price` each; a count above `high` is arbitrary."""
    above, factor, anchor = price - costs.bias, costs.factor, costs.anchor
    if costs.exponent == 1:
        return np.floor((above / (factor + anchor) + 1) / 2)
    if costs.exponent == 2:  # root of factor (3 k^2 - 3 k + 1) + anchor (2 k - 1) = above
        linear = 2 * anchor - 3 * factor
        root = np.sqrt(np.maximum(4 * anchor**2 - 3 * factor**2 + 12 * factor * above, 0.0))
        with np.errstate(divide="ignore", invalid="ignore"):  # both forms are evaluated
            count = np.where(
                linear > 0, 2 * (above - factor + anchor) / (root + linear), (root - linear) / (6 * factor)
            )
        return np.where(above >= factor + anchor, np.floor(count), 0.0)
    fits, too_many = costs.low, costs.high + 1  # `low` participations fit at any price
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
