"""Every epsilon and delta that is shown is rounded up, in one place; a budget that was kept does not look exceeded."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from dpfl_lightning.privacy.accounting.accountant import exact_sum
from dpfl_lightning.privacy.accounting.client_plan import plan
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.runtime.text import at_least, at_most, span

PACKAGE = Path(__file__).parents[1] / "dpfl_lightning"
ODD = [0.1 + 0.2, 1.2345614, 2.0000003, math.nextafter(2.0, 3.0), 5e-7, 1 / 60000, 12345678.9]


def values() -> list[float]:
    drawn = np.random.default_rng(0)
    return [*ODD, *(10.0 ** drawn.uniform(-9, 7, 2000)).tolist(), *np.round(drawn.uniform(0, 20, 2000), 6).tolist()]


def test_an_upper_bound_is_rounded_up_and_a_lower_bound_down_by_less_than_a_unit_of_the_sixth_digit():
    for value in values():
        assert value <= float(at_most(value)) <= value * (1 + 1e-5)
        assert value >= float(at_least(value)) >= value * (1 - 1e-5)


def test_what_has_six_digits_is_shown_as_it_is():
    shown = {
        2.0: "2",
        0.1: "0.1",
        1.99999: "1.99999",
        1e-5: "1e-05",
        0.0: "0",
        math.inf: "inf",
        2.4644e-05: "2.4644e-05",
    }
    assert {value: at_most(value) for value in shown} == {value: at_least(value) for value in shown} == shown


def test_a_budget_that_was_kept_does_not_look_exceeded():
    """The text grows with the value, so that spent <= budget is seen as such."""
    for budget in values():
        for spent in (budget, math.nextafter(budget, 0.0), budget * (1 - 1e-7)):
            assert float(at_most(spent)) <= float(at_most(budget))


@pytest.mark.parametrize("epsilon", [2.0, 1.2345678, 1 / 3])
def test_solved_noise_spends_at_most_the_budget(epsilon):
    solved = plan(num_records=900, batch_size=90, rounds=3, delta=1e-4, epsilon=epsilon, accountant="rdp").guarantee
    assert epsilon * 0.999 <= solved.epsilon <= epsilon


def test_sums_are_those_of_the_written_numbers():
    assert exact_sum([0.1] * 3) == 0.3 and exact_sum([1e-5] * 3) == 3e-5 and exact_sum([1.0, -0.9]) == 0.1
    assert exact_sum([1.0, math.inf]) == math.inf and exact_sum([]) == 0


def test_words_and_ranges_round_up():
    words = Guarantee(epsilon=1.2345614, delta=1.2345614e-5, sampling="full batches", accountant="RDP").words()
    assert words.startswith("(1.23457, 1.23457e-05)-differential privacy")
    assert span([1.2345614e-5, 2.0000001e-5], at_most) == "1.23457e-05 to 2.00001e-05"


def test_nothing_else_formats_an_epsilon_or_a_delta():
    """In f-strings, format calls, templates and columns of the package. Noise multipliers and scores are no bounds."""
    bound = "(epsilon|delta|budget|spent|reserved)"
    forms = [
        rf"\{{[^{{}}]*{bound}[^{{}}]*:[,.\d]*[efg]\}}",  # f"{epsilon:.6g}"
        rf":[.\d]*[efg]\}}\"\.format\([^)]*{bound}",  # "{:g}".format(delta)
        rf"\bround\([^()]*{bound}",
        rf"{bound}.*, \"\.\d[efg]\"$",  # a column of a printed table
    ]
    lines = [
        f"{file.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for file in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.html")])
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if re.search("|".join(forms), line) and ">>>" not in line
    ]
    assert lines == []
