"""Accounting events: immutable descriptions of what a client releases, without anything about data.

The accountant defines which data sets are neighbours; a noise multiplier never includes that relation.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class GaussianEvent:
    """`steps` adaptive releases of a clipped sum with Gaussian noise, over Poisson-sampled records.

    Args:
        sample_rate: Poisson probability of a record in one step, in (0, 1]; 1.0 is the full batch.
        noise_multiplier: noise std / clip norm, on the sum, >= 0 (0.0: no privacy); None: `calibrate` has to solve it.
    """

    sample_rate: float
    noise_multiplier: float | None
    steps: int = 1


@dataclass(frozen=True)
class LaplaceEvent:
    """`steps` adaptive releases of full-batch sums clipped in L1, with Laplace noise: each is 1 / noise_multiplier-DP.

    `noise_multiplier` is the scale of the noise / L1 clip norm, on the sum; otherwise as in `GaussianEvent`.
    """

    sample_rate: ClassVar[float] = 1.0

    noise_multiplier: float | None
    steps: int = 1


@dataclass(frozen=True)
class SelectionEvent:
    """`count` choices by the exponential mechanism with a monotone utility (Gumbel noise of scale 1 / epsilon).

    Adding or removing one record moves all utilities in the same direction by at most 1, which bounds the range by
    `epsilon`: the RDP of each choice is alpha * epsilon^2 / 8 (Cesar and Rogers, 2021). Replacing one record moves
    utilities in both directions, which bounds the range by 2 * epsilon.
    """

    epsilon: float
    count: int = 1


@dataclass(frozen=True)
class Caveat:
    """A limitation that costs nothing and protects nothing. Every guarantee that composes it includes `words`."""

    words: str


@dataclass(frozen=True)
class NonPrivateEvent:
    """A release of private information without noise: epsilon is infinite. `words` describe what is released."""

    words: str


#: releases of training: sums of clipped gradients with noise
NoisedEvent = GaussianEvent | LaplaceEvent

Event = GaussianEvent | LaplaceEvent | SelectionEvent | Caveat | NonPrivateEvent


def repeated(event: Event, times: int) -> Event:
    """Return the event of `times` such releases, one after the other."""
    if isinstance(event, NoisedEvent):
        return dataclasses.replace(event, steps=event.steps * times)
    if isinstance(event, SelectionEvent):
        return dataclasses.replace(event, count=event.count * times)
    return event
