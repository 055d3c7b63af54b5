"""KM-CDPFL: k-means on the updates of each round decides which clients share their updates."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.algorithms.update_geometry import centred_gram
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.papers.clustered.cluster_metrics import GroupingStrategy
from dpfl_lightning.strategies.clustering.local import Local


def coordinates(deltas: Tensor) -> np.ndarray:
    """Return points `[C, C]`, float64, with the same distances between them as the updates `deltas` `[C, P]`."""
    values, vectors = np.linalg.eigh(centred_gram(deltas))
    return vectors * np.sqrt(np.maximum(values, 0.0))


def kmeans(points: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    """Return the cluster `[n]` of each of the points `[n, d]`, by k-means++ with the best of 10 starts."""
    from sklearn.cluster import KMeans

    count = min(num_clusters, len(points))
    return KMeans(count, init="k-means++", n_init=10, random_state=seed).fit_predict(points)


@dataclass
class KMeansClusters(GroupingStrategy, Local):
    """KM-CDPFL: k-means on the updates of each round finds clusters, whose mean update changes the members' models.

    The method is simple and myopic: it compares updates from different models as if they came from one model. It is
    combined with an aggregation rule, which gives the weights within the cluster; the paper's mean is `uniform`.

    Args:
        num_clusters: M; a round with fewer clients has as many clusters as clients.
        models: the papers do not say whose models change. `of_clients` (each client has its own, as in Werner et al.),
            `merged` (and the clients of a cluster continue from their mean), or `of_clusters`: the server has M models,
            as the other methods. Numbers of clusters are arbitrary in each round, so that clients change models.

    **Privacy** Post-processing of released updates; nothing is charged.

    Reference: Werner et al. (2023), with DPSGD at the clients as in Malekmohammadi, Taik and Farnadi (2024).
    """

    num_clusters: Annotated[int, Interval(ge=1)] = 4
    models: Literal["of_clients", "merged", "of_clusters"] = "of_clients"

    role = "route"

    def initialise(self, state: ServerState, view: View) -> ServerState:
        if self.models != "of_clusters":
            return super().initialise(state, view)
        return dataclasses.replace(state, models=state.models[:1].repeat(self.num_clusters, 1))

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        """Return the weights `[K, C]`: row k has 1 for each client of the cluster that changes model k."""
        order = np.argsort(updates.clients)  # labels must not depend on the order of arrival
        seed = int(np.random.SeedSequence([view.seed, view.round]).generate_state(1)[0])
        labels = np.empty(len(order), dtype=np.int64)
        labels[order] = kmeans(coordinates(updates.released.flatten(1)[order.tolist()]), self.num_clusters, seed)
        self._labels = labels.tolist()
        if self.models == "of_clusters":
            return torch.from_numpy(np.arange(self.num_clusters)[:, None] == labels[None, :]).double()
        route = torch.zeros(view.facts.num_clients, len(labels), dtype=torch.float64)
        route[list(updates.clients)] = torch.from_numpy(labels[:, None] == labels[None, :]).double()
        return route

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        self._note(view, updates.clients, self._labels)
        clients, labels = torch.tensor(updates.clients), torch.tensor(self._labels)
        if self.models == "of_clusters":
            model_of = torch.tensor(state.model_of)
            model_of[clients] = labels
            return dataclasses.replace(state, model_of=tuple(model_of.tolist()))
        if self.models == "of_clients":
            return state
        models = state.models.clone()
        for label in set(self._labels):
            members = clients[labels == label]
            models[members] = models[members].mean(dim=0)
        return dataclasses.replace(state, models=models)
