"""Equal weights for all participants."""

import torch
from torch import Tensor

from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View


class Uniform(Strategy):
    """Gives every participant the same weight, `w_i = 1 / C`; no information about the clients is needed.

    **Privacy** Post-processing.
    """

    role = "base"

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        return torch.ones(len(updates.clients), dtype=torch.float64)
