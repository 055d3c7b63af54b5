"""Accountants against Opacus, a second library, exact values and frozen numbers."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from oracle import upper_bound

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.accountant import Rdp, get_accountant, rounded_up
from dpfl_lightning.privacy.accounting.events import (
    Caveat,
    GaussianEvent,
    NonPrivateEvent,
    SelectionEvent,
)
from dpfl_lightning.privacy.accounting.rdp import ORDERS, converted, sampled_gaussian_rdp

PLD, RDP, MA = (get_accountant(name) for name in ("pld", "rdp", "paper_ma"))
OPACUS_ORDERS = tuple(RDPAccountant.DEFAULT_ALPHAS)


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.2, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("noise", [0.1, 0.6, 1.5, 8.0, 200.0])
def test_vectorised_rdp_is_opacus(rate, noise):
    orders = (1.1, 1.5, 2, 2.5, 3.7, 5, 10.9, 11, 32, 63, 256, 1024)
    ours = sampled_gaussian_rdp([rate, 0.3], [noise, 1.0], orders)[0]
    theirs = compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=list(orders))
    to_log_a = np.array(orders) - 1
    # Opacus cuts its series at 1e-13 of A and adds rounded logarithms; ours has more digits (next test).
    np.testing.assert_allclose(ours * to_log_a, theirs * to_log_a, rtol=1e-9, atol=1e-12)


HISTORIES = [
    [(1.5, 0.04, 2250)],
    [(5.0, 1.0, 1), (1.0873, 32 / 6600, 41193)],
    [(22.0, 16 / 2400, 30000)],
    [(0.7, 0.3, 10), (4.0, 0.01, 1000), (1.1, 1.0, 2)],
]


@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")  # of 63, Opacus' last
@pytest.mark.parametrize("history", HISTORIES)
def test_epsilon_is_opacus_own(history):
    accountant = RDPAccountant()
    accountant.history = history
    theirs = accountant.get_epsilon(1e-5)
    events = [GaussianEvent(rate, noise, steps) for noise, rate, steps in history]
    assert Rdp(orders=OPACUS_ORDERS).epsilon(events, 1e-5) == pytest.approx(theirs, abs=2e-6)
    assert Rdp(orders=OPACUS_ORDERS).epsilon(events, 1e-5) >= theirs
    assert RDP.epsilon(events, 1e-5) <= theirs + 1e-6  # more orders are never worse


def test_rdp_golden_values():
    assert RDP.epsilon([GaussianEvent(0.04, 1.5, 2250)], 1e-5) == pytest.approx(7.32911117143, abs=1e-6)  # Opacus
    assert RDP.epsilon([GaussianEvent(150 / 60000, 1.3, 6000)], 1e-5) == pytest.approx(0.7242234026, abs=1e-6)
    assert RDP.epsilon([GaussianEvent(100 / 1e5, 1.0, 30000)], 1e-7) == pytest.approx(1.4154988495, abs=1e-6)
    assert RDP.epsilon([GaussianEvent(1.0, 0.7, 2)], 1e-5) == pytest.approx(10.8602036, abs=2e-6)
    assert RDP.epsilon([GaussianEvent(0.01, 0.7, 120)], 1e-5) == pytest.approx(3.2392676, abs=1e-4)
    assert RDP.epsilon([GaussianEvent(1.0, 4.530877117)], 1e-6) == pytest.approx(1.0, abs=2e-6)
    rdp = 50 * sampled_gaussian_rdp([0.01], [2.5], (1.5, 2.5, 5, 50, 100))[0]
    theirs = np.array([6.70579741e-4, 1.08548710e-3, 2.18075656e-3, 2.38460375e-2, 167.416308])
    np.testing.assert_allclose(rdp[2:], theirs[2:], rtol=1e-8)
    # The second library bounds fractional orders by those around them; the integral is 3 % and 0.01 % lower.
    assert (rdp[:2] <= theirs[:2]).all() and (rdp[:2] >= 0.96 * theirs[:2]).all()


def test_selections_cost_alpha_epsilon_squared_over_eight():
    train, select = GaussianEvent(0.01, 1.2, 500), SelectionEvent(0.15, 20)
    order = np.array(ORDERS)
    rdp = 500 * sampled_gaussian_rdp([0.01], [1.2])[0] + 20 * order * 0.15**2 / 8
    assert RDP.epsilon([train, select], 1e-5) == pytest.approx(converted(rdp, ORDERS, 1e-5).min(), abs=2e-6)
    assert RDP.epsilon([SelectionEvent(0.15, 20)], 1e-4) == pytest.approx(1.20, abs=5e-3)  # clustered.md 3.5


def test_full_batches_golden_values():
    for noise, steps, delta, epsilon in [
        *((1.0, 1, 1e-5, 4.377178), (3.730632, 1, 1e-5, 1.0), (math.sqrt(2), 1, 4.0834087e-4, 2.25)),
        *((math.sqrt(3), 3, 0.126936, 1.0), (0.7, 2, 1e-5, 10.1224946), (1.0, 10, 1e-5, 17.856587)),
        *((5.0, 50, 1e-5, 6.572970), (24.5081, 1, 1e-4, 0.1), (1 / 137.23, 1, 1e-5, 1e4)),
    ]:
        assert PLD.epsilon([GaussianEvent(1.0, noise, steps)], delta) == pytest.approx(epsilon, rel=1e-4)


@pytest.mark.e2e
def test_full_batches_compose_unequal_noise_exactly():
    events = [GaussianEvent(1.0, 3.0, 5), GaussianEvent(1.0, 7.0, 20), GaussianEvent(1.0, 0.9)]
    one = GaussianEvent(1.0, (5 / 9 + 20 / 49 + 1 / 0.81) ** -0.5)
    assert PLD.epsilon(events, 1e-6) == pytest.approx(PLD.epsilon([one], 1e-6), abs=2e-6)
    assert PLD.epsilon(events, 1e-6) == pytest.approx(upper_bound(events, 1e-6), abs=2e-3)


@pytest.mark.parametrize("accountant", [PLD, RDP, MA], ids=lambda one: one.name)
class TestEvery:
    event = GaussianEvent(1.0, 4.0, 3)

    def test_nothing_is_free_and_no_noise_is_infinite(self, accountant):
        for events in ([], [GaussianEvent(0.5, 1.0, 0)], [Caveat("words")], [GaussianEvent(1.0, math.inf, 9)]):
            assert accountant.epsilon(events, 1e-5) == 0.0
        assert accountant.epsilon([self.event, GaussianEvent(1.0, 0.0)], 1e-5) == math.inf
        assert accountant.epsilon([GaussianEvent(1.0, 1e-300)], 1e-5) == math.inf
        assert accountant.epsilon([GaussianEvent(1.0, 9e-7)], 1e-5) == math.inf  # lost in a float32 sum
        assert accountant.epsilon([GaussianEvent(1.0, 1e-5)], 1e-5) < math.inf
        assert accountant.epsilon([GaussianEvent(1.0, 0.0)], 0.0) == math.inf  # of a run without privacy
        assert accountant.epsilon([GaussianEvent(1.0, 1e300, 10)], 1e-5) < (0.19 if accountant is MA else 0.01)
        assert accountant.epsilon([NonPrivateEvent("clip fractions were shown")], 1e-5) == math.inf

    def test_equal_events_are_one(self, accountant):
        whole = accountant.epsilon([self.event.repeated(7)], 1e-5)
        assert accountant.epsilon([self.event] * 7, 1e-5) == whole
        assert accountant.epsilon([self.event, Caveat("x"), self.event.repeated(6)], 1e-5) == whole

    def test_monotone(self, accountant):
        def epsilon(noise=4.0, steps=10, delta=1e-5):
            return accountant.epsilon([GaussianEvent(1.0, noise, steps)], delta)

        assert epsilon(noise=8.0) < epsilon() < epsilon(noise=2.0)
        assert epsilon(steps=9) < epsilon() < epsilon(steps=11)
        assert epsilon(delta=1e-4) < epsilon() < epsilon(delta=1e-6)

    def test_search_agrees_with_epsilon(self, accountant):
        queries = [([GaussianEvent(1.0, 6.0, 2), Caveat("x"), self.event.repeated(n)], 1e-5) for n in (0, 1, 5, 30)]
        exact = [accountant.epsilon(*query) for query in queries]
        np.testing.assert_allclose(accountant.search(queries), exact, atol=2e-6)
        assert accountant.search([([], 1e-5), ([GaussianEvent(1.0, 0.0)], 1e-5)]).tolist() == [0.0, math.inf]

    def test_bad_input(self, accountant):
        for events, delta, words in [
            ([GaussianEvent(1.8, 1.0)], 1e-5, "`sample_rate` must be in .0, 1., got 1.8. Divide a batch size"),
            ([GaussianEvent(0.0, 1.0)], 1e-5, "`sample_rate`"),
            ([GaussianEvent(1.0, -1.0)], 1e-5, "`noise_multiplier` must be at least 0, got -1"),
            ([GaussianEvent(1.0, math.nan)], 1e-5, "`noise_multiplier`"),
            ([GaussianEvent(1.0, None)], 1e-5, "`noise_multiplier` must be a number, got None. Solve it"),
            ([GaussianEvent(1.0, 1.0, -1)], 1e-5, "`steps` must be at least 0, got -1"),
            ([GaussianEvent(1.0, 1.0)], 0.0, "`delta` must be in .0, 1., got 0.0"),
            ([GaussianEvent(1.0, 1.0)], 1.0, "`delta`"),
        ]:
            with pytest.raises(UserError, match=words):
                accountant.epsilon(events, delta)


@pytest.mark.e2e
@settings(deadline=None, max_examples=40)
@given(
    rate=st.floats(1e-4, 1.0),
    noise=st.floats(0.3, 50.0),
    steps=st.integers(1, 10_000),
    extra=st.integers(1, 1000),
    delta=st.floats(1e-9, 1e-2),
)
def test_rdp_properties(rate, noise, steps, extra, delta):
    event = GaussianEvent(rate, noise, steps)
    epsilon = RDP.epsilon([event], delta)
    assert epsilon == pytest.approx(RDP.search([([event], delta)])[0], rel=1e-7, abs=2e-6)
    assert RDP.epsilon([GaussianEvent(rate, noise, steps + extra)], delta) >= epsilon
    assert RDP.epsilon([GaussianEvent(rate, noise * 1.05, steps)], delta) <= epsilon
    full = PLD.epsilon([GaussianEvent(1.0, noise, steps)], delta)
    assert RDP.epsilon([GaussianEvent(1.0, noise, steps)], delta) >= full
    assert epsilon <= RDP.epsilon([GaussianEvent(1.0, noise, steps)], delta)  # sampling never costs


@given(value=st.floats(0, 1e6), decimals=st.integers(0, 8))
def test_rounding_is_up(value, decimals):
    assert value <= rounded_up(value, decimals) <= value + 10.0**-decimals + 1e-9
