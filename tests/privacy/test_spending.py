"""Live epsilons: never below what was spent, exact at the end, and each costly value computed once."""

from __future__ import annotations

import pytest

from dpfl_lightning.privacy.accounting.accountant import Prv, get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, SelectionEvent, repeated
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned, SpentEpsilon

SCHEDULE = ClientSchedule(
    2.0, 1e-4, (Planned("train", GaussianEvent(0.05, 1.5, 10), 8), Planned("select", SelectionEvent(0.1), 5))
)


@pytest.mark.parametrize("name", ["rdp", "prv"])
def test_live_values_bound_the_truth_and_meet_it_at_the_end(name):
    accountant = get_accountant(name)
    spent = SpentEpsilon(accountant)
    for train, select in ((0, 0), (1, 0), (3, 2), (8, 4), (8, 5)):
        events = [repeated(GaussianEvent(0.05, 1.5, 10), train), SelectionEvent(0.1, select)]
        live = spent(SCHEDULE, {"train": train, "select": select}.__getitem__)
        exact = accountant.epsilon(events, 1e-4)
        assert live >= exact - 2e-6
        if name == "rdp" or (train, select) == (8, 5):
            assert live == pytest.approx(exact, abs=2e-6)


def test_a_slow_accountant_is_asked_once_a_schedule(monkeypatch):
    asked = []
    monkeypatch.setattr(Prv, "bound", lambda self, events, delta: (asked.append(1), (1.0, ""))[1])
    spent = SpentEpsilon(get_accountant("prv"))
    for used in range(1, 6):
        spent(SCHEDULE, lambda purpose, used=used: used)
    assert len(asked) == 1
