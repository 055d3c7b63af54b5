"""Samplers of records: what a release draws, and the event that it is accounted as, in one object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:  # they load torch, which reports of a ledger do not need
    from dpfl_lightning.privacy.accounting.events import NoisedEvent
    from dpfl_lightning.privacy.mechanism import Mechanism
    from dpfl_lightning.privacy.noise import RandomGenerator


Rows = Iterator[np.ndarray]
Labels = Callable[[], np.ndarray]


@dataclass(frozen=True)
class RecordSampler(ABC):
    """The draws of one release of `steps` steps of a mechanism. Clients are charged `event` and train on `draws`.

    Attributes:
        words: its description in a guarantee.
        moved: how many drawn records differ if the client has one record more.
    """

    words: ClassVar[str]
    moved: ClassVar[int] = 1

    mechanism: Mechanism
    steps: int = 1

    @property
    def event(self) -> NoisedEvent:
        """What is charged."""
        return self.mechanism.event(self.steps)

    @property
    def clip_norm(self) -> float:
        """The bound on one record's contribution, with which a sum moves by at most the mechanism's clip norm."""
        return self.mechanism.clip_norm / self.moved

    @abstractmethod
    def draws(self, num_records: int, generator: RandomGenerator, labels: Labels | None = None) -> Rows:
        """Yield the row numbers `[B]` of each step. `labels` returns those of all records, `[num_records]`."""


class Poisson(RecordSampler):
    """Draws every record of a step independently, as accountants assume; full batches at a sample rate of 1."""

    words = "Poisson sampling"

    def draws(self, num_records: int, generator: RandomGenerator, labels: Labels | None = None) -> Rows:
        for _ in range(self.steps):
            yield poisson_rows(num_records, self.mechanism.sample_rate, generator)


class Shuffled(RecordSampler):
    """Draws batches of shuffled epochs; the last batch of an epoch may be smaller."""

    words = "shuffled batches accounted as if they were Poisson samples: this epsilon is NOT proven"

    def draws(self, num_records: int, generator: RandomGenerator, labels: Labels | None = None) -> Rows:
        size, order = max(1, round(self.mechanism.sample_rate * num_records)), np.zeros(0, dtype=np.int64)
        for _ in range(self.steps):
            if not len(order):
                order = generator.permutation(num_records)
            yield order[:size]
            order = order[size:]


@dataclass(frozen=True)
class OfEachClass(RecordSampler):
    """Draws at most `most` records of each class without replacement.

    An added record can push another one out: two drawn records differ, and nothing is amplified. Raises ValueError
    unless the mechanism's sample rate is 1.
    """

    words: ClassVar = "a number of records of each class"
    moved: ClassVar = 2

    most: int = 1

    def __post_init__(self) -> None:
        if self.mechanism.sample_rate < 1:
            raise ValueError("draws of a fixed number of records are not amplified: their sample rate is 1")

    def draws(self, num_records: int, generator: RandomGenerator, labels: Labels | None = None) -> Rows:
        if labels is None:
            raise ValueError("draws of each class need labels")
        for _ in range(self.steps):
            yield rows_of_each_class(labels(), self.most, generator)


#: privacy.sampling -> sampler of local steps
SAMPLERS: dict[str, type[RecordSampler]] = {"poisson": Poisson, "shuffle": Shuffled}


def weakest(samplings: Iterable[str]) -> str:
    """Return the name of the sampler whose words describe several runs together: one that is not proven, if any is."""
    names = list(samplings)
    return next((name for name in names if name != "poisson"), names[0])


def poisson_rows(num_records: int, sample_rate: float, generator: RandomGenerator) -> np.ndarray:
    """Draw every record independently with probability `sample_rate`: row numbers `[B]`, ascending, B may be 0."""
    if sample_rate >= 1.0:
        return np.arange(num_records)
    return np.flatnonzero(generator.coins(num_records, sample_rate))


def rows_of_each_class(labels: np.ndarray, most: int, generator: RandomGenerator) -> np.ndarray:
    """Draw at most `most` records of each class without replacement: row numbers `[B]`, ascending."""
    order = generator.permutation(len(labels))
    chosen_rows = [class_rows[:most] for label in np.unique(labels) if len(class_rows := order[labels[order] == label])]
    return np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *chosen_rows]))
