"""What clients do in a round: jobs, which a plan gives to all its clients and a strategy states that it works with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from dpfl_lightning.models.augmentation import ClassAugmentation, RowsInPasses
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.sampling import SAMPLERS, OfEachClass, RecordSampler

LARGEST = 1e6  # of a parameter or its change: clipped steps reach it only if something else grows without a bound


class Work:
    """What clients compute and release: a job in a round, or the answer to a query.

    Attributes:
        does: what clients do, in words.
        any_unit: whether the release bounds what any unit of privacy adds to it, and not only what a record adds.
        trains: whether clients train, so that models move by what they send.
    """

    does: ClassVar[str] = "clients answer a query"
    any_unit: ClassVar[bool] = False
    trains: ClassVar[bool] = False


class Job(Work):
    """What clients compute and release in a round. Subclasses are frozen dataclasses.

    Attributes:
        blocks: rows of one release.
        largest: no number of a sound release is larger.
        pull: strength with which local steps are pulled to `anchors` `[A, P]`; `anchor_of` is client -> row, None is
            `RoundPlan.model_of`.
    """

    largest: ClassVar[float] = LARGEST
    pull: float = 0.0
    anchors: Tensor | None = None
    anchor_of: Mapping[int, int] | None = None

    @property
    def asked(self) -> Job:
        """The job as a request to one client holds it."""
        return self

    @property
    def blocks(self) -> int:
        return 1

    def to(self, device: str | torch.device) -> Self:
        """The same job with its tensors on a device."""
        return self

    def sampler(self, mechanism: Mechanism, steps: int = 1, sampling: str = "poisson") -> RecordSampler:
        """The draws of a client, and the event that pays for them. Raises ValueError if none covers the release."""
        return SAMPLERS[sampling](mechanism, steps)

    def expected_records(self, mechanism: Mechanism) -> float:
        """Expected number of records of one step."""
        return mechanism.expected_batch_size

    def noise_std(self, mechanism: Mechanism, steps: float, learning_rate: float) -> float:
        """Standard deviation of the noise in each number of a release after so many independent steps."""
        return mechanism.noise_std(steps, learning_rate)

    def size(self, sizes: Mapping[str, int]) -> int:
        """How many numbers a release has, given the size of each parameter."""
        return sum(sizes.values())


@dataclass(frozen=True)
class LocalTraining(Job):
    """Local DPSGD steps. The client sends the change of the parameters `[P]`."""

    does: ClassVar = "clients train"
    any_unit: ClassVar = True
    trains: ClassVar = True


@dataclass(frozen=True)
class ProximalTraining(LocalTraining):
    """Local steps, each of which adds `pull * (parameters - anchor)`, so that updates may be shorter than their noise.

    Args:
        anchors: models `[A, P]`, and client -> row of its own; None: those of the round, each of which a client
            starts from.
    """

    does: ClassVar = "clients train with a proximal term"
    pull: float
    anchors: Tensor
    anchor_of: Mapping[int, int] | None = None

    @property
    def asked(self) -> Job:
        """Local training: model and anchor of one client stand in the request."""
        return LocalTraining()

    def to(self, device: str | torch.device) -> Self:
        return dataclasses.replace(self, anchors=self.anchors.to(device))


@dataclass(frozen=True)
class ClassGradients(Job):
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

    does: ClassVar = "clients release gradients of classes"  # the records of a unit may have several
    largest: ClassVar = math.inf  # sums grow with the records
    num_classes: int
    parameters: tuple[str, ...] | None = None
    augmentation: ClassAugmentation | None = None
    most_records: int | None = None
    counts: bool = False

    @property
    def blocks(self) -> int:
        return self.num_classes

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

    def noise_std(self, mechanism: Mechanism, steps: float, learning_rate: float) -> float:
        """That of the one sum, which has no learning rate."""
        return mechanism.noise_std(1, 1.0)

    def augmented(self, x: Tensor, y: Tensor, rows: RowsInPasses) -> Tensor:
        return x if self.augmentation is None else self.augmentation.in_passes(x, y, rows)

    def size(self, sizes: Mapping[str, int]) -> int:
        width = sum(size for name, size in sizes.items() if self.parameters is None or name in self.parameters)
        return self.num_classes * (width + (2 if self.counts else 0))


#: jobs in which clients train
TRAINING: tuple[type[Work], ...] = (LocalTraining, ProximalTraining)
