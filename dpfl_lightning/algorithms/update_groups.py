"""Number and members of groups of updates: Ward's cuts, compared with what clients without groups would show.

Clients without groups are those that differ by one Gaussian, of any covariance: by noise, sampled records, or labels.

Reference: rotation tests, Langsrud (2005); significance of clusters, Liu, Hayes, Nobel and Marron (2008), Kimes et al.
(2017); parts of clusters, Meinshausen (2008); tails of simulated p-values, Knijnenburg et al. (2009); from p-values to
probabilities, Sellke, Bayarri and Berger (2001).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import softmax
from scipy.stats import chi2, gumbel_r

from dpfl_lightning.algorithms.update_geometry import Updates, cut, in_order, squared_distances, ward

MOST_GROUPS = 10
MIN_SIZE = 2  # clients of a group; a client alone is an outlier
FALSE_ALARMS = 0.01  # probability in a run of clients without groups
NOISY = 3.0  # noise std, in units of the median, above which clients do not count in the probability of groups
COMPLETE = 3.0  # separation that the papers call complete: 0.3 % of two Gaussians overlap
_FEWEST = 6  # clients; of fewer even groups far apart are as likely as not to look like one
_DRAWS = 1000
_SIMULATIONS = 200
_ROUNDING = 1e-9  # relative, of sums of squares
_NUMBERS, _AT_ONCE = 1 << 20, 100  # numbers, and draws, that are made at once
_ENOUGH, _SURE = 10, 1e-6  # null draws that exceed a value, and p-value below which, no more draws are needed


@dataclass(frozen=True)
class Groups:
    """Groups of clients.

    Args:
        members: clients of each group, ascending; groups in the order of their first clients.
        memberships: probabilities of the groups for each client, `[n, M]`.
        probability: estimated probability that these are the groups of all clients but outliers, see `find_groups`, and
            those with more than three times the median noise std. 0 if nothing was tested (one group of fewer than six
            clients, or a given M of 1), or one of a given number of groups is a single client; if M was given, it says
            nothing of other numbers.
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


def find_groups(updates: Updates, num_groups: int | None = None, distance: float = math.inf) -> Groups:
    """Find Ward's groups of the updates of full batches from one model, `num_groups` or as many as are significant.

    A cut in 2..10 groups is accepted if random rotations of the updates seldom leave as little variance within groups
    (1 %), and if groups are `COMPLETE`; accepted groups are cut again. Clients alone in a group are outliers, and get
    the nearest group. Groups nearer than `distance`, in units of the updates, need not be found. Post-processing.
    Limits and false alarms: page "Clustered clients" of the docs.

    >>> gram = next(noisy_grams(np.zeros((12, 1)), np.ones(12), 1000, draws=1))[0]
    >>> [group.tolist() for group in find_groups(Updates(gram, np.ones(12), 1000)).members]
    [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
    """
    updates = as_noisy_as_seen(updates)
    noised = as_noisy_as_most(updates)
    count = len(updates.gram)
    if num_groups is None:
        leaves, probability, first = _by_cuts(noised, distance)
    else:
        number = min(num_groups, count)
        first = _best_cut(noised, range(number, number + 1), FALSE_ALARMS, given=True)
        leaves, probability = first.groups, _real(first.p_value)
        if len(leaves) < number:  # some groups of each such cut are single clients
            leaves, probability = cut(ward(noised.gram[None], noised.weights)[1][0], number), 0.0
    if len(leaves) == 1:
        tested = num_groups is None and count >= _FEWEST
        return Groups((np.arange(count),), np.ones((count, 1)), probability * tested, first.p_value, first.separation)
    members, memberships = assigned(updates, leaves)
    found = np.isin(np.arange(count), np.concatenate(leaves))
    core = [group[found[group]] for group in members]
    probability *= _recovered(noised, core)
    return Groups(tuple(members), memberships, probability, first.p_value, Separation.of(updates, core).least)


