"""What a client releases, as immutable accounting facts: events, composed by an accountant.

An event states what was released in the units an accountant needs, and nothing about data. Which data sets are
neighbours is the accountant's business, never hidden in a noise multiplier.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class GaussianEvent:
    """`steps` adaptive releases of a clipped sum with Gaussian noise, over Poisson-sampled records.

    Args:
        sample_rate: Poisson probability of one record in one step, in (0, 1]; 1.0 is the full batch.
        noise_multiplier: noise standard deviation / clip norm, on the sum, >= 0; 0.0 is no privacy; None is
            "to be solved by `calibrate`".
        steps: number of releases, >= 0.
    """

    sample_rate: float
    noise_multiplier: float | None
    steps: int = 1


@dataclass(frozen=True)
class LaplaceEvent:
    """`steps` adaptive releases of full-batch sums, clipped in L1, with Laplace noise: each is 1 / noise_multiplier-DP.

    Args:
        noise_multiplier: scale of the Laplace noise / L1 clip norm, on the sum, >= 0; 0.0 is no privacy; None is
            "to be solved by `calibrate`".
        steps: number of releases, >= 0.
    """

    sample_rate: ClassVar[float] = 1.0

    noise_multiplier: float | None
    steps: int = 1


@dataclass(frozen=True)
class SelectionEvent:
    """`count` choices by the exponential mechanism with a monotone utility (Gumbel noise of scale 1 / epsilon).

    Adding or removing one record moves all utilities in one direction by at most 1: the range is bounded by `epsilon`,
    RDP alpha * epsilon^2 / 8 each. Replacing one moves them both ways: the range is bounded by 2 * epsilon.

    Reference: Cesar and Rogers (2021), bounded range.
    """

    epsilon: float
    count: int = 1


@dataclass(frozen=True)
class Caveat:
    """Costs nothing and protects nothing: `words` travel into every guarantee that composes it."""

    words: str


@dataclass(frozen=True)
class NonPrivateEvent:
    """Something private was shown without noise: epsilon is infinite; `words` say what."""

    words: str


#: sums of clipped gradients with noise: what training releases
NoisedEvent = GaussianEvent | LaplaceEvent

Event = GaussianEvent | LaplaceEvent | SelectionEvent | Caveat | NonPrivateEvent


def repeated(event: Event, times: int) -> Event:
    """The event of `times` such releases, one after the other.

    >>> repeated(GaussianEvent(0.1, 1.0, steps=3), 4).steps
    12
    """
    if isinstance(event, NoisedEvent):
        return dataclasses.replace(event, steps=event.steps * times)
    if isinstance(event, SelectionEvent):
        return dataclasses.replace(event, count=event.count * times)
    return event
