"""DPFedAvg: weights by data size."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View


class SizeWeighted(Strategy):
    """DPFedAvg: `w_i = N_i / sum_j N_j`. With `privacy: null` it is plain FedAvg.

    Right when noise levels are alike; with unequal budgets or batch sizes a noise-aware rule is better.

    **Privacy** Post-processing. Trusts the announced data sizes, which are taken as public: under add-or-remove
    adjacency an exact count is not covered by the guarantee.

    Reference: Noble et al. (2021), with the weights that Malekmohammadi et al. (2024) use; McMahan et al. (2017).
    """

    role = "base"

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        return torch.tensor([view.facts.num_records[client] for client in updates.clients], dtype=torch.float64)
