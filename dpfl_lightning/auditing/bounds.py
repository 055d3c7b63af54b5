"""Statistics of an audit: what releases prove about the build that made them.

Every bound holds with probability at least 1 - significance, over the noise and the coins of the audit. A lower bound
of epsilon at or below a claim proves nothing; one above it disproves the claim.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom, chi2, nct

RunTotals = tuple[int, int]  # number of guesses, number of right guesses
Curve = Callable[[float], float]  # power of a test -> its smallest possible false positive rate

_FAR = 300.0  # t statistic beyond which noncentral t probabilities cannot be evaluated


def guesses(scores: np.ndarray, included: np.ndarray, each_side: Sequence[int]) -> list[RunTotals]:
    """Guess that the k highest scores were included and the k lowest were not, for every k of `each_side`.

    `scores` `[m]` are computed from releases without the coins, `included` `[m]` bool are the fair coins; the numbers
    k <= m / 2 are fixed before the run.

    >>> guesses(np.array([3.0, -1.0, 0.5, 0.0]), np.array([True, False, False, True]), (1, 2))
    [(2, 2), (4, 2)]
    """
    right = included[np.argsort(scores, kind="stable")]
    return [(2 * k, int(right[len(right) - k :].sum() + k - right[:k].sum())) for k in each_side]


def numbers_of_guesses(canaries: int) -> tuple[int, ...]:
    """Return how many guesses an audit makes on each side, from a few (the strongest canaries) to all.

    >>> numbers_of_guesses(200)
    (6, 12, 25, 50, 100)
    """
    return tuple(sorted({max(1, canaries // divisor) for divisor in (2, 4, 8, 16, 32)}))


def one_run_p_value(canaries: int, guessed: int, correct: int, epsilon: float, delta: float) -> float:
    """Bound the probability of `correct` right ones of `guessed` guesses if one canary is (epsilon, delta)-private.

    Each of m = `canaries` was included by a fair coin; those without a guess are skipped.

    Reference: Steinke, Nasr and Jagielski (2023), https://arxiv.org/abs/2305.08846.

    >>> round(one_run_p_value(canaries=10, guessed=10, correct=10, epsilon=0.0, delta=0.0) * 2**10, 6)
    1.0
    """
    right = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guessed, right))
    if delta == 0 or correct == 0:
        return tail
    fewer = np.arange(1, correct + 1)
    just_below = binom.sf(correct - 1 - fewer, guessed, right) - tail  # P(correct - i <= right guesses < correct)
    return min(1.0, tail + 2 * canaries * delta * float((just_below / fewer).max()))


def one_run_epsilon(canaries: int, tallies: Sequence[RunTotals], significance: float, delta: float) -> float:
    """Return a lower bound of epsilon from guesses about canaries that a fair coin each included in ONE run.

    The significance is shared evenly among the tallies. Holds for any (epsilon, delta)-private mechanism, whatever the
    scores are. With many canaries it lies far below the true value, because they share one run's noise.

    >>> round(one_run_epsilon(200, [(200, 150)], significance=0.05, delta=1e-5), 3)
    0.821
    """

    def refuted(epsilon: float, totals: RunTotals) -> bool:
        return one_run_p_value(canaries, *totals, epsilon, delta) < significance / len(tallies)

    return _largest(refuted, tallies)


def curve_refuted(canaries: int, totals: RunTotals, significance: float, curve: Curve) -> bool:
    """Return whether so many right guesses refute that adding or removing one canary is hidden as `curve` says.

    Reference: Mahloujifar, Melis and Chaudhuri (2024), "Auditing f-differential privacy in one run",
    https://arxiv.org/abs/2410.22235: its recursion, for guesses between two values.
    """
    guessed, correct = totals
    right, wrong = significance * correct / canaries, significance * (guessed - correct) / canaries
    for left in range(correct - 1, -1, -1):
        next_wrong = max(wrong, curve(min(right, 1.0)))
        if next_wrong == wrong:  # nothing changes from here on
            break
        right += left / (guessed - left) * (next_wrong - wrong)
        wrong = next_wrong
    return right + wrong > guessed / canaries


def one_run_weakness(
    canaries: int, tallies: Sequence[RunTotals], significance: float, family: Callable[[float], Curve]
) -> float:
    """Return the largest t >= 0 for which the guesses refute `family(t)`, curves of decreasing privacy.

    If more is claimed than one (epsilon, delta), this is far tighter than `one_run_epsilon`.

    >>> round(one_run_weakness(200, [(200, 150)], significance=0.05, family=gaussian_curve), 3)
    0.441
    """

    def refuted(t: float, totals: RunTotals) -> bool:
        return curve_refuted(canaries, totals, significance / len(tallies), family(t))

    return _largest(refuted, tallies)


def gaussian_curve(mu: float) -> Curve:
    """Return the curve of a Gaussian mechanism with sensitivity / noise std = mu (Dong, Roth and Su 2022)."""
    return lambda power: float(ndtr(ndtri(power) - mu))


def curve_of_points(epsilons: np.ndarray, deltas: np.ndarray) -> Curve:
    """Return the curve of a mechanism that is only known to be (epsilons[j], deltas[j])-private for every j.

    >>> curve_of_points(np.array([0.0]), np.array([0.1]))(0.5)
    0.4
    """
    grow, shrink = np.exp(epsilons), np.exp(-epsilons)

    def least(power: float) -> float:
        return max(0.0, float(((power - deltas) * shrink).max()), float((1 - deltas - grow * (1 - power)).max()))

    return least


def _largest(refuted: Callable[[float, RunTotals], bool], tallies: Sequence[RunTotals]) -> float:
    """Return the largest number >= 0 that some tally refutes, to 1e-7 relative from below; 0 if none is refuted."""
    low = 0.0
    for totals in tallies:
        if not refuted(low, totals):
            continue
        high = max(1.0, 2 * low)
        while refuted(high, totals):
            low, high = high, 2 * high
        while high - low > 1e-7 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if refuted(middle, totals) else (low, middle)
    return low


def threshold_epsilon(inside: np.ndarray, outside: np.ndarray, significance: float, delta: float) -> float:
    """Return a lower bound of epsilon: how well a threshold distinguishes scores `[n]` with and without the canary.

    The first half of each sample chooses the threshold and its side, the second half bounds both error rates (Clopper
    and Pearson, exact). Holds for any (epsilon, delta)-private mechanism, whatever the scores are.

    >>> threshold_epsilon(np.zeros(100), np.zeros(100), significance=0.05, delta=1e-5)
    0.0
    """
    best, bound = -math.inf, 0.0
    for positives, negatives in ((inside, outside), (-outside, -inside)):  # both sides of the threshold
        (tried, judged), (tried_others, judged_others) = (np.split(s, [len(s) // 2]) for s in (positives, negatives))
        thresholds = np.unique(np.concatenate([tried, tried_others]))
        bounds = _threshold_bounds(thresholds, tried, tried_others, significance, delta)
        if bounds.max() > best:
            best, chosen = bounds.max(), thresholds[[bounds.argmax()]]
            bound = float(_threshold_bounds(chosen, judged, judged_others, significance, delta)[0])
    return max(0.0, bound)


def _threshold_bounds(
    thresholds: np.ndarray, positives: np.ndarray, negatives: np.ndarray, significance: float, delta: float
) -> np.ndarray:
    """log((P(sure >= t) - delta) / P(other >= t)), both rates at the unfavourable ends of their intervals."""
    hits, alarms = (len(scores) - np.searchsorted(np.sort(scores), thresholds) for scores in (positives, negatives))
    power = rate_interval(hits, len(positives), significance / 2)[0] - delta
    return np.log(np.maximum(power, 1e-300)) - np.log(rate_interval(alarms, len(negatives), significance / 2)[1])


def shift_interval(inside: np.ndarray, outside: np.ndarray, significance: float) -> tuple[float, float]:
    """Return an interval for (mean inside - mean outside) / std of normal samples with one std: a Gaussian's mu.

    Each end fails with probability `significance` < 0.5; at least three samples together. Exact: the t statistic has a
    noncentral t distribution. For |t| > 300 it is a union bound over numerator and denominator, a little wider.

    >>> low, high = shift_interval(np.array([2.0, 3.0, 4.0]), np.array([0.0, 1.0, -1.0]), significance=0.05)
    >>> round(low, 2), round(high, 2)
    (0.74, 5.05)
    """
    n, m = len(inside), len(outside)
    squares = float(((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum())
    difference, freedom, size = float(inside.mean() - outside.mean()), n + m - 2, math.sqrt(n * m / (n + m))
    if squares == 0:  # no noise at all
        return (math.copysign(math.inf, difference),) * 2 if difference else (0.0, 0.0)
    t = difference / math.sqrt(squares / freedom) * size
    if abs(t) > _FAR:
        spread = [math.sqrt(float(chi2.ppf(p, freedom)) / freedom) for p in (significance / 2, 1 - significance / 2)]
        ends, quantile = sorted(t * factor for factor in spread), -float(ndtri(significance / 2))
        return (ends[0] - quantile) / size, (ends[1] + quantile) / size
    step = math.sqrt(1 + t**2 / (2 * freedom))  # approximate std of t

    def end(tail: Callable[..., float], outwards: float) -> float:
        inner, outer = t, t + outwards * step
        while tail(t, freedom, outer) > significance:
            inner, outer = outer, outer + 2 * (outer - inner)
        return brentq(lambda centre: tail(t, freedom, centre) - significance, inner, outer) / size

    return end(nct.sf, -1.0), end(nct.cdf, 1.0)


def std_interval(std: float, freedom: int, significance: float) -> tuple[float, float]:
    """Return an interval for the true std of a normal sample; each end fails with probability `significance`.

    `std` is the root of (sum of squares / freedom), `freedom` >= 1 the degrees of freedom.

    >>> low, high = std_interval(1.0, freedom=10_000, significance=0.05)
    >>> round(low, 4), round(high, 4)
    (0.9885, 1.0118)
    """
    low, high = (std * math.sqrt(freedom / float(chi2.ppf(p, freedom))) for p in (1 - significance, significance))
    return low, high


def rate_interval(hits: np.ndarray | int, trials: int, significance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the exact interval (Clopper and Pearson 1934) for a probability; each end fails with probability
    `significance`.

    >>> low, high = rate_interval(0, 100, significance=0.05)
    >>> float(low), round(float(high), 4)
    (0.0, 0.0295)
    """
    hits = np.asarray(hits)
    low = np.where(hits > 0, beta.ppf(significance, np.maximum(hits, 1), trials - hits + 1), 0.0)
    high = np.where(hits < trials, beta.ppf(1 - significance, hits + 1, np.maximum(trials - hits, 1)), 1.0)
    return low, high


def releases_to_tell(mu: float, ratio: float, significance: float, miss: float = 0.1) -> int:
    """Return how many releases with the canary, and as many without, show that `ratio * mu` is above `mu`; ratio > 1.

    `significance` is that of the lower end of `shift_interval`, `miss` the probability that they fail to show it.

    >>> releases_to_tell(mu=1.0, ratio=1.5, significance=1e-3)
    163
    """
    deviations = -ndtri(significance) - ndtri(miss)
    return max(2, math.ceil(2 * (deviations / ((ratio - 1) * mu)) ** 2 + 2 * (deviations / 2) ** 2))
