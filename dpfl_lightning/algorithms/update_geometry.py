"""Distances between groups of updates, without the noise, whose variance the server knows."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.spatial.distance import squareform
from scipy.special import erfc
from torch import Tensor

SEPARATION = 1.5 * math.sqrt(2)  # of groups in the first round, in units of P^(1/4)
_COLUMNS = 1 << 13  # columns that are converted to float64 at once


def double_columns(deltas: Tensor) -> Iterator[Tensor]:
    """Yield blocks of columns of `deltas` `[n, P]` in float64."""
    deltas = deltas.cpu() if deltas.device.type == "mps" else deltas  # MPS has no float64
    for columns in deltas.split(_COLUMNS, dim=1):
        yield columns.double()


def gram_of(blocks: Iterable[Tensor]) -> Tensor:
    """Return the sum of `block @ block.T` over blocks of columns, `[n, n]` float64 on the CPU."""
    return sum((block @ block.T for block in blocks), torch.zeros((), dtype=torch.float64)).cpu()


@torch.no_grad()
def gram_and_width(deltas: Tensor) -> tuple[np.ndarray, int]:
    """Return the Gram matrix of updates `[n, P]`, `[n, n]` float64, and how many parameters change in any of them."""
    gram, width = torch.zeros((), dtype=torch.float64), 0
    for columns in double_columns(deltas):
        gram, width = gram + columns @ columns.T, width + int(columns.any(dim=0).sum())
    return gram.cpu().numpy(), width


@torch.no_grad()
def folded(rows: Tensor, width: int) -> Tensor:
    """Return rows `[n, P]`, folded to at most `width` columns with public random signs: products are kept on average.

    The error of the product of two rows has a standard deviation of about the product of their lengths / sqrt(width).
    """
    columns, width = rows.shape[1], max(width, 1)
    if columns <= width:
        return rows
    signs = 2 * torch.randint(2, (columns,), generator=torch.Generator().manual_seed(0)) - 1
    padded = torch.nn.functional.pad(rows * signs.to(rows), (0, -columns % width))
    return padded.view(len(rows), -1, width).sum(dim=1)


@torch.no_grad()
def centred_gram(deltas: Tensor) -> np.ndarray:
    """Return `(X - mean) (X - mean)'` of updates X `[n, P]`: `[n, n]` float64, all that the search for groups needs."""
    return gram_of(columns - columns.mean(dim=0) for columns in double_columns(deltas)).numpy()


@dataclass(frozen=True)
class Updates:
    """n released updates: their Gram matrix, and how much of it is noise.

    Args:
        gram: `[n, n]` float64, see `centred_gram`.
        noise_std: noise std in each parameter of each update, `[n]`, >= 0.
    """

    gram: np.ndarray
    noise_std: np.ndarray
    num_params: int

    @functools.cached_property
    def unit(self) -> float:
        """Root mean square of `noise_std`; the unit of `coordinates`."""
        return math.sqrt(float(np.mean(self.noise_std**2)))

    @functools.cached_property
    def signal(self) -> np.ndarray:
        """The Gram matrix without `P * noise_std^2`, which noise adds to its diagonal."""
        return self.gram - np.diag(self.num_params * self.noise_std**2)

    @functools.cached_property
    def weights(self) -> np.ndarray:
        """Precisions `1 / noise_std^2`, of mean 1: with them noise adds the same to every merge. 1 without noise."""
        precisions = 1 / self.noise_std**2 if self.noise_std.min() > 0 else np.ones(len(self.gram))
        return precisions / precisions.mean()

    def of(self, members: np.ndarray) -> Updates:
        """Return the updates of these clients."""
        return Updates(self.gram[np.ix_(members, members)], self.noise_std[members], self.num_params)

    def coordinates(self, dimensions: int) -> np.ndarray:
        """Return the updates along the directions in which they differ most, `[n, dimensions]`, in units of noise std.

        The directions are those of the noise-free Gram matrix, so that a noisy client does not attract one.
        """
        values, vectors = np.linalg.eigh(self.signal)
        order = np.argsort(-values)[:dimensions]
        image = self.gram @ vectors[:, order]
        length = np.sqrt(np.maximum(np.einsum("ij,ij->j", vectors[:, order], image), 0.0))
        unit = self.unit or math.sqrt(np.trace(self.gram) / len(self.gram)) or 1.0
        image /= np.where(length > 0, length, np.inf) * unit
        image *= np.where(image[np.abs(image).argmax(axis=0), range(image.shape[1])] < 0, -1.0, 1.0)  # fix the signs
        return np.pad(image, ((0, 0), (0, dimensions - image.shape[1])))


def squared_distances(gram: np.ndarray) -> np.ndarray:
    """Return the squared distances of points with Gram matrices `[..., n, n]`."""
    squares = np.diagonal(gram, axis1=-2, axis2=-1)
    return np.maximum(squares[..., :, None] + squares[..., None, :] - 2 * gram, 0.0)


def ward(grams: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the weighted Ward clustering of points with Gram matrices `[draws, n, n]` and weights `[n]`.

    Each of the n - 1 merges is the one that adds least to the weighted sum of squared distances from the clusters'
    means. Returned are what it adds, `[draws, n - 1]`, and the clusters it merges, `[draws, n - 1, 2]`, named by their
    first points. SciPy's `linkage` has no weights.

    Reference: Ward (1963), with the recurrence of Lance and Williams (1967).
    """
    draws, count = len(grams), len(weights)
    mass = np.tile(weights, (draws, 1))
    costs = mass[:, :, None] * mass[:, None, :] / (mass[:, :, None] + mass[:, None, :]) * squared_distances(grams)
    costs[:, range(count), range(count)] = np.inf
    added, merges = np.empty((draws, count - 1)), np.empty((draws, count - 1, 2), dtype=int)
    every = np.arange(draws)
    for step in range(count - 1):
        first, second = np.divmod(costs.reshape(draws, -1).argmin(axis=1), count)
        first, second = np.minimum(first, second), np.maximum(first, second)
        least_cost, mass_1, mass_2 = (
            one[:, None] for one in (costs[every, first, second], mass[every, first], mass[every, second])
        )
        to_first, to_second = costs[every, first], costs[every, second]
        joined = (
            (mass + mass_1) * to_first + (mass + mass_2) * to_second - mass * least_cost
        )  # infinite if merged before
        joined /= mass + mass_1 + mass_2
        added[:, step], merges[:, step] = least_cost[:, 0], np.stack([first, second], axis=1)
        costs[every, first], costs[every, :, first] = joined, joined
        costs[every, second] = costs[every, :, second] = np.inf
        costs[every, first, first] = np.inf
        mass[every, first] += mass[every, second]
    return added, merges


