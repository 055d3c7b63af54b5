"""Findings of an audit."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpfl_lightning.privacy.accounting.accountant import epsilon_text


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        what: description of what was measured.
        measured: measured interval or bound, as text.
        claimed: value that it is compared with, as text.
        refuted: whether the build violates its claim.
        confidence: probability with which a sound build is not refuted; None means always.
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
    """Format a lower bound, rounded down.

    >>> at_least(1.9999), at_least(math.inf)
    ('1.999', 'inf')
    """
    return f"{math.floor(value * 1000) / 1000:.3f}" if math.isfinite(value) else str(value)


def at_most(value: float) -> str:
    """Format a claim, rounded up.

    >>> at_most(1.0001)
    '1.001'
    """
    return epsilon_text(value, decimals=3)