def _by_cuts(updates: Updates, distance: float) -> tuple[list[np.ndarray], float, _Cut]:
    """Return the groups, the probability that every accepted cut is real and none is missed, and the first cut.

    With equal noise the first p-value is exact, but for its fitted tail (`_p_value`). Those of parts are not: the same
    updates chose the parts. A part of m of n clients is cut at 1 % * m / n (Meinshausen 2008), which bounds the alarms
    of parts that did not depend on the updates.
    """
    count = len(updates.gram)
    leaves: list[np.ndarray] = []
    open_nodes, probability, first = [np.arange(count)], 1.0, None
    while open_nodes:
        members = open_nodes.pop()
        level = FALSE_ALARMS * len(members) / count
        best = _best_cut(updates.of(members), range(2, MOST_GROUPS + 1), level)
        first, p_value = first or best, best.p_value * count / len(members)
        groups = [members[group] for group in best.groups]
        if len(groups) > 1:
            open_nodes += groups
            probability *= _real(p_value)
        else:
            leaves += groups
            part = updates.of(groups[0])
            halves = np.arange(len(part.gram)) % 2
            apart = np.where(halves, distance, 0.0)[:, None]
            testable = [len(some) >= 2 * MIN_SIZE for some in (members, halves)]  # with and without outliers
            missed = 1 - _recovery(apart, halves, part) if testable[1] else float(testable[0])
            probability /= 1 + max(missed, 1 / _bayes_factor(p_value) - 1)
    assert first is not None  # for mypy
    return in_order(leaves), probability, first


def _bayes_factor(p_value: float) -> float:
    """Return the least odds of chance against any alternative that a p-value leaves; below 1/1000 those of 1/1000."""
    p_value = max(p_value, 1 / _DRAWS)
    return -math.e * p_value * math.log(p_value) if p_value < 1 / math.e else 1.0


def _real(p_value: float) -> float:
    return 1 / (1 + _bayes_factor(p_value))


