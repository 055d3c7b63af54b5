"""PFA: updates of clients with small budgets are projected onto a subspace of updates of clients with large budgets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.aggregation.epsilon_weighted import EpsilonWeighted

_VARIANTS = ("liu_code", "liu_printed", "hdpfl")


def projected_mean(deltas: Tensor, weights: Tensor, public: Tensor, variant: str, components: int = 1) -> Tensor:
    """Return the weighted mean `[P]` of the updates, with private updates projected onto the public subspace.

    Let `m` and `s` be the mean and standard deviation of the public updates, and `V` their `components` leading
    directions. A private update x is replaced by:

    - liu_code: `V V' (x - m) + m`, with `V` of the centred public updates;
    - liu_printed: `v v' x`, with `v` the direction of the weighted public mean;
    - hdpfl: as liu_code, in coordinates `(x - m) / s`.

    Args:
        deltas: updates `[C, P]`.
        weights: `[C]`, >= 0, with sum 1.
        public: `[C]` bool; if all or none are public, the result is the plain weighted mean.
        variant: liu_code, liu_printed or hdpfl.
        components: dimension of the subspace, >= 1; liu_printed always uses 1.
    """
    if bool(public.all()) or not bool(public.any()):
        return (weights @ deltas.double()).to(deltas.dtype)
    weights, rows = weights.to(deltas.device, torch.float64), deltas.double()
    of_public, of_private = weights * public, weights * ~public
    private_mean = of_private @ rows / of_private.sum().clamp_min(1e-300)
    image = _image(private_mean, rows[public], of_public[public], variant, components)
    return (of_public @ rows + of_private.sum() * image).to(deltas.dtype)


def _image(x: Tensor, public: Tensor, weights: Tensor, variant: str, components: int) -> Tensor:
    """Project `x` `[P]` into the subspace of the public updates `[m, P]`."""
    mean = public.mean(dim=0)
    if variant == "liu_printed" or len(public) == 1:  # one centred update is zero, so the update itself is used
        main = (weights @ public if variant == "liu_printed" else mean)[None]
        return _projected(x, main, 1, 0.0)
    scale = torch.ones_like(mean)
    if variant == "hdpfl":
        std = public.std(dim=0, correction=0)
        scale = torch.where(std > 0, std, 1.0)
    rounding = 1e-24 * float((public / scale).square().sum())  # of equal updates
    return _projected((x - mean) / scale, (public - mean) / scale, components, rounding) * scale + mean


def _projected(x: Tensor, rows: Tensor, components: int, rounding: float) -> Tensor:
    """Project `x` `[P]` onto the leading right singular vectors of `rows` `[m, P]`, using their m x m Gram matrix."""
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    kept = values[-components:] > max(1e-12 * float(values[-1]), rounding)
    values, vectors = values[-components:][kept], vectors[:, -components:][:, kept]
    return ((vectors / values) @ (vectors.T @ (rows @ x))) @ rows


def larger_budgets(epsilon: np.ndarray, grouping: str, top_fraction: float, seed: int) -> np.ndarray:
    """Return which clients are "public" `[N]` bool: the group with the larger mean budget, or all if budgets are equal.

    Args:
        epsilon: claimed budget of each client, `[N]`.
        grouping: `top`, or a key of `_GROUPINGS`.
        top_fraction: share of the clients that is public under `top`, in (0, 1).
        seed: of the grouping.
    """
    if epsilon.max() == epsilon.min():
        return np.ones(len(epsilon), dtype=bool)
    if grouping == "top":
        count = max(1, round(top_fraction * len(epsilon)))
        return np.isin(np.arange(len(epsilon)), np.argsort(-epsilon, kind="stable")[:count])
    scaled = ((epsilon - epsilon.min()) / (epsilon.max() - epsilon.min()))[:, None]
    group = _GROUPINGS[grouping](scaled, seed)
    first = epsilon[group == 0].mean() if (group == 0).any() else -np.inf
    second = epsilon[group == 1].mean() if (group == 1).any() else -np.inf
    return group == (1 if second > first else 0)


def _mixture(scaled: np.ndarray, seed: int) -> np.ndarray:
    from sklearn.mixture import GaussianMixture

    return GaussianMixture(2, random_state=seed).fit(scaled).predict(scaled)


def _kmeans(scaled: np.ndarray, seed: int) -> np.ndarray:
    from sklearn.cluster import KMeans

    return KMeans(2, n_init=10, random_state=seed).fit_predict(scaled)


def _hierarchical(scaled: np.ndarray, seed: int) -> np.ndarray:
    from sklearn.cluster import AgglomerativeClustering

    return AgglomerativeClustering(2, linkage="single").fit_predict(scaled)


_GROUPINGS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "mixture": _mixture,
    "kmeans": _kmeans,
    "hierarchical": _hierarchical,
}


class Pfa(EpsilonWeighted):
    """Projected federated averaging: weights by claimed budgets, small budgets projected onto large ones.

    Clients are split once, by their claimed epsilon, into "public" (large) and "private" (small). In every round the
    private updates are replaced by their projection onto the leading directions of the public updates. If a round has
    only clients of one kind, it is WeiAvg (`epsilon_weighted`). The claimed epsilon is trusted twice: for the weights
    and for the groups.

    Args:
        variant: form of the projection: `liu_code`, `liu_printed`, or `hdpfl`, with which the numbers of the
            noise-aware paper were computed.
        grouping: how clients are split: `mixture` (two Gaussians), `top` (the largest `top_fraction`), `kmeans` or
            `hierarchical`.
        components: dimension of the subspace, >= 1; `liu_printed` always uses 1.
        top_fraction: share of clients that are public with `grouping: top`, in (0, 1).

    **Privacy** Post-processing. The clients' budgets themselves are disclosed to the server.

    Raises:
        UserError: a name is unknown, a number is out of range, or a client has no finite budget.

    Reference: Liu et al. (2021), Algorithm 3 (liu_printed) and its code (liu_code), which projects each parameter
    tensor separately; here the whole vector is projected. The code of Malekmohammadi et al. (2024) (hdpfl).
    """

    needs_training = True

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def __init__(
        self,
        variant: str = "liu_code",
        grouping: str = "mixture",
        components: int = 1,
        top_fraction: float = 0.1,
    ) -> None:
        groupings = (*_GROUPINGS, "top")
        require(variant in _VARIANTS, "strategies.pfa.variant", f"be one of {', '.join(_VARIANTS)}", variant)
        require(grouping in groupings, "strategies.pfa.grouping", f"be one of {', '.join(groupings)}", grouping)
        require(components >= 1, "strategies.pfa.components", "be >= 1", components)
        require(0 < top_fraction < 1, "strategies.pfa.top_fraction", "be in (0, 1)", top_fraction)
        self.variant, self.grouping, self.components, self.top_fraction = variant, grouping, components, top_fraction

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        schedule = super().plan_run(schedule, view)
        epsilon = np.array(view.facts.reported_epsilon)
        self.public = torch.from_numpy(larger_budgets(epsilon, self.grouping, self.top_fraction, view.seed))
        return schedule

    def combine(self, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        public = self.public[list(updates.clients)].to(updates.released.device)
        rows = [
            projected_mean(updates.released, share.to(updates.released.device), public, self.variant, self.components)
            if bool(share.any())
            else torch.zeros_like(updates.released[0])
            for share in weights
        ]
        return torch.stack(rows)
