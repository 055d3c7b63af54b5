"""Sums over the rounds of a run."""

from __future__ import annotations

import copy
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
        metrics: metrics of the last round.
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
        """Return the content for a checkpoint, independent of later changes."""
        return {**dataclasses.asdict(self), "seconds": self.wall_seconds}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> RunTotals:
        """Return the totals of a checkpoint."""
        return cls(**copy.deepcopy({one.name: saved[one.name] for one in dataclasses.fields(cls)}))
