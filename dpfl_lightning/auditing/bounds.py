"""What releases prove about the build that made them: the statistics of an audit, and nothing of how it is run.

Every bound holds with probability at least 1 - significance, over the noise and the coins of the audit. A lower bound
of epsilon at or below a claim proves nothing; one above it disproves the claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom, chi2, nct

RunTotals = tuple[int, int]  # guesses, and how many of them were right
Curve = Callable[[float], float]  # a test's power -> the least false positive rate that goes with it

_FAR = 300.0  # of a t statistic: beyond, noncentral t probabilities are not found


# ---- one run with many canaries, each included by a fair coin


def guesses(scores: np.ndarray, included: np.ndarray, each_side: Sequence[int]) -> list[RunTotals]:
    """Guess that the k highest scores were included and the k lowest were not, for every k of `each_side`.

    Args:
        scores: `[m]`, of canaries that a fair coin each included; they know the releases, but not the coins.
        included: `[m]` bool, how the coins fell.
        each_side: numbers k <= m / 2, fixed before the run: the bounds pay for each by a union bound.

    >>> guesses(np.array([3.0, -1.0, 0.5, 0.0]), np.array([True, False, False, True]), (1, 2))
    [(2, 2), (4, 2)]
    """
    right = included[np.argsort(scores, kind="stable")]
    return [(2 * k, int(right[len(right) - k :].sum() + k - right[:k].sum())) for k in each_side]


def numbers_of_guesses(canaries: int) -> tuple[int, ...]:
    """How many guesses on each side an audit makes: few, where the strongest canaries show, up to all of them.

    >>> numbers_of_guesses(200)
    (6, 12, 25, 50, 100)
    """
    return tuple(sorted({max(1, canaries // divisor) for divisor in (2, 4, 8, 16, 32)}))


def one_run_p_value(canaries: int, guessed: int, correct: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at most, if one canary more or less is (epsilon, delta)-private.

    Args:
        canaries: m, each included by a fair coin.
        guessed: about how many of them a guess was made, in or out; the others were passed over.
        correct: how many guesses were right.
        epsilon: >= 0.
        delta: in [0, 1].

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
    """Lower bound of epsilon from guesses about canaries that a fair coin each included in ONE run.

    Args:
        canaries: m.
        tallies: one for each number of guesses; significance is shared evenly among them.
        significance: how often the bound may fail, in (0, 1).
        delta: of the claim, in [0, 1].

    **Guarantees** Holds for any (epsilon, delta)-private mechanism, whatever the scores are. With many canaries it
    lies far below the truth: they share one run's noise.

    Reference: Steinke, Nasr and Jagielski (2023); `one_run_p_value`.

    >>> round(one_run_epsilon(200, [(200, 150)], significance=0.05, delta=1e-5), 3)
    0.821
    """
    bound, each = 0.0, significance / len(tallies)
    for guessed, correct in tallies:

        def refuted(epsilon: float, guessed: int = guessed, correct: int = correct) -> bool:
            return one_run_p_value(canaries, guessed, correct, epsilon, delta) < each

        bound = _largest(refuted, bound)
    return bound


def curve_refuted(canaries: int, totals: RunTotals, significance: float, curve: Curve) -> bool:
    """Whether so many right guesses refute that one canary more or less is hidden as `curve` says.

    Reference: Mahloujifar, Melis and Chaudhuri (2024), "Auditing f-differential privacy in one run",
    https://arxiv.org/abs/2410.22235: its recursion, for guesses between two values.
    """
    guessed, correct = totals
    right, wrong = significance * correct / canaries, significance * (guessed - correct) / canaries
    for left in range(correct - 1, -1, -1):
        most = max(wrong, curve(min(right, 1.0)))
        if most == wrong:  # then nothing changes any more
            break
        right += left / (guessed - left) * (most - wrong)
        wrong = most
    return right + wrong > guessed / canaries


def one_run_weakness(
    canaries: int, tallies: Sequence[RunTotals], significance: float, family: Callable[[float], Curve]
) -> float:
    """The largest t for which the guesses refute `family(t)`; 0 if they refute none.

    When to use it: where more is claimed than one (epsilon, delta). It is tighter than `one_run_epsilon` by far.

    Args:
        canaries: m, each included by a fair coin.
        tallies: one for each number of guesses; significance is shared evenly among them.
        significance: how often the bound may fail, in (0, 1).
        family: curves by how little they hide, from t = 0, which hides most.

    >>> round(one_run_weakness(200, [(200, 150)], significance=0.05, family=gaussian_curve), 3)
    0.441
    """
    bound, each = 0.0, significance / len(tallies)
    for totals in tallies:

        def refuted(t: float, totals: RunTotals = totals) -> bool:
            return curve_refuted(canaries, totals, each, family(t))

        bound = _largest(refuted, bound)
    return bound


def gaussian_curve(mu: float) -> Curve:
    """Of one Gaussian mechanism with sensitivity / noise std = mu (Dong, Roth and Su 2022)."""
    return lambda power: float(ndtr(ndtri(power) - mu))


def curve_of_points(epsilons: np.ndarray, deltas: np.ndarray) -> Curve:
    """Of a mechanism that is (epsilons[j], deltas[j])-private for every j, which is all that is known of it.

    >>> curve_of_points(np.array([0.0]), np.array([0.1]))(0.5)
    0.4
    """
    more, less = np.exp(epsilons), np.exp(-epsilons)

    def least(power: float) -> float:
        return max(0.0, float(((power - deltas) * less).max()), float((1 - deltas - more * (1 - power)).max()))

    return least


def _largest(refuted: Callable[[float], bool], least: float) -> float:
    """The largest number that is refuted, to 1e-7 relative from below; `least` if that one is not."""
    if not refuted(least):
        return least
    low, high = least, max(1.0, 2 * least)
    while refuted(high):
        low, high = high, 2 * high
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


# ---- many releases with and without one canary


def threshold_epsilon(inside: np.ndarray, outside: np.ndarray, significance: float, delta: float) -> float:
    """Lower bound of epsilon from scores with and without the canary: how well a threshold tells them apart.

    The first half of each sample chooses the threshold and the side of it, the second half bounds both error rates
    (Clopper and Pearson, exact).

    Args:
        inside: `[n]`, scores of independent releases with the canary.
        outside: `[n']`, without it.
        significance: how often the bound may fail, in (0, 1).
        delta: of the claim, in [0, 1].

    **Guarantees** Holds for any (epsilon, delta)-private mechanism, whatever the scores are.

    >>> threshold_epsilon(np.zeros(100), np.zeros(100), significance=0.05, delta=1e-5)
    0.0
    """
    (try_in, in_), (try_out, out) = ((one[: len(one) // 2], one[len(one) // 2 :]) for one in (inside, outside))
    pairs = [(1, try_in, try_out), (-1, -try_out, -try_in)]  # who says "out" below a threshold errs the other way round
    found = [(side, *_best_threshold(sure, other, significance, delta)) for side, sure, other in pairs]
    side, threshold, _ = max(found, key=lambda one: one[2])
    sure, other = (in_, out) if side > 0 else (-out, -in_)
    return max(0.0, float(_threshold_bounds(np.array([threshold]), sure, other, significance, delta)[0]))


def _best_threshold(sure: np.ndarray, other: np.ndarray, significance: float, delta: float) -> tuple[float, float]:
    thresholds = np.unique(np.concatenate([sure, other]))
    bounds = _threshold_bounds(thresholds, sure, other, significance, delta)
    best = int(bounds.argmax())
    return float(thresholds[best]), float(bounds[best])


def _threshold_bounds(
    thresholds: np.ndarray, sure: np.ndarray, other: np.ndarray, significance: float, delta: float
) -> np.ndarray:
    """log((P(sure >= t) - delta) / P(other >= t)), both rates at the unfavourable ends of their intervals."""
    hits, alarms = (len(one) - np.searchsorted(np.sort(one), thresholds) for one in (sure, other))
    power = rate_interval(hits, len(sure), significance / 2)[0] - delta
    return np.log(np.maximum(power, 1e-300)) - np.log(rate_interval(alarms, len(other), significance / 2)[1])


def shift_interval(inside: np.ndarray, outside: np.ndarray, significance: float) -> tuple[float, float]:
    """Both ends of (mean inside - mean outside) / std, for normal samples of one unknown std: a Gaussian's mu.

    Args:
        inside: `[n]`, projections of independent releases with the canary.
        outside: `[n']`, without it; n + n' >= 3.
        significance: how often each end may fail, in (0, 0.5).

    **Guarantees** Exact: the t statistic has a noncentral t distribution. Where that cannot be evaluated, |t| > 300, a
    union bound over its numerator and denominator: a little wider.

    >>> low, high = shift_interval(np.array([2.0, 3.0, 4.0]), np.array([0.0, 1.0, -1.0]), significance=0.05)
    >>> round(low, 2), round(high, 2)
    (0.74, 5.05)
    """
    n, m = len(inside), len(outside)
    squares = float(((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum())
    apart, freedom, size = float(inside.mean() - outside.mean()), n + m - 2, math.sqrt(n * m / (n + m))
    if squares == 0:  # no noise at all
        return (math.copysign(math.inf, apart),) * 2 if apart else (0.0, 0.0)
    t = apart / math.sqrt(squares / freedom) * size
    if abs(t) > _FAR:
        spread = [math.sqrt(float(chi2.ppf(p, freedom)) / freedom) for p in (significance / 2, 1 - significance / 2)]
        ends, own = sorted(t * one for one in spread), -float(ndtri(significance / 2))
        return (ends[0] - own) / size, (ends[1] + own) / size
    step = math.sqrt(1 + t**2 / (2 * freedom))  # about the std of t

    def end(tail: Callable[..., float], outwards: float) -> float:
        inner, outer = t, t + outwards * step
        while tail(t, freedom, outer) > significance:
            inner, outer = outer, outer + 2 * (outer - inner)
        return brentq(lambda centre: tail(t, freedom, centre) - significance, inner, outer) / size

    return end(nct.sf, -1.0), end(nct.cdf, 1.0)


def std_interval(std: float, freedom: int, significance: float) -> tuple[float, float]:
    """Both ends of a normal sample's true std; each may fail as often as `significance`.

    Args:
        std: root of (sum of squares / freedom).
        freedom: degrees of freedom, >= 1.

    >>> low, high = std_interval(1.0, freedom=10_000, significance=0.05)
    >>> round(low, 4), round(high, 4)
    (0.9885, 1.0118)
    """
    low, high = (std * math.sqrt(freedom / float(chi2.ppf(p, freedom))) for p in (1 - significance, significance))
    return low, high


def rate_interval(hits: np.ndarray | int, trials: int, significance: float) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of a probability after `hits` in so many trials; each may fail as often as `significance`.

    Reference: Clopper and Pearson (1934): exact.

    >>> low, high = rate_interval(0, 100, significance=0.05)
    >>> float(low), round(float(high), 4)
    (0.0, 0.0295)
    """
    hits = np.asarray(hits)
    low = np.where(hits > 0, beta.ppf(significance, np.maximum(hits, 1), trials - hits + 1), 0.0)
    high = np.where(hits < trials, beta.ppf(1 - significance, hits + 1, np.maximum(trials - hits, 1)), 1.0)
    return low, high


def releases_to_tell(mu: float, ratio: float, significance: float, miss: float = 0.1) -> int:
    """Releases with and without the canary, of each, that show `ratio * mu` to be above `mu`.

    Args:
        mu: claimed, > 0.
        ratio: > 1.
        significance: of the lower end of `shift_interval`.
        miss: how often they may fail to show it, in (0, 1).

    >>> releases_to_tell(mu=1.0, ratio=1.5, significance=1e-3)
    163
    """
    deviations = -ndtri(significance) - ndtri(miss)
    return max(2, math.ceil(2 * (deviations / ((ratio - 1) * mu)) ** 2 + 2 * (deviations / 2) ** 2))
