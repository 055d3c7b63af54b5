"""Number and members of groups of updates: Ward's cuts, compared with what clients without groups would show.

Clients without groups are those that differ by one Gaussian, of any covariance: by noise, sampled records, or labels.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import softmax
from scipy.stats import chi2

from dpfl_lightning.algorithms.update_geometry import Updates, cut, in_order, ward
from dpfl_lightning.errors import require

MOST_GROUPS = 10
FALSE_ALARMS = 0.01  # probability in a run of clients without groups
COMPLETE = 3.0  # separation that the papers call complete: 0.3 % of two Gaussians overlap
_DRAWS = 1000
_SIMULATIONS = 200
_ROUNDING = 1e-9  # relative, of sums of squares
_NUMBERS = 1 << 20  # numbers that are drawn at once


@dataclass(frozen=True)
class GroupOptions:
    """Options of the search for groups.

    Args:
        num_groups: M, if it is known; None estimates it.
        min_size: smallest number of clients in a group, >= 1.
    """

    num_groups: int | None = None
    min_size: int = 2

    def __post_init__(self) -> None:
        valid = self.num_groups is None or self.num_groups >= 1
        require(valid, "num_clusters", "be `auto` or at least 1", self.num_groups)
        require(self.min_size >= 1, "min_cluster_size", "be at least 1", self.min_size)


@dataclass(frozen=True)
class Groups:
    """Groups of clients.

    Args:
        members: clients of each group, ascending; groups in the order of their first clients.
        memberships: probabilities of the groups for each client, `[n, M]`.
        probability: estimated probability that these are the groups.
        p_value: of the first split, or of the one that was rejected.
        separation: least separation of two groups, see `separation`; of the best cut if there is one group.
    """

    members: tuple[np.ndarray, ...]
    memberships: np.ndarray
    probability: float
    p_value: float
    separation: float

    @property
    def labels(self) -> np.ndarray:
        labels = np.empty(len(self.memberships), dtype=int)
        for group, members in enumerate(self.members):
            labels[members] = group
        return labels


@dataclass(frozen=True)
class _Cut:
    """Ward's cut of some updates that differs most from cuts of one Gaussian, with its p-value."""

    groups: list[np.ndarray]
    p_value: float
    separation: float


def find_groups(updates: Updates, options: GroupOptions | None = None, distance: float = math.inf) -> Groups:
    """Find Ward's groups of the first round's updates, and decide whether one Gaussian explains them. Post-processing.

    A cut in 2..10 groups is accepted if the share of the updates' variance within groups is smaller than in 99 % of
    rotations of the updates, and groups are at least 3 standard deviations from the middle between them (`Separation`).
    Parts are cut again. Rotations of Gaussian updates, whatever their covariance, are as likely as the updates: the
    p-value is exact if the noise is equal. A cut of m of the n clients may alarm in 1 % * m / n (Meinshausen 2008), so
    with equal noise true groups are divided in at most 1 % of runs. Where a few clients have a tenth of the noise of
    the others or less, and data are skewed, alarms are far more frequent. At last each client gets the group that is
    nearest to its update.

    `distance`, in units of the updates, is the least distance of groups that matter: the probability of one group takes
    into account whether such groups would have been found.

    Reference: rotation tests, Langsrud (2005); significance of clusters, Liu, Hayes, Nobel and Marron (2008), Kimes et
    al. (2017); from p-values to probabilities, Sellke, Bayarri and Berger (2001).

    >>> gram = next(simulated(np.zeros((12, 1)), np.ones(12), 1000, draws=1))[0]
    >>> [group.tolist() for group in find_groups(Updates(gram, np.ones(12), 1000)).members]
    [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
    """
    options = options or GroupOptions()
    count, number = len(updates.gram), options.num_groups
    if number is None and count > 1:
        leaves, probability, first = _by_cuts(updates, options, distance)
    else:
        first = _best_cut(updates, range(min(number or 1, count), count + 1)[:1], None)
        large_enough = 1 < len(first.groups) == number and min(map(len, first.groups)) >= options.min_size
        leaves, probability = first.groups, _real(first.p_value) if large_enough else 0.0
    if len(leaves) == 1:
        return Groups((np.arange(count),), np.ones((count, 1)), probability, first.p_value, first.separation)
    members, memberships = assigned(updates, leaves, options.min_size)
    probability *= _recovered(updates, members)
    return Groups(tuple(members), memberships, probability, first.p_value, Separation.of(updates, members).least)


