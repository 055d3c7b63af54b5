"""Calibration: never over the budget, never more noise than it asks for, frozen tables."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, SelectionEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.schedule import calibrate, cut_to_budgets

RDP, PLD = (get_accountant(name) for name in ("rdp", "pld"))


def one_phase(epsilon, rate, steps, delta=1e-4, count=1):
    return ClientSchedule(epsilon, delta, (Planned("train", GaussianEvent(rate, None, steps), count),))


def solve(schedule, accountant=RDP, purpose="train"):
    return calibrate([schedule], accountant)[0].noise_multiplier(purpose)


def test_noise_aware_table():
    """Last column of the noise-aware paper's table; its sparse orders are up to 0.5 % above ours."""
    epsilons = (0.15, 0.17, 0.2, 0.5, 1, 2, 5)
    small_batches = (22.35, 19.98, 17.28, 7.598, 4.122, 2.305, 1.207)
    large_batches = (63.19, 56.47, 48.84, 21.41, 11.51, 6.251, 2.925)
    for batch, steps, table in ((16, 30000, small_batches), (128, 3750, large_batches)):
        solved = calibrate([one_phase(epsilon, batch / 2400, steps) for epsilon in epsilons], RDP)
        assert [one.noise_multiplier("train") for one in solved] == pytest.approx(table, rel=5e-3)


def test_phases_share_a_noise_unless_it_is_given_and_selections_are_part_of_the_plan():
    """Budget 5: with a full first round 1.3104, 1.0873 beside its noise of 5, 1.359 with 20 selections."""
    later, select = (
        Planned("train", GaussianEvent(32 / 6600, None, 207), 199),
        Planned("select", SelectionEvent(0.15), 20),
    )
    for first, others, noise in ((None, (), 1.3104), (5.0, (), 1.0873), (None, (select,), 1.359)):
        lines = (Planned("first_round", GaussianEvent(1.0, first), 1), *others, later)
        solved = calibrate([ClientSchedule(5.0, 1e-4, lines)], RDP)[0]
        assert solved.noise_multiplier("train") == pytest.approx(noise, rel=4e-4)
        assert solved.noise_multiplier("first_round") == (first or solved.noise_multiplier("train"))


@pytest.mark.e2e
def test_tight_noise_golden_values():
    assert solve(one_phase(1.0, 1.0, 1, 1e-5), PLD) == pytest.approx(3.730632, rel=1e-4)
    assert solve(one_phase(2.25, 1.0, 1, 4.0834087e-4), PLD) == pytest.approx(math.sqrt(2), rel=1e-4)
    for epsilon, inverse_mu in ((0.1, 24.5081), (0.5, 5.8938), (1.5, 2.2292), (4.0, 0.9587), (10.0, 0.4553)):
        assert solve(one_phase(epsilon, 1.0, 4), PLD) == pytest.approx(2 * inverse_mu, rel=2e-4)
    # the second library's least noise
    assert 0.67379 <= solve(one_phase(1.0, 0.01, 1, 1e-5), PLD) <= 0.674
    assert 3.2095 <= 6 * solve(one_phase(1.0, 0.001, 25, 1e-5), PLD) <= 3.211


@pytest.mark.e2e
@settings(deadline=None, max_examples=60)
@given(
    epsilon=st.floats(0.05, 30.0),
    delta=st.floats(1e-8, 1e-2),
    rate=st.one_of(st.just(1.0), st.floats(1e-4, 1.0)),
    steps=st.integers(1, 300),
    count=st.integers(1, 300),
    first=st.booleans(),
    selections=st.integers(0, 5),
)
def test_calibration_is_safe_and_tight(epsilon, delta, rate, steps, count, first, selections):
    lines = [Planned("train", GaussianEvent(rate, None, steps), count)]
    lines += [Planned("first_round", GaussianEvent(1.0, None), 1)] if first else []
    lines += [Planned("select", SelectionEvent(0.01 * epsilon), selections)]
    schedule = ClientSchedule(epsilon, delta, tuple(lines))
    solved = calibrate([schedule], RDP)[0]
    noise = solved.noise_multiplier("train")
    assert RDP.epsilon(solved.events(), delta) <= epsilon
    assert RDP.epsilon(schedule.with_noise(0.999 * noise).events(), delta) > epsilon


