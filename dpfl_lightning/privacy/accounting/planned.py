"""Planned releases of one client."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dpfl_lightning.privacy.accounting.events import Caveat, Event, NoisedEvent, NonPrivateEvent, repeated


@dataclass(frozen=True)
class Planned:
    """`count` releases of one purpose.

    Args:
        purpose: name of the releases in the ledger ("train", "first_round", ...); unique in a schedule.
        event: ONE release, for example a round of 38 steps. Its noise_multiplier is None if it has to be solved. A
            release without protection is a `NonPrivateEvent`.
        count: number of releases, >= 0.

    Raises:
        TypeError: the event is a `Caveat`, which is not a release.
    """

    purpose: str
    event: Event
    count: int

    def __post_init__(self) -> None:
        if isinstance(self.event, Caveat):
            raise TypeError(f"a release of {self.purpose!r} must have noise or be `NonPrivateEvent`, got {self.event}")

    def events(self) -> list[Event]:
        """Return what all releases together release; empty if count is 0."""
        return [repeated(self.event, self.count)] if self.count else []

    @property
    def unsolved(self) -> bool:
        """Whether the noise still has to be solved."""
        return isinstance(self.event, NoisedEvent) and self.event.noise_multiplier is None

    def with_noise(self, noise_multiplier: float) -> Planned:
        """Return a copy with this noise if the noise is unsolved, otherwise self."""
        if isinstance(self.event, NoisedEvent) and self.event.noise_multiplier is None:
            return replace(self, event=replace(self.event, noise_multiplier=noise_multiplier))
        return self


@dataclass(frozen=True)
class ClientSchedule:
    """All releases of one client, and the budget they must fit.

    Args:
        target_epsilon: privacy budget, > 0; inf means no budget: epsilon is only reported.
        delta: in (0, 1); 0 where no release is Gaussian.
        planned: every release of the run.

    >>> from dpfl_lightning.privacy.accounting.events import GaussianEvent
    >>> from dpfl_lightning.privacy.accounting.events import GaussianEvent
    >>> run = ClientSchedule(2.0, 1e-4, (Planned("train", GaussianEvent(0.02, None, steps=50), 30),))
    >>> run.with_noise(1.5).events()
    [GaussianEvent(sample_rate=0.02, noise_multiplier=1.5, steps=1500)]
    """

    target_epsilon: float
    delta: float
    planned: tuple[Planned, ...]

    def events(self) -> list[Event]:
        """Return what the whole run releases."""
        return [event for line in self.planned for event in line.events()]

    @property
    def releases(self) -> tuple[int, ...]:
        """Number of releases of each of `events`."""
        return tuple(line.count for line in self.planned if line.count)

    @property
    def protected(self) -> ClientSchedule:
        """The schedule without `NonPrivateEvent` releases. Calibration uses it, because no noise can pay for those."""
        lines = tuple(line for line in self.planned if not isinstance(line.event, NonPrivateEvent))
        return replace(self, planned=lines)

    @property
    def main(self) -> NoisedEvent:
        """One of the most frequent noised sums. It defines the noise and the sample rate of the client.

        Raises:
            KeyError: no noised sum is planned.
        """
        event = self.main_line.event
        assert isinstance(event, NoisedEvent)  # for mypy
        return event

    def batch_size(self, num_records: int) -> int:
        """Return the expected batch size of a step of `main` for this number of records.

        >>> from dpfl_lightning.privacy.accounting.events import GaussianEvent
        >>> from dpfl_lightning.privacy.accounting.events import GaussianEvent
        >>> ClientSchedule(2.0, 1e-4, (Planned("train", GaussianEvent(0.02, 1.0), 30),)).batch_size(2400)
        48
        """
        return round(self.main.sample_rate * num_records)

    @property
    def main_line(self) -> Planned:
        """The line of `main`."""
        noised = [line for line in self.planned if isinstance(line.event, NoisedEvent)]
        if not noised:
            raise KeyError("no noised sum is planned")
        return max(noised, key=lambda line: line.count)

    @property
    def adds_noise(self) -> bool:
        """Whether training adds noise, which need not be solved yet."""
        noise = self.main.noise_multiplier
        return math.isfinite(self.target_epsilon) if noise is None else noise > 0

    def count_of(self, purpose: str) -> int:
        """Return the number of planned releases of a purpose; 0 if the purpose is not planned."""
        return sum(line.count for line in self.planned if line.purpose == purpose)

    def noise_multiplier(self, purpose: str) -> float:
        """Return noise std (or Laplace scale) / clip norm of the releases of a purpose.

        Raises:
            KeyError: no noised sum of that purpose is planned, or its noise is not solved yet.
        """
        events = [line.event for line in self.planned if line.purpose == purpose]
        noises = [event.noise_multiplier for event in events if isinstance(event, NoisedEvent)]
        if not noises or noises[0] is None:
            raise KeyError(purpose)
        return noises[0]

    def with_noise(self, noise_multiplier: float) -> ClientSchedule:
        """Return the schedule with every unsolved noise set to this value."""
        return replace(self, planned=tuple(line.with_noise(noise_multiplier) for line in self.planned))
