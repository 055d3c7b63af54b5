"""Events, checked and merged: what accountants compose."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.accounting.events import (
    Caveat,
    Event,
    GaussianEvent,
    LaplaceEvent,
    NonPrivateEvent,
    SelectionEvent,
)


@dataclass(frozen=True)
class Composed:
    """Events after merging equal ones, and without those that cost nothing.

    Args:
        gaussian: (sample_rate, noise_multiplier, steps) of each distinct Gaussian event.
        laplace: (noise_multiplier, steps) of each distinct Laplace event.
        selection: (epsilon, count) of each distinct selection.
        unprotected: something was shown without noise.
    """

    gaussian: tuple[tuple[float, float, int], ...] = ()
    laplace: tuple[tuple[float, int], ...] = ()
    selection: tuple[tuple[float, int], ...] = ()
    unprotected: bool = False

    @property
    def noiseless(self) -> bool:
        """Epsilon is infinite."""
        silent = any(noise == 0 for _, noise, _ in self.gaussian) or any(noise == 0 for noise, _ in self.laplace)
        return self.unprotected or silent or any(math.isinf(epsilon) for epsilon, _ in self.selection)

    @property
    def free(self) -> bool:
        """Epsilon is 0."""
        return not (self.gaussian or self.laplace or self.selection or self.unprotected)

    def pure(self, sensitivity: int) -> float:
        """The epsilon that holds at delta 0, by addition; infinite with Gaussian noise or none.

        Args:
            sensitivity: 1 where neighbours have one record more or less, 2 where one record is another.
        """
        if self.gaussian or self.noiseless:
            return math.inf
        each = [count * epsilon for epsilon, count in self.selection]
        return sensitivity * sum(each + [steps / noise for noise, steps in self.laplace])


def composed(events: Sequence[Event], delta: float) -> Composed:
    """Check events and delta, and merge equal events (a ledger has one line a round).

    Raises:
        UserError: a sampling rate outside (0, 1], negative or unsolved noise, negative counts, delta outside (0, 1) (or
            negative, where no release has Gaussian noise).

    >>> composed([GaussianEvent(0.1, 1.0, 3), GaussianEvent(0.1, 1.0, 4)], 1e-5).gaussian
    ((0.1, 1.0, 7),)
    """
    gaussian: Counter[tuple[float, float]] = Counter()
    laplace: Counter[float] = Counter()
    selection: Counter[float] = Counter()
    unprotected = False
    for event in events:
        if isinstance(event, GaussianEvent):
            gaussian[_rate(event), _noise(event)] += _count("steps", event.steps)
        elif isinstance(event, LaplaceEvent):
            laplace[_noise(event)] += _count("steps", event.steps)
        elif isinstance(event, SelectionEvent):
            require(event.epsilon >= 0, "selection epsilon", "be at least 0", event.epsilon)
            selection[float(event.epsilon)] += _count("count", event.count)
        elif isinstance(event, NonPrivateEvent):
            unprotected = True
        elif not isinstance(event, Caveat):
            raise TypeError(f"not an event: {event!r}")
    releases = Composed(
        tuple((*key, steps) for key, steps in gaussian.items() if steps and math.isfinite(key[1])),
        tuple((noise, steps) for noise, steps in laplace.items() if steps and math.isfinite(noise)),
        tuple((epsilon, count) for epsilon, count in selection.items() if count and epsilon > 0),
        unprotected,
    )
    if not (releases.free or releases.noiseless):  # nothing spent, and nothing protected, are so at any delta
        lowest = delta > 0 if releases.gaussian else delta >= 0
        require(lowest and delta < 1, "delta", "be in (0, 1)", delta, "Usual is at most 1 / number of records.")
    return releases


def _rate(event: GaussianEvent) -> float:
    rate = event.sample_rate
    require(0 < rate <= 1, "sample_rate", "be in (0, 1]", rate, "A batch size? Divide by the number of records.")
    return float(rate)


def _noise(event: GaussianEvent | LaplaceEvent) -> float:
    noise = event.noise_multiplier
    if noise is None:
        raise UserError("`noise_multiplier` must be a number, got None. Solve it first with `calibrate`.")
    require(noise >= 0, "noise_multiplier", "be at least 0", noise, "0 is no privacy.")
    if 1e100 < noise < math.inf:  # its square leaves a double's range: the safe bound of less noise
        noise = 1e100
    return float(noise) if noise >= 1e-6 else 0.0  # less is lost in the rounding of float32 sums: none


def _count(key: str, value: int) -> int:
    require(value >= 0, key, "be at least 0", value)
    return value
