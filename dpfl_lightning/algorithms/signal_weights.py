"""Aggregation weights from the cosines between updates: as much signal per noise as possible, and no client decides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import null_space
from scipy.optimize import nnls
from scipy.special import log_ndtr
from scipy.stats import norm

_SLOPES = np.linspace(0.0, 1.0, 21)  # from "every update has the same share of signal" to "the same length of signal"
# how probable each is before evidence: chosen on simulated updates, where 0.8 to 0.98 for the last are equally good in
# the mean; less loses more where weak signals are equal, and more where they follow unequal steps
_PRIOR = np.array([0.05 / 20] * 20 + [0.95])
_MOST_ALIGNED = 0.9999  # bound of a client's share of signal, which keeps weights finite
_EDGE = 3.27  # 99.9 % quantile of the Tracy-Widom law of real symmetric matrices
_OPPOSED = -4.0  # sum of votes, in standard deviations of votes by noise, below which an update goes against others
_VOTE = 3.0  # bound of one vote, in standard deviations of a cosine of noise
_PROVEN = 3.09  # 99.9 % quantile of the normal distribution
_OF_MEDIAN = (math.pi / 2) ** 0.5  # standard error of a median / of a mean of normal numbers
# least squared cosine between two sides / product of the cosines within them, for one to be the other's opposite
_MIRRORED = 2 / 3


@dataclass(frozen=True)
class SignalEstimate:
    """What the cosines of C updates of one model say about their signals; all arrays are float64.

    Args:
        alignment: length of the common part of each update's signal / length of the update, `[C]`, in [0, 1).
        factors: loadings of the updates on all directions that clients share, `[C, r]`; the first is `alignment`, but
            negative for updates that go against the common part, whose alignment is 0.
        private: length of the signal that this client has alone / length of the update, `[C]`.
        length: lengths of the updates, each limited to the range of the others, `[C]`.
    """

    alignment: np.ndarray
    factors: np.ndarray
    private: np.ndarray
    length: np.ndarray

    @property
    def shared(self) -> np.ndarray:
        """Length of the signal that each update shares with others / length of the update, `[C]`."""
        return np.sqrt(np.square(self.factors).sum(axis=1))

    @property
    def noise_share(self) -> np.ndarray:
        """Share of each update's squared length that is noise, or a signal that is not seen, `[C]`, in (0, 1]."""
        return np.maximum(1 - np.square(self.factors).sum(axis=1) - self.private**2, 1 - _MOST_ALIGNED**2)


