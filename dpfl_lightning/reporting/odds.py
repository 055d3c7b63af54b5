"""What a guarantee means for someone who guesses whether a record took part."""

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import NamedTuple

from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.privacy.accounting.units import RECORD
from dpfl_lightning.runtime.text import at_least

_USELESS = 10.0  # epsilon of a group above which no bound is shown
_DIGITS = 3  # of factors, so that their products can be checked
_MOST = 1e6  # factor above which no number is shown


class Odds(NamedTuple):
    """A promise (epsilon, delta) in plain words, each number rounded to the unfavourable side."""

    factor: str
    exception: str
    guesses: str

    @property
    def times(self) -> str:
        """The factor within a sentence, before "as likely"."""
        return f"at most {self.factor} times" if self.factor[0].isdigit() else f"possibly {self.factor} times"

    @classmethod
    def of(cls, epsilon: float, delta: float) -> "Odds":
        """Translate a finite epsilon; no other one has odds.

        With all that a client sent, a guess between two equally likely data sets is right with probability at most
        (exp(epsilon) + delta) / (exp(epsilon) + 1).

        >>> Odds.of(2.0, 1e-4)
        Odds(factor='7.39', exception='1 in 10,000', guesses='88.1 of 100 cases')
        """
        right = (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon))
        of_cases = f"{at_least(math.ceil(min(right, 1) * 1000) / 10)} of 100 cases"
        return cls(likelihood_ratio(epsilon), one_in(delta), of_cases)

    @classmethod
    def left(cls, epsilon: float, delta: float) -> "Odds":
        """Translate what is left of a budget: rounded down, and without guesses, of which there are none.

        >>> Odds.left(0.5, 9e-5)
        Odds(factor='1.64', exception='1 in 11,112', guesses='')
        """
        exception = f"1 in {math.ceil(1 / delta - 1e-6):,}" if delta else "0"
        return cls(likelihood_ratio(epsilon, math.floor), exception, "")


def anybody_words(counts: Sequence[int], guarantees: Sequence[Guarantee]) -> str:
    """Return how likely the exception hits anybody of all units of clients, of whom each has so many.

    A sum of probabilities of 1 and more bounds nothing.
    """
    chance = sum(count * one.delta for count, one in zip(counts, guarantees, strict=True))
    everybody = f"anybody of all {sum(counts):,} {guarantees[0].unit}s"
    if chance >= 1:
        return f" That it hits {everybody} is not excluded: expect up to {math.ceil(chance - 1e-6):,} of them."
    return f" It hits {everybody} with probability {one_in(chance)} at most."


def one_in(probability: float) -> str:
    """Return a probability as 1 in a whole number, rounded up.

    >>> one_in(1e-5), one_in(0.012), one_in(0.0), one_in(1.5)
    ('1 in 100,000', '1 in 83', '0', '1 in 1')
    """
    return f"1 in {int(1 / min(probability, 1.0) + 1e-6):,}" if probability else "0"


def likelihood_ratio(epsilon: float, to_whole: Callable[[float], int] = math.ceil) -> str:
    """Return exp(epsilon) with three digits, rounded up.

    >>> likelihood_ratio(0.0), likelihood_ratio(3.0), likelihood_ratio(8.0), likelihood_ratio(40.0)
    ('1', '20.1', '2,990', 'more than a million')
    >>> likelihood_ratio(0.5), likelihood_ratio(1.0), likelihood_ratio(5.0)
    ('1.65', '2.72', '149')
    """
    if epsilon > math.log(_MOST):
        return "more than a million"
    value = math.exp(epsilon) * (1 - 1e-9 if to_whole is math.ceil else 1 + 1e-9)
    step = 10.0 ** (math.floor(math.log10(value)) - _DIGITS + 1)
    rounded = to_whole(value / step) * step
    return f"{round(rounded, _DIGITS - 1):,g}" if value < 1000 else f"{rounded:,.0f}"


def of_several(one: Guarantee, client: str = "client") -> list[dict[str, str]]:
    """Return what holds for k records of one unit: k epsilon, and delta (e^(k epsilon) - 1) / (e^epsilon - 1)."""
    rows = []
    for count in (2, 4):
        epsilon, useful = count * one.epsilon, count * one.epsilon < _USELESS
        delta = one.delta * (math.expm1(epsilon) / math.expm1(one.epsilon) if one.epsilon else count) if useful else 1.0
        useful = useful and delta < 0.5
        odds = Odds.of(epsilon, delta) if useful else Odds("no useful bound", "", "")
        rows.append(
            {
                f"{RECORD.one_group} with": f"{count} records of one {client}",
                "times as likely, at most": odds.factor,
                "exception": odds.exception,
                "right guesses, at most": odds.guesses,
            }
        )
    return rows


def without_exponents(text: str) -> str:
    """Return a text with small numbers written out.

    >>> without_exponents("(0.5, 1e-05) and 2.5e-07")
    '(0.5, 0.00001) and 0.00000025'
    """
    return re.sub(r"\b\d+(?:\.\d+)?e-\d+\b", lambda found: f"{Decimal(found[0]):f}", text)
