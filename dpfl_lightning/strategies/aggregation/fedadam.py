"""FedAdam: Adam on the server."""

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
class FedAdam(Strategy):
    """FedAdam: Adam steps with the aggregated update, `models += learning_rate * m / (sqrt(v) + epsilon)`.

    A model that no client trained is not changed. Where privacy noise dominates, `v` mostly measures the noise.

    Args:
        learning_rate: learning rate of the server.
        beta1: decay of the first moment `m`.
        beta2: decay of the second moment `v`.
        epsilon: it bounds the step of parameters that hardly move, and `v` starts at its square.

    **Privacy** Post-processing.

    Reference: Reddi et al. (2021), Algorithm 2.
    """

    learning_rate: Annotated[float, Interval(gt=0, lt=math.inf)] = 0.01
    beta1: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Interval(ge=0, lt=1)] = 0.99
    epsilon: Annotated[float, Interval(gt=0, lt=math.inf)] = 1e-3

    jobs = TRAINING

    def __post_init__(self) -> None:
        super().__post_init__()
        self._moments: Tensor | None = None  # [2, K, P]

    def step(self, state: ServerState, combined: Tensor, view: View) -> ServerState:
        if self._moments is None or self._moments.shape[1:] != combined.shape:
            self._moments = torch.stack([torch.zeros_like(combined), torch.full_like(combined, self.epsilon**2)])
        trained, (first, second) = combined.any(dim=1, keepdim=True), self._moments
        changed = torch.stack([torch.lerp(combined, first, self.beta1), self._second(second, combined.square())])
        self._moments = torch.where(trained, changed, self._moments)
        move = self.learning_rate * self._moments[0] / (self._moments[1].sqrt() + self.epsilon)
        return dataclasses.replace(state, models=state.models + trained * move)

    def _second(self, second: Tensor, square: Tensor) -> Tensor:
        return torch.lerp(square, second, self.beta2)

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self._moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._moments = state["moments"]
