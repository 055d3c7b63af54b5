"""Weights by the noise that clients say is in their updates: the least noise that weights can give."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View


class InverseNoise(Strategy):
    """`w_i ~ 1 / v_i`, v_i the variance of the noise in client i's update; without noise all weigh the same.

    Believes what clients say of budgets, batch sizes and clip norms; `noise_aware` finds the same out from the updates.

    **Privacy** Post-processing; budgets and batch sizes are disclosed to the server.
    """

    role = "base"

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        return weights(torch.tensor(updates.noise_std, dtype=torch.float64) ** 2)
