"""The models that a run evaluates and exports, and their accuracy and loss as the server receives them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ClientModels:
    """Models `[K, P]`, and for each of the N clients the row of its model."""

    models: Tensor
    model_of: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """Accuracy in [0, 1] (None for a regression, and without records) and mean loss of a model on some records."""

    accuracy: float | None
    loss: float


@dataclass(frozen=True)
class Evaluation:
    """`test`: mean over clients of their models' scores on the test set. `clients`: scores on held-out records."""

    test: Score
    clients: tuple[Score, ...]
