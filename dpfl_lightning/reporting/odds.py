"""What a guarantee means for someone who guesses whether a record took part."""

import math
from typing import NamedTuple

from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.runtime.text import at_least

_USELESS = 10.0  # epsilon of a group above which no bound is shown


class Odds(NamedTuple):
    """A promise (epsilon, delta) in plain words, each number rounded to the unfavourable side."""

    factor: str
    exception: str
    guesses: str

    @classmethod
    def of(cls, epsilon: float, delta: float) -> "Odds":
        """Translate a finite epsilon; no other epsilon has odds.

        With all that a client sent, a guess between two equally likely data sets is right with probability at most
        (exp(epsilon) + delta) / (exp(epsilon) + 1).

        >>> Odds.of(2.0, 1e-4)
        Odds(factor='7.4', exception='1 in 10,000', guesses='88.1 of 100 cases')
        """
        right = (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon))
        of_cases = f"{at_least(math.ceil(min(right, 1) * 1000) / 10)} of 100 cases"
        return cls(likelihood_ratio(epsilon), f"1 in {int(1 / delta + 1e-6):,}" if delta else "0", of_cases)


def likelihood_ratio(epsilon: float) -> str:
    """Return exp(epsilon) with two digits, rounded up.

    >>> likelihood_ratio(0.0), likelihood_ratio(3.0), likelihood_ratio(8.0), likelihood_ratio(40.0)
    ('1', '21', '3,000', 'more than a million')
    """
    if epsilon > math.log(1e6):
        return "more than a million"
    value = math.exp(epsilon) * (1 - 1e-9)
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return (
        f"{round(math.ceil(value / step) * step, 1):,g}" if value < 1000 else f"{math.ceil(value / step) * step:,.0f}"
    )


def of_several(one: Guarantee) -> list[dict[str, str]]:
    """Return what holds for k records of a person: k epsilon, and delta (e^(k epsilon) - 1) / (e^epsilon - 1)."""
    rows = []
    for count in (2, 4):
        epsilon, useful = count * one.epsilon, count * one.epsilon < _USELESS
        delta = one.delta * (math.expm1(epsilon) / math.expm1(one.epsilon) if one.epsilon else count) if useful else 1.0
        useful = useful and delta < 0.5
        odds = Odds.of(epsilon, delta) if useful else Odds("no useful bound", "", "")
        rows.append(
            {
                "a person with": f"{count} records of one client",
                "times as likely, at most": odds.factor,
                "exception": odds.exception,
                "right guesses, at most": odds.guesses,
            }
        )
    return rows
