"""The exponential mechanism: which of several candidates the records of a client favour."""

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
    """Chooses one of M candidates by the sums of scores that each record gives them.

    Args:
        epsilon: bounded range of one choice, > 0 and finite.

    **Guarantees** A record gives each candidate a score in [0, 1], so one record more moves all sums in the same
    direction by at most 1, and the range of the choice is bounded by `epsilon`. Where one record replaces another the
    sums move both ways, and the accountant charges twice the range.

    **Privacy** One call of `choose` is `event(1)`.

    Raises:
        UserError: `epsilon` is out of range.
    """

    epsilon: float

    def __post_init__(self) -> None:
        require(0 < self.epsilon < math.inf, "epsilon", "be above 0 and finite for a selection", self.epsilon)

    def choose(self, scores: Tensor, generator: RandomGenerator) -> int:
        """The index of the largest of `scores` `[M]` (sums over records) after Gumbel noise of scale 1 / epsilon."""
        noise = generator.gumbel(0.0, 1.0 / self.epsilon, len(scores))
        return int((scores.cpu().double() + torch.from_numpy(noise)).argmax())

    def event(self, count: int) -> SelectionEvent:
        """What `count` calls of `choose` release."""
        return SelectionEvent(self.epsilon, count)