@settings(deadline=None, max_examples=30)
@given(
    accountant=st.sampled_from([RDP, PLD, get_accountant("paper_ma")]),
    log_epsilon=st.floats(-7, 13),
    log_delta=st.floats(-300, -0.01),
    log_rate=st.floats(-9, 0),
    steps=st.integers(1, 10**6),
    count=st.integers(1, 10**5),
    first_noise=st.one_of(st.none(), st.floats(-3, 6)),
)
def test_far_out_settings_are_safe_and_tight_or_refused(
    accountant, log_epsilon, log_delta, log_rate, steps, count, first_noise
):
    epsilon, delta, rate = 10**log_epsilon, 10**log_delta, 1.0 if accountant is PLD else 10**log_rate
    lines = [Planned("train", GaussianEvent(rate, None, steps), count)]
    lines += [] if first_noise is None else [Planned("first_round", GaussianEvent(1.0, 10**first_noise), 1)]
    schedule = ClientSchedule(epsilon, delta, tuple(lines))

    def epsilon_with(noise):
        return float(accountant.search([(schedule.with_noise(noise).events(), delta)])[0])

    try:
        solved = calibrate([schedule], accountant)[0]
    except UserError as error:
        assert "`epsilon` must be above" in str(error) and epsilon_with(1e9) > epsilon
        return
    noise = solved.noise_multiplier("train")
    assert accountant.epsilon(solved.events(), delta) <= epsilon
    assert epsilon_with(0.999 * noise) > epsilon - 1e-6, "it is computed in steps of this size"


@pytest.mark.parametrize(("accountant", "rate"), [(RDP, 0.05), (PLD, 0.05), (PLD, 1.0)])
@pytest.mark.parametrize(("epsilon", "delta"), [(2.0, 1e-300), (2.0, 1e-18), (1e5, 1e-4), (1e6, 1e-4), (1e12, 1e-4)])
def test_where_an_accountant_leaves_its_range_the_bound_is_safe(accountant, rate, epsilon, delta):
    schedule = one_phase(epsilon, rate, 40, delta, 30)
    noise = solve(schedule, accountant)
    found, how = accountant.bound(schedule.with_noise(noise).events(), delta)
    assert 0.999 * epsilon < found <= epsilon
    assert accountant is RDP or rate == 1 or epsilon < 100 or ("RDP" in how and "because epsilon is above 100" in how)


@pytest.mark.parametrize("rate", [0.02, 1.0])
@pytest.mark.parametrize("epsilon", [0.0005, 0.3, 3.0])
def test_tight_noise_is_safe_and_smallest(rate, epsilon):
    schedule = one_phase(epsilon, rate, 50, 1e-5, 20)
    noise = solve(schedule, PLD)
    assert PLD.epsilon(schedule.with_noise(noise).events(), 1e-5) <= epsilon
    assert PLD.epsilon(schedule.with_noise(0.998 * noise).events(), 1e-5) > epsilon


MOST = 100_000


def affordable_count(event, epsilon, delta, accountant, before=(), most=MOST):
    before = tuple(Planned(f"before {number}", one, 1) for number, one in enumerate(before))
    schedule = ClientSchedule(epsilon, delta, (*before, Planned("train", event, most)))
    return cut_to_budgets([schedule], accountant)[0].count_of("train")


@settings(deadline=None, max_examples=30)
@given(epsilon=st.floats(0.2, 20.0), noise=st.floats(0.4, 10.0), rate=st.floats(1e-3, 1.0))
def test_affordable_count_is_the_largest(epsilon, noise, rate):
    event, paid = GaussianEvent(rate, noise, 3), [GaussianEvent(1.0, 80.0)]
    count = affordable_count(event, epsilon, 1e-5, RDP, paid)
    if count:
        assert RDP.epsilon([*paid, event.repeated(count)], 1e-5) <= epsilon
    if count < MOST:
        assert RDP.epsilon([*paid, event.repeated(count + 1)], 1e-5) > epsilon