def estimate_signals(
    cosines: np.ndarray,
    lengths: np.ndarray,
    models: Sequence[Sequence[int]],
    precision: np.ndarray,
    lasting: tuple[np.ndarray, np.ndarray] | None = None,
) -> list[SignalEstimate]:
    """Estimate how much of each update is signal that it shares with others of its model. Post-processing.

    Noise of different clients is independent, so the cosine of two updates of one model is the product of their
    alignments, give or take an error of variance 1 / `precision`. Where this shows too little, alignments follow a law:
    they are proportional to a power of 1 / length between 0 (all updates have the same share of signal) and 1 (all have
    equal signals), over which the estimate averages; equal signals are assumed unless the cosines are against them.
    Clients differ from the law as far as cosines prove it (empirical Bayes). Further directions, which clients with one
    kind of data share, count if noise alone shows as much, apart from the common direction, in one of 1,000 rounds.
    Updates that clearly are the opposite of the others' have no alignment, and the others are judged without them. What
    an update has in common with the client's earlier ones, and not with other clients, is a signal that this client has
    alone, because noises of different rounds are independent, too.

    Args:
        cosines: between updates, `[C, C]`; of several rounds their mean.
        lengths: of the updates, `[C]`, > 0.
        models: rows of the clients of each model.
        precision: number of parameters times number of rounds in which the cosine was seen, `[C, C]`.
        lasting: mean cosine between each client's updates in two rounds, `[C]`, and its standard error, `[C]` > 0,
            infinite if unknown; None if all are.
    """
    limited, everybody = lengths.copy(), _limits(lengths[lengths > 0])
    for rows in map(list, models):
        (low, high), (low_here, high_here) = everybody, _limits(lengths[rows])
        limited[rows] = np.clip(lengths[rows], min(low, low_here), max(high, high_here))
    lasting = lasting or (np.zeros(len(lengths)), np.full(len(lengths), np.inf))
    opposed = _opposed(cosines, models, precision)
    together = precision * np.outer(~opposed, ~opposed)
    prior = _law(cosines, limited, models, together)
    estimates = []
    for rows in map(list, models):
        block, seen = _pairs(cosines, rows), _pairs(precision, rows)
        against, alignment = opposed[rows], np.zeros(len(rows))
        others = list(np.array(rows)[~against])
        alignment[~against] = _shrunk(
            _pairs(cosines, others), _pairs(precision, others), prior[others], (limited != lengths)[others]
        )
        opposite = np.clip(_seen(block, seen, alignment)[0], -_MOST_ALIGNED, 0.0)
        signed = np.where(against | (alignment < 1e-6), opposite, alignment)  # the fit only comes near to 0
        rest = block - np.outer(signed, signed)
        np.fill_diagonal(rest, 0.0)
        cosine, error = (one[rows] for one in lasting)
        whole = _whole(cosine, error, limited[rows])
        further = _further(rest, seen, 1 - signed**2, signed)
        squared = np.square(further).sum(axis=1)
        room = np.clip(_room(whole, error, signed**2 + squared) - signed**2, 0.0, 1 - signed**2)
        if (squared > room).any():
            further = _further(rest, seen, room, signed)
        factors = np.column_stack([signed, further])
        private = _alone(np.square(factors).sum(axis=1), cosine, error, whole)
        estimates.append(SignalEstimate(alignment, factors, private, limited[rows]))
    return estimates


def _limits(values: np.ndarray) -> tuple[float, float]:
    """Return limits of values `[C]` > 0: half of the second smallest, and the second largest one.

    No limit is beyond 30 times the median, so no value alone moves them. Of two values both become the smaller one. An
    honest client with far less noise than all others loses by this.

    >>> _limits(np.array([0.001, 1.0, 2.0, 3.0]))
    (0.5, 2.0)
    """
    if len(values) < 2:
        return 0.0, np.inf
    ordered, median = np.sort(values), float(np.median(values))
    return max(float(ordered[1]) / 2, median / 30), min(float(ordered[-2]), 30 * median)


def _opposed(cosines: np.ndarray, models: Sequence[Sequence[int]], precision: np.ndarray) -> np.ndarray:
    """Return the clients whose updates clearly are the opposite of the others', `[C]`; less than half of each model.

    Each pair of updates has one bounded vote, so that no client decides. Clients who agree with each other more than
    the opposite of the others have data of another kind, and are not opposed. A single client may have such data, too,
    unless its update is hardly more than the opposite of what the others share.
    """
    opposed = np.zeros(len(cosines), dtype=bool)
    for rows in map(list, models):
        block, known = _pairs(cosines, rows), _pairs(precision, rows)
        votes = np.clip(np.sqrt(known) * block, -_VOTE, _VOTE)
        against = votes.sum(axis=1) / np.sqrt(np.maximum((known > 0).sum(axis=1), 1)) < _OPPOSED
        if 0 < 2 * against.sum() < len(rows):
            within, rest, between = (
                (known * block)[pairs].sum() / max(known[pairs].sum(), 1e-300)
                for pairs in (np.ix_(against, against), np.ix_(~against, ~against), np.ix_(against, ~against))
            )
            within -= 3 / max(known[np.ix_(against, against)].sum() / 2, 1e-300) ** 0.5
            within = 1.0 if against.sum() == 1 else max(within, 0.0)  # nobody can confirm a single client
            opposed[rows] = against & (between**2 >= _MIRRORED * within * max(rest, 0.0))
    return opposed


