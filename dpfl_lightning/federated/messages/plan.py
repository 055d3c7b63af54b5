"""The plan of a round: who takes part, from which model, with which mechanism and job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dpfl_lightning.federated.messages.jobs import ClassGradients, Job, LocalTraining
from dpfl_lightning.privacy.mechanism import Mechanism


@dataclass(frozen=True)
class RoundPlan:
    """The part of each of C clients in a round, as parallel tuples of length C.

    Args:
        purpose: the line of each client's schedule that pays for this round.
        model_of: row of the server's models that each client starts from, and that its update is added to unless a
            strategy with role `route` decides otherwise.
        anchors: models `[A, P]` to which `anchor_of` refers. Local steps are pulled to them with strength `pull`.
        fewest: >= 1. If fewer clients are left, for example because others cannot pay, no client trains.
    """

    round: int
    clients: tuple[int, ...]
    model_of: tuple[int, ...]
    mechanism_of: tuple[Mechanism, ...]
    steps: tuple[int, ...]
    learning_rate_of: tuple[float, ...]
    purpose: str = "train"
    job: Job = field(default_factory=LocalTraining)
    anchors: Tensor | None = None
    anchor_of: tuple[int, ...] = ()
    pull: float = 0.0
    fewest: int = 1

    def __post_init__(self) -> None:
        columns = (self.model_of, self.mechanism_of, self.steps, self.learning_rate_of)
        if any(len(column) != len(self.clients) for column in columns) or len(set(self.clients)) < len(self.clients):
            raise ValueError(f"a plan needs one entry for each client in every column, and each client once: {self}")
        if isinstance(self.job, ClassGradients):
            for problem in filter(None, map(self.job.problem, self.mechanism_of)):
                raise ValueError(f"{problem}: {self.job}")

    @property
    def expected_records(self) -> tuple[float, ...]:
        """Expected number of records that each client processes, `[C]`. The observed number is private."""
        pairs = zip(self.mechanism_of, self.steps, strict=True)
        return tuple(self.job.expected_records(mechanism) * steps for mechanism, steps in pairs)

    def clip_norm(self, row: int) -> float:
        """The bound on one record's gradient at the client of a row."""
        return self.job.clip_norm(self.mechanism_of[row])

    def only(self, keep: Callable[[int], bool]) -> RoundPlan:
        """The same plan for those clients for which `keep(client)` is true."""
        rows = [row for row, client in enumerate(self.clients) if keep(client)]
        columns = ("clients", "model_of", "mechanism_of", "steps", "learning_rate_of", "anchor_of")
        kept: dict[str, Any] = {
            name: tuple(getattr(self, name)[row] for row in rows) for name in columns if getattr(self, name)
        }
        return dataclasses.replace(self, **kept)