@settings(deadline=None, max_examples=20)
@given(
    offers=st.lists(
        st.tuples(st.floats(0.4, 10.0), st.floats(1e-3, 1.0), st.floats(0.4, 20.0), st.booleans()), max_size=6
    ),
    most=st.integers(0, 300),
)
def test_many_clients_afford_what_each_affords_alone(offers, most):
    asked = [
        ClientSchedule(
            epsilon if bounded else math.inf,
            1e-5,
            (Planned("select", SelectionEvent(0.01), i), Planned("train", GaussianEvent(rate, noise, 3), most)),
        )
        for i, (noise, rate, epsilon, bounded) in enumerate(offers)
    ]
    assert cut_to_budgets(asked, RDP) == [cut_to_budgets([one], RDP)[0] for one in asked]


def test_given_noise_is_cut_to_what_the_budget_pays_beside_other_releases():
    train, select = Planned("train", GaussianEvent(0.1, 2.0, 5), 300), Planned("select", SelectionEvent(0.2), 9)
    free = ClientSchedule(2.0, 1e-5, (replace(train, event=GaussianEvent(0.1, None, 5)), select))
    unbounded = ClientSchedule(math.inf, 1e-5, (train, select))
    plain, beside, *same = cut_to_budgets(
        [ClientSchedule(2.0, 1e-5, (train,)), ClientSchedule(2.0, 1e-5, (train, select)), free, unbounded], RDP
    )
    assert same == [free, unbounded]
    assert 0 < beside.count_of("train") < plain.count_of("train") < 300 and beside.count_of("select") == 9
    for own in (plain, beside):
        assert RDP.epsilon(own.events(), 1e-5) <= 2.0
        one_more = [*own.events(), train.event]
        assert RDP.epsilon(one_more, 1e-5) > 2.0
    with pytest.raises(UserError, match=r"above \d.* the cost of select"):
        cut_to_budgets([ClientSchedule(0.1, 1e-5, (train, select))], RDP)


def test_affordable_count_at_the_ends():
    event = GaussianEvent(0.1, 1.0)
    assert affordable_count(event, math.inf, 1e-5, RDP) == MOST
    assert affordable_count(event, 1.0, 1e-5, RDP, most=0) == 0
    assert affordable_count(GaussianEvent(0.1, 0.0), 1.0, 1e-5, RDP) == 0
    with pytest.raises(UserError, match="the cost of before 0 with the given noise"):
        affordable_count(event, 1.0, 1e-5, RDP, before=[GaussianEvent(1.0, 0.5)])
    assert affordable_count(GaussianEvent(1.0, 7.5), 1.0, 1e-5, PLD) == 4
    assert affordable_count(event, 2.0, 1e-5, PLD) >= affordable_count(event, 2.0, 1e-5, RDP)


def test_order_is_kept_and_equal_clients_are_solved_once():
    seen = []
    a, b = one_phase(1.0, 0.1, 10), one_phase(2.0, 0.1, 10)
    fixed = ClientSchedule(1.0, 1e-4, (Planned("train", GaussianEvent(0.1, 0.5), 100),))
    solved = calibrate([a, b, a, fixed, a], RDP, lambda done, total: seen.append((done, total)))
    assert list(dict.fromkeys(seen)) == [(0, 2), (1, 2), (2, 2)], "also while the first is being solved"
    assert solved[0] == solved[2] == solved[4] != solved[1]
    assert solved[3] == fixed  # given noise is left as it is
    assert solved[0].noise_multiplier("train") > solved[1].noise_multiplier("train")
    assert calibrate([b], RDP)[0] == solved[1]  # nobody's noise depends on the others
    assert calibrate([], RDP) == []


