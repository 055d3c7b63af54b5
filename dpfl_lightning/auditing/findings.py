"""What an audit found, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpfl_lightning.privacy.accounting.accountant import epsilon_text


@dataclass(frozen=True)
class Finding:
    """One check's answer.

    Args:
        check: its name.
        what: what was measured, in words.
        measured: interval or bound, in words.
        claimed: what it is held to, in words.
        refuted: whether the build is not what it claims to be.
        confidence: the probability with which a sound build is not refuted; None: it never is.
        figures: the numbers, ready for JSON.
    """

    check: str
    what: str
    measured: str
    claimed: str
    refuted: bool
    confidence: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


def at_least(value: float) -> str:
    """A lower bound as it is shown: rounded down.

    >>> at_least(1.9999), at_least(math.inf)
    ('1.999', 'inf')
    """
    return f"{math.floor(value * 1000) / 1000:.3f}" if math.isfinite(value) else str(value)


def at_most(value: float) -> str:
    """A claim as it is shown: rounded up.

    >>> at_most(1.0001)
    '1.001'
    """
    return epsilon_text(value, decimals=3)
