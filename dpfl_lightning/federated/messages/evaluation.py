"""Accuracy and loss of models, as the server receives them."""

from __future__ import annotations

from dataclasses import dataclass


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