def test_where_nothing_is_bounded_or_released_no_noise_is_needed():
    assert solve(one_phase(math.inf, 0.1, 10, delta=0.0)) == solve(one_phase(1.0, 0.1, 10, count=0)) == 0.0
    infinite = Planned("first_round", GaussianEvent(1.0, math.inf), 1)
    both = ClientSchedule(1.0, 1e-4, (*one_phase(1.0, 0.1, 10).planned, infinite))
    assert solve(both) == solve(one_phase(1.0, 0.1, 10)), "infinite noise costs nothing"


def test_targets_near_the_floor_are_solved_or_refused():
    for epsilon in (5e-7, 0.99e-6):  # below what is shown: delta alone must cover it
        schedule = one_phase(epsilon, 1.0, 1)
        assert PLD.epsilon(schedule.with_noise(solve(schedule, PLD)).events(), 1e-4) == 0.0
    schedule = one_phase(0.0013, 0.1, 10)
    assert RDP.epsilon(schedule.with_noise(solve(schedule)).events(), 1e-4) <= 0.0013
    with pytest.raises(UserError, match="`epsilon` must be above 1e-09, the least that pld can certify"):
        calibrate([one_phase(1e-300, 1.0, 1)], PLD)


FIRST_COSTS_TOO_MUCH = (Planned("first_round", GaussianEvent(1.0, 1.0), 1), *one_phase(1.0, 0.1, 1).planned)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (one_phase(0.0, 0.1, 10), "`epsilon` must be above 0, got 0.0"),
        (one_phase(-1.0, 0.1, 10), "`epsilon` must be above 0"),
        (one_phase(math.nan, 0.1, 10), "`epsilon` must be above 0"),
        (one_phase(1.0, 0.1, 10, delta=0.0), "`delta` must be in .0, 1., got 0.0"),
        (one_phase(1.0, 0.1, 10, delta=1.0), "`delta`"),
        (one_phase(1.0, 0.1, 10, count=-1), "`count` must be at least 0 for train, got -1"),
        (one_phase(1.0, 32, 10), "`sample_rate` must be in .0, 1., got 32. Divide a batch size"),
        (one_phase(0.001, 0.1, 10), "above 0.001251, the least that rdp can certify at delta 0.0001, got 0.001. Raise"),
        (
            ClientSchedule(1.0, 1e-4, FIRST_COSTS_TOO_MUCH),
            "the cost of first_round with the given noise at delta 0.0001, got 1. Raise it, or",
        ),
    ],
)
def test_bad_input(schedule, words):
    with pytest.raises(UserError, match=words):
        calibrate([one_phase(1.0, 0.1, 10), schedule], RDP)


@pytest.mark.parametrize("steps, count", [(0, 30), (10, 0)])
def test_no_step_needs_no_noise_and_saves_no_budget_that_is_spent(steps, count):
    train = Planned("train", GaussianEvent(0.1, None, steps), count)
    assert solve(ClientSchedule(1.0, 1e-4, (train, Planned("select", SelectionEvent(0.1), 5)))) == 0.0
    bounded, unbounded = r"above \d.* the cost of select", "the cost of select .*, which is unbounded,"
    for epsilon, words in ((1.0, bounded), (math.inf, unbounded)):
        spent = ClientSchedule(1.0, 1e-4, (train, Planned("select", SelectionEvent(epsilon), 5)))
        with pytest.raises(UserError, match=words):
            calibrate([spent], RDP)


SCHEDULE = ClientSchedule(
    2.0, 1e-4, (Planned("train", GaussianEvent(0.05, 1.5, 10), 8), Planned("select", SelectionEvent(0.1), 5))
)


def test_what_was_released_is_counted_by_purpose():
    released = SCHEDULE.released({"train": 3, "select": 9}.__getitem__)
    assert released == [GaussianEvent(0.05, 1.5, 10).repeated(3), SelectionEvent(0.1, 5)], "at most what is planned"
    assert SCHEDULE.released(lambda _: 0) == []
