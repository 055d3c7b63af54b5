"""DPFedAvg: weights by data size."""

import torch
from torch import Tensor

from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View


class SizeWeighted(Strategy):
    """DPFedAvg: weights are proportional to data size, `w_i = N_i / sum_j N_j`.

    With `privacy: null` this is plain FedAvg. If budgets or batch sizes differ, a noise-aware rule is better.

    **Privacy** Post-processing. The data sizes are trusted, and they are treated as public: under add-or-remove
    adjacency the guarantee does not cover an exact count.

    Reference: Noble et al. (2021), with the weights that Malekmohammadi et al. (2024) use; McMahan et al. (2017).
    """

    role = "base"

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        return torch.tensor([view.facts.num_records[client] for client in updates.clients], dtype=torch.float64)