def cut(merges: np.ndarray, groups: int) -> list[np.ndarray]:
    """Return the members of each of this number of groups (1..n) of a clustering with `merges` `[n - 1, 2]`."""
    members = {point: [point] for point in range(len(merges) + 1)}
    for first, second in merges[: len(merges) + 1 - groups].tolist():
        members[first] += members.pop(second)
    return in_order([np.sort(one) for one in members.values()])


def in_order(groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    return sorted(groups, key=lambda members: int(members[0]))


def least(matrix: np.ndarray) -> float:
    """Return the smallest entry off the diagonal; infinite for a single row."""
    return float(squareform(matrix, checks=False).min(initial=math.inf))


def overlap(separation: float) -> float:
    """Return the overlap of two Gaussians of equal weight and spread, `2 Q(separation)`, Q the standard normal tail."""
    return float(erfc(separation / math.sqrt(2)))


def noise_that_separates(distance: float, num_records: int, num_params: int, epochs: int = 1) -> float:
    """Return the noise multiplier of full batches at which groups are 2.1 P^(1/4) noise standard deviations apart.

    `distance` in (0, 2] is that of the groups' mean clipped gradients at the start, in units of the clip norm. After K
    epochs of N records at noise multiplier z groups are `distance * N sqrt(K) / (2 z)` apart (half the distance of
    their means / noise std), if steps are so small that gradients stay constant. Means of pure noise lie about P^(1/4)
    apart.

    >>> round(noise_that_separates(0.1, 2285, 28_938), 2)
    4.13
    """
    return distance * num_records * math.sqrt(epochs) / (2 * SEPARATION * num_params**0.25)
