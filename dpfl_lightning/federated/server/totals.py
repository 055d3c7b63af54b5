"""Sums over the rounds of a run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class RunTotals:
    """Sums over rounds. Checkpoints contain them, so that a resumed run continues to count.

    Args:
        seconds: time of the run before this process.
        records: expected number of records of all releases.
        training_seconds: time in rounds, without evaluation.
        client_seconds: part of it that is the clients' work on this machine.
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
        """The content for a checkpoint, independent of later changes.

        >>> RunTotals.of(RunTotals(records=3, noise_std={0: 0.5}).saved()).records
        3
        """
        own = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {**own, "seconds": self.wall_seconds, "metrics": dict(self.metrics), "noise_std": dict(self.noise_std)}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> RunTotals:
        """The totals from a checkpoint."""
        own = {one.name: saved[one.name] for one in dataclasses.fields(cls)}
        return cls(**{**own, "metrics": dict(own["metrics"]), "noise_std": dict(own["noise_std"])})
