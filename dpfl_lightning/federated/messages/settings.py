"""The settings of each client."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ClientSettings:
    """The settings of one client. `epsilon` inf is no budget; `noise_multiplier` None is solved from the budget."""

    num_records: int
    batch_size: int
    local_epochs: int
    learning_rate: float
    epsilon: float
    delta: float
    clip_norm: float
    noise_multiplier: float | None

    @property
    def steps(self) -> int:
        """Local steps of a round."""
        return self.local_epochs * math.ceil(self.num_records / self.batch_size)

    @property
    def sample_rate(self) -> float:
        return self.batch_size / self.num_records
