"""PFA: updates of clients with small budgets are projected onto a subspace of updates of clients with large budgets."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.algorithms.cohorts import larger_budgets
from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.jobs import TRAINING
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.papers.baselines.epsilon_weighted import EpsilonWeighted

_TOP = 0.1  # share of clients that are public with `grouping: top`


@dataclass
class Pfa(EpsilonWeighted):
    """Projected federated averaging: weights by claimed budgets, small budgets projected onto large ones.

    Clients are split once, by their claimed epsilon, into "public" (large) and "private" (small). In every round the
    private updates are replaced by their projection onto the leading directions of the public updates, for each
    parameter tensor. With several models, this is done for each model with the clients that have weight in it. A model
    with clients of one kind only is that of WeiAvg (`epsilon_weighted`). The claimed epsilon is trusted.

    Args:
        grouping: how clients are split: `mixture` (two Gaussians), `top` (the largest `top_fraction`), `kmeans` or
            `hierarchical`.
        components: dimension of the subspace.
        top_fraction: share of clients that are public with `grouping: top`; null is 0.1.

    **Privacy** Post-processing. The clients' budgets themselves are disclosed to the server.

    Reference: Liu et al. (2021), as in their code; their Algorithm 3 prints a projection of the whole update. That of
    Malekmohammadi et al. (2024) is `WholeUpdatePfa` of `experiments/papers/noise_aware/pfa.py`.
    """

    grouping: Literal["mixture", "kmeans", "hierarchical", "top"] = "mixture"
    components: Annotated[int, Interval(ge=1)] = 1
    top_fraction: Annotated[float, Interval(gt=0, lt=1)] | None = None

    jobs = TRAINING

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = self.grouping != "top" and self.top_fraction is not None
        must = f"be null with grouping {self.grouping}"
        require(not unused, self._key("top_fraction"), must, self.top_fraction, "It is of grouping top alone.")

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        schedule = super().plan_run(schedule, view)
        epsilon = np.array(view.facts.reported_epsilon)
        top = _TOP if self.top_fraction is None else self.top_fraction
        self._public = torch.from_numpy(larger_budgets(epsilon, self.grouping, top, view.seed))
        return schedule

    def combine(self, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        deltas = updates.released
        public, weights = self._public[list(updates.clients)].to(deltas.device), weights.to(deltas.device)
        parts = deltas.split([tensor.numel() for tensor in view.module.trainable], dim=1)
        return torch.stack([torch.cat([self._mean(part, row, public) for part in parts]) for row in weights])

    def _mean(self, deltas: Tensor, weights: Tensor, public: Tensor) -> Tensor:
        """Return the weighted mean `[P]` of the updates `[C, P]`, with private updates projected.

        `weights` `[C]` are >= 0 with sum 1, or all 0. A client with weight 0 is in no mean and in no direction. If all
        or none of the weighted clients are `public` `[C]`, the result is the plain weighted mean.
        """
        weighted = weights > 0
        rows, weights, public = deltas[weighted].double(), weights[weighted].double(), public[weighted]
        if bool(public.all()) or not bool(public.any()):
            return (weights @ rows).to(deltas.dtype)
        of_public, of_private = weights[public], weights[~public]
        private_mean = of_private @ rows[~public] / of_private.sum()
        image = self._image(private_mean, rows[public])
        return (of_public @ rows[public] + of_private.sum() * image).to(deltas.dtype)

    def _image(self, x: Tensor, public: Tensor) -> Tensor:
        """Project `x` `[P]`: `V V' (x - m) + m`, m the mean of the public updates `[m, P]`, V their directions."""
        mean = public.mean(dim=0)
        return projected(x, public, mean, torch.ones_like(mean), self.components)


def projected(x: Tensor, public: Tensor, mean: Tensor, scale: Tensor, components: int) -> Tensor:
    """Project `x` `[P]` onto the leading directions of `public` `[m, P]`, in the coordinates `(x - mean) / scale`.

    A single public update is itself the direction, because it would be zero after centring.
    """
    if len(public) == 1:
        return _onto(x, public, 1, 0.0)
    rounding = 1e-24 * float((public / scale).square().sum())  # of equal updates
    return _onto((x - mean) / scale, (public - mean) / scale, components, rounding) * scale + mean


def _onto(x: Tensor, rows: Tensor, components: int, rounding: float) -> Tensor:
    """Project `x` `[P]` onto the leading right singular vectors of `rows` `[m, P]`, using their m x m Gram matrix."""
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    kept = values[-components:] > max(1e-12 * float(values[-1]), rounding)
    values, vectors = values[-components:][kept], vectors[:, -components:][:, kept]
    return ((vectors / values) @ (vectors.T @ (rows @ x))) @ rows
