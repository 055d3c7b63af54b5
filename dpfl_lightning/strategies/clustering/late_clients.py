"""Clients that missed the full batches of `clustered`: they train every group's model, and join the nearest group."""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from dpfl_lightning.algorithms.update_groups import distances
from dpfl_lightning.algorithms.update_mixture import noisy_updates
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View

_ENOUGH = 3  # rounds with a group's model after which no comparison with its members is awaited
_TINY = 1e-60


class LateClients:
    """Which clients have no group yet, and how far their updates were from those of each group. Post-processing.

    A client's update is compared with a group if members trained the group's model in the same round, each update in
    units of learning rate times local steps. A client is placed when it was compared with every group, or with some and
    trained the models of the others in three rounds.

    Args:
        seen: client -> visits, 1 / variance of the squared distance because of noise, and this times the squared
            distance of the M groups, `[3, M]`.
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

    def placed(self, updates: ClientUpdates, view: View) -> dict[int, Tensor]:
        """Compare updates of late clients with those of groups; return memberships `[M]` of clients placed now."""
        groups: dict[int, Tensor] = {}
        if not (late := [client for client in updates.clients if client in self.seen]):
            return groups
        rates = torch.tensor([view.learning_rate[client] for client in updates.clients], dtype=torch.float64)
        size = rates * torch.tensor(updates.steps)
        noise_std = torch.tensor(updates.noise_std, dtype=torch.float64) / size
        deltas = view.module.sent(updates.released) / size.to(updates.released)[:, None]
        pairs = list(enumerate(zip(updates.clients, updates.model_of, strict=True)))
        for client in late:
            row, seen = updates.clients.index(client), self.seen[client]
            group = updates.model_of[row]
            seen[0, group] += 1
            if members := [one for one, (i, of) in pairs if of == group and i not in self.seen]:
                rows = [row, *members]
                near = noisy_updates(deltas[rows], noise_std[rows].tolist())
                squares, of_means = distances(near, [np.array([0]), np.arange(1, len(rows))])
                noise = near.num_params * near.noise_std[0] ** 2 + of_means[0, 1]  # its mean share of the distance
                precision = near.num_params / 2 / max(noise, _TINY) ** 2
                seen[1:, group] += precision * torch.tensor([1.0, squares[0, 1]], dtype=torch.float64)
            if not bool(self._open(client).any()) and bool((seen[1] > 0).any()):
                groups[client] = nearest(seen[2] / seen[1], seen[1])
        for client in groups:
            del self.seen[client]
        return groups


def nearest(squares: Tensor, precisions: Tensor) -> Tensor:
    """Return the probability of each group to have the smallest squared distance, `[M]`, if the M errors are Gaussian.

    A group of precision 0 was not compared, and has the probability 0.

    >>> nearest(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([1.0, 1.0, 0.0])).round(decimals=2).tolist()
    [0.76, 0.24, 0.0]
    """
    known = (precisions > 0).nonzero().flatten()
    mean, std = squares[known].double().numpy(), precisions[known].double().numpy() ** -0.5
    steps = np.linspace(-8, 8, 321)
    points = mean[:, None] + std[:, None] * steps  # of each group
    farther = norm.sf((points[:, None] - mean[:, None]) / std[:, None])  # [group, other, point]
    farther[range(len(known)), range(len(known))] = norm.pdf(steps)
    probability = torch.zeros(len(squares), dtype=torch.float64)
    probability[known] = torch.from_numpy(farther.prod(axis=1).sum(axis=1))
    return probability / probability.sum()
