"""The plan of a round: who takes part, from which model, with which mechanism, and what the clients compute."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dpfl_lightning.federated.messages.jobs import Job, LocalTraining
from dpfl_lightning.models.optimizers import PLAIN_SGD, LocalOptimizer
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.sampling import RecordSampler


@dataclass(frozen=True)
class RoundPlan:
    """The part of each of C clients in a round, as parallel tuples of length C.

    Args:
        model_of: row of the server's models that each client starts from, and that its update is added to unless a
            strategy with role `route` decides otherwise.
        purpose: the line of each client's schedule that pays for this round.
        optimizer: of the local steps; None is the one that the clients' module configures.
        fewest: if fewer clients (>= 1) are left, for example because others cannot pay, no client trains.
    """

    round: int
    clients: tuple[int, ...]
    model_of: tuple[int, ...]
    mechanism_of: tuple[Mechanism, ...]
    steps: tuple[int, ...]
    learning_rate_of: tuple[float, ...]
    purpose: str = "train"
    job: Job = field(default_factory=LocalTraining)
    fewest: int = 1
    optimizer: LocalOptimizer | None = PLAIN_SGD

    def __post_init__(self) -> None:
        columns = (self.model_of, self.mechanism_of, self.steps, self.learning_rate_of)
        if any(len(column) != len(self.clients) for column in columns) or len(set(self.clients)) < len(self.clients):
            raise ValueError(f"a plan needs one entry for each client in every column, and each client once: {self}")
        for row in {id(mechanism): row for row, mechanism in enumerate(self.mechanism_of)}.values():
            self.sampler(row)  # raises where no event would cover a release

    @property
    def expected_records(self) -> tuple[float, ...]:
        """Expected number of records that each client processes, `[C]`. The observed number is private."""
        pairs = zip(self.mechanism_of, self.steps, strict=True)
        return tuple(self.job.expected_records(mechanism) * steps for mechanism, steps in pairs)

    def independent_steps(self, steps: int) -> float:
        """See `LocalOptimizer.independent_steps`."""
        return math.nan if self.optimizer is None else self.optimizer.independent_steps(steps)

    def sampler(self, row: int, sampling: str = "poisson") -> RecordSampler:
        """The draws of the client in this row, and the event that pays for them."""
        return self.job.sampler(self.mechanism_of[row], self.steps[row], sampling)

    def only(self, keep: Callable[[int], bool]) -> RoundPlan:
        """The same plan for those clients for which `keep(client)` is true."""
        rows = [row for row, client in enumerate(self.clients) if keep(client)]
        columns = ("clients", "model_of", "mechanism_of", "steps", "learning_rate_of")
        kept: dict[str, Any] = {name: tuple(getattr(self, name)[row] for row in rows) for name in columns}
        return dataclasses.replace(self, **kept)
