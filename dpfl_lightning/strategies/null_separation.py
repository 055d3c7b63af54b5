"""How far groups lie apart that are none: what Ward's cuts of pure noise show, by parametric bootstrap."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from dpfl_lightning.strategies.update_geometry import Updates, least

MOST_GROUPS = 10
_DRAWS = 300
_LEVEL = 0.95
_ENOUGH = 20  # draws that a quantile is taken of
_DIGITS = 3  # of relative noise: clients that differ by less share their thresholds


def candidates(points: int) -> range:
    """Numbers of groups that are looked at: 2..10, each of two points on average at least."""
    return range(2, min(MOST_GROUPS, points // 2) + 1)


def two_way(num_params: int, relative_noise: Sequence[float] | np.ndarray, min_size: int = 2) -> float:
    """95 % quantile of the separation of Ward's cut in two, where a cut with a smaller part counts as none.

    Args:
        num_params: P.
        relative_noise: noise of each of the points / the unit of separations.
        min_size: of a group, >= 1.
    """
    return _two_way(num_params, _key(relative_noise), min_size)


def given_cut(num_params: int, relative_noise: Sequence[float] | np.ndarray, groups: int, min_size: int = 2) -> float:
    """95 % quantile of the least separation in Ward's cut in so many groups, among cuts without a smaller group.

    Where nearly no cut of noise is such, of all cuts: then an alarm is rare already.
    """
    return _given_cut(num_params, _key(relative_noise), groups, min_size)


def any_cut(num_params: int, relative_noise: Sequence[float] | np.ndarray, min_size: int = 2) -> float:
    """95 % quantile of the largest least separation over all `candidates` without a smaller group."""
    return _any_cut(num_params, _key(relative_noise), min_size)


def _key(relative_noise: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    return tuple(sorted(round(float(one), _DIGITS) for one in relative_noise))


@functools.lru_cache(maxsize=256)
def _two_way(num_params: int, noise: tuple[float, ...], min_size: int) -> float:
    return _quantile([least_of for least_of, size in _cuts(num_params, noise, 2) if size >= min_size])


@functools.lru_cache(maxsize=256)
def _given_cut(num_params: int, noise: tuple[float, ...], groups: int, min_size: int) -> float:
    cuts = list(_cuts(num_params, noise, groups))
    allowed = [least_of for least_of, size in cuts if size >= min_size]
    of = allowed if len(allowed) >= _ENOUGH else [least_of for least_of, _ in cuts]
    return float(np.quantile(of, _LEVEL))


@functools.lru_cache(maxsize=256)
def _any_cut(num_params: int, noise: tuple[float, ...], min_size: int) -> float:
    largest = []
    for updates in noise_alone(num_params, noise):
        cuts = [updates.tree.cut(groups) for groups in candidates(len(noise))]
        allowed = [cut for cut in cuts if min(map(len, cut)) >= min_size]
        largest.append(max((least(updates.half_distances(cut)) for cut in allowed), default=0.0))
    return float(np.quantile(largest, _LEVEL))


def _cuts(num_params: int, noise: tuple[float, ...], groups: int) -> Iterator[tuple[float, int]]:
    """Least separation and smallest size, in the unit that `noise` is given in."""
    for updates in noise_alone(num_params, noise):
        cut = updates.tree.cut(groups)
        yield least(updates.half_distances(cut)), min(map(len, cut))


def _quantile(alarms: Sequence[float]) -> float:
    """Of all draws, where those that are not among the alarms count as 0."""
    return float(np.quantile([*alarms, *[0.0] * (_DRAWS - len(alarms))], _LEVEL))


def noise_alone(
    num_params: int, noise: Sequence[float], draws: int = _DRAWS, seed: Sequence[int] = ()
) -> Iterator[Updates]:
    """Updates of clients that do not differ: Wishart Gram matrices with P degrees of freedom, by Bartlett's factors.

    A draw costs nothing that grows with P. The same arguments give the same draws.
    """
    count = len(noise)
    rng = np.random.default_rng([num_params, count, *seed])
    scale = np.asarray(noise, dtype=float)
    for _ in range(draws):
        if num_params < count:
            factor = rng.standard_normal((count, num_params))
        else:
            factor = np.tril(rng.standard_normal((count, count)), -1)
            factor[np.diag_indices(count)] = np.sqrt(rng.chisquare(num_params - np.arange(count)))
        factor *= scale[:, None]
        yield Updates(factor @ factor.T, scale, num_params, np.zeros(count))
