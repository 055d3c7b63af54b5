"""A mixed-effects model: every client has its own model, which moves by what all updates say of its gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.algorithms.mixed_effects import blup_weights, limited_weights
from dpfl_lightning.algorithms.random_effects import LEAST, excess, most_influence, opposed
from dpfl_lightning.algorithms.update_geometry import gram_and_width
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.summary import of_all
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.aggregation.client_differences import ClientDifferences
from dpfl_lightning.strategies.clustering.local import Local


@dataclass
class MixedEffects(ClientDifferences, Local):
    """A model for each client that moves by the best linear unbiased prediction of the client's own mean gradient.

    The prediction is a weighted mean of all updates, for each layer. Products of updates of different rounds show how
    much clients differ: not at all, in groups, or each from all others. The weights are those of one model, of a model
    for each group, or of `local` then, and anything between. Clients without an update in a round move by those of the
    others.

    An update counts for others as far as noise and three times the median signal explain its length. Up to a third of
    the clients, whose updates clearly point away from most others, move their own models alone.

    Args:
        max_influence: bound on the weight of one client in another one's model. null is 0.25, or 2 / clients where that
            is more, but at most 2 / 3.

    **Privacy** Post-processing of released updates; nothing is charged.

    Reference: Henderson (1975) and Robinson (1991), "That BLUP is a good thing"; see `algorithms/mixed_effects.py`.
    """

    max_influence: Annotated[float, Interval(gt=0, le=1)] | None = None

    role = "base"
    needs_noise_std = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._noted: tuple[int, dict[str, float | Tensor]] = 0, {}  # round and its metrics

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        return torch.ones(len(updates.clients), dtype=torch.float64)

    def combine(self, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        combined = torch.zeros_like(view.state.models)
        counted = np.flatnonzero(weights.cpu().any(dim=0).numpy())  # masks leave out the others
        if not len(counted):
            return combined
        clients, count = np.array(updates.clients)[counted], view.facts.num_clients
        size = np.array(view.learning_rate)[clients] * np.array(updates.steps)[counted]
        noise = (np.array(updates.noise_std)[counted] / size) ** 2
        noise = np.maximum(noise, LEAST * noise.mean())
        rounds = view.schedule.rounds * len(clients) / count
        gram, num_params = gram_and_width(view.module.sent(updates.released[counted]))
        gram /= np.outer(size, size)
        too_long = excess(np.diag(gram), num_params * noise, num_params)
        cut = np.sqrt(1 - too_long / np.maximum(np.diag(gram), 1e-300))
        gradients = updates.released[counted] * torch.from_numpy(cut / size).to(updates.released)[:, None]
        products = self._products_of(view)
        if noise.any():
            products.add(gradients, noise, clients)
            effects = products.effects()
            covariances, groups = effects.covariance, effects.groups()
        else:  # every client knows its own gradient
            covariances, groups = np.broadcast_to(np.eye(count), products.products.shape), []
        error = noise / rounds + too_long / max(num_params, 1)
        apart = opposed(gram, num_params)
        own = np.zeros(count)
        for block, covariance in enumerate(covariances):
            columns = products.columns_of(block).to(combined.device)
            weight = self._weights(covariance, error, clients, apart)
            alone = np.clip(weight[clients, range(len(clients))], 0.0, 1.0)
            step = np.full(count, size.mean())
            step[clients] += alone * (size - size.mean())  # a client alone moves as far as it did, others as the mean
            steps = torch.from_numpy(weight * step[:, None]).to(combined.device)
            combined[:, columns] = (steps @ gradients[:, columns].double()).to(combined)
            own[clients] += alone * len(columns) / max(view.module.num_sent, 1)
        self._note(view, groups, of_all(clients.tolist(), own[clients].tolist(), count))
        return combined

    def _weights(self, covariance: np.ndarray, error: np.ndarray, clients: np.ndarray, apart: np.ndarray) -> np.ndarray:
        """Return the weights `[N, C]` of the updates in each client's model; those `apart` count among themselves."""
        largest = self.max_influence or most_influence(len(clients))
        own = np.arange(len(covariance))[:, None] == clients
        weight = limited_weights(blup_weights(covariance, error, clients), own, largest)
        if apart.any():
            others = np.zeros_like(weight)
            rest = blup_weights(covariance, error[~apart], clients[~apart])
            others[:, ~apart] = limited_weights(rest, own[:, ~apart], largest)
            weight = np.where(own[:, apart].any(axis=1)[:, None], weight, others)
        return weight

    def _note(self, view: View, groups: Sequence[np.ndarray], own: Tensor) -> None:
        group = torch.full_like(own, torch.nan)
        for number, members in enumerate(groups):
            group[members] = number
        self._noted = view.round, {"own_weight": own, "num_groups": float(len(groups)), "group": group}

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        round, noted = self._noted
        return noted if round == view.state.round else {}