def _by_cuts(updates: Updates, options: GroupOptions, distance: float) -> tuple[list[np.ndarray], float, _Cut]:
    """Return the groups, the probability that every accepted cut is real and none is missed, and the first cut."""
    count, numbers = len(updates.gram), range(2, MOST_GROUPS + 1)
    leaves: list[np.ndarray] = []
    open_nodes, probability, first = [np.arange(count)], 1.0, None
    while open_nodes:
        members = open_nodes.pop()
        part = updates.of(members)
        best = _best_cut(part, numbers[: max(0, len(members) // options.min_size - 1)], options.min_size)
        first = first or best
        p_value = min(1.0, best.p_value * count / len(members))
        if p_value <= FALSE_ALARMS:
            open_nodes += [members[group] for group in best.groups]
            probability *= _real(p_value)
        else:
            leaves.append(members)
            halves = np.arange(len(members)) % 2
            apart = np.where(halves, distance, 0.0)[:, None]
            missed = len(members) >= 2 * options.min_size and 1 - _recovery(apart, halves, part)
            probability /= 1 + max(missed, 1 / _bayes_factor(p_value) - 1)
    assert first is not None  # for mypy
    return in_order(leaves), probability, first


def _bayes_factor(p_value: float) -> float:
    """Return the least odds of chance against any alternative that a p-value leaves."""
    return -math.e * p_value * math.log(p_value) if p_value < 1 / math.e else 1.0


def _real(p_value: float) -> float:
    return 1 / (1 + _bayes_factor(p_value))


def _best_cut(updates: Updates, numbers: range, min_size: int | None) -> _Cut:
    """Return the cut that rotations of the updates explain least; with `min_size`, of those in complete groups."""
    count = len(updates.gram)
    numbers = range(numbers.start, min(numbers.stop, count if len(numbers) > 1 else count + 1))
    if not numbers or count == 1 or numbers.start == 1:
        return _Cut([np.arange(count)], 1.0, 0.0)
    added, merges = ward(updates.gram[None], updates.weights)
    null = np.concatenate([_log_within(ward(grams, updates.weights)[0], numbers) for grams in rotated(updates)])
    gaps = (null.mean(axis=0) - _log_within(added, numbers))[0]
    cuts = [cut(merges[0], groups) for groups in numbers]
    least = [Separation.of(updates, groups).least for groups in cuts]
    usable = np.ones(len(cuts), dtype=bool)
    if min_size is not None:
        usable &= [min(map(len, one)) >= min_size and far >= COMPLETE for one, far in zip(cuts, least, strict=True)]
    best = int(np.where(usable, gaps, -np.inf).argmax()) if usable.any() else int(gaps.argmax())
    exceeding = int(((null.mean(axis=0) - null).max(axis=1) >= gaps[best] - _ROUNDING).sum())
    return _Cut(cuts[best], (1 + exceeding) / (1 + len(null)) if usable.any() else 1.0, least[best])


def _log_within(added: np.ndarray, numbers: range) -> np.ndarray:
    """Return the log of the share of the sum of squares that is within groups, `[draws, numbers]`."""
    from_one = np.pad(added, ((0, 0), (1, 0))).cumsum(axis=1)  # within n groups: 0
    total = np.where(from_one[:, -1:] > 0, from_one[:, -1:], 1.0)
    return np.log(np.maximum(from_one[:, [-groups for groups in numbers]] / total, _ROUNDING))


def rotated(updates: Updates) -> Iterator[np.ndarray]:
    """Yield blocks `[., n, n]` of Gram matrices: the weighted updates after random rotations of the n points.

    There are 1,000, or 200 of more than 200 points, as the cost of each grows with n^3.
    """
    count, root = len(updates.gram), np.sqrt(updates.weights)
    centred = np.eye(count) - updates.weights / count
    basis = np.linalg.qr(np.column_stack([root, np.eye(count)[:, 1:]]))[0][:, 1:]  # what centring leaves
    weighted = basis.T @ (root[:, None] * (centred @ updates.gram @ centred.T) * root) @ basis
    lengths = np.sqrt(np.maximum(np.linalg.eigvalsh(weighted), 0.0))
    rng = np.random.default_rng([updates.num_params, count])
    for draws in _blocks(_DRAWS if count <= 200 else _DRAWS // 5, count):
        turns, upper = np.linalg.qr(rng.standard_normal((draws, count - 1, count - 1)))
        turns *= np.sign(np.diagonal(upper, axis1=1, axis2=2))[:, None, :]
        points = basis @ (turns * lengths) / root[:, None]
        yield points @ points.transpose(0, 2, 1)


# ---- distances from given groups


def distances(updates: Updates, groups: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the squared distances of clients from the weighted means of groups without them, `[n, M]`, without noise.

    The second array is the noise that was subtracted for the means. A client alone in its group has distance 0 from it.
    """
    count = len(updates.gram)
    shares = np.zeros((count, len(groups), count))
    for column, members in enumerate(groups):
        shares[:, column, members] = updates.weights[members]
    shares[np.arange(count), :, np.arange(count)] = 0.0
    total = shares.sum(axis=2, keepdims=True)
    shares /= np.where(total > 0, total, 1.0)
    of_means = updates.num_params * (shares**2 @ updates.noise_std**2)
    projected = shares @ updates.gram
    own = np.diagonal(projected, axis1=0, axis2=2).T
    squares = np.diag(updates.signal)[:, None] - 2 * own + (projected * shares).sum(axis=2) - of_means
    return np.where(total[:, :, 0] > 0, squares, 0.0), of_means


@dataclass(frozen=True)
class Separation:
    """How far groups are apart: half the distance of their means / standard deviation of clients on the line between.

    The deviation is that of noise, which is known, and of the clients' spread, which is estimated: it is what 99 % of
    draws of the noise do not explain.

    Args:
        least: of all pairs of groups; infinite for one group.
        noise_factor: variance of a client's position between two groups because of noise / its noise variance; it is
            above 1, because the means are noisy. Largest of all pairs, as the next one.
        spread: the same variance because clients differ, >= 0.
    """

    least: float
    noise_factor: float
    spread: float

    @classmethod
    def of(cls, updates: Updates, groups: Sequence[np.ndarray]) -> "Separation":
        squares, of_means = distances(updates, groups)
        variance, worst = updates.noise_std**2, cls(math.inf, 1.0, 0.0)
        for a, first in enumerate(groups):
            for b, second in enumerate(groups[:a]):
                members, weights = np.r_[first, second], updates.weights[np.r_[first, second]]
                here, there = np.repeat([a, b], [len(first), len(second)]), np.repeat([b, a], [len(first), len(second)])
                positions = (squares[members, there] - squares[members, here]) / 2
                square = max(2 * float(np.average(positions, weights=weights)), 0.0)
                if square == 0:
                    return cls(0.0, math.inf, math.inf)
                noisy = square + of_means[members, here] + of_means[members, there]
                is_first = members[:, None] == first
                centres = [
                    np.average(positions[one], weights=weights[one]) for one in (is_first.any(1), ~is_first.any(1))
                ]
                residuals = positions - np.where(is_first.any(1), *centres)
                freedom = max(len(members) - 2, 1)
                by_noise = chi2.ppf(1 - FALSE_ALARMS, freedom) / freedom * variance[members] * noisy
                excess = np.average(residuals**2 * len(members) / freedom - by_noise, weights=weights)
                spread = max(float(excess), 0.0) / square
                noise = float(np.average(variance[members], weights=weights))
                deviation = math.sqrt(noise + spread)
                apart = math.sqrt(square) / 2 / deviation if deviation > 0 else math.inf
                factor = float((noisy / square).max())
                worst = cls(min(worst.least, apart), max(worst.noise_factor, factor), max(worst.spread, spread))
        return worst


def assigned(
    updates: Updates, groups: Sequence[np.ndarray], min_size: int = 1
) -> tuple[Sequence[np.ndarray], np.ndarray]:
    """Return the groups after each client has moved to the most likely one, and the memberships `[n, M]`.

    Memberships are the posterior probabilities of equally likely Gaussians around the groups' means, whose deviation is
    that of `Separation`. If a group would be left with fewer than `min_size` clients, nobody moves.
    """
    squares, _ = distances(updates, groups)
    apart = Separation.of(updates, groups)
    variance = updates.noise_std[:, None] ** 2 * apart.noise_factor + apart.spread
    if math.isinf(apart.spread) or not (variance > 0).all():
        return groups, np.stack([np.isin(np.arange(len(squares)), one) for one in groups], axis=1).astype(float)
    memberships = softmax(-squares / (2 * variance), axis=1)
    nearest = memberships.argmax(axis=1)
    moved = [np.flatnonzero(nearest == group) for group in range(len(groups))]
    if min(map(len, moved)) < min_size:
        return groups, np.stack([np.isin(np.arange(len(squares)), one) for one in groups], axis=1).astype(float)
    order = sorted(range(len(groups)), key=lambda group: moved[group][0])
    return [moved[group] for group in order], memberships[:, order]


# ---- simulations


def _recovered(updates: Updates, groups: Sequence[np.ndarray]) -> float:
    """Return how often the groups are found again in simulated updates with these means and new noise."""
    labels = np.empty(len(updates.gram), dtype=int)
    shares = np.zeros((len(groups), len(labels)))
    for group, members in enumerate(groups):
        labels[members] = group
        shares[group, members] = updates.weights[members] / updates.weights[members].sum()
    values, vectors = np.linalg.eigh(shares @ updates.signal @ shares.T)
    return _recovery((vectors * np.sqrt(np.maximum(values, 0.0)))[labels], labels, updates)


def _recovery(points: np.ndarray, labels: np.ndarray, updates: Updates) -> float:
    """Return how often Ward's cut and `distances` find the groups `labels` `[n]` of points `[n, r]` in noise."""
    if not np.isfinite(points).all() or updates.unit == 0:
        return 1.0
    right = 0
    for grams in simulated(points, updates.noise_std, updates.num_params, _SIMULATIONS):
        for gram, merges in zip(grams, ward(grams, updates.weights)[1], strict=True):
            one = Updates(gram, updates.noise_std, updates.num_params)
            nearest = distances(one, cut(merges, int(labels.max()) + 1))[0].argmin(axis=1)
            right += np.array_equal(nearest[:, None] == nearest, labels[:, None] == labels)
    return right / _SIMULATIONS


def simulated(
    points: np.ndarray, noise_std: np.ndarray, num_params: int, draws: int, seed: Sequence[int] = ()
) -> Iterator[np.ndarray]:
    """Yield blocks `[., n, n]` of Gram matrices of points `[n, r]`, r <= P - n, with Gaussian noise in P dimensions.

    Noise outside the r dimensions is a Wishart matrix by Bartlett's factors, so the cost of a draw does not grow with
    P. The same arguments give the same draws.
    """
    count, dimensions = points.shape
    rng = np.random.default_rng([num_params, count, *seed])
    for size in _blocks(draws, count):
        seen = points + rng.standard_normal((size, count, dimensions)) * noise_std[:, None]
        rest = _bartlett(num_params - dimensions, count, size, rng) * noise_std[:, None]
        yield seen @ seen.transpose(0, 2, 1) + rest @ rest.transpose(0, 2, 1)


def _blocks(draws: int, count: int) -> Iterator[int]:
    at_once = max(1, _NUMBERS // count**2)
    for start in range(0, draws, at_once):
        yield min(at_once, draws - start)


def _bartlett(num_params: int, count: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Return factors `[draws, count, .]`; each times its transpose is a Wishart matrix."""
    if num_params < count:
        return rng.standard_normal((draws, count, max(num_params, 0)))
    factors = np.tril(rng.standard_normal((draws, count, count)), -1)
    diagonal = np.arange(count)
    factors[:, diagonal, diagonal] = np.sqrt(rng.chisquare(num_params - diagonal, (draws, count)))
    return factors
