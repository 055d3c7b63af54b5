"""Clients that missed the full batches of `clustered`: they train every group's model once, and join the nearest."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.algorithms.update_groups import distances
from dpfl_lightning.algorithms.update_mixture import noisy_updates
from dpfl_lightning.federated.messages.update import ClientUpdates


class LateClients:
    """Which clients have no group yet, and how far their updates were from those of each group. Post-processing.

    Args:
        seen: client -> visits, precision, and precision times squared distance of the M groups, `[3, M]`.
    """

    def __init__(self, seen: dict[int, Tensor] | None = None) -> None:
        self.seen = seen or {}

    @classmethod
    def of(cls, clients: Sequence[int], num_groups: int) -> "LateClients":
        return cls({client: torch.zeros(3, num_groups, dtype=torch.float64) for client in clients})

    def next_models(self, clients: Sequence[int]) -> dict[int, int]:
        """Return the group whose model each late one of the clients trains next: the one it trained least often."""
        return {client: int(self.seen[client][0].argmin()) for client in clients if client in self.seen}

    def placed(self, updates: ClientUpdates) -> dict[int, int]:
        """Compare updates of late clients with those of groups; return the groups of clients that have seen all."""
        groups: dict[int, int] = {}
        if not (late := [client for client in updates.clients if client in self.seen]):
            return groups
        deltas, noise_std = updates.released, torch.tensor(updates.noise_std)
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
            if bool((seen[0] > 0).all()) and bool((seen[1] > 0).any()):
                groups[client] = int((seen[2] / seen[1]).nan_to_num(nan=math.inf).argmin())
        for client in groups:
            del self.seen[client]
        return groups
