"""What a run adds up from round to round."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class RunTotals:
    """Kept by checkpoints, so that a resumed run goes on counting.

    Args:
        seconds: that the run has taken before now; its clock runs from there.
        records: expected of all releases so far.
        training_seconds: of all rounds, evaluation aside.
        client_seconds: of them the clients', on this machine.
        metrics: what strategies had to say of the last round.
        noise_std: client -> noise in one number of its last update.
    """

    seconds: float = 0.0
    records: int = 0
    training_seconds: float = 0.0
    client_seconds: float = 0.0
    metrics: dict[str, float | Tensor] = field(default_factory=dict)
    noise_std: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = time.perf_counter() - self.seconds

    @property
    def wall_seconds(self) -> float:
        return time.perf_counter() - self._began

    def saved(self) -> dict[str, Any]:
        """For a checkpoint; what is added later does not change it.

        >>> Tally.of(Tally(records=3, noise_std={0: 0.5}).saved()).records
        3
        """
        own = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {**own, "seconds": self.wall_seconds, "metrics": dict(self.metrics), "noise_std": dict(self.noise_std)}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> RunTotals:
        """What a checkpoint kept."""
        own = {one.name: saved[one.name] for one in dataclasses.fields(cls)}
        return cls(**{**own, "metrics": dict(own["metrics"]), "noise_std": dict(own["noise_std"])})
