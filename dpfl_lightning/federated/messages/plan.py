"""The plan of a round: who takes part, from which model, with which mechanism, and what the clients compute."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dpfl_lightning.models.augmentation import ClassAugmentation, RowsInPasses
from dpfl_lightning.models.optimizers import PLAIN_SGD, LocalOptimizer
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.sampling import SAMPLERS, OfEachClass, RecordSampler


@dataclass(frozen=True)
class LocalTraining:
    """Local DPSGD steps. The client sends the change of the parameters `[P]`."""

    def sampler(self, mechanism: Mechanism, steps: int, sampling: str) -> RecordSampler:
        return SAMPLERS[sampling](mechanism, steps)

    def expected_records(self, mechanism: Mechanism) -> float:
        return mechanism.expected_batch_size


@dataclass(frozen=True)
class ClassGradients:
    """The noisy sum of the clipped gradients of each class, divided by the expected batch size, `[num_classes, p]`.

    Args:
        parameters: names of the parameters whose p gradient entries are clipped and sent; None is all, p = P.
        augmentation: public transformation of every record, the same for all clients.
        most_records: number of records drawn of each class without replacement, instead of a Poisson draw.
        counts: append two columns, the exact numbers of drawn and of existing records of each class, divided as the
            sums are; allowed without noise only.

    **Privacy** A record has one label, so all rows together have the sensitivity of one clipped gradient. With
    `most_records`, an additional record may replace another one, so records are clipped to half the mechanism's norm.
    """

    num_classes: int
    parameters: tuple[str, ...] | None = None
    augmentation: ClassAugmentation | None = None
    most_records: int | None = None
    counts: bool = False

    def sampler(self, mechanism: Mechanism, steps: int = 1, sampling: str = "poisson") -> RecordSampler:
        """The sampler of the only batch. Raises ValueError if its event would not cover the release."""
        if self.counts and mechanism.noise_multiplier > 0:
            raise ValueError("exact counts beside noisy sums are covered by no epsilon")
        if self.most_records is None:
            return SAMPLERS[sampling](mechanism)
        return OfEachClass(mechanism, most=self.most_records)

    def expected_records(self, mechanism: Mechanism) -> float:
        """An upper bound of the expected number, because the classes that a client lacks are private."""
        drawn = math.inf if self.most_records is None else self.num_classes * self.most_records
        return min(mechanism.expected_batch_size, drawn)

    def augmented(self, x: Tensor, y: Tensor, rows: RowsInPasses) -> Tensor:
        return x if self.augmentation is None else self.augmentation.in_passes(x, y, rows)

    def size(self, sizes: Mapping[str, int]) -> int:
        """How many numbers a release has, given the size of each parameter."""
        width = sum(size for name, size in sizes.items() if self.parameters is None or name in self.parameters)
        return self.num_classes * (width + (2 if self.counts else 0))


Job = LocalTraining | ClassGradients


@dataclass(frozen=True)
class RoundPlan:
    """The part of each of C clients in a round, as parallel tuples of length C.

    Args:
        model_of: row of the server's models that each client starts from, and that its update is added to unless a
            strategy with role `route` decides otherwise.
        purpose: the line of each client's schedule that pays for this round.
        anchors: models `[A, P]` to which `anchor_of` refers. Local steps are pulled to them with strength `pull`.
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
    anchors: Tensor | None = None
    anchor_of: tuple[int, ...] = ()
    pull: float = 0.0
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
        columns = ("clients", "model_of", "mechanism_of", "steps", "learning_rate_of", "anchor_of")
        kept: dict[str, Any] = {
            name: tuple(getattr(self, name)[row] for row in rows) for name in columns if getattr(self, name)
        }
        return dataclasses.replace(self, **kept)
