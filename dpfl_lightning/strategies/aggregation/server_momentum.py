"""FedAvgM: momentum on the server."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.federated.messages.jobs import TRAINING
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState, View


@dataclass
class ServerMomentum(Strategy):
    """FedAvgM: the server computes `m = momentum * m + update` and `models += learning_rate * m`.

    A model that no client trained in a round is not changed. If the number of models changes, the momentum is reset.

    Args:
        momentum: decay of the momentum.
        learning_rate: learning rate of the server.

    **Privacy** Post-processing.

    Reference: Hsu, Qi and Brown (2019).
    """

    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    learning_rate: Annotated[float, Interval(gt=0, lt=math.inf)] = 1.0

    jobs = TRAINING

    def __post_init__(self) -> None:
        super().__post_init__()
        self._momentum: Tensor | None = None  # [K, P]

    def step(self, state: ServerState, combined: Tensor, view: View) -> ServerState:
        if self._momentum is None or self._momentum.shape != combined.shape:
            self._momentum = torch.zeros_like(combined)
        trained = combined.any(dim=1, keepdim=True)
        self._momentum = torch.where(trained, self.momentum * self._momentum + combined, self._momentum)
        return dataclasses.replace(state, models=state.models + trained * self.learning_rate * self._momentum)

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self._momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._momentum = state["momentum"]
