"""Weights by the inverse variance of the noise."""

import torch
from torch import Tensor

from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View


class InverseNoise(Strategy):
    """Inverse-variance weights: `w_i ~ 1 / v_i`, where v_i is the variance of the noise in client i's update.

    Among all weights of the mean these give the least noise. Without noise all clients have the same weight. The
    reported budgets, batch sizes and clip norms are trusted; `noise_aware` estimates the variances from the updates.

    **Privacy** Post-processing. Budgets and batch sizes are disclosed to the server.
    """

    role = "base"
    needs_noise_std = True

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        return weights(torch.tensor(updates.noise_std, dtype=torch.float64) ** 2)
