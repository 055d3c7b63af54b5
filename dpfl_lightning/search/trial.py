"""A trial as everybody but the study knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


class Pruned(Exception):
    """A trial that ended early because others did better; says after how much."""


@dataclass(frozen=True)
class Trial:
    """One that ended.

    Args:
        number: in the study.
        state: complete, pruned or failed.
        found: dotted key -> what was drawn (of choices the label).
        scores: name -> value; of a pruned trial what it had last.
        reason: why it failed or was pruned, in words.
        begun: when; None if it never was.
        ended: when.
        steps: step -> accuracy that was known then.
        facts: what was noted of it: num_params, seconds, host, cost, error.
        again: another trial makes it again.
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
