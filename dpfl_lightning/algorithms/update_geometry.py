"""Distances between groups of updates, without the noise, whose variance the server knows."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform
from scipy.special import erfc
from torch import Tensor

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
def centred_gram(deltas: Tensor) -> np.ndarray:
    """Return `(X - mean) (X - mean)'` of updates X `[n, P]`: `[n, n]` float64, all that the search for groups needs."""
    return gram_of(columns - columns.mean(dim=0) for columns in double_columns(deltas)).numpy()


@dataclass(frozen=True)
class Updates:
    """n released updates: their Gram matrix, and how much of it is noise.

    Args:
        gram: `[n, n]` float64, see `centred_gram`.
        noise_std: noise std in each parameter of each update, `[n]`, >= 0.
        sampling_std: upper bound of the distance between an update and the mean of its group because the client's
            records are a sample, `[n]`: `steps * learning_rate * clip_norm / sqrt(records)`; 0 neglects it.
    """

    gram: np.ndarray
    noise_std: np.ndarray
    num_params: int
    sampling_std: np.ndarray

    @functools.cached_property
    def unit(self) -> float:
        """Root mean square of `noise_std`; the unit of separations."""
        return math.sqrt(float(np.mean(self.noise_std**2)))

    @functools.cached_property
    def signal(self) -> np.ndarray:
        """The Gram matrix without `P * noise_std^2`, which noise adds to its diagonal."""
        return self.gram - np.diag(self.num_params * self.noise_std**2)

    @functools.cached_property
    def tree(self) -> WardTree:
        """Ward's linkage, as if all updates were as noisy as the noisiest, so that it does not split them by noise."""
        equalised = self.signal + np.diag(np.full(len(self.gram), self.num_params * np.max(self.noise_std**2)))
        squares = np.diag(equalised)
        return WardTree(squares[:, None] + squares[None, :] - 2 * equalised)

    def half_distances(self, groups: Sequence[np.ndarray], with_noise: bool = False) -> np.ndarray:
        """Return half the distances between the groups' means, `[m, m]`, without the contribution of noise.

        `|mean_a - mean_b|^2 - P (sum_a noise_std^2 / n_a^2 + sum_b noise_std^2 / n_b^2)`, or 0 if that is negative.
        """
        weights = np.zeros((len(groups), len(self.gram)))
        for row, members in enumerate(groups):
            weights[row, members] = 1 / len(members)
        between = weights @ (self.gram if with_noise else self.signal) @ weights.T
        squares = np.diag(between)
        return np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * between, 0.0)) / 2

    def separation(self, groups: Sequence[np.ndarray], with_noise: bool = False) -> float:
        """Return the least separation of two groups: half the distance of their means / noise standard deviation.

        It is infinite for one group, and without noise unless two means are equal.
        """
        half_distance = least(self.half_distances(groups, with_noise))
        return half_distance / self.unit if self.unit > 0 else math.inf if half_distance > 0 else 0.0

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


class WardTree:
    """Ward's clustering of `[n, n]` squared distances: nodes 0..n-1 are the points, the others the merges in order."""

    def __init__(self, squares: np.ndarray) -> None:
        self.size = len(squares)
        distances = np.sqrt(np.maximum(squareform(squares, checks=False), 0.0))
        self._merges = linkage(distances, "ward")[:, :2].astype(int) if self.size > 1 else np.empty((0, 2), int)
        self._members: list[list[int]] = [[point] for point in range(self.size)]
        for left, right in self._merges:
            self._members.append(self._members[left] + self._members[right])

    @property
    def root(self) -> int:
        return 2 * self.size - 2

    def parts(self, node: int) -> tuple[int, int]:
        """Return the two nodes that were merged into this one."""
        left, right = self._merges[node - self.size]
        return int(left), int(right)

    def members(self, node: int) -> np.ndarray:
        return np.sort(self._members[node])

    def cut(self, groups: int) -> list[np.ndarray]:
        """Return the members of each of this number of groups (1..n), in the order of their first members."""
        nodes = [self.root]
        while len(nodes) < groups:
            newest = max(nodes)
            nodes.remove(newest)
            nodes += self.parts(newest)
        return in_order([self.members(node) for node in nodes])


def in_order(groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    return sorted(groups, key=lambda members: int(members[0]))


def least(matrix: np.ndarray) -> float:
    """Return the smallest entry off the diagonal; infinite for a single row."""
    return float(squareform(matrix, checks=False).min(initial=math.inf))


def overlap(separation: float) -> float:
    """Return the overlap of two Gaussians of equal weight and spread, `2 Q(separation)`, Q the standard normal tail."""
    return float(erfc(separation / math.sqrt(2)))


def expected_separation(
    gradient_distance: float, num_records: int, noise_multiplier: float, epochs: int = 1, batch_size: int | None = None
) -> float:
    """Return the expected separation in the first round, `g sqrt(K N b) / (2 z)`: K epochs, N records, b a batch, z.

    It holds for steps so small that gradients stay constant, and neglects the noise from drawing batches. g in [0, 2]
    is the distance between two groups' mean clipped gradients at the start / clip norm; a batch of None is full.

    >>> expected_separation(0.1, 6600, 1.31)
    251.9...
    """
    batch = num_records if batch_size is None else batch_size
    return gradient_distance * math.sqrt(epochs * num_records * batch) / (2 * noise_multiplier)
