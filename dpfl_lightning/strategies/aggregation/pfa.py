"""PFA: the updates of clients with small budgets are projected onto what those with large budgets found."""

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
    """The weighted mean of the updates, private ones by their image in the subspace of the public ones, `[P]`.

    With `m` and `s` the public updates' mean and standard deviation and `V` their `components` leading directions:

    - liu_code: `V V' (x - m) + m`, `V` of the centred public updates;
    - liu_printed: `v v' x`, `v` the direction of the weighted public mean;
    - hdpfl: as liu_code, in coordinates `(x - m) / s`.

    Args:
        deltas: `[C, P]`.
        weights: `[C]`, >= 0, of sum 1.
        public: `[C]` bool; all or none is the plain weighted mean.
        variant: liu_code, liu_printed or hdpfl.
        components: dimension of the subspace, >= 1; liu_printed has one.
    """
    if bool(public.all()) or not bool(public.any()):
        return (weights @ deltas.double()).to(deltas.dtype)
    weights, rows = weights.to(deltas.device, torch.float64), deltas.double()
    of_public, of_private = weights * public, weights * ~public
    private_mean = of_private @ rows / of_private.sum().clamp_min(1e-300)
    image = _image(private_mean, rows[public], of_public[public], variant, components)
    return (of_public @ rows + of_private.sum() * image).to(deltas.dtype)


def _image(x: Tensor, public: Tensor, weights: Tensor, variant: str, components: int) -> Tensor:
    """`x` `[P]` in the subspace of the public updates `[m, P]`."""
    mean = public.mean(dim=0)
    if variant == "liu_printed" or len(public) == 1:  # one centred update is zero: it is its own direction
        main = (weights @ public if variant == "liu_printed" else mean)[None]
        return _projected(x, main, 1, 0.0)
    scale = torch.ones_like(mean)
    if variant == "hdpfl":
        std = public.std(dim=0, correction=0)
        scale = torch.where(std > 0, std, 1.0)
    rounding = 1e-24 * float((public / scale).square().sum())  # of updates that are all the same
    return _projected((x - mean) / scale, (public - mean) / scale, components, rounding) * scale + mean


def _projected(x: Tensor, rows: Tensor, components: int, rounding: float) -> Tensor:
    """`x` `[P]` on the leading right singular vectors of `rows` `[m, P]`, through their m x m Gram matrix."""
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    kept = values[-components:] > max(1e-12 * float(values[-1]), rounding)
    values, vectors = values[-components:][kept], vectors[:, -components:][:, kept]
    return ((vectors / values) @ (vectors.T @ (rows @ x))) @ rows


def larger_budgets(epsilon: np.ndarray, grouping: str, top_fraction: float, seed: int) -> np.ndarray:
    """Which clients are "public": the group with the larger mean budget, `[N]` bool; all of them if they are equal."""
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

    Clients are split once by their claimed epsilon into "public" (large) and "private" (small); in every round the
    private updates are replaced by their projection onto the leading directions of the public ones (`projected_mean`).
    A round with only one of the two kinds is WeiAvg.

    Args:
        variant: liu_code (default), liu_printed or hdpfl (what the noise-aware paper's numbers came from).
        grouping: mixture (default: two Gaussians), top (the largest `top_fraction`), kmeans or hierarchical.
        components: dimension of the subspace, >= 1.
        top_fraction: share of clients that are public under `top`, in (0, 1).

    Trusts the claimed epsilon, twice: for weights and for groups.

    **Privacy** Post-processing; the clients' budgets themselves are disclosed to the server.

    Raises:
        UserError: an unknown variant or grouping, or a number out of range.

    Reference: Liu et al. (2021), Algorithm 3 (liu_printed) and its code (liu_code, there for each parameter tensor,
    here for the whole vector); Malekmohammadi et al. (2024)'s code (hdpfl).
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
            projected_mean(updates.released, own.to(updates.released.device), public, self.variant, self.components)
            if bool(own.any())
            else torch.zeros_like(updates.released[0])
            for own in weights
        ]
        return torch.stack(rows)
