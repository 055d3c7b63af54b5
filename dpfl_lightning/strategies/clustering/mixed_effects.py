"""A mixed-effects model: every client has its own model, which moves by what all updates say of its gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor
from torch.utils._pytree import tree_map

from dpfl_lightning.algorithms.mixed_effects import RandomEffects, blup_weights, limited_weights
from dpfl_lightning.algorithms.random_effects import at_least, excess, most_influence, opposed
from dpfl_lightning.algorithms.update_geometry import gram_and_width
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.summary import of_all
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.aggregation.client_differences import ClientDifferences, FoundGroups
from dpfl_lightning.strategies.clustering.local import Local


@dataclass
class MixedEffects(ClientDifferences, Local):
    """A model for each client that moves by the best linear unbiased prediction of the client's own mean gradient.

    The prediction is a weighted mean of all updates, for each layer. Products of updates of different rounds show how
    much clients differ, random samples of one distribution included: not at all, in groups, or each from all others.
    The weights are those of one model, of a model for each group, or of `local` then, and anything between. Clients
    without an update in a round move by those of the others.

    An update counts for others as far as noise and three times the median signal explain its length. Up to a third of
    the clients, whose updates clearly point away from most others, have no weight in the models of the others.

    Args:
        max_influence: bound on the weight of one client in another one's model, at least 1 / the clients that count in
            it. null is 0.25, or 2 / clients where that is more, but at most 2 / 3.

    **Privacy** Post-processing of released updates; nothing is charged.

    Reference: Henderson (1975) and Robinson (1991), "That BLUP is a good thing"; see `algorithms/mixed_effects.py`.
    """

    max_influence: Annotated[float, Interval(gt=0, le=1)] | None = None

    role = "base"
    needs_noise_std = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._noted: tuple[int, dict[str, float | Tensor]] = 0, {}  # round and its metrics
        self._found: FoundGroups | None = None  # when there were several last

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
        noise = at_least((np.array(updates.noise_std)[counted] / size) ** 2)
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
            covariances, groups = effects.covariance, self._groups_of(effects).groups
        else:  # every client knows its own gradient
            covariances, groups = np.broadcast_to(np.eye(count), products.products.shape), []
        error = noise / rounds + too_long / max(num_params, 1)  # R; what is too long does not average out over rounds
        apart = opposed(gram, num_params)
        own = np.zeros(count)
        for block, covariance in enumerate(covariances):
            columns = products.columns_of(block).to(combined.device)
            weight = self._weights(covariance, error, clients, apart)
            alone = np.clip(weight[clients, range(len(clients))], 0.0, 1.0)
            share = np.abs(weight)
            step = share @ size / share.sum(axis=1)  # a model moves as far as the clients that count in it
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

    def _groups_of(self, effects: RandomEffects) -> FoundGroups:
        """Return the groups that were found last: as models come to fit their groups, these differ less and less."""
        now = super()._groups_of(effects)
        if len(now.groups) > 1:
            self._found = now
        return self._found or now

    def _note(self, view: View, groups: Sequence[np.ndarray], own: Tensor) -> None:
        group = torch.full_like(own, torch.nan)
        for number, members in enumerate(groups):
            group[members] = number
        self._noted = view.round, {"own_weight": own, "num_groups": float(len(groups)), "group": group}

    def state_dict(self) -> dict[str, Any]:
        found = self._found and tree_map(lambda one: torch.from_numpy(one.copy()), self._found._asdict())
        return {**super().state_dict(), "found": found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._found = state["found"] and FoundGroups(**tree_map(lambda one: one.cpu().numpy(), state["found"]))

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        round, noted = self._noted
        return noted if round == view.state.round else {}
