"""What a client is asked to compute in a round: local training, or one gradient sum for each class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dpfl_lightning.models.augmentation import ClassAugmentation
from dpfl_lightning.privacy.mechanism import Mechanism


@dataclass(frozen=True)
class LocalTraining:
    """The job of a usual round: `steps` DPSGD steps; the release is the change of the parameters, `[P]`."""

    def clip_norm(self, mechanism: Mechanism) -> float:
        """Of one record's gradient."""
        return mechanism.clip_norm

    def expected_records(self, mechanism: Mechanism) -> float:
        """Of one step."""
        return mechanism.expected_batch_size


@dataclass(frozen=True)
class ClassGradients:
    """One noised sum of clipped gradients for each class, divided by the expected batch size, `[num_classes, p]`.

    Args:
        num_classes: blocks of the release; a class that the client lacks has one, too.
        parameters: names of those whose gradients are measured, clipped and sent, p numbers; None is all, p = P.
        augmentation: what every record becomes before its gradient is taken: public, the same for all clients.
        most_records: of each class, drawn without replacement in place of a Poisson draw.
        counts: whether two columns follow: how many records of each class were drawn and how many there are, divided
            as the sums are. They are exact, so only releases without noise may have them.

    **Privacy** A record has one label, so the whole stack has the sensitivity of one clipped gradient. Of
    `most_records` a record more may push another out: records are then clipped to half the mechanism's norm.
    """

    num_classes: int
    parameters: tuple[str, ...] | None = None
    augmentation: ClassAugmentation | None = None
    most_records: int | None = None
    counts: bool = False

    def clip_norm(self, mechanism: Mechanism) -> float:
        """Of one record's gradient, so that one record moves the stack by at most the mechanism's."""
        return mechanism.clip_norm if self.most_records is None else mechanism.clip_norm / 2

    def expected_records(self, mechanism: Mechanism) -> float:
        """At most: which classes a client lacks is private."""
        drawn = math.inf if self.most_records is None else self.num_classes * self.most_records
        return min(mechanism.expected_batch_size, drawn)

    def size(self, sizes: Mapping[str, int]) -> int:
        """Numbers in a release, from those in each parameter."""
        width = sum(size for name, size in sizes.items() if self.parameters is None or name in self.parameters)
        return self.num_classes * (width + (2 if self.counts else 0))

    def problem(self, mechanism: Mechanism) -> str:
        """Why this job's releases would not be what the mechanism's event says; empty if they are."""
        if self.counts and mechanism.noise_multiplier > 0:
            return "exact counts beside noised sums are covered by no epsilon"
        if self.most_records is not None and mechanism.sample_rate < 1:
            return "draws of a fixed number of records are not amplified: their sample rate is 1"
        return ""


Job = LocalTraining | ClassGradients
