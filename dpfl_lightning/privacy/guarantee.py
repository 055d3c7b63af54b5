"""What a client is promised: an epsilon is shown with this, never alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpfl_lightning.privacy.accountant import ADJACENCIES, Accountant, rounded_up
from dpfl_lightning.privacy.events import Caveat, Event, GaussianEvent


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What a client is promised: an epsilon is shown with this, never alone.

    Args:
        epsilon: upper bound, >= 0, rounded up to 1e-6; inf is no guarantee.
        delta: in (0, 1).
        sampling: how batches were drawn, in words.
        accountant: how epsilon was found, in words.
        unit: whose contribution is hidden.
        adjacency: in what neighbouring data sets differ.
        caveats: what epsilon does not cover, in words.
    """

    epsilon: float
    delta: float
    sampling: str
    accountant: str
    unit: str = "record"
    adjacency: str = "add or remove one record"
    caveats: tuple[str, ...] = ()

    def words(self) -> str:
        """One sentence, and the caveats after it.

        >>> Guarantee(epsilon=1.9999991, delta=0.1, sampling="full batch", accountant="RDP").words()
        '(2, 0.1)-differential privacy per record (add or remove one record), full batch, accounted by RDP.'
        """
        if math.isinf(self.epsilon):
            sentence = f"No differential privacy per {self.unit}: something is released without noise."
        else:
            shown = f"{rounded_up(self.epsilon, 4):.4f}".rstrip("0").rstrip(".")
            sentence = (
                f"({shown}, {self.delta:g})-differential privacy per {self.unit} ({self.adjacency}), "
                f"{self.sampling}, accounted by {self.accountant}."
            )
        return " ".join([sentence, *(f"Caveat: {caveat.rstrip('.')}." for caveat in self.caveats)])

    def as_dict(self) -> dict[str, Any]:
        """All fields and `words`, ready for JSON: an infinite epsilon is None, for JSON has no infinity."""
        finite = self.epsilon if math.isfinite(self.epsilon) else None
        return {**asdict(self), "epsilon": finite, "caveats": list(self.caveats), "words": self.words()}


def guarantee(events: Sequence[Event], delta: float, accountant: Accountant, sampling: str | None = None) -> Guarantee:
    """The guarantee of composed events; the words of their `Caveat`s travel in, each once.

    Args:
        events: everything that one client releases.
        delta: in (0, 1).
        accountant: from `get_accountant`.
        sampling: in words, where the sample rates do not say it (shuffled batches: with a `Caveat`).
    Privacy: arithmetic on public facts.

    >>> from dpfl_lightning.privacy.accountant import get_accountant
    >>> events = [GaussianEvent(1.0, 2.0), Caveat("data sizes are public")]
    >>> guarantee(events, 1e-5, get_accountant("gdp")).caveats
    ('data sizes are public',)
    """
    epsilon, how = accountant.bound(events, delta)
    caveats = dict.fromkeys(event.words for event in events if isinstance(event, Caveat))
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        sampling=_sampling_words(events) if sampling is None else sampling,
        accountant=how,
        adjacency=ADJACENCIES[accountant.adjacency],
        caveats=tuple(caveats),
    )


def _sampling_words(events: Sequence[Event]) -> str:
    full = {event.sample_rate == 1 for event in events if isinstance(event, GaussianEvent) and event.steps}
    if full == {True, False}:
        return "full and Poisson-sampled batches"
    return "full batches" if full == {True} else "Poisson-sampled batches"
