"""Separations that Ward's cuts find in pure noise, by parametric bootstrap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dpfl_lightning.algorithms.update_geometry import Updates, least

MOST_GROUPS = 10
_DRAWS = 1000
FALSE_ALARMS = 0.01  # probability in a run; groups that lie 1.2 P^(1/4) apart are still found
_ENOUGH = 100  # draws needed for a quantile
_NUMBERS = 1 << 20  # numbers that are drawn at once


def candidates(points: int) -> range:
    """Return the numbers of groups to consider: 2..10, each group of at least two points on average."""
    return range(2, min(MOST_GROUPS, points // 2) + 1)


def _remembered(threshold: Callable[..., float]) -> Callable[..., float]:
    """Cache a threshold; noises that differ by less than three digits share one."""
    cached = functools.lru_cache(maxsize=256)(threshold)

    @functools.wraps(cached)
    def with_key(num_params: int, relative_noise: Sequence[float], *args: Any, **kwargs: Any) -> float:
        return cached(num_params, tuple(sorted(round(float(one), 3) for one in relative_noise)), *args, **kwargs)

    return with_key


@_remembered
def two_way(num_params: int, relative_noise: Sequence[float], min_size: int = 2, share: float = 1.0) -> float:
    """Return the separation that Ward's cut in two exceeds in 1 % of draws, or in a `share` of that.

    `relative_noise` is the noise of each point / the unit of separations. Cuts with a part below `min_size` count as 0.
    """
    cuts = _cuts(num_params, relative_noise, 2)
    return _quantile([least_of if size >= min_size else 0.0 for least_of, size in cuts], share)


@_remembered
def given_cut(num_params: int, relative_noise: Sequence[float], groups: int, min_size: int = 2) -> float:
    """Return the 99 % quantile of the least separation in Ward's cuts in `groups` groups that are all large enough.

    If almost no cut of noise has only such groups, all cuts count, because a false alarm is then already rare.
    """
    cuts = list(_cuts(num_params, relative_noise, groups))
    allowed = [least_of for least_of, size in cuts if size >= min_size]
    return _quantile(allowed if len(allowed) >= _ENOUGH else [least_of for least_of, _ in cuts])


@_remembered
def any_cut(num_params: int, relative_noise: Sequence[float], min_size: int = 2) -> float:
    """Return the 99 % quantile of the largest least separation over all `candidates` without a smaller group."""
    largest = []
    for updates in noise_alone(num_params, relative_noise):
        cuts = [updates.tree.cut(groups) for groups in candidates(len(relative_noise))]
        allowed = [cut for cut in cuts if min(map(len, cut)) >= min_size]
        largest.append(max((least(updates.half_distances(cut)) for cut in allowed), default=0.0))
    return _quantile(largest)


def _cuts(num_params: int, noise: Sequence[float], groups: int) -> Iterator[tuple[float, int]]:
    """Yield the least separation, in the unit of `noise`, and the smallest size of each cut."""
    for updates in noise_alone(num_params, noise):
        cut = updates.tree.cut(groups)
        yield least(updates.half_distances(cut)), min(map(len, cut))


def _quantile(separations: Sequence[float], share: float = 1.0) -> float:
    return float(np.quantile(separations, 1 - FALSE_ALARMS * share))


def noise_alone(
    num_params: int, noise: Sequence[float], draws: int = _DRAWS, seed: Sequence[int] = ()
) -> Iterator[Updates]:
    """Yield updates of identical clients: Wishart Gram matrices with P degrees of freedom, by Bartlett's factors.

    The cost of a draw does not grow with P. The same arguments give the same draws.
    """
    count, scale = len(noise), np.asarray(noise, dtype=float)
    rng = np.random.default_rng([num_params, count, *seed])
    at_once = max(1, _NUMBERS // count**2)
    for start in range(0, draws, at_once):
        for factor in _bartlett(num_params, count, min(at_once, draws - start), rng) * scale[:, None]:
            yield Updates(factor @ factor.T, scale, num_params, np.zeros(count))


def _bartlett(num_params: int, count: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Return factors `[draws, count, .]`; each times its transpose is a Wishart matrix."""
    if num_params < count:
        return rng.standard_normal((draws, count, num_params))
    factors = np.tril(rng.standard_normal((draws, count, count)), -1)
    diagonal = np.arange(count)
    factors[:, diagonal, diagonal] = np.sqrt(rng.chisquare(num_params - diagonal, (draws, count)))
    return factors