def _best_cut(updates: Updates, numbers: range, level: float, given: bool = False) -> _Cut:
    """Return the cut in `numbers` groups that one Gaussian explains least, or one group of all clients.

    A cut is accepted if its groups are complete and its p-value is at most `level`, or if its number is `given`. If
    a cut in groups and outliers is significant, the outliers are left out, and the others are cut again; beside an
    accepted cut only if it has more groups, and 1 % of its p-value. After several groups the next p-value must be at
    most 1 % of `level`, as tails have outliers, too. A significant p-value beside one group means that there seem to be
    several groups, but also clients in none.
    """
    members, hidden = np.arange(len(updates.gram)), 1.0
    while possible := numbers[: max(0, len(members) // MIN_SIZE + 1 - numbers.start)]:
        cuts = _Cuts.of(updates.of(members), possible)
        usable = ~cuts.outliers & (cuts.complete | given)
        best = cuts.least_explained(usable)
        p_value = float(cuts.p_values[best]) if usable.any() else 1.0
        accepted = bool(usable.any()) and (given or p_value <= level)
        aside = cuts.outliers & (cuts.complete | (cuts.counts == 1)) & (cuts.p_values <= level)
        if accepted:
            aside &= (cuts.counts > cuts.counts[best]) & (cuts.p_values < FALSE_ALARMS * p_value)
        if not aside.any():
            if accepted:
                return cuts.cut(best, members, p_value)
            return _Cut([members], min(p_value, hidden), cuts.separation(best))
        worst = cuts.least_explained(aside)
        if cuts.counts[worst] > 1:
            hidden, level = min(hidden, float(cuts.p_values[worst])), level * FALSE_ALARMS
        members = members[cuts.without_outliers(worst)]
    return _Cut([members], hidden, 0.0)


@dataclass(frozen=True)
class _Cuts:
    """Ward's cuts of some updates in several numbers of groups, beside cuts of their rotations.

    Args:
        groups: of each cut.
        large: those of them with enough clients; the clients of the others are outliers.
        complete: whether the large groups of each cut are `COMPLETE`.
        gaps: how much less of the variance is within groups than in rotations, in logarithms.
        p_values: of the gaps, for all cuts together.
    """

    updates: Updates
    groups: list[list[np.ndarray]]
    large: list[list[np.ndarray]]
    complete: np.ndarray
    gaps: np.ndarray
    p_values: np.ndarray

    @classmethod
    def of(cls, updates: Updates, numbers: range) -> "_Cuts":
        added, merges = ward(updates.gram[None], updates.weights)
        cuts = [cut(merges[0], groups) for groups in numbers]
        large = [[group for group in groups if len(group) >= MIN_SIZE] for groups in cuts]
        complete = np.array([Separation.of(updates, groups).least >= COMPLETE for groups in large])
        gaps, p_values = _against_rotations(updates, _log_within(added, numbers)[0], numbers)
        return cls(updates, cuts, large, complete, gaps, p_values)

    @property
    def counts(self) -> np.ndarray:
        """Number of large groups of each cut."""
        return np.array([len(groups) for groups in self.large])

    @property
    def outliers(self) -> np.ndarray:
        """Whether each cut has outliers."""
        return self.counts < np.array([len(groups) for groups in self.groups])

    def least_explained(self, some: np.ndarray) -> int:
        """Return which of some cuts has the largest gap, of all cuts if there are none."""
        return int(np.where(some | ~some.any(), self.gaps, -np.inf).argmax())

    def without_outliers(self, which: int) -> np.ndarray:
        """Return the rows of the updates in large groups, ascending."""
        return np.sort(np.concatenate(self.large[which]))

    def separation(self, which: int) -> float:
        return Separation.of(self.updates, self.groups[which]).least

    def cut(self, which: int, members: np.ndarray, p_value: float) -> _Cut:
        return _Cut([members[group] for group in self.groups[which]], p_value, self.separation(which))


def _log_within(added: np.ndarray, numbers: range) -> np.ndarray:
    """Return the log of the share of the sum of squares that is within groups, `[draws, numbers]`."""
    from_one = np.pad(added, ((0, 0), (1, 0))).cumsum(axis=1)  # within n groups: 0
    total = np.where(from_one[:, -1:] > 0, from_one[:, -1:], 1.0)
    return np.log(np.maximum(from_one[:, [-groups for groups in numbers]] / total, _ROUNDING))


def _against_rotations(updates: Updates, within: np.ndarray, numbers: range) -> tuple[np.ndarray, np.ndarray]:
    """Return how far `within` `[numbers]` is below the mean of rotations, and p-values of all numbers together.

    Draws end when the smallest p-value is clearly large or small.
    """
    drawn = np.empty((0, len(numbers)))
    for grams in rotated(updates):
        drawn = np.concatenate([drawn, _log_within(ward(grams, updates.weights)[0], numbers)])
        gaps, largest = drawn.mean(axis=0) - within, (drawn.mean(axis=0) - drawn).max(axis=1)
        if (largest >= gaps.max()).sum() >= _ENOUGH or _p_value(gaps.max(), largest) < _SURE:
            break
    return gaps, np.array([_p_value(gap, largest) for gap in gaps])


def _p_value(gap: float, null: np.ndarray) -> float:
    """Return the share of null draws of at least `gap`; if few are, the tail of a Gumbel distribution if smaller."""
    exceeding = int((null >= gap - _ROUNDING).sum())
    counted = (1 + exceeding) / (1 + len(null))
    if exceeding >= _ENOUGH:
        return counted
    scale = max(float(null.std()) * math.sqrt(6) / math.pi, _ROUNDING)
    return min(counted, float(gumbel_r.sf(gap, null.mean() - np.euler_gamma * scale, scale)))


def as_noisy_as_seen(updates: Updates) -> Updates:
    """Return the updates with the noise std that is seen where it is above the announced one, up to the median.

    An update is as far from one of its own group as the noise of both. One that is farther from all others has more
    noise than it announced, or other data; in neither case may it count for more than an update of median noise.
    """
    squares = squared_distances(updates.gram) / max(updates.num_params, 1) - updates.noise_std**2
    np.fill_diagonal(squares, np.inf)
    seen = np.sqrt(np.maximum(squares.min(axis=1), 0.0))
    most = np.maximum(updates.noise_std, np.median(updates.noise_std))
    return Updates(updates.gram, np.clip(seen, updates.noise_std, most), updates.num_params)


def as_noisy_as_most(updates: Updates) -> Updates:
    """Return the updates, with noise added to those of clients with less than the median noise, up to the median.

    The difference of clients by their data would else be larger, in units of their noise, for clients with less noise.
    """
    more = np.sqrt(np.maximum(np.median(updates.noise_std) ** 2 - updates.noise_std**2, 0.0))
    if not more.any():
        return updates
    values, vectors = np.linalg.eigh(updates.gram)
    points = vectors * np.sqrt(np.maximum(values, 0.0))
    gram = next(noisy_grams(points, more, updates.num_params, 1))[0]
    return Updates(gram, np.hypot(updates.noise_std, more), updates.num_params)


def rotated(updates: Updates) -> Iterator[np.ndarray]:
    """Yield blocks `[., n, n]` of Gram matrices: the weighted updates after random rotations of the n points."""
    count, root = len(updates.gram), np.sqrt(updates.weights)
    centred = np.eye(count) - updates.weights / count
    basis = np.linalg.qr(np.column_stack([root, np.eye(count)[:, 1:]]))[0][:, 1:]  # what centring leaves
    weighted = basis.T @ (root[:, None] * (centred @ updates.gram @ centred.T) * root) @ basis
    lengths = np.sqrt(np.maximum(np.linalg.eigvalsh(weighted), 0.0))
    rng = np.random.default_rng([updates.num_params, count])
    for draws in _blocks(_DRAWS if count <= 100 else _DRAWS // 5, count):
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


def assigned(updates: Updates, groups: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the groups after each client has moved to the most likely one, and the memberships `[n, M]`.

    Memberships are the posterior probabilities of equally likely Gaussians around the groups' means, whose deviation is
    that of `Separation`. If a group would be left with fewer than `MIN_SIZE` clients, only clients move that are in no
    group.
    """
    squares, _ = distances(updates, groups)
    nearest = squares.argmin(axis=1)
    apart = Separation.of(updates, groups)
    variance = updates.noise_std[:, None] ** 2 * apart.noise_factor + apart.spread
    if (
        np.isfinite(variance).all()
        and (variance > 0).all()
        and np.bincount(nearest, minlength=len(groups)).min() >= MIN_SIZE
    ):
        memberships = softmax(-squares / (2 * variance), axis=1)
    else:
        for group, members in enumerate(groups):
            nearest[members] = group
        memberships = np.eye(len(groups))[nearest]
    moved = [np.flatnonzero(nearest == group) for group in range(len(groups))]
    order = sorted(range(len(groups)), key=lambda group: moved[group][0])
    return [moved[group] for group in order], memberships[:, order]


# ---- simulations


def _recovered(updates: Updates, groups: Sequence[np.ndarray]) -> float:
    """Return how often the groups are found again in simulated updates with these means and new noise."""
    part = updates.of(np.concatenate(groups))
    labels = np.repeat(range(len(groups)), [len(members) for members in groups])
    shares = (labels == np.arange(len(groups))[:, None]) * part.weights
    shares /= shares.sum(axis=1, keepdims=True)
    values, vectors = np.linalg.eigh(shares @ part.signal @ shares.T)
    return _recovery((vectors * np.sqrt(np.maximum(values, 0.0)))[labels], labels, part)


def _recovery(points: np.ndarray, labels: np.ndarray, updates: Updates) -> float:
    """Return how often Ward's cut and `distances` find the groups `labels` `[n]` of points `[n, r]` in noise.

    Clients with more than `NOISY` times the median noise may be in any group.
    """
    if not np.isfinite(points).all() or updates.unit == 0:
        return 1.0
    quiet = updates.noise_std <= NOISY * np.median(updates.noise_std)
    same = labels[quiet, None] == labels[quiet]
    right, draws = 0, _SIMULATIONS if len(labels) <= 100 else _SIMULATIONS // 4
    for grams in noisy_grams(points, updates.noise_std, updates.num_params, draws):
        for gram, merges in zip(grams, ward(grams, updates.weights)[1], strict=True):
            one = Updates(gram, updates.noise_std, updates.num_params)
            nearest = distances(one, cut(merges, int(labels.max()) + 1))[0].argmin(axis=1)[quiet]
            right += np.array_equal(nearest[:, None] == nearest, same)
    return right / draws


def noisy_grams(
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
    at_once = max(1, min(_AT_ONCE, _NUMBERS // count**2))
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
