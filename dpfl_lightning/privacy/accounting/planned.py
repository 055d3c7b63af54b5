"""Planned releases of one client."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dpfl_lightning.errors import require
from dpfl_lightning.privacy.accounting.events import PURE, NoisedEvent, Release

Value = TypeVar("Value", bound=Hashable)
Answer = TypeVar("Answer")


def numbered(values: Sequence[Value]) -> tuple[list[Value], list[int]]:
    """Return the different values in order, and the place of every value among them.

    >>> numbered(["a", "b", "a"])
    (['a', 'b'], [0, 1, 0])
    """
    objects = {id(value): value for value in values}  # equal clients usually share an object, which is hashed once
    places: dict[Value, int] = {}
    place_of = {key: places.setdefault(value, len(places)) for key, value in objects.items()}
    return list(places), [place_of[id(value)] for value in values]


def once_each(function: Callable[[Value], Answer], values: Sequence[Value]) -> list[Answer]:
    """Return `function(value)` for every value, computed once for equal values, which share the answer.

    >>> once_each(lambda budgets: [sum(budgets)], [(1, 2), (3,), (1, 2)])
    [[3], [3], [3]]
    """
    different, places = numbered(values)
    answers = [function(value) for value in different]
    return [answers[place] for place in places]


@dataclass(frozen=True)
class Planned:
    """`count` >= 0 releases of one purpose ("train", "first_round", ...), which is unique in a schedule.

    `event` is ONE release, for example a round of 38 steps. Its noise_multiplier is None if it has to be solved. A
    release without protection is a `NonPrivateEvent`. Raises TypeError for a `Caveat`, which is no release.
    """

    purpose: str
    event: Release
    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.event, Release):
            raise TypeError(f"a release of {self.purpose!r} must have noise or be `NonPrivateEvent`, got {self.event}")

    def events(self) -> list[Release]:
        """Return what all releases together release; empty if count is 0."""
        return [self.event.repeated(self.count)] if self.count else []

    @property
    def unsolved(self) -> bool:
        """Whether the noise still has to be solved."""
        return isinstance(self.event, NoisedEvent) and self.event.noise_multiplier is None


@dataclass(frozen=True)
class ClientSchedule:
    """All releases of one client, and the budget they must fit.

    `target_epsilon` is > 0 (inf means no budget: epsilon is only reported), `delta` in (0, 1), or 0 where no release is
    Gaussian.
    """

    target_epsilon: float
    delta: float
    planned: tuple[Planned, ...]

    def events(self) -> list[Release]:
        """Return what the whole run releases."""
        return [event for line in self.planned for event in line.events()]

    def released(self, used: Callable[[str], int]) -> list[Release]:
        """Return what was released so far; `used(purpose)` is the number of releases of a purpose."""
        counts = [(line.event, min(used(line.purpose), line.count)) for line in self.planned]
        return [event.repeated(count) for event, count in counts if count]

    @property
    def releases(self) -> tuple[int, ...]:
        """Number of releases of each of `events`."""
        return tuple(line.count for line in self.planned if line.count)

    @property
    def protected(self) -> ClientSchedule:
        """The schedule without `NonPrivateEvent` releases, which no noise can pay for."""
        lines = tuple(line for line in self.planned if line.event.private)
        return replace(self, planned=lines)

    def check_filter(self) -> None:
        """Raise UserError unless later noise may be chosen from earlier releases: unless a privacy filter is known.

        It is for full batches of Gaussian noise, and for pure epsilons.
        """
        bounded = math.isfinite(self.target_epsilon) or not self.adds_noise  # without noise nothing is promised
        require(bounded, "privacy.epsilon", "be a number where later noise follows from releases", self.target_epsilon)
        events = [line.event for line in self.planned if line.event.private]
        gaussian = all(event.is_gaussian for event in events)
        pure = self.delta == 0 and not any(event.needs_delta for event in events)
        must = (
            "plan only full batches of Gaussian noise (clients.batch_size: null), or only pure epsilons "
            f"(privacy.mechanism: {PURE.kind}, delta: 0), where one of them chooses later noise from earlier releases"
        )
        require(gaussian or pure, "strategies", must, self.outline, "Leave out what plans other releases.")

    @property
    def outline(self) -> str:
        """The planned releases in words."""
        lines, sampled = [(line.purpose, line.event) for line in self.planned], " of sampled batches"
        return ", ".join(f"{name}: {event.protection}{sampled * event.is_sampled}" for name, event in lines)

    @property
    def noised(self) -> list[NoisedEvent]:
        """The events of noisy sums."""
        return [line.event for line in self.planned if isinstance(line.event, NoisedEvent)]

    @property
    def main_line(self) -> Planned:
        """One of the most frequent noisy sums of training records (KeyError without one).

        It defines the noise and the sample rate.
        """
        sums = [line for line in self.planned if isinstance(line.event, NoisedEvent)]
        noised = [line for line in sums if not line.event.scores]
        if not noised:
            raise KeyError("no noisy sum is planned")
        return max(noised, key=lambda line: line.count)

    @property
    def adds_noise(self) -> bool:
        """Whether training adds noise, which need not be solved yet."""
        noise = self.main.noise_multiplier
        return math.isfinite(self.target_epsilon) if noise is None else noise > 0

    @property
    def main(self) -> NoisedEvent:
        """The event of `main_line`."""
        event = self.main_line.event
        assert isinstance(event, NoisedEvent)  # for mypy
        return event

    @property
    def main_noise(self) -> float | None:
        """The noise multiplier of `main`, 0 if none is solved; None if no release is planned."""
        return (self.main.noise_multiplier or 0.0) if any(self.releases) else None

    def batch_size(self, num_records: int) -> int:
        """Return the expected batch size of a step of `main`."""
        return round(self.main.sample_rate * num_records)

    def count_of(self, purpose: str) -> int:
        """Return the number of planned releases of a purpose."""
        return sum(line.count for line in self.planned if line.purpose == purpose)

    def noise_multiplier(self, purpose: str) -> float:
        """Return noise / clip norm of a purpose. KeyError if it is not planned or not solved."""
        events = [line.event for line in self.planned if line.purpose == purpose]
        noises = [event.noise_multiplier for event in events if isinstance(event, NoisedEvent)]
        if not noises or noises[0] is None:
            raise KeyError(purpose)
        return noises[0]

    def with_main_count(self, count: int) -> ClientSchedule:
        """Return the schedule with another count of `main_line`."""
        main = self.main_line
        return replace(self, planned=tuple(replace(one, count=count) if one is main else one for one in self.planned))

    def with_noise(self, noise_multiplier: float) -> ClientSchedule:
        """Return the schedule with every unsolved noise set to this value."""
        lines = tuple(
            replace(line, event=line.event.with_noise(noise_multiplier))
            if isinstance(line.event, NoisedEvent) and line.unsolved
            else line
            for line in self.planned
        )
        return replace(self, planned=lines)
