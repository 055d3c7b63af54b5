"""Soft memberships of clients in groups from the first round's updates: a robust mixture, and that of the papers."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from dpfl_lightning.algorithms.update_geometry import Updates, centred_gram, double_columns, least, overlap
from dpfl_lightning.algorithms.update_groups import MOST_GROUPS, find_groups

_SMALL = 1e-6  # tolerance of EM, and the term it adds to variances
_ROUNDING = 1e-6  # bound of the relative rounding of float32 updates; serves as noise if there is no other


CONFIDENT = 0.9  # least probability of groups that are used as if they were right


@dataclass(frozen=True)
class Mixture:
    """Memberships of clients in groups, and their certainty.

    Args:
        responsibilities: `[n, M]` float64, rows of sum 1.
        embedding: picture of the updates, `[n, 2]` float64.
        separation: least separation of two groups: half the distance of their means / standard deviation.
        probability: estimated probability that these are the groups.
        diagnostics: numbers to log.
    """

    responsibilities: Tensor
    embedding: Tensor
    separation: float
    probability: float
    diagnostics: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_groups(self) -> int:
        return self.responsibilities.shape[1]

    @property
    def confident(self) -> bool:
        """Whether the groups are at least as likely as `CONFIDENT`."""
        return self.probability >= CONFIDENT

    @property
    def overlap(self) -> float:
        """`2 Q(separation)`; 1 for one group, and for groups that are not confident."""
        return overlap(self.separation) if self.confident and self.num_groups > 1 else 1.0


def noisy_updates(deltas: Tensor, noise_std: Sequence[float]) -> Updates:
    """Return what the search for groups needs of released updates `[n, P]` from one model with noise `[n]`."""
    # personal parameters have no noise
    noisy_params = sum(int(part.any(dim=0).sum()) for part in double_columns(deltas))
    lengths = np.array([float(vector_norm(row, dtype=torch.float64)) for row in deltas])
    rounding = _ROUNDING * lengths / math.sqrt(max(noisy_params, 1))
    return Updates(centred_gram(deltas), np.maximum(np.asarray(noise_std, dtype=float), rounding), noisy_params)


def robust_mixture(
    deltas: Tensor,
    noise_std: Sequence[float],
    num_groups: int | None = None,
    distance: float = math.inf,
) -> Mixture:
    """Find groups that one Gaussian does not explain, and the clients' memberships, by `find_groups`. Post-processing.

    `deltas` are released updates `[n, P]`, all from one model, with noise std `[n]`; groups matter from `distance` on.

    Reference: Malekmohammadi et al., but Ward's linkage instead of EM from random starts, and a rotation test.

    >>> deltas = torch.randn(12, 500, generator=torch.Generator().manual_seed(0))
    >>> deltas[4:, :50] += 5
    >>> mixture = robust_mixture(deltas, [1.0] * 12)
    >>> mixture.responsibilities.argmax(dim=1).tolist(), mixture.confident
    ([0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], True)
    """
    updates = noisy_updates(deltas, noise_std)
    groups = find_groups(updates, num_groups, distance)
    return Mixture(
        torch.from_numpy(groups.memberships),
        torch.from_numpy(updates.coordinates(2)),
        groups.separation,
        groups.probability,
        {"p_value": groups.p_value},
    )


def paper_mixture(deltas: Tensor, num_groups: int | None, seed: int = 0) -> Mixture:
    """Return the mixture of the papers' code: spherical, in the first two principal coordinates, scaled to [0, 1].

    It is never uncertain: without any separation it still shows about 1.2, an overlap near 0.2. `num_groups` None takes
    the number of 2..10 (below n) with the largest least separation; `seed` is that of k-means++. Post-processing.

    Reference: Malekmohammadi et al., with the public code's scaling, and its weights made equal after EM.
    """
    points = scaled_principal_coordinates(deltas)
    if num_groups is None:
        numbers = list(range(2, min(MOST_GROUPS, len(points) - 1) + 1)) or [1]
    else:
        numbers = [min(num_groups, len(points))]
    fits = {number: _paper_fit(points, number, seed) for number in numbers}
    number = max(fits, key=lambda count: fits[count][1])
    responsibilities, separation = fits[number]
    logged = {f"separation_of_{count}": value for count, (_, value) in fits.items()} if num_groups is None else {}
    members, picture = torch.from_numpy(responsibilities), torch.from_numpy(points)
    return Mixture(members, picture, separation, float(number > 1), logged)


@torch.no_grad()
def scaled_principal_coordinates(deltas: Tensor) -> np.ndarray:
    """Return coordinates `[n, 2]` in [0, 1]: directions from standardised updates, applied to the unscaled updates.

    As scikit-learn's `StandardScaler`, `PCA` and `MinMaxScaler`, but without a second `[n, P]` matrix; a coordinate in
    which all updates are equal is 0.
    """
    gram = cross = torch.zeros((), dtype=torch.float64)
    for columns in double_columns(deltas):
        spread = columns.std(dim=0, correction=0)
        scaled = (columns - columns.mean(dim=0)) / torch.where(spread > 0, spread, 1.0)
        gram, cross = gram + scaled @ scaled.T, cross + columns @ scaled.T
    values, vectors = np.linalg.eigh(gram.cpu().numpy())
    values, vectors = values[::-1][:2], vectors[:, ::-1][:, :2]
    nonzero = values > 1e-12 * max(values[0], 0.0)
    points = cross.cpu().numpy() @ vectors[:, nonzero] / np.sqrt(values[nonzero])
    points -= points.min(axis=0, initial=np.inf)
    largest = points.max(axis=0, initial=0.0)
    points /= np.where(largest > 0, largest, 1.0)
    return np.pad(points, ((0, 0), (0, 2 - points.shape[1])))


def _paper_fit(points: np.ndarray, number: int, seed: int) -> tuple[np.ndarray, float]:
    """Return responsibilities `[n, M]` and the least separation."""
    from sklearn.mixture import GaussianMixture

    if number == 1:
        return np.ones((len(points), 1)), 0.0
    equal = np.full(number, 1 / number)
    mixture = GaussianMixture(
        number, covariance_type="spherical", tol=_SMALL, init_params="k-means++", weights_init=equal, random_state=seed
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # EM may be stopped early or points may coincide, as in the papers' code
        mixture.fit(points)
    mixture.weights_ = equal
    spread = np.sqrt(mixture.covariances_)
    gaps = np.linalg.norm(mixture.means_[:, None] - mixture.means_[None], axis=2)
    separation = least(gaps / (2 * np.maximum(spread[:, None], spread[None, :])))
    return mixture.predict_proba(points), separation


def switch_round(overlap: float, rounds: int) -> int:
    """Return the last round in which groups are drawn, `max(1, floor((1 - overlap) rounds / 2))`.

    >>> [switch_round(one, 200) for one in (1.0, 0.215, 0.0)]
    [1, 78, 100]
    """
    return max(1, math.floor((1 - overlap) * rounds / 2 + 1e-6))
