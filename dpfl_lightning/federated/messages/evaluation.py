"""Accuracy and loss of models, as the server receives them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """On n records: accuracy in [0, 1] (None for regression, or without records) and mean loss."""

    accuracy: float | None
    loss: float


@dataclass(frozen=True)
class Evaluation:
    """`test`: mean over clients of the client's own model on the test set. `clients`: on its own held-out records."""

    test: Score
    clients: tuple[Score, ...]
