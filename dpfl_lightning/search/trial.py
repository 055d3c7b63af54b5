"""A trial as all modules except the study see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


class Pruned(Exception):
    """Raised by a trial that ends early because others did better. The message states after how much."""


@dataclass(frozen=True)
class Trial:
    """A finished trial.

    Args:
        number: number in the study.
        state: complete, pruned or failed.
        found: dotted key -> drawn value (label, for choices).
        scores: name -> value; a pruned trial has its last value.
        reason: why it failed or was pruned.
        begun: start time; None if it never started.
        ended: end time.
        steps: step -> accuracy at that step.
        facts: notes about the trial: num_params, seconds, host, cost, error.
        again: whether another trial repeats it.
    """

    number: int
    state: str
    found: Mapping[str, Any]
    scores: Mapping[str, float]
    reason: str = ""
    begun: datetime | None = None
    ended: datetime | None = None
    steps: Mapping[int, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    again: bool = False
