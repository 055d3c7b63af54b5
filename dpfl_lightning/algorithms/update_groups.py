"""Number and members of groups of updates: Ward's cuts, compared with what noise and sampling would show.

Separations that Ward's cuts find in pure noise are simulated (parametric bootstrap).
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpfl_lightning.algorithms.update_geometry import Updates, in_order, least
from dpfl_lightning.errors import nearest, require

MOST_GROUPS = 10
_DRAWS = 1000
FALSE_ALARMS = 0.01  # probability in a run; groups that lie 1.2 P^(1/4) apart are still found
_ENOUGH = 100  # draws needed for a quantile
_NUMBERS = 1 << 20  # numbers that are drawn at once


@dataclass(frozen=True)
class GroupOptions:
    """Options of the search for groups.

    Args:
        num_groups: M, if it is known; None determines it by `choose`.
        choose: `split` cuts in two, and the parts again, as long as a cut is wider than noise explains: it finds groups
            within groups. `mss` takes the largest least separation: never too many groups, but only the coarsest level.
        min_size: smallest number of clients in a group, >= 1.
        data_floor: share of the largest separation that sampled records can explain, >= 0; groups must exceed it.
    """

    num_groups: int | None = None
    choose: str = "split"
    min_size: int = 2
    data_floor: float = 0.6

    def __post_init__(self) -> None:
        valid = self.num_groups is None or self.num_groups >= 1
        require(valid, "num_clusters", "be `auto` or at least 1", self.num_groups)
        hint = nearest(self.choose, _RULES)
        require(self.choose in _RULES, "choose_m", f"be one of {', '.join(_RULES)}", self.choose, hint)
        require(self.min_size >= 1, "min_cluster_size", "be at least 1", self.min_size)
        require(self.data_floor >= 0, "data_floor", "be at least 0", self.data_floor)


@dataclass(frozen=True)
class Groups:
    """Groups of clients.

    Args:
        members: clients of each group, ascending; groups in the order of their first clients.
        confident: whether the groups are more than noise.
        separation: least separation of two groups; of Ward's cut in two if there is one group.
        threshold: value with which the (first) separation was compared.
        curve: number of groups -> least separation of Ward's cut.
    """

    members: tuple[np.ndarray, ...]
    confident: bool
    separation: float
    threshold: float
    curve: Mapping[int, float] = field(default_factory=dict)

    @property
    def labels(self) -> np.ndarray:
        labels = np.empty(sum(map(len, self.members)), dtype=int)
        for group, members in enumerate(self.members):
            labels[members] = group
        return labels


def find_groups(updates: Updates, options: GroupOptions | None = None) -> Groups:
    """Find Ward's groups of the first round's updates, and decide whether they are more than noise. Post-processing.

    Means of pure noise lie about `P^(1/4)` noise standard deviations apart even without the mean of that noise, so
    separations are compared with a parametric bootstrap. If clients differ only by Gaussian noise of `noise_std`,
    groups are found (or confident, if their number is given) in 1 % of runs. `split` divides a true group in at most
    1 % of runs: a cut of m of the n clients may alarm in 1 % * m / n (hierarchical testing, Meinshausen 2008).

    >>> noise = next(noise_alone(1000, [1.0] * 12, seed=[1]))
    >>> find_groups(noise).members[0].tolist(), find_groups(noise).confident
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], False)
    """
    options = options or GroupOptions()
    count = len(updates.gram)
    curve = {groups: updates.separation(updates.tree.cut(groups)) for groups in candidates(count)}
    if count == 1 or options.num_groups == 1:
        members: Sequence[np.ndarray] = [np.arange(count)]
        threshold, confident = math.inf, False
    elif options.num_groups is not None:
        groups = min(options.num_groups, count)
        members = updates.tree.cut(groups)
        noise = given_cut(updates.num_params, _relative_noise(updates), groups, options.min_size)
        threshold = _threshold(updates, noise, options)
        large_enough = min(map(len, members)) >= options.min_size
        confident = groups == options.num_groups and large_enough and updates.separation(members) > threshold
    else:
        members, threshold = _RULES[options.choose](updates, options)
        confident = len(members) > 1
    cut = members if len(members) > 1 or count == 1 else updates.tree.cut(2)
    return Groups(tuple(members), confident, updates.separation(cut) if count > 1 else 0.0, threshold, curve)


def _by_splits(updates: Updates, options: GroupOptions) -> tuple[list[np.ndarray], float]:
    tree = updates.tree
    root_threshold = math.inf
    leaves, open_nodes = [], [tree.root]
    while open_nodes:
        node = open_nodes.pop()
        members = tree.members(node)
        if len(members) >= 2 * options.min_size:
            parts = tree.parts(node)
            pair = [tree.members(part) for part in parts]
            share = len(members) / tree.size  # share of false alarms: those of all true groups sum to at most 1 %
            relative_noise = _relative_noise(updates, members)
            noise = two_way(updates.num_params, relative_noise, options.min_size, share)
            threshold = _threshold(updates, noise, options)
            root_threshold = threshold if node == tree.root else root_threshold
            if min(map(len, pair)) >= options.min_size and updates.separation(pair) > threshold:
                open_nodes += parts
                continue
        leaves.append(members)
    return in_order(leaves), root_threshold


def _by_mss(updates: Updates, options: GroupOptions) -> tuple[list[np.ndarray], float]:
    noise = any_cut(updates.num_params, _relative_noise(updates), options.min_size)
    threshold = _threshold(updates, noise, options)
    cuts = [updates.tree.cut(groups) for groups in candidates(len(updates.gram))]
    cuts = [cut for cut in cuts if min(map(len, cut)) >= options.min_size and updates.separation(cut) > threshold]
    return max(cuts, key=updates.separation, default=[np.arange(len(updates.gram))]), threshold


_RULES: dict[str, Callable[[Updates, GroupOptions], tuple[list[np.ndarray], float]]] = {
    "split": _by_splits,
    "mss": _by_mss,
}


def _relative_noise(updates: Updates, members: np.ndarray | None = None) -> np.ndarray:
    noise_std = updates.noise_std if members is None else updates.noise_std[members]
    return noise_std / updates.unit if updates.unit > 0 else np.zeros(len(noise_std))


def _threshold(updates: Updates, noise: float, options: GroupOptions) -> float:
    """Return the separation that noise and sampling explain: `sqrt(noise^2 + floor^2 * sampling^2)`."""
    sampling = options.data_floor * math.sqrt(float(np.mean(updates.sampling_std**2)))
    if updates.unit > 0:
        return math.hypot(noise, sampling / updates.unit)
    return math.inf if sampling > 0 else 0.0


# ---- separations of pure noise


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
