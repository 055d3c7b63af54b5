"""The releases that are planned for one client."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpfl_lightning.privacy.accounting.events import (
    Caveat,
    Event,
    NoisedEvent,
    NonPrivateEvent,
    repeated,
)


@dataclass(frozen=True)
class Planned:
    """`count` releases of one purpose.

    Args:
        purpose: what the ledger calls them ("train", "first_round", ...); unique in a schedule.
        event: ONE release, for example a round of 38 steps; its noise_multiplier None is "to be solved". What nothing
            protects is `NonPrivateEvent`.
        count: how many, >= 0.

    Raises:
        TypeError: the event is a `Caveat`, which is no release and pays for none.
    """

    purpose: str
    event: Event
    count: int

    def __post_init__(self) -> None:
        if isinstance(self.event, Caveat):
            raise TypeError(f"a release of {self.purpose!r} must have noise or be `NonPrivateEvent`, got {self.event}")

    def events(self) -> list[Event]:
        """What all of them release; nothing if there are none."""
        return [repeated(self.event, self.count)] if self.count else []

    @property
    def unsolved(self) -> bool:
        """Whether its noise is still to be solved."""
        return isinstance(self.event, NoisedEvent) and self.event.noise_multiplier is None

    def with_noise(self, noise_multiplier: float) -> Planned:
        """The same with this noise, if its own is still to be solved."""
        if isinstance(self.event, NoisedEvent) and self.event.noise_multiplier is None:
            return replace(self, event=replace(self.event, noise_multiplier=noise_multiplier))
        return self


@dataclass(frozen=True)
class ClientSchedule:
    """All releases of one client, and the budget they must fit.

    Args:
        target_epsilon: > 0; inf is "no budget": nothing is solved for, epsilon is only reported.
        delta: in (0, 1); 0 where no release is Gaussian.
        planned: every release of the run.

    >>> run = ClientSchedule(2.0, 1e-4, (Planned("train", GaussianEvent(0.02, None, steps=50), 30),))
    >>> run.with_noise(1.5).events()
    [GaussianEvent(sample_rate=0.02, noise_multiplier=1.5, steps=1500)]
    """

    target_epsilon: float
    delta: float
    planned: tuple[Planned, ...]

    def events(self) -> list[Event]:
        """What the whole run releases."""
        return [event for line in self.planned for event in line.events()]

    @property
    def releases(self) -> tuple[int, ...]:
        """How many releases each of `events` stands for."""
        return tuple(line.count for line in self.planned if line.count)

    @property
    def protected(self) -> ClientSchedule:
        """The schedule without `NonPrivateEvent` releases: what noise is solved for, since none could pay for those."""
        lines = tuple(line for line in self.planned if not isinstance(line.event, NonPrivateEvent))
        return replace(self, planned=lines)

    @property
    def main(self) -> NoisedEvent:
        """One of the most frequent noised sums: what "the" noise and rate of a client are.

        Raises:
            KeyError: no noised sum is planned.
        """
        event = self.main_line.event
        assert isinstance(event, NoisedEvent)  # for mypy
        return event

    def batch_size(self, num_records: int) -> int:
        """Records that a step of `main` expects of so many.

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

    def count_of(self, purpose: str) -> int:
        """Planned releases of that purpose; 0 for one that is not planned."""
        return sum(line.count for line in self.planned if line.purpose == purpose)

    def noise_multiplier(self, purpose: str) -> float:
        """Noise std (of Laplace noise: scale) / clip norm of that purpose's releases.

        Raises:
            KeyError: no noised sum of that purpose is planned, or its noise is not solved yet.
        """
        events = [line.event for line in self.planned if line.purpose == purpose]
        noises = [event.noise_multiplier for event in events if isinstance(event, NoisedEvent)]
        if not noises or noises[0] is None:
            raise KeyError(purpose)
        return noises[0]

    def with_noise(self, noise_multiplier: float) -> ClientSchedule:
        """The schedule with every unsolved noise set to this one."""
        return replace(self, planned=tuple(line.with_noise(noise_multiplier) for line in self.planned))
