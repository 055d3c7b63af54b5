"""The epsilon of persons with several records follows from events that dominate those of their records."""

import math

import pytest
from scipy.stats import binom, norm

from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, LaplaceEvent, SelectionEvent
from dpfl_lightning.privacy.accounting.guarantee import guarantee
from dpfl_lightning.privacy.accounting.units import Person, Record, of_group

pytestmark = pytest.mark.e2e


def largest_excess(rate: float, noise: float, records: int, epsilon: float) -> float:
    """The least delta of one step, in both orders: a person's records are drawn one by one, and add up."""
    weights = binom.pmf(range(records + 1), records, rate)
    grid = [noise * 12 * (step / 4000 - 1) + records / 2 for step in range(8001)]
    width = noise * 12 / 4000
    both = [(sum(w * norm.pdf(x, j, noise) for j, w in enumerate(weights)), norm.pdf(x, 0, noise)) for x in grid]
    limit = math.exp(epsilon)
    return width * max(sum(max(p - limit * q, 0) for p, q in both), sum(max(q - limit * p, 0) for p, q in both))


@pytest.mark.parametrize(("rate", "noise", "records"), [(0.1, 1.0, 2), (0.3, 2.0, 4), (1.0, 3.0, 4), (0.01, 0.7, 3)])
def test_a_group_costs_at_least_what_its_records_can(rate, noise, records):
    event = of_group(GaussianEvent(rate, noise, 1), records)
    for delta in (1e-2, 1e-4):
        epsilon = get_accountant("pld").bound([event], delta)[0]
        assert largest_excess(rate, noise, records, epsilon) <= delta * 1.01


def test_other_releases_cost_a_group_as_many_times():
    assert of_group(SelectionEvent(0.1, 3), 4) == SelectionEvent(0.4, 3)
    assert of_group(LaplaceEvent(8.0, 5), 4) == LaplaceEvent(2.0, 5)


def test_a_guarantee_of_records_says_what_holds_for_persons():
    events, accountant = [GaussianEvent(0.02, 6.0, 200)], get_accountant("pld")
    (words,) = Record(6).group_words(events, 1e-5, accountant, chosen=False)
    assert words.startswith("for all records of a person with several, at the same delta, holds: epsilon ")
    assert " for 2, " in words and words.endswith(" for 6 records")
    stated = guarantee(events, 1e-5, accountant, unit=Record(6))
    assert words in stated.caveats and words in stated.words()
    (vacuous,) = Record(64).group_words([GaussianEvent(1.0, 1.0, 500)], 1e-5, accountant, chosen=False)
    assert "vacuous for" in vacuous and not guarantee(events, 1e-5, accountant, unit=Person(6)).caveats
