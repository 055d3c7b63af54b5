"""Every participant counts the same."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfl_lightning.federated.messages.plan import ClientUpdates, View
from dpfl_lightning.federated.server.strategy import ServerCallback


class Uniform(ServerCallback):
    """`w_i = 1 / C`. Needs nothing from the clients, not even their data sizes.

    **Privacy** Post-processing.
    """

    role = "base"

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        return torch.ones(len(updates.clients), dtype=torch.float64)