def _law(
    cosines: np.ndarray, lengths: np.ndarray, models: Sequence[Sequence[int]], precision: np.ndarray
) -> np.ndarray:
    """Return the alignments `[C]` of the law: their mean over its power, and over the length of the signals.

    Both are unknown. Every squared length >= 0 is equally probable before evidence, in its standard errors, so a power
    whose signals would have been seen has short ones where nothing is seen.
    """
    fits, evidence = np.zeros((len(_SLOPES), len(lengths))), np.log(_PRIOR)
    for rows in map(list, models):
        block, known = _pairs(cosines, rows), _pairs(precision, rows)
        relative = lengths[rows].min(initial=np.inf) / lengths[rows]
        for number, slope in enumerate(_SLOPES):
            shape = relative**slope
            product = np.outer(shape, shape)
            information = float((known * product**2).sum() / 2)
            if not information > 0:  # a client alone shows no signal
                continue
            score = float((known * product * block).sum() / 2) / information**0.5  # squared length / its standard error
            log_evidence, mean = _of_positive(score)
            evidence[number] += log_evidence
            fits[number, rows] = np.sqrt(mean / information**0.5) * shape
    share = np.exp(evidence - evidence.max())
    return np.minimum(share @ fits / share.sum(), 0.99)


def _of_positive(score: float) -> tuple[float, float]:
    """Return log evidence, and mean, of a number >= 0 that was measured as `score` with standard error 1.

    >>> tuple(round(value, 3) for value in _of_positive(0.0)), tuple(round(value, 3) for value in _of_positive(-1e9))
    ((-0.693, 0.798), (-21.642, 0.0))
    """
    if score < -30:  # where the difference below is lost in rounding
        return -math.log(-score * (2 * math.pi) ** 0.5), -1 / score
    return score**2 / 2 + float(log_ndtr(score)), score + float(np.exp(norm.logpdf(score) - log_ndtr(score)))


def _pairs(matrix: np.ndarray, rows: list[int]) -> np.ndarray:
    """Return these rows and columns of a matrix, with zeros on the diagonal."""
    pairs = matrix[rows][:, rows]
    np.fill_diagonal(pairs, 0.0)
    return pairs


