"""What a client releases, as immutable accounting facts: events, composed by an accountant.

An event states what was released in the units an accountant needs, and nothing about data. Adjacency is add or remove
one record; it is the accountant's business, never hidden in a noise multiplier.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


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
class SelectionEvent:
    """`count` choices by the exponential mechanism with bounded range `epsilon` (RDP: alpha * epsilon^2 / 8 each).

    Reference: Cesar and Rogers (2021), bounded range; holds for add or remove one record and a monotone utility.
    """

    epsilon: float
    count: int = 1


@dataclass(frozen=True)
class Caveat:
    """Costs nothing and protects nothing: `words` travel into every guarantee that composes it."""

    words: str


Event = GaussianEvent | SelectionEvent | Caveat


def repeated(event: Event, times: int) -> Event:
    """The event of `times` such releases, one after the other.

    >>> repeated(GaussianEvent(0.1, 1.0, steps=3), 4).steps
    12
    """
    if isinstance(event, GaussianEvent):
        return dataclasses.replace(event, steps=event.steps * times)
    if isinstance(event, SelectionEvent):
        return dataclasses.replace(event, count=event.count * times)
    return event
