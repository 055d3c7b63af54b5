"""What clients compute in a round: local training, or the sum of gradients of each class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dpfl_lightning.models.augmentation import ClassAugmentation
from dpfl_lightning.privacy.mechanism import Mechanism


@dataclass(frozen=True)
class LocalTraining:
    """Local DPSGD steps. The client sends the change of the parameters `[P]`."""

    def clip_norm(self, mechanism: Mechanism) -> float:
        """The bound on the norm of one record's gradient."""
        return mechanism.clip_norm

    def expected_records(self, mechanism: Mechanism) -> float:
        """The expected number of records in one step."""
        return mechanism.expected_batch_size


@dataclass(frozen=True)
class ClassGradients:
    """The noised sum of the clipped gradients of each class, divided by the expected batch size, `[num_classes, p]`.

    Args:
        num_classes: number of rows; a class without records has a row, too.
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

    def clip_norm(self, mechanism: Mechanism) -> float:
        """The bound on one record's gradient, so that all rows change by at most the mechanism's clip norm."""
        return mechanism.clip_norm if self.most_records is None else mechanism.clip_norm / 2

    def expected_records(self, mechanism: Mechanism) -> float:
        """An upper bound of the expected number: which classes a client lacks is private."""
        drawn = math.inf if self.most_records is None else self.num_classes * self.most_records
        return min(mechanism.expected_batch_size, drawn)

    def augmented(self, x: Tensor, y: Tensor) -> Tensor:
        """The records `x` `[B, *X]` of classes `y` `[B]`, augmented."""
        return x if self.augmentation is None else self.augmentation(x, y)

    def size(self, sizes: Mapping[str, int]) -> int:
        """How many numbers a release has, given the size of each parameter."""
        width = sum(size for name, size in sizes.items() if self.parameters is None or name in self.parameters)
        return self.num_classes * (width + (2 if self.counts else 0))

    def problem(self, mechanism: Mechanism) -> str:
        """Why the mechanism's event would not cover this job's releases; empty if it does."""
        if self.counts and mechanism.noise_multiplier > 0:
            return "exact counts beside noised sums are covered by no epsilon"
        if self.most_records is not None and mechanism.sample_rate < 1:
            return "draws of a fixed number of records are not amplified: their sample rate is 1"
        return ""


Job = LocalTraining | ClassGradients
