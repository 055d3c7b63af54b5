"""Myopic clustering: k-means on the updates of every round says who shares with whom."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.algorithms.update_geometry import centred_gram
from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.strategies.clustering.cluster_metrics import TellsGroups
from dpfl_lightning.strategies.clustering.local import Local


def coordinates(deltas: Tensor) -> np.ndarray:
    """Points with the same distances from each other as the updates `[C, P]`, in C dimensions: `[C, C]` float64.

    C points and their mean span at most C - 1 dimensions: coordinates come from the Gram matrix of the centred updates.

    >>> points = coordinates(torch.tensor([[0.0, 0.0, 9.0], [3.0, 4.0, 9.0]]))
    >>> round(float(np.linalg.norm(points[0] - points[1])), 12)
    5.0
    """
    values, vectors = np.linalg.eigh(centred_gram(deltas))
    return vectors * np.sqrt(np.maximum(values, 0.0))


def kmeans(points: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    """Which cluster each of the points `[n, d]` is in, `[n]`: k-means++, the best of 10 starts; at most n clusters."""
    from sklearn.cluster import KMeans

    count = min(num_clusters, len(points))
    return KMeans(count, init="k-means++", n_init=10, random_state=seed).fit_predict(points)


class KMeansClusters(TellsGroups, Local):
    """KM-CDPFL: every client has a model of its own, and adds to it the mean update of its cluster of this round.

    As simple as clustering gets, and myopic: updates from different models are compared as if they came from one. Goes
    beside a base rule, which weighs within the cluster: `uniform` is the paper's mean.

    Args:
        num_clusters: M, >= 1; a round with fewer clients has as many clusters as clients.

    **Privacy** Post-processing of released updates: charges nothing.

    Raises:
        UserError: a number out of range.

    Reference: Werner et al. (2023), with DPSGD at the clients as in Malekmohammadi, Taik and Farnadi (2024).
    """

    role = "route"

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def __init__(self, num_clusters: int = 4) -> None:
        require(num_clusters >= 1, "strategies.kmeans_clusters.num_clusters", "be >= 1", num_clusters)
        self._num_clusters = num_clusters

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        """Row i is client i's model: 1 for each member of its cluster."""
        order = np.argsort(updates.clients)  # labels must not depend on who came first
        seed = int(np.random.SeedSequence([view.seed, view.round]).generate_state(1)[0])
        labels = np.empty(len(order), dtype=np.int64)
        labels[order] = kmeans(coordinates(updates.released.flatten(1)[order.tolist()]), self._num_clusters, seed)
        self._labels = labels.tolist()
        route = torch.zeros(view.facts.num_clients, len(labels), dtype=torch.float64)
        route[list(updates.clients)] = torch.from_numpy(labels[:, None] == labels[None, :]).double()
        return route

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        self._note(view, updates.clients, self._labels)
        return state
