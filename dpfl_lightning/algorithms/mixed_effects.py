"""A mixed-effects model of noisy updates: best linear unbiased prediction (BLUP) of each client's mean gradient.

The update per unit step of client i in round t has, in each of its numbers, `y_i(t) = mu + b_i + z_i(t)`: what all
clients share (the fixed effect, with a flat prior), what distinguishes client i (the random effect), and noise. G is
that of the numbers along the main inputs of a layer (`main_inputs`), without what is along the mean of all clients
(`RoundProducts._multiply`): it makes the error along these inputs small, as data lie there, not that of all numbers.

| Henderson (1975), Robinson (1991)              | here                                                       |
| ---------------------------------------------- | ---------------------------------------------------------- |
| R = Var(z), of the mean of a run of T rounds   | `noise / rounds`, diagonal, known from the plan            |
| G = Cov(b), one for each layer                 | `RandomEffects.covariance`: groups of clients, and clients |
|                                                | that differ from all others                                |
| V = Z G Z' + R                                 | `total` in `blup_weights`                                  |
| GLS mean `(1' V^-1 1)^-1 1' V^-1 y`            | `gls` in `blup_weights`                                    |
| BLUP `mu + G Z' V^-1 (y - 1 mu)`               | `blup_weights @ y`; universal kriging (Matheron, 1969)     |

G is estimated from products of updates of different rounds, whose noise is independent, so that none is subtracted.
All functions read released updates alone: post-processing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from dpfl_lightning.algorithms.random_effects import limited_shares
from dpfl_lightning.algorithms.update_geometry import Updates, folded
from dpfl_lightning.algorithms.update_groups import find_groups

Array = NDArray[np.float64]
Indices = NDArray[np.int64] | Sequence[int]

#: 99.9 % quantile of the Tracy-Widom law of real symmetric matrices
_TRACY_WIDOM = 3.27
_LONGEST = 3.0  # a difference may be this many times as long as the median one
_MOST_INPUTS = 1 << 10  # of a layer, so that its main directions are found in seconds
_TESTED = 100  # clients that show whether there are groups, so that this takes a second
_KEPT = 1 << 25  # numbers of the sums of all clients together
_PRODUCTS = 1 << 22  # entries of products between clients, of all layers together


def blup_weights(covariance: Array, noise: Array, clients: Indices) -> Array:
    """Return the weights `[N, C]` of C updates in the best linear unbiased prediction of N mean gradients.

    Each row w has sum 1 and the least mean squared error `w' R w + E (sum_j w_j b_j - b_n)^2`. Rows of clients without
    an update predict from what they have in common with others.

    Args:
        covariance: G, of the random effects `[N, N]`.
        noise: diagonal of R, of the updates `[C]` > 0.
        clients: whose updates these are, `[C]`.

    >>> blup_weights(np.zeros((2, 2)), np.array([1.0, 3.0]), [0, 1]).tolist()  # one model, by inverse noise
    [[0.75, 0.25], [0.75, 0.25]]
    """
    with_updates = covariance[:, clients]
    total = with_updates[clients] + np.diag(noise)
    precision = np.linalg.inv(total)
    gls = precision.sum(axis=0) / precision.sum()
    own = with_updates @ precision
    return own + np.outer(1 - own.sum(axis=1), gls)


def limited_weights(weights: Array, own: NDArray[np.bool_], largest: float) -> Array:
    """Limit weights `[N, C]` to `[-largest, largest]`, except for a client's own; the sum of each row stays 1.

    What is cut off is added to the other positive weights of the row in proportion. Where a row has n positive weights,
    the largest one may be 1 / n of their sum.

    Args:
        own: whether the update is that of the row's client, `[N, C]`.

    >>> limited_weights(np.array([[0.1, 0.7, 0.2]]), np.array([[True, False, False]]), 0.4).round(2).tolist()
    [[0.2, 0.4, 0.4]]
    """
    limited = weights.copy()
    for row in np.flatnonzero(((np.abs(weights) > largest) & ~own).any(axis=1)):
        negative = np.clip(weights[row], -largest, 0.0)
        total = 1 - negative.sum()
        bound = np.where(own[row], 1.0, largest / total)
        limited[row] = negative + total * limited_shares(np.maximum(weights[row], 0.0), bound)
    return limited


@dataclass(frozen=True)
class NoiseSpectrum:
    """The eigenvalues of products of noise of different rounds, and what they do to those of a signal.

    The sum of the products of all pairs of T rounds is `((T - 1) W - W') / 2` of independent Wishart matrices of
    `numbers` and `(T - 1) numbers` degrees of freedom, whose R-transforms add up (Voiculescu, 1986; Marchenko and
    Pastur, 1967). With many numbers it is Wigner's semicircle.

    Args:
        variance: of an entry off the diagonal; on it twice as much.
        size: rows of the matrix.
        numbers: how many products an entry adds up for a pair of rounds.
        rounds: T >= 2.
    """

    variance: float
    size: int
    numbers: float
    rounds: float = 2.0

    def edge(self) -> float:
        """Return what the largest eigenvalue of noise exceeds about once in 1,000 matrices (Tracy and Widom, 1996).

        That is so with many numbers. With 10 numbers it is 5 to 18 times.

        >>> round(NoiseSpectrum(1.0, 100, 1e9).edge() / (2 * 100**0.5), 3)  # of the semicircle
        1.076
        """
        return float(self._signals()[1].min()) * (1 + _TRACY_WIDOM / 2 * self.size ** (-2 / 3))

    def signals(self, values: Array) -> tuple[Array, Array]:
        """Return the strengths of signals by their eigenvalues beyond the edge, and how right their directions are.

        The latter is the squared product of an eigenvector with the direction of the signal. With many numbers and
        `V = variance * size`, a signal of strength s has the eigenvalue `s + V / s`, and `1 - V / s^2`.

        Reference: Capitaine, Donati-Martin and Feral (2009); Benaych-Georges and Nadakuditi (2011).

        >>> strength, overlap = NoiseSpectrum(0.01, 100, 1e9).signals(np.array([2.5]))
        >>> strength.round(3).tolist(), overlap.round(3).tolist()
        ([2.0], [0.75])
        """
        strengths, eigenvalues, overlaps = self._signals()
        seen = slice(int(eigenvalues.argmin()), None, -1)  # of increasing strength
        strength, overlap = (np.interp(values, eigenvalues[seen], one[seen]) for one in (strengths, overlaps))
        return strength, overlap

    def _signals(self) -> tuple[Array, Array, Array]:
        """Return strengths of signals in descending order, their eigenvalues, and squared products of directions."""
        later = max(self.rounds, 2.0) - 1
        unit = math.sqrt(self.variance / (self.numbers * later * (later + 1) / 4))
        x = np.geomspace(1e-6, 1, 4000, endpoint=False) / later
        strength = self.size / (2 * x)
        shift = self.numbers * later / 2 * (1 / (1 - later * x) - 1 / (1 + x))
        slope = self.numbers * later / 2 * (later / (1 - later * x) ** 2 + 1 / (1 + x) ** 2)
        return unit * strength, unit * (strength + shift), 1 - slope * x / strength


def shrunken(estimate: Array, variance: Array | float) -> Array:
    """Return estimates >= 0 of variances between clients, shrunken as far as their own errors may explain them.

    Estimates below two standard errors are 0, and larger ones are hardly changed: what a client seems to have alone by
    mistake costs it the noise that others would have averaged out.

    Reference: the positive part of the non-negative garrote (Breiman, 1995), `x (1 - 4 variance / x^2)`.

    >>> shrunken(np.array([-1.0, 1.0, 4.0]), 1.0).tolist()
    [0.0, 0.0, 3.0]
    """
    positive = np.maximum(estimate, 1e-300)
    return np.maximum(positive - 4 * variance / positive, 0.0) * (estimate > 0)


@torch.no_grad()
def main_inputs(sums: Tensor, noise: Tensor) -> Tensor:
    """Return the directions `[in, r]` of the inputs of a layer in which matrices `[n, out, in]` are more than noise.

    These are the right singular vectors of the stacked matrices, whitened by their `noise` `[n]`, with singular values
    above `sqrt(rows) + sqrt(columns)`, about the largest one of noise (Marchenko and Pastur, 1967).
    """
    white = (sums / noise.sqrt()[:, None, None]).flatten(0, 1).double()
    rows, columns = white.shape
    wide = columns > rows
    squares, vectors = torch.linalg.eigh(white @ white.T if wide else white.T @ white)
    vectors = vectors[:, squares > (math.sqrt(rows) + math.sqrt(columns)) ** 2]
    return normalize(white.T @ vectors, dim=0) if wide else vectors


@dataclass(frozen=True)
class Layer:
    """The parameters of a layer as a matrix `[out, in]`, where a bias is one more input.

    Args:
        places: positions of its tensors in the flat vector of parameters, one after the other.
        shapes: `(out, inputs)` of each tensor.
    """

    places: Tensor
    shapes: tuple[tuple[int, int], ...]

    def matrices(self, updates: Tensor, most: int) -> Tensor:
        """Return matrices `[C, out, in]` of updates `[C, P]`, folded to about `most` numbers each, see `folded`."""
        parts = updates[:, self.places.to(updates.device)].split([rows * inputs for rows, inputs in self.shapes], dim=1)
        matrix = torch.cat(
            [part.view(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)],
            dim=2,
        )
        matrix = _folded(matrix, min(_MOST_INPUTS, most))
        return _folded(matrix.mT, most // matrix.shape[2]).mT


def layers_of(parameters: Mapping[str, Tensor], personal: Sequence[str] = ()) -> list[Layer]:
    """Return the layers of a model: tensors of a module with as many outputs, without those that stay with clients."""
    tensors: dict[tuple[str, int], list[tuple[Tensor, tuple[int, int]]]] = {}
    start = 0
    for name, one in parameters.items():
        if name not in personal and one.numel():
            outputs = one.shape[0] if one.ndim else 1
            shape = outputs, one.numel() // outputs
            tensors.setdefault((name.rpartition(".")[0], outputs), []).append(
                (torch.arange(start, start + one.numel()), shape)
            )
        start += one.numel()
    return [
        Layer(torch.cat([place for place, _ in of_layer]), tuple(shape for _, shape in of_layer))
        for of_layer in tensors.values()
    ]


def _folded(matrices: Tensor, width: int) -> Tensor:
    """Return matrices `[C, rows, columns]` with at most `width` columns, whose numbers have the variance of noise."""
    count, rows, columns = matrices.shape
    if columns <= width:
        return matrices
    terms = torch.arange(columns - 1, columns - 1 - width, -1).div(width, rounding_mode="floor") + 1  # of each sum
    return folded(matrices.flatten(0, 1), width).view(count, rows, width) / terms.sqrt().to(matrices)


@dataclass(frozen=True)
class _Means:
    """Products of the mean gradients of n clients, whitened by the noise of these means.

    Args:
        products: of a number, `[n, n]`.
        variance: of noise in an entry off the diagonal; on it twice as much.
        scale: standard deviation of the noise of each client's mean `[n]`.
        numbers: how many products of numbers an entry adds up for a pair of rounds, on average.
    """

    products: Array
    variance: float
    scale: Array
    numbers: float


@dataclass(frozen=True)
class RandomEffects:
    """What is known of the random effects of N clients; n of them were seen in two rounds.

    Args:
        covariance: G of each block of layers, `[B, N, N]`.
        clients: which these are, `[n]`.
        positions: what groups of clients differ in, `[n, k]`, in units of `scale`; k + 1 groups differ in k directions.
        doubt: which part of the squared positions is noise.
        scale: standard deviation of the noise of each client's mean update, `[n]`.
        variance: of the clients' mean gradients around their mean by precision, of all numbers along main inputs
            together, weighted by precision. With few clients it is too small, as that mean is theirs.
    """

    covariance: Array
    clients: NDArray[np.int64]
    positions: Array
    doubt: float
    scale: Array
    variance: float

    def points(self) -> Array:
        """Return in what groups of clients differ, `[n, k]`, in units of the mean gradient; the most in the last."""
        return self.positions * self.scale[:, None]

    def groups(self) -> list[NDArray[np.int64]]:
        """Return the clients of each group; one group if no differences are found, none if they form no groups.

        Of more than a hundred clients these many decide, and the others get the nearest group.
        """
        count = len(self.clients)
        if not self.positions.size:
            return [self.clients]
        points = self.points()
        noise = math.sqrt(self.doubt * float((self.positions**2).sum()) / self.positions.size) * self.scale
        tested = np.sort(np.random.default_rng(0).permutation(count)[:_TESTED])
        updates = Updates(points[tested] @ points[tested].T, noise[tested], self.positions.shape[1])
        members = [tested[one] for one in find_groups(updates).members]
        if len(members) == 1:
            return []
        means = np.stack([np.average(points[one], axis=0, weights=self.scale[one] ** -2) for one in members])
        others = np.setdiff1d(np.arange(count), tested)
        nearest = ((points[others, None] - means) ** 2).sum(axis=2).argmin(axis=1)
        return [self.clients[np.sort(np.r_[one, others[nearest == group]])] for group, one in enumerate(members)]

    def own_weight(self) -> float:
        """Return the mean weight of a client's own update in its prediction, over the rounds so far: 1 / n to 1."""
        place = np.ix_(self.clients, self.clients)
        every = range(len(self.clients))
        return fmean(np.diag(blup_weights(one[place], self.scale**2, every)).mean() for one in self.covariance)


