"""How far groups of updates lie apart once the noise, which the server knows, is taken off."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform
from scipy.special import erfc
from torch import Tensor

_COLUMNS = 1 << 13  # that are converted to float64 at once


@torch.no_grad()
def centred_gram(deltas: Tensor) -> np.ndarray:
    """`(X - mean) (X - mean)'` of updates X `[n, P]`: `[n, n]` float64, all that groups are found by.

    >>> centred_gram(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    array([[ 1., -1.],
           [-1.,  1.]])
    """
    deltas = deltas.cpu() if deltas.device.type == "mps" else deltas  # MPS has no float64
    total = torch.zeros(len(deltas), len(deltas), dtype=torch.float64, device=deltas.device)
    for part in deltas.split(_COLUMNS, dim=1):
        part = part.double()
        part = part - part.mean(dim=0)
        total += part @ part.T
    return total.cpu().numpy()


@dataclass(frozen=True)
class Updates:
    """n released updates: their Gram matrix, and how much of it is noise.

    Args:
        gram: `[n, n]` float64, see `centred_gram`.
        noise_std: `[n]`, of the noise in each parameter of each update, >= 0.
        num_params: P.
        sampling_std: `[n]`, the most by which an update lies off the mean of its group because the client's records
            are a sample, a length: `steps * learning_rate * clip_norm / sqrt(records)`; 0 neglects it.
    """

    gram: np.ndarray
    noise_std: np.ndarray
    num_params: int
    sampling_std: np.ndarray

    @functools.cached_property
    def unit(self) -> float:
        """Root mean square of `noise_std`: separations are counted in it."""
        return math.sqrt(float(np.mean(self.noise_std**2)))

    @functools.cached_property
    def signal(self) -> np.ndarray:
        """The Gram matrix without the `P * noise_std^2` that noise adds to its diagonal."""
        return self.gram - np.diag(self.num_params * self.noise_std**2)

    @functools.cached_property
    def tree(self) -> WardTree:
        """Ward's linkage, as if all had as much noise as the noisiest: it must not part the noisy from the others."""
        filled = self.signal + np.diag(np.full(len(self.gram), self.num_params * np.max(self.noise_std**2)))
        squares = np.diag(filled)
        return WardTree(squares[:, None] + squares[None, :] - 2 * filled)

    def half_distances(self, groups: Sequence[np.ndarray], with_noise: bool = False) -> np.ndarray:
        """Half the distances between the groups' means, `[m, m]`, without what noise adds to them.

        `|mean_a - mean_b|^2 - P (sum_a noise_std^2 / n_a^2 + sum_b noise_std^2 / n_b^2)`, 0 where that is negative.
        """
        share = np.zeros((len(groups), len(self.gram)))
        for row, members in enumerate(groups):
            share[row, members] = 1 / len(members)
        between = share @ (self.gram if with_noise else self.signal) @ share.T
        squares = np.diag(between)
        return np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * between, 0.0)) / 2

    def separation(self, groups: Sequence[np.ndarray], with_noise: bool = False) -> float:
        """Least separation of two groups: half the distance of their means / noise standard deviation.

        Without noise it is infinite, unless two means are the same; so it is for one group.
        """
        half = least(self.half_distances(groups, with_noise))
        return half / self.unit if self.unit > 0 else math.inf if half > 0 else 0.0

    def coordinates(self, dimensions: int) -> np.ndarray:
        """The updates along the directions in which they differ most, `[n, dimensions]`, in noise standard deviations.

        Directions are those of the noise-free Gram matrix, so that a noisy client does not draw one to itself.
        """
        values, vectors = np.linalg.eigh(self.signal)
        order = np.argsort(-values)[:dimensions]
        image = self.gram @ vectors[:, order]
        length = np.sqrt(np.maximum(np.einsum("ij,ij->j", vectors[:, order], image), 0.0))
        unit = self.unit or math.sqrt(np.trace(self.gram) / len(self.gram)) or 1.0
        image /= np.where(length > 0, length, np.inf) * unit
        image *= np.where(image[np.abs(image).argmax(axis=0), range(image.shape[1])] < 0, -1.0, 1.0)  # one sign for all
        return np.pad(image, ((0, 0), (0, dimensions - image.shape[1])))


class WardTree:
    """Who is merged with whom: nodes 0..n-1 are the points, the next n-1 the merges in their order.

    Args:
        squares: `[n, n]` squared distances.
    """

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
        """The two nodes that were merged into this one."""
        left, right = self._merges[node - self.size]
        return int(left), int(right)

    def members(self, node: int) -> np.ndarray:
        """The points of a node, ascending."""
        return np.sort(self._members[node])

    def cut(self, groups: int) -> list[np.ndarray]:
        """The members of each of so many groups (1..n), in the order of their first members."""
        nodes = [self.root]
        while len(nodes) < groups:
            last = max(nodes)
            nodes.remove(last)
            nodes += self.parts(last)
        return in_order([self.members(node) for node in nodes])


def in_order(groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    """By their first members."""
    return sorted(groups, key=lambda members: int(members[0]))


def least(matrix: np.ndarray) -> float:
    """Smallest entry off the diagonal; infinite if there is none."""
    return float(squareform(matrix, checks=False).min(initial=math.inf))


def overlap(separation: float) -> float:
    """How much two Gaussians of equal weight and spread overlap, `2 Q(separation)`, Q the standard normal tail.

    >>> [round(overlap(s), 4) for s in (0.0, 1.0, 3.0)]
    [1.0, 0.3173, 0.0027]
    """
    return float(erfc(separation / math.sqrt(2)))


def expected_separation(
    gradient_distance: float, num_records: int, noise_multiplier: float, epochs: int = 1, batch_size: int | None = None
) -> float:
    """Separation that the first round will show, `g sqrt(K N b) / (2 z)`, whatever clip norm and learning rate are.

    Args:
        gradient_distance: g, between two groups' mean clipped gradients at the start / clip norm, in [0, 2].
        num_records: N, of one client.
        noise_multiplier: z of the first round, > 0.
        epochs: K, local ones.
        batch_size: b; None is the full batch.

    Holds while steps are so small that gradients stay as they were, and noise from drawing batches is neglected.

    >>> expected_separation(0.1, 6600, 1.31)
    251.9...
    """
    batch = num_records if batch_size is None else batch_size
    return gradient_distance * math.sqrt(epochs * num_records * batch) / (2 * noise_multiplier)
