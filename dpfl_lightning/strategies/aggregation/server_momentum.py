"""FedAvgM: momentum on the server."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState, View


class ServerMomentum(Strategy):
    """FedAvgM: the server computes `m = momentum * m + update` and `models += learning_rate * m`.

    A model that no client trained in a round is not changed. If the number of models changes, the momentum is reset.

    Args:
        momentum: decay of the momentum, in [0, 1).
        learning_rate: learning rate of the server, > 0.

    **Privacy** Post-processing.

    Reference: Hsu, Qi and Brown (2019).
    """

    needs_training = True

    def __init__(self, momentum: float = 0.9, learning_rate: float = 1.0) -> None:
        require(0 <= momentum < 1, "strategies.server_momentum.momentum", "be in [0, 1)", momentum)
        require(learning_rate > 0, "strategies.server_momentum.learning_rate", "be > 0", learning_rate)
        self._decay, self._rate = momentum, learning_rate
        self._momentum: Tensor | None = None  # [K, P]

    def step(self, state: ServerState, combined: Tensor, view: View) -> ServerState:
        if self._momentum is None or self._momentum.shape != combined.shape:
            self._momentum = torch.zeros_like(combined)
        trained = combined.any(dim=1, keepdim=True)
        self._momentum = torch.where(trained, self._decay * self._momentum + combined, self._momentum)
        return dataclasses.replace(state, models=state.models + trained * self._rate * self._momentum)

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self._momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._momentum = state["momentum"]
