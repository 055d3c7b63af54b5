"""Accounting events: immutable descriptions of what a client releases, without anything about data.

The accountant defines which data sets are neighbours; a noise multiplier never includes that relation.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from dpfl_lightning.errors import UserError, require


@dataclass(frozen=True)
class GaussianEvent:
    """`steps` adaptive releases of a clipped sum with Gaussian noise, over Poisson-sampled records.

    `sample_rate` is the Poisson probability of a record in one step, in (0, 1]; 1.0 is the full batch.
    `noise_multiplier` is noise std / clip norm, on the sum, >= 0 (0: no privacy; None: `calibrate` has to solve it).
    """

    kind: ClassVar = "gaussian"
    protection: ClassVar = "Gaussian noise"

    sample_rate: float
    noise_multiplier: float | None
    steps: int = 1

    def repeated(self, times: int) -> Self:
        return dataclasses.replace(self, steps=self.steps * times)

    def step_words(self) -> str:
        """Describe one step in a guarantee."""
        noised = "noised" if self.noise_multiplier else "un-noised"
        return f"{noised} {'full-batch' if self.sample_rate == 1 else 'gradient'} step"

    def cells(self) -> list[str]:
        """Return sample rate, noise and steps of one release, for tables."""
        return [f"{self.sample_rate:.6g}", f"{self.noise_multiplier or 0.0:.6g}", str(self.steps)]


@dataclass(frozen=True)
class LaplaceEvent:
    """`steps` adaptive releases of full-batch sums clipped in L1, with Laplace noise: each is 1 / noise_multiplier-DP.

    `noise_multiplier` is the scale of the noise / L1 clip norm, on the sum; otherwise as in `GaussianEvent`.
    """

    kind: ClassVar = "laplace"
    protection: ClassVar = "Laplace noise"
    sample_rate: ClassVar[float] = 1.0

    noise_multiplier: float | None
    steps: int = 1

    def repeated(self, times: int) -> Self:
        return dataclasses.replace(self, steps=self.steps * times)

    def step_words(self) -> str:
        """Describe one step in a guarantee."""
        return f"{'Laplace-noised' if self.noise_multiplier else 'un-noised'} full-batch step"

    def cells(self) -> list[str]:
        """Return sample rate, noise and steps of one release, for tables."""
        return ["1", f"{self.noise_multiplier:.6g} (Laplace)", str(self.steps)]


@dataclass(frozen=True)
class SelectionEvent:
    """`count` choices by the exponential mechanism with a monotone utility (Gumbel noise of scale 1 / epsilon).

    Adding or removing one record moves all utilities in the same direction by at most 1, which bounds the range by
    `epsilon`: the RDP of each choice is alpha * epsilon^2 / 8 (Cesar and Rogers, 2021). Replacing one record moves
    utilities in both directions, which bounds the range by 2 * epsilon.
    """

    kind: ClassVar = "selection"
    protection: ClassVar = "choice of a model"

    epsilon: float
    count: int = 1

    def repeated(self, times: int) -> Self:
        return dataclasses.replace(self, count=self.count * times)

    def cells(self) -> list[str]:
        """Return sample rate, noise and number of choices of one release, for tables."""
        scale = 1 / self.epsilon if self.epsilon else math.inf
        return ["1", f"{scale:.6g} (Gumbel)", str(self.count)]


@dataclass(frozen=True)
class _Words:
    """What has no noise: its `words` are all that a guarantee says of it."""

    protection: ClassVar = "no noise"

    words: str

    def repeated(self, times: int) -> Self:
        return self

    def cells(self) -> list[str]:
        """Return sample rate, noise and steps for tables: all records, whose noise does not count."""
        return ["1", "none", "-"]


@dataclass(frozen=True)
class Caveat(_Words):
    """A limitation that costs nothing and protects nothing. Every guarantee that composes it includes `words`."""


@dataclass(frozen=True)
class NonPrivateEvent(_Words):
    """A release of private information without noise: epsilon is infinite. `words`, one line, describe what it is."""

    kind: ClassVar = "unprotected"

    def __post_init__(self) -> None:
        if not self.words.isprintable():  # guarantees and ledgers state them
            raise ValueError(f"what is released must be described in one line of text, got {self.words!r}")


#: releases of training: sums of clipped gradients with noise
NoisedEvent = GaussianEvent | LaplaceEvent

#: what a client releases; a ledger records each with its `kind`
Release = NoisedEvent | SelectionEvent | NonPrivateEvent

Event = Release | Caveat


def noised_event(mechanism: str, sample_rate: float, noise_multiplier: float | None, steps: int) -> NoisedEvent:
    """Return the event of `steps` noised sums by a mechanism, "gaussian" or "laplace" (always on full batches)."""
    if mechanism == LaplaceEvent.kind:
        return LaplaceEvent(noise_multiplier, steps)
    return GaussianEvent(sample_rate, noise_multiplier, steps)


@dataclass(frozen=True)
class Composed:
    """Merged events, without those that cost nothing.

    Each tuple holds distinct events: (sample_rate, noise_multiplier, steps), (noise_multiplier, steps) and
    (epsilon, count); `unprotected` means that something is released without noise.
    """

    gaussian: tuple[tuple[float, float, int], ...] = ()
    laplace: tuple[tuple[float, int], ...] = ()
    selection: tuple[tuple[float, int], ...] = ()
    unprotected: bool = False

    @property
    def noiseless(self) -> bool:
        """Whether epsilon is infinite."""
        without_noise = any(noise == 0 for _, noise, _ in self.gaussian) or any(noise == 0 for noise, _ in self.laplace)
        return self.unprotected or without_noise or any(math.isinf(epsilon) for epsilon, _ in self.selection)

    @property
    def free(self) -> bool:
        """Whether epsilon is 0."""
        return not (self.gaussian or self.laplace or self.selection or self.unprotected)

    @property
    def full_batches(self) -> bool:
        """Whether all of it is Gaussian noise on full batches, some of which may have none."""
        only_gaussian = bool(self.gaussian) and not (self.laplace or self.selection or self.unprotected)
        return only_gaussian and all(rate == 1 for rate, _, _ in self.gaussian)

    def pure(self, sensitivity: int) -> float:
        """Return the epsilon that holds at delta 0, by addition; infinite with Gaussian noise or without noise."""
        if self.gaussian or self.noiseless:
            return math.inf
        epsilons = [count * epsilon for epsilon, count in self.selection]
        return sensitivity * sum(epsilons + [steps / noise for noise, steps in self.laplace])


def composed(events: Sequence[Event], delta: float) -> Composed:
    """Check events and delta, and merge equal events.

    Raises UserError if a sampling rate is outside (0, 1], noise is negative or unsolved, a count is negative, or delta
    is outside (0, 1) (or negative, if no release has Gaussian noise).
    """
    gaussian: Counter[tuple[float, float]] = Counter()
    laplace: Counter[float] = Counter()
    selection: Counter[float] = Counter()
    for event in events:
        if isinstance(event, GaussianEvent):
            rate, way_out = event.sample_rate, "Divide a batch size by the number of records."
            require(0 < rate <= 1, "sample_rate", "be in (0, 1]", rate, way_out)
            gaussian[float(rate), _noise(event)] += _count("steps", event.steps)
        elif isinstance(event, LaplaceEvent):
            laplace[_noise(event)] += _count("steps", event.steps)
        elif isinstance(event, SelectionEvent):
            require(event.epsilon >= 0, "selection epsilon", "be at least 0", event.epsilon)
            selection[float(event.epsilon)] += _count("count", event.count)
        elif not isinstance(event, Caveat | NonPrivateEvent):
            raise TypeError(f"not an event: {event!r}")
    releases = Composed(
        tuple((*key, steps) for key, steps in gaussian.items() if steps and math.isfinite(key[1])),
        tuple((noise, steps) for noise, steps in laplace.items() if steps and math.isfinite(noise)),
        tuple((epsilon, count) for epsilon, count in selection.items() if count and epsilon > 0),
        any(isinstance(event, NonPrivateEvent) for event in events),
    )
    if not (releases.free or releases.noiseless):  # epsilon 0 and infinity hold at any delta
        in_range = delta > 0 if releases.gaussian else delta >= 0
        require(in_range and delta < 1, "delta", "be in (0, 1)", delta, "It is usually at most 1 / number of records.")
    return releases


def _noise(event: GaussianEvent | LaplaceEvent) -> float:
    noise = event.noise_multiplier
    if noise is None:
        raise UserError("`noise_multiplier` must be a number, got None. Solve it first with `calibrate`.")
    require(noise >= 0, "noise_multiplier", "be at least 0", noise, "0 means no privacy.")
    if 1e100 < noise < math.inf:
        return 1e100  # its square would overflow; less noise gives a valid upper bound
    return float(noise) if noise >= 1e-6 else 0.0  # the rounding of float32 sums would hide smaller noise


def _count(key: str, value: int) -> int:
    require(value >= 0, key, "be at least 0", value)
    return value
