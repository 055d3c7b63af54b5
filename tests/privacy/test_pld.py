"""The tight accountant: exact values, a second library, hostile settings, and the cost of asking."""

import math
import time

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opacus_prv import interval
from oracle import lower_bound

from dpfl_lightning.privacy.accounting import losses, pld
from dpfl_lightning.privacy.accounting.accountant import ADJACENCIES, Pld, get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, LaplaceEvent, SelectionEvent
from dpfl_lightning.privacy.accounting.gaussian import gaussian_epsilon
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.schedule import calibrate

PLD, RDP = get_accountant("pld"), get_accountant("rdp")
TRAIN, FEW = GaussianEvent(64 / 2400, 1.9, 1140), GaussianEvent(0.2, 3.0, 60)


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-10, 1e-15, 1e-30])
@pytest.mark.parametrize(("mu", "steps"), [(0.05, 1), (1.0, 10), (1.0, 3000), (5.0, 100_000)])
def test_numerical_composition_is_exact_where_the_exact_value_is_known(mu, steps, delta):
    """Also where a transform without tilting would lose the tail in its rounding errors."""
    exact = float(gaussian_epsilon(np.array([mu]), np.array([delta]))[0])
    mesh = pld._mesh(mu, steps, delta)
    tail = math.log(delta * 1e-4 / steps)
    loss, _ = losses.gaussian_losses(1.0, math.sqrt(steps) / mu, "add_remove", mesh, tail)
    found = pld._epsilon([(loss, steps)], mesh, delta)
    assert exact * (1 - 1e-9) <= found <= exact + min(0.005, 0.003 * exact) + 1e-5


@pytest.mark.e2e
@settings(deadline=None, max_examples=25)
@given(st.floats(1e-4, 1.0), st.floats(0.3, 50.0), st.integers(6, 60), st.floats(1e-3, 1.0))
@example(1.0, 2.0, 20, 0.5)
def test_a_sampled_gaussian_has_the_bits_of_dp_accounting(rate, noise, tail, fineness):
    mesh = 2.0 ** math.floor(math.log2(fineness * losses.gaussian_reach(rate, 1 / noise, -tail) / 10))
    ours = losses.gaussian_losses(rate, noise, "add_remove", mesh, -float(tail))
    theirs = from_gaussian_mechanism(
        noise, value_discretization_interval=mesh, log_mass_truncation_bound=-float(tail), sampling_prob=rate
    )
    sides = [(ours[0], theirs._pmf_remove), (ours[1], theirs._pmf_add)]
    for loss, pmf in sides[: 1 if rate == 1 else 2]:  # full batches: only the first is used
        expected = losses.loss_of(pmf)
        assert (loss.lowest, loss.infinite) == (expected.lowest, expected.infinite)
        np.testing.assert_array_equal(loss.log_probability, expected.log_probability)


def test_golden_values():
    assert PLD.epsilon([GaussianEvent(0.04, 1.5, 2249)], 1e-5) == pytest.approx(6.7674, abs=2e-3)  # Opacus PRV - 0.01
    for steps, estimate in ((100, 0.2600), (20000, 1.2859)):  # of Microsoft's PRV accountant, error 0.01
        assert PLD.epsilon([GaussianEvent(0.001, 0.8, steps)], 1e-6) == pytest.approx(estimate, abs=2e-3)
    assert 2.4612 <= PLD.epsilon([GaussianEvent(0.01, 0.7, 120)], 1e-5) <= 2.4635  # TensorFlow Privacy, PLD
    assert 1 <= PLD.epsilon([GaussianEvent(0.2, 0.5, 3)], 0.15594) <= 1.001  # dp-accounting, PLD


CASES = [
    ([TRAIN], 1e-4, "add_remove"),
    ([TRAIN], 1e-4, "replace_one"),
    ([FEW, GaussianEvent(1.0, 5.0)], 1e-5, "add_remove"),
    ([FEW, GaussianEvent(0.05, 1.1, 300)], 1e-8, "replace_one"),
    ([FEW, LaplaceEvent(20.0, 5)], 1e-5, "add_remove"),
    ([FEW, SelectionEvent(0.1, 10)], 1e-5, "add_remove"),
    ([FEW, SelectionEvent(0.1, 10)], 1e-5, "replace_one"),
]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("events", "delta", "adjacency"), [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.e2e) for case in CASES[2:])]
)
def test_a_second_library_agrees(events, delta, adjacency):
    lower, tight, _ = interval(events, delta, adjacency, 2e-3)
    found = get_accountant("pld", adjacency).epsilon(events, delta)
    assert lower <= found <= tight + 0.003 * min(1, tight)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    rate=st.floats(1e-3, 0.9),
    noise=st.floats(0.5, 20.0),
    steps=st.integers(1, 3000),
    log_delta=st.floats(-9, -2),
    adjacency=st.sampled_from(list(ADJACENCIES)),
)
def test_never_below_the_second_librarys_lower_bound_nor_above_rdp(rate, noise, steps, log_delta, adjacency):
    events, delta = [GaussianEvent(rate, noise, steps)], 10**log_delta
    rdp = get_accountant("rdp", adjacency).epsilon(events, delta)
    found = get_accountant("pld", adjacency).epsilon(events, delta)
    assert found <= rdp
    if 0.01 < rdp < 30:
        assert lower_bound(events, delta, adjacency) <= found


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 3.0])
def test_one_selection_has_its_closed_form(epsilon):
    """The largest divergence at x of a choice of range epsilon: (1 - e^((x - epsilon) / 2))^2 / (1 - e^-epsilon)."""
    for delta in (1e-4, 0.1 * math.tanh(epsilon / 4)):
        x = epsilon + 2 * math.log1p(-math.sqrt(delta * -math.expm1(-epsilon)))
        assert x <= PLD.epsilon([SelectionEvent(epsilon)], delta) <= x + 0.003 * min(1, x) + 1e-6


