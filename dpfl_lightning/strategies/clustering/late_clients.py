"""Clients that missed the full batches of `clustered`: they train every group's model once, and join the nearest."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.algorithms.update_groups import distances
from dpfl_lightning.algorithms.update_mixture import noisy_updates
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.models.model import Model

_ENOUGH = 3  # rounds with a group's model after which no comparison with its members is awaited


class LateClients:
    """Which clients have no group yet, and how far their updates were from those of each group. Post-processing.

    A client's update is compared with a group if members trained the group's model in the same round. A client is
    placed when it was compared with every group, or with some and trained the models of the others in three rounds.

    Args:
        seen: client -> visits, precision, and precision times squared distance of the M groups, `[3, M]`.
    """

    def __init__(self, seen: dict[int, Tensor] | None = None) -> None:
        self.seen = seen or {}

    @classmethod
    def of(cls, clients: Sequence[int], num_groups: int) -> "LateClients":
        return cls({client: torch.zeros(3, num_groups, dtype=torch.float64) for client in clients})

    def next_models(self, clients: Sequence[int]) -> dict[int, int]:
        """Return the group whose model each late one of the clients trains next: one it was not compared with.

        Of several groups it is the one whose model the client trained least often.
        """
        return {
            client: int(torch.where(self._open(client), visits, visits + _ENOUGH).argmin())
            for client, (visits, _, _) in self.seen.items()
            if client in clients
        }

    def _open(self, client: int) -> Tensor:
        """Return whether the client waits for a comparison with each group, `[M]`."""
        visits, compared, _ = self.seen[client]
        return (compared == 0) & (visits < _ENOUGH)

    def placed(self, updates: ClientUpdates, model: Model) -> dict[int, int]:
        """Compare updates of late clients with those of groups; return the groups of clients that are placed now."""
        groups: dict[int, int] = {}
        if not (late := [client for client in updates.clients if client in self.seen]):
            return groups
        deltas, noise_std = model.sent(updates.released), torch.tensor(updates.noise_std)
        pairs = list(enumerate(zip(updates.clients, updates.model_of, strict=True)))
        for client in late:
            row, seen = updates.clients.index(client), self.seen[client]
            group = updates.model_of[row]
            seen[0, group] += 1
            if members := [one for one, (i, of) in pairs if of == group and i not in self.seen]:
                rows = [row, *members]
                near = noisy_updates(deltas[rows], noise_std[rows].tolist())
                squares, of_means = distances(near, [np.array([0]), np.arange(1, len(rows))])
                precision = (near.num_params * near.noise_std[0] ** 2 + of_means[0, 1]) ** -2.0
                seen[1:, group] += precision * torch.tensor([1.0, squares[0, 1]], dtype=torch.float64)
            if not bool(self._open(client).any()) and bool((seen[1] > 0).any()):
                groups[client] = int((seen[2] / seen[1]).nan_to_num(nan=math.inf).argmin())
        for client in groups:
            del self.seen[client]
        return groups
