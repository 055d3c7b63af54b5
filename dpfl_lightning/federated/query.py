"""Any question to a client other than training: noised at the client, with an event that is charged first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.client import ClientModule
from dpfl_lightning.privacy.events import Event, SelectionEvent
from dpfl_lightning.privacy.noise import RandomGenerator

Answers = Mapping[int, object]  # client -> noised answer


class Query(Protocol):
    """A question with a price.

    Attributes:
        purpose: the line of every asked client's schedule that pays.
        clients: who is asked.
        event: what one answer releases; must be the event that was planned.
    """

    purpose: str
    clients: tuple[int, ...]

    @property
    def event(self) -> Event: ...

    def answer(self, module: ClientModule, x: Tensor, y: Tensor, generator: RandomGenerator) -> object:
        """The noised answer of one client for its records `x [n, *X]`, `y [n]`. Runs at the client."""
        ...


@dataclass(frozen=True)
class SelectModel:
    """Which of M models fits a client best: the exponential mechanism on clipped losses.

    `argmax_m [ -sum_j min(loss_j(theta_m), loss_bound) / loss_bound + Gumbel(0, 1 / epsilon) ]`. One record moves every
    utility in the same direction by at most 1, so the range is bounded by `epsilon`.

    Args:
        models: `[M, P]`.
        epsilon: bounded range of one selection, > 0.
        loss_bound: losses are clipped to [0, loss_bound]; log(classes) to 2 log(classes) is sensible.

    **Privacy** `SelectionEvent(epsilon)` for each asked client. Where one record is replaced by another a utility moves
    either way, and the accountant charges twice the range.
    """

    clients: tuple[int, ...]
    models: Tensor
    epsilon: float
    loss_bound: float
    purpose: str = "select"

    @property
    def event(self) -> SelectionEvent:
        return SelectionEvent(self.epsilon)

    def answer(self, module: ClientModule, x: Tensor, y: Tensor, generator: RandomGenerator) -> int:
        with torch.no_grad():
            losses = [module.sample_loss(module.unflatten(model), x, y) for model in self.models]
        utilities = [
            -float((loss.clamp(0, self.loss_bound) / self.loss_bound).sum(dtype=torch.float64)) for loss in losses
        ]
        return int(np.argmax(np.array(utilities) + generator.gumbel(0.0, 1.0 / self.epsilon, len(utilities))))