@pytest.mark.e2e
def test_many_selections_are_composed_in_groups_and_cost_little_more():
    whole = PLD.epsilon([SelectionEvent(0.05, 100)], 1e-5)
    assert PLD.epsilon([SelectionEvent(0.05, 130)], 1e-5) > whole
    assert PLD.epsilon([SelectionEvent(0.05, 1000)], 1e-5) < RDP.epsilon([SelectionEvent(0.05, 1000)], 1e-5)


@pytest.mark.parametrize("delta", [0.9, 0.99, 0.998, 0.999, 0.9999, 1 - 1e-9])
def test_a_delta_near_one_has_no_epsilon_below_the_truth(delta):
    events = [GaussianEvent(0.5, 4.0, 1000)]
    found = get_accountant("pld", "replace_one").epsilon(events, delta)
    assert found >= max(0.0, 7.0 if delta < 0.9985 else 0.01), "true delta of 0.01: 0.999912"


@pytest.mark.parametrize(("rate", "noise", "steps", "tight"), [(1e-5, 1.0, 10**5, 0.0131), (1e-4, 0.8, 10**5, 0.2437)])
def test_small_rates_are_tight(rate, noise, steps, tight):
    assert tight * 0.98 <= PLD.epsilon([GaussianEvent(rate, noise, steps)], 1e-6) <= tight * 1.01


def test_where_rdp_stands_in_the_guarantee_says_so():
    epsilon, how = PLD.bound([GaussianEvent(0.05, 0.05, 10)], 1e-5)
    assert epsilon == RDP.epsilon([GaussianEvent(0.05, 0.05, 10)], 1e-5)
    assert how == "RDP (Opacus, orders 1.1 to 1024), because epsilon is above 100"


def test_where_the_numerics_fail_rdp_stands_in(monkeypatch):
    events = [GaussianEvent(0.123, 1.0, 10)]
    for reason, error in (("too large", losses.NoPld("too large")), ("the numerics failed (odd)", ValueError("odd"))):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(losses, "gaussian_losses", fail)
        epsilon, how = Pld().bound(events, 1e-5)
        assert epsilon == RDP.epsilon(events, 1e-5) and how.startswith("RDP") and how.endswith(f"because {reason}")


@pytest.mark.e2e
@settings(deadline=None, max_examples=12)
@given(
    log_rate=st.floats(-9, 0),
    log_noise=st.floats(-3, 9),
    log_steps=st.floats(0, 9),
    log_delta=st.floats(-300, -0.01),
    log_selection=st.floats(-9, 3),
    count=st.integers(0, 300),
)
def test_far_out_settings_have_a_bound_in_reasonable_time(
    log_rate, log_noise, log_steps, log_delta, log_selection, count
):
    events = [GaussianEvent(10**log_rate, 10**log_noise, int(10**log_steps)), SelectionEvent(10**log_selection, count)]
    begun = time.process_time()
    epsilon = PLD.epsilon(events, 10**log_delta)
    assert 0 <= epsilon <= RDP.epsilon(events, 10**log_delta)
    assert time.process_time() - begun < 60  # on a loaded machine


@pytest.mark.e2e
def test_twenty_clients_are_solved_in_seconds_and_asked_again_in_milliseconds():
    def client(number: int) -> ClientSchedule:
        return ClientSchedule(1.0 + number / 10, 1e-4, (Planned("train", GaussianEvent(64 / 2400, None, 38), 30),))

    begun = time.process_time()
    solved = calibrate([client(number) for number in range(20)], Pld())
    assert time.process_time() - begun < 20
    for plan in solved:
        assert 0.999 * plan.target_epsilon < PLD.epsilon(plan.events(), 1e-4) <= plan.target_epsilon
    queries = [(plan.released(lambda _: 17), 1e-4) for plan in solved]
    PLD.search(queries)
    begun = time.process_time()
    PLD.search(queries)
    assert time.process_time() - begun < 0.1
