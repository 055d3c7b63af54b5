"""PFA: updates of clients with small budgets are projected onto a subspace of updates of clients with large budgets."""

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.errors import require, require_one_of
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.aggregation.epsilon_weighted import EpsilonWeighted


def projected_mean(deltas: Tensor, weights: Tensor, public: Tensor, variant: str, components: int = 1) -> Tensor:
    """Return the weighted mean `[P]` of the updates `[C, P]`, with private updates projected onto the public subspace.

    Let `m` and `s` be the mean and standard deviation of the public updates, and `V` their `components` leading
    directions. A private update x becomes `V V' (x - m) + m` (liu_code, `V` of the centred public updates), `v v' x`
    (liu_printed, `v` the direction of the weighted public mean), or as liu_code in coordinates `(x - m) / s` (hdpfl).

    Args:
        deltas: P numbers are projected together: those of one tensor, or of all of them.
        weights: `[C]`, >= 0, with sum 1, or all 0. A client with weight 0 is in no mean and in no direction.
        public: `[C]` bool; if all or none of the weighted clients are public, the result is the plain weighted mean.
    """
    weighted = weights > 0
    rows, weights, public = deltas[weighted].double(), weights[weighted].double(), public[weighted]
    if bool(public.all()) or not bool(public.any()):
        return (weights @ rows).to(deltas.dtype)
    of_public, of_private = weights[public], weights[~public]
    private_mean = of_private @ rows[~public] / of_private.sum()
    image = _image(private_mean, rows[public], of_public, variant, components)
    return (of_public @ rows[public] + of_private.sum() * image).to(deltas.dtype)


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

    The options are those of `Pfa`; `epsilon` `[N]` holds the claimed budgets.
    """
    if epsilon.max() == epsilon.min():
        return np.ones(len(epsilon), dtype=bool)
    if grouping == "top":
        count = max(1, round(top_fraction * len(epsilon)))
        return np.isin(np.arange(len(epsilon)), np.argsort(-epsilon, kind="stable")[:count])
    from sklearn.cluster import AgglomerativeClustering, KMeans
    from sklearn.mixture import GaussianMixture

    models = {
        "mixture": GaussianMixture(2, random_state=seed),
        "kmeans": KMeans(2, n_init=10, random_state=seed),
        "hierarchical": AgglomerativeClustering(2, linkage="single"),
    }
    group = models[grouping].fit_predict(((epsilon - epsilon.min()) / (epsilon.max() - epsilon.min()))[:, None])
    means = [epsilon[group == one].mean() if (group == one).any() else -np.inf for one in (0, 1)]
    return group == int(np.argmax(means))


class Pfa(EpsilonWeighted):
    """Projected federated averaging: weights by claimed budgets, small budgets projected onto large ones.

    Clients are split once, by their claimed epsilon, into "public" (large) and "private" (small). In every round the
    private updates are replaced by their projection onto the leading directions of the public updates. With several
    models, this is done for each model with the clients that have weight in it. A model with clients of one kind only
    is that of WeiAvg (`epsilon_weighted`). The claimed epsilon is trusted for weights and groups.

    Args:
        variant: form of the projection: `liu_code`, for each parameter tensor separately; `liu_printed`, for the whole
            update; or `hdpfl`, for the whole update, with which the numbers of the noise-aware paper were computed.
        grouping: how clients are split: `mixture` (two Gaussians), `top` (the largest `top_fraction`), `kmeans` or
            `hierarchical`.
        components: dimension of the subspace, >= 1; `liu_printed` always uses 1.
        top_fraction: share of clients that are public with `grouping: top`, in (0, 1).

    **Privacy** Post-processing. The clients' budgets themselves are disclosed to the server.

    Reference: Liu et al. (2021), Algorithm 3 (liu_printed) and its code (liu_code). The code of Malekmohammadi et al.
    (2024) (hdpfl).
    """

    needs_training = True

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def __init__(
        self, variant: str = "liu_code", grouping: str = "mixture", components: int = 1, top_fraction: float = 0.1
    ) -> None:
        require_one_of(("liu_code", "liu_printed", "hdpfl"), "strategies.pfa.variant", variant)
        require_one_of(("mixture", "kmeans", "hierarchical", "top"), "strategies.pfa.grouping", grouping)
        require(components >= 1, "strategies.pfa.components", "be >= 1", components)
        require(0 < top_fraction < 1, "strategies.pfa.top_fraction", "be in (0, 1)", top_fraction)
        self._variant, self._grouping, self._components, self._top = variant, grouping, components, top_fraction

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        schedule = super().plan_run(schedule, view)
        epsilon = np.array(view.facts.reported_epsilon)
        self._public = torch.from_numpy(larger_budgets(epsilon, self._grouping, self._top, view.seed))
        return schedule

    def combine(self, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        deltas = updates.released
        public, weights = self._public[list(updates.clients)].to(deltas.device), weights.to(deltas.device)
        sizes = [tensor.numel() for tensor in view.module.trainable] if self._variant == "liu_code" else deltas.shape[1]
        parts = deltas.split(sizes, dim=1)
        rows = [
            torch.cat([projected_mean(part, row, public, self._variant, self._components) for part in parts])
            for row in weights
        ]
        return torch.stack(rows)