@dataclass
class RoundProducts:
    """Products of updates of different rounds, and what they show of G.

    Several layers share products where N is large, so that memory is bounded.
    """

    layers: Sequence[Layer]
    num_clients: int

    def __post_init__(self) -> None:
        blocks = min(len(self.layers), max(1, _PRODUCTS // self.num_clients**2))
        self._block_of = [place * blocks // len(self.layers) for place in range(len(self.layers))]
        shape = blocks, self.num_clients, self.num_clients
        #: [i, j] has products of updates of client i with earlier ones of client j, their noise variance, and of how
        #: many pairs of numbers these are
        self.products, self.variance, self.pairs = np.zeros((3, *shape))
        #: of each client, the sum of its noise variances, and its rounds
        self.noise, self.rounds = np.zeros((2, self.num_clients))
        #: [i, j] counts the pairs of rounds of which client i was in the later one and client j in the earlier one
        self.later = np.zeros((self.num_clients, self.num_clients))
        self.sums: list[Tensor] = []  # of each layer's matrices, over rounds: [N, out, in]

    @torch.no_grad()
    def add(self, updates: Tensor, noise: Array, clients: Indices) -> None:
        """Add the updates of a round.

        Args:
            updates: per unit step, `[C, P]`.
            noise: variance in each number, `[C]` > 0.
            clients: `[C]`.
        """
        size, seen = sum(len(layer.places) for layer in self.layers), np.flatnonzero(self.rounds)
        for place, layer in enumerate(self.layers):
            now = layer.matrices(updates, math.ceil(_KEPT / self.num_clients * len(layer.places) / size))
            if len(self.sums) == place:
                self.sums.append(now.new_zeros(self.num_clients, *now.shape[1:]))
            if len(seen) > 1:
                self._multiply(
                    self._block_of[place], now, self.sums[place][seen], noise, np.ix_(np.array(clients), seen)
                )
            self.sums[place][clients] += now
        self.later[clients] += self.rounds
        self.noise[clients] += noise
        self.rounds[clients] += 1

    def columns_of(self, block: int) -> Tensor:
        """Return the positions of a block's parameters in the flat vector."""
        places = zip(self._block_of, self.layers, strict=True)
        return torch.cat([layer.places for place, layer in places if place == block])

    def _multiply(self, block: int, now: Tensor, before: Tensor, noise: Array, place: tuple[NDArray[Any], ...]) -> None:
        """Add the products of matrices `now` `[C, out, in]` with sums `before` `[n, out, in]` of earlier rounds.

        How long they are along the mean of all clients does not count: gradients get shorter in the course of a round,
        so clients with more steps have shorter means, and this is no difference between their data.
        """
        seen = place[1][0]
        inputs = main_inputs(before, torch.from_numpy(self.noise[seen]).to(before))
        if not inputs.shape[1]:
            return
        rounds, precision = self.rounds[seen], self.rounds[seen] / self.noise[seen]
        vectors = [(one.double() @ inputs).flatten(1).cpu().numpy() for one in (now, before)]
        mean = normalised(precision @ vectors[1])
        a, b = (one - np.outer(np.maximum(one @ mean, 0.0), mean) for one in vectors)
        self.products[block][place] += a @ b.T
        self.variance[block][place] += np.outer(noise, (b**2).sum(axis=1))  # given the earlier rounds
        self.pairs[block][place] += a.shape[1] * rounds

    def _means(self, blocks: slice, known: NDArray[np.int64]) -> _Means:
        parts = (part[blocks].sum(axis=0) for part in (self.products, self.variance, self.pairs))
        products, variance, pairs = ((one + one.T)[np.ix_(known, known)] for one in parts)
        off, scale = ~np.eye(len(known), dtype=bool), np.sqrt(self.noise[known]) / self.rounds[known]
        unit = np.maximum(pairs, 1.0) * np.outer(scale, scale)
        numbers = float((pairs / self._round_pairs(known))[off].mean())
        return _Means(products / unit, float((variance / unit**2)[off].mean()), scale, max(numbers, 1.0))

    def _round_pairs(self, clients: NDArray[np.int64]) -> Array:
        """Return of each pair of these clients in how many pairs of different rounds they were there, `[n, n]`."""
        return (self.later + self.later.T)[np.ix_(clients, clients)]

    def effects(self) -> RandomEffects:
        """Return what the products show of the random effects."""
        blocks, count = self.products.shape[:2]
        clients = np.flatnonzero(self.rounds > 1)
        covariance, variance = np.zeros((blocks, count, count)), 0.0
        if len(clients) < 2 or not self.pairs.any():
            return RandomEffects(covariance, clients, np.zeros((len(clients), 0)), 0.0, np.ones(len(clients)), variance)
        every = self._means(slice(None), clients)
        rest = np.linalg.qr(1 / every.scale[:, None], mode="complete")[0][:, 1:]  # contrasts between clients
        values, vectors = np.linalg.eigh(rest.T @ every.products @ rest)
        noise = NoiseSpectrum(every.variance, len(values), every.numbers, float(self.rounds[clients].mean()))
        found = values > noise.edge()
        between, others = rest @ vectors[:, found], rest @ vectors[:, ~found]
        strength, overlap = noise.signals(values[found])
        precision = every.scale**-2 / (every.scale**-2).sum()
        for block in np.flatnonzero(self.pairs.any(axis=(1, 2))):
            one = self._means(slice(block, block + 1), clients)
            known = _covariance(one, between, overlap, others)
            covariance[block] = known.diagonal().mean() * np.eye(count)  # clients not seen twice differ like others
            covariance[block][np.ix_(clients, clients)] = known
            variance += float(precision @ known.diagonal()) * one.numbers * self._terms(int(block))
        # directions are wrong by noise, and each client's mean has noise along them
        wrong = strength @ (1 - overlap) + len(clients) * len(strength) / every.numbers
        doubt = float(wrong / max(strength.sum(), 1e-300))
        return RandomEffects(covariance, clients, between * np.sqrt(strength), doubt, every.scale, variance)

    def _terms(self, block: int) -> float:
        """Return how many numbers of a block's parameters one of its folded matrices stands for, on average."""
        of_layers = zip(self._block_of, self.layers, self.sums, strict=True)
        sizes = [(len(layer.places), sums[0].numel()) for of, layer, sums in of_layers if of == block]
        whole, kept = map(sum, zip(*sizes, strict=True))
        return whole / kept

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: torch.from_numpy(getattr(self, name).copy()) for name in _ARRAYS}
        return {**arrays, "sums": [one.clone() for one in self.sums]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _ARRAYS:
            setattr(self, name, state[name].cpu().numpy().copy())
        self.sums = [one.clone() for one in state["sums"]]


_ARRAYS = ("products", "variance", "pairs", "noise", "rounds", "later")


def _covariance(one: _Means, between: Array, overlap: Array, others: Array) -> Array:
    """Return G of a layer: `sum_k s_k u_k u_k'` of contrasts between groups, and `tau^2 I` of single clients.

    Method of moments: a product along a fixed direction u of length 1 has the mean `u' G u`, whitened. The directions
    are those in which the products are largest, so s_k is too large and tau^2 too small, the less the more numbers. A
    client adds to tau^2 at most nine times the median, so that one that sends anything does not make all others differ.
    u is a true direction and an error that is alike for all clients, whitened, so that of noisy clients it says little.
    What it says of each client, over all directions, is predicted by the variance of true places and that of errors.

    Args:
        between: directions in which groups of clients differ `[n, k]`.
        overlap: squared products of these with the true directions `[k]`.
        others: directions without groups `[n, m]`, orthogonal to `between`.
    """
    error, alone, precision = 2 * one.variance, 0.0, one.scale**-2
    if others.shape[1]:
        apart = others @ others.T
        unit = apart**2 @ precision
        own = (apart @ one.products * apart).sum(axis=1)
        most = _LONGEST**2 * max(np.median(own / unit), 0.0) * unit + 2 * math.sqrt(error) * np.diag(apart)
        alone = np.minimum(own, most).sum() / unit.sum()
        alone = float(shrunken(alone, error * others.shape[1] / unit.sum() ** 2))
    along = (between * (one.products @ between)).sum(axis=0)
    strength = shrunken(along - alone * (precision @ between**2), error)
    if not strength.any():
        return alone * np.eye(len(precision))
    apart_from_mean = precision * (1 - precision / precision.sum())
    right = strength @ overlap / strength.sum()
    known = right / (right + (1 - right) * one.scale**2 * apart_from_mean.mean())  # reliability of a client's place
    places = between * (one.scale * known)[:, None] / math.sqrt(right)
    unknown = (1 - known) * strength.sum() / apart_from_mean.sum()
    return places * strength @ places.T + np.diag(unknown + alone)


def normalised(vector: Array) -> Array:
    """Return a vector of length 1; of zeros the vector itself."""
    return vector / (float(np.linalg.norm(vector)) or 1.0)
