"""The exponential mechanism: a private choice of the best of several candidates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.privacy.accounting.events import SelectionEvent
from dpfl_lightning.privacy.noise import RandomGenerator


@dataclass(frozen=True)
class ExponentialMechanism:
    """Chooses one of M candidates by the sums of the scores that the records give them.

    `epsilon`, > 0 and finite, is the bounded range of one choice: a record gives each candidate a score in [0, 1], so
    adding a record moves all sums in the same direction by at most 1. Replacing a record moves the sums in both
    directions, and the accountant charges twice the range.

    **Privacy** One call of `choose` is `event(1)`.
    """

    epsilon: float

    def __post_init__(self) -> None:
        require(0 < self.epsilon < math.inf, "epsilon", "be above 0 and finite for a selection", self.epsilon)

    def choose(self, scores: Tensor, generator: RandomGenerator) -> int:
        """Return the index of the largest score of `[M]` (sums over records) plus Gumbel noise of scale 1 / epsilon."""
        noise = generator.gumbel(0.0, 1.0 / self.epsilon, len(scores))
        return int((scores.cpu().double() + torch.from_numpy(noise)).argmax())

    def event(self, count: int) -> SelectionEvent:
        """Return the accounting event of `count` calls of `choose`."""
        return SelectionEvent(self.epsilon, count)