def _shrunk(block: np.ndarray, precision: np.ndarray, law: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """Return alignments between those of the law and those that the cosines show, by the errors of both.

    The law says little of clients whose lengths are `outside` the range of the others. Where its signals are not seen
    in the cosines, noise is all that they show of single clients, and the law is followed.
    """
    if len(law) < 3 or not (precision @ law**2 > 0).all():
        return law
    seen, variance = _seen(block, precision, law)
    relative, spread = variance / law**2, 0.0
    for _ in range(30):  # relative variance of alignments around the law, by moments, less one standard error
        weight = 1 / (relative + spread) ** 2
        moment = float((weight * ((seen / law - 1) ** 2 - relative)).sum() / weight.sum() - (2 / weight.sum()) ** 0.5)
        # a law that is lost in noise is followed rather than the noise; half a step, because whole ones can alternate
        spread = (spread + min(max(moment, 0.0), 1.0)) / 2
    product = np.outer(law, law)
    information = (precision * product**2).sum() / 2
    squared = (precision * product * block).sum() / 2 / information  # squared length of the signals / that of the law
    shown = min(max(squared - information**-0.5, 0.0), 1.0)
    alignment, trust = law, shown * np.where(outside, 1.0, spread) * law**2
    for _ in range(100):
        seen, variance = _seen(block, precision, alignment)
        wanted = (trust * seen + variance * law) / (trust + variance)
        wanted = (alignment + np.clip(wanted, 0.0, _MOST_ALIGNED)) / 2
        moved, alignment = np.abs(wanted - alignment).max(), wanted
        if moved < 1e-10:
            break
    return alignment


def _seen(block: np.ndarray, precision: np.ndarray, alignment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the alignment of each client that its cosines with the others show, and its variance."""
    information = np.maximum(precision @ alignment**2, 1e-300)
    noise = np.maximum(1 - alignment**2, 1 - _MOST_ALIGNED**2)
    return (precision * block) @ alignment / information, noise / information


def _further(rest: np.ndarray, precision: np.ndarray, room: np.ndarray, signed: np.ndarray) -> np.ndarray:
    """Return loadings `[C, r]` on directions that explain the matrix off its diagonal beyond noise; r is often 0.

    The noise of one client has one cosine with all that is common to quiet clients, so its cosines with them have
    common errors. These, and what remains of a negative alignment, lie along `signed`, and are not counted. Directions
    are added one by one, as long as more than noise is left and each one explains at least half of what it should, and
    are at most half as many as clients, because two share each.
    """
    count = len(rest)
    loadings = np.zeros((count, 0))
    if count < 4 or not (precision + np.eye(count) > 0).all():
        return loadings
    mean = 1 / float((1 / precision[precision > 0]).mean())  # of pairs that were seen in few rounds, too
    edge = mean**-0.5 * (2 * count**0.5 + _EDGE * count ** (-1 / 6)) + count / mean  # of a matrix of noise alone
    left = rest
    while loadings.shape[1] < count // 2:
        outside = null_space(np.column_stack([signed, loadings]).T)
        largest = float(np.linalg.eigvalsh(outside.T @ left @ outside)[-1])
        if largest <= edge:
            break
        more = _loadings(rest, loadings.shape[1] + 1, room)
        remains = rest - more @ more.T
        np.fill_diagonal(remains, 0.0)
        if np.square(left).sum() - np.square(remains).sum() < largest**2 / 2:
            break
        left, loadings = remains, more
    return loadings


def _loadings(rest: np.ndarray, rank: int, room: np.ndarray) -> np.ndarray:
    """Return loadings `[C, rank]` that explain the matrix off its diagonal, of squared sums `[C]` of at most `room`."""
    shared = rest.copy()
    for _ in range(100):
        values, vectors = np.linalg.eigh(shared)
        loadings = vectors[:, -rank:] * np.sqrt(np.maximum(values[-rank:], 0.0))
        diagonal = np.minimum(np.square(loadings).sum(axis=1), room)
        moved = np.abs(diagonal - shared.diagonal()).max()
        np.fill_diagonal(shared, diagonal)
        if moved < 1e-8:
            break
    length = np.square(loadings).sum(axis=1)
    return loadings * np.sqrt(np.where(length > 0, diagonal / np.where(length > 0, length, 1.0), 0.0))[:, None]


def _whole(lasting: np.ndarray, error: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return the share of each update's squared length that lasts over rounds, so is signal, `[C]`; 1 if unknown.

    Squared signals are taken to have the model's median, give or take once that median, as far as their errors leave it
    open (empirical Bayes): so a signal that is hidden in noise counts as a usual one.
    """
    known = np.isfinite(error)
    if not known.any():
        return np.ones(len(lasting))
    squared, spread = lasting * length**2, error * length**2
    usual = max(_weighted_median(squared[known], spread[known] ** -2.0)[0], 0.0)
    trust = usual**2 / (usual**2 + spread**2)
    return np.clip((trust * squared + (1 - trust) * usual) / length**2, 0.0, 1.0)


def _room(whole: np.ndarray, error: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Return the most that can be shared signal, `[C]`: what can last, or more where shared signals turn.

    Where it is not proven that signals last, there is no limit.
    """
    usual = float(np.median(whole - _PROVEN * error))
    most = whole + _PROVEN * error
    return most * max(1.0, float(np.median(shared)) / usual) if usual > 0 else np.ones(len(whole))


def _weighted_median(values: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Return the median of values `[C]`, C >= 1, with weights of at most the median weight, and the sum of weights."""
    weight = np.minimum(weight, np.median(weight))
    order, total = np.argsort(values), float(weight.sum())
    return float(values[order][np.searchsorted(np.cumsum(weight[order]), total / 2)]), total


def _alone(shared: np.ndarray, lasting: np.ndarray, error: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return the length of the signal that each client has alone / length of the update, from squares `[C]` of those.

    It is what is proven for this client, and at least what all clients of the model together show: the weighted median
    of the ratios to the shared signal, less its standard error, as a share of the client's whole signal.
    """
    beyond = lasting - shared
    ratio, information = _weighted_median(beyond / np.maximum(shared, 1e-300), (shared / error) ** 2)
    ratio = max(ratio - _OF_MEDIAN / information**0.5, 0.0) if information > 0 else 0.0
    alone = np.maximum(beyond - _PROVEN * error, ratio / (1 + ratio) * whole)
    return np.sqrt(np.clip(alone, 0.0, np.maximum(_MOST_ALIGNED**2 - shared, 0.0)))


def contributions(signals: SignalEstimate, rounds: int, max_influence: float) -> np.ndarray:
    """Return how long each client's part of the aggregate is, `[C]` >= 0 of sum 1, at most `max_influence` each.

    They minimise the expected squared error of the sum of `rounds` rounds as an estimate of the clients' mean signal:
    `(c - t)' S (c - t) + c' V c / rounds`, with S the signals, V the noise, t the plain mean of signals that are at
    most twice as long as the median one, so that no minority decides by its length. Noise averages out over rounds and
    a bias does not. If all clients share one signal and have no other, the ratio of signal to noise is largest.
    """
    noise = signals.noise_share
    if signals.factors.shape[1] == 1 and not signals.private.any():
        share = signals.alignment / noise
    else:
        loadings = np.vstack([signals.factors.T, np.diag(signals.private)])
        signal = np.sqrt(np.square(loadings).sum(axis=0)) * signals.length
        target = signals.length * np.minimum(1.0, 2 * np.median(signal) / np.maximum(signal, 1e-300))
        target /= target.sum()
        stacked = np.vstack([np.diag(np.sqrt(noise / rounds)), loadings])
        share, _ = nnls(stacked, np.concatenate([np.zeros(len(noise)), loadings @ target]))
    return limited_shares(share, max_influence)


def most_influence(num_clients: int) -> float:
    """Return the default bound on one client's share: a quarter, or twice an equal share if more, but at most half.

    >>> [most_influence(count) for count in (1, 3, 5, 20)]
    [0.5, 0.5, 0.4, 0.25]
    """
    return max(0.25, min(0.5, 2 / num_clients))


def limited_shares(share: np.ndarray, largest: float) -> np.ndarray:
    """Scale shares `[C]` >= 0 to sum 1; those above `largest` become it, and the others grow in proportion.

    Shares of 0 grow, equally, only if the others cannot. Fewer than 1 / largest shares become equal.

    >>> limited_shares(np.array([8.0, 1.0, 1.0, 0.0]), 0.4).round(2).tolist()
    [0.4, 0.3, 0.3, 0.0]
    >>> limited_shares(np.array([1.0, 0.0, 0.0, 0.0]), 0.4).round(2).tolist()
    [0.4, 0.2, 0.2, 0.2]
    """
    share = np.maximum(share, 0.0)
    total = share.sum()
    share = np.full(len(share), 1 / max(len(share), 1)) if not total > 0 else share / total
    largest = max(largest, 1 / max(len(share), 1))
    if largest * int((share > 0).sum()) < 1:
        rest = share == 0
        share = np.where(rest, (1 - largest * (~rest).sum()) / max(rest.sum(), 1), largest)
    limited = np.zeros(len(share), dtype=bool)
    while (above := (share > largest * (1 + 1e-12)) & ~limited).any():
        limited |= above
        rest = share[~limited].sum()
        share = np.where(limited, largest, share * (1 - largest * limited.sum()) / rest if rest > 0 else share)
    return share
