"""FedAdam: Adam on the server."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState, View


class FedAdam(Strategy):
    """FedAdam: Adam steps with the aggregated update, `models += learning_rate * m / (sqrt(v) + epsilon)`.

    A model that no client trained is not changed. Where privacy noise dominates, `v` mostly measures the noise.

    Args:
        learning_rate: learning rate of the server, > 0.
        beta1: decay of the first moment `m`, in [0, 1).
        beta2: decay of the second moment `v`, in [0, 1).
        epsilon: > 0; it bounds the step of parameters that hardly move, and `v` starts at its square.

    **Privacy** Post-processing.

    Reference: Reddi et al. (2021), Algorithm 2.
    """

    needs_training = True

    def __init__(
        self, learning_rate: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, epsilon: float = 1e-3
    ) -> None:
        key = f"strategies.{type(self).__name__.lower()}"
        for name, value in (("learning_rate", learning_rate), ("epsilon", epsilon)):
            require(value > 0, f"{key}.{name}", "be > 0", value)
        for name, value in (("beta1", beta1), ("beta2", beta2)):
            require(0 <= value < 1, f"{key}.{name}", "be in [0, 1)", value)
        self._rate, self._beta1, self._beta2, self._epsilon = learning_rate, beta1, beta2, epsilon
        self._moments: Tensor | None = None  # [2, K, P]

    def step(self, state: ServerState, combined: Tensor, view: View) -> ServerState:
        if self._moments is None or self._moments.shape[1:] != combined.shape:
            self._moments = torch.stack([torch.zeros_like(combined), torch.full_like(combined, self._epsilon**2)])
        trained, (first, second) = combined.any(dim=1, keepdim=True), self._moments
        changed = torch.stack([torch.lerp(combined, first, self._beta1), self._second(second, combined.square())])
        self._moments = torch.where(trained, changed, self._moments)
        move = self._rate * self._moments[0] / (self._moments[1].sqrt() + self._epsilon)
        return dataclasses.replace(state, models=state.models + trained * move)

    def _second(self, second: Tensor, square: Tensor) -> Tensor:
        return torch.lerp(square, second, self._beta2)

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self._moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._moments = state["moments"]
