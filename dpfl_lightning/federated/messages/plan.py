"""The plan of a round: who takes part, from which model, with which mechanism and job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dpfl_lightning.privacy.mechanism import Mechanism

if TYPE_CHECKING:
    pass
from dpfl_lightning.federated.messages.jobs import ClassGradients, Job, LocalTraining


@dataclass(frozen=True)
class RoundPlan:
    """Who takes part in a round, from which model, with which mechanism and job. Parallel tuples of length C.

    Args:
        purpose: the line of every client's schedule that pays for this round.
        model_of: row of `ServerState.models` each client starts from (and, unless a `route` says otherwise, adds to).
        anchors: `[A, P]` models that `anchor_of` points to; `pull` is the strength. Post-processing.
        fewest: clients, >= 1: where fewer are left, in the end or because the others cannot pay, nobody is asked.
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
            raise ValueError(f"a plan has one entry a client in every column, and each client once: {self}")
        if isinstance(self.job, ClassGradients):
            for problem in filter(None, map(self.job.problem, self.mechanism_of)):
                raise ValueError(f"{problem}: {self.job}")

    @property
    def expected_records(self) -> tuple[float, ...]:
        """Records each client's steps process in expectation, `[C]`: the observed number is private."""
        pairs = zip(self.mechanism_of, self.steps, strict=True)
        return tuple(self.job.expected_records(mechanism) * steps for mechanism, steps in pairs)

    def clip_norm(self, row: int) -> float:
        """Of one record's gradient, at the client of a row."""
        return self.job.clip_norm(self.mechanism_of[row])

    def only(self, keep: Callable[[int], bool]) -> RoundPlan:
        """The plan of the clients for which `keep(client)` holds."""
        rows = [row for row, client in enumerate(self.clients) if keep(client)]
        columns = ("clients", "model_of", "mechanism_of", "steps", "learning_rate_of", "anchor_of")
        kept: dict[str, Any] = {
            name: tuple(getattr(self, name)[row] for row in rows) for name in columns if getattr(self, name)
        }
        return dataclasses.replace(self, **kept)
