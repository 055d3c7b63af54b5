"""Replaced records, Laplace noise, selections and the paper's accountant: exact values and a second library."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import lower_bound

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.accountant import ADJACENCIES, Pld, get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, LaplaceEvent, SelectionEvent
from dpfl_lightning.privacy.accounting.rdp import ORDERS, classically_converted, laplace_rdp, sampled_gaussian_rdp

ALL = ("pld", "rdp", "paper_ma")


def epsilon(name, events, delta=1e-5, adjacency="add_remove"):
    return get_accountant(name, adjacency).epsilon(events, delta)


@pytest.mark.parametrize("name", ALL)
def test_full_batches_cost_what_half_of_their_noise_would_and_others_twice_their_epsilon(name):
    for noise, steps in ((4.0, 1), (20.0, 50), (3.0, 7)):
        replaced = epsilon(name, [GaussianEvent(1.0, noise, steps)], adjacency="replace_one")
        assert replaced == pytest.approx(epsilon(name, [GaussianEvent(1.0, noise / 2, steps)]), abs=2e-6)
    pairs = [(SelectionEvent(0.1, 20), SelectionEvent(0.2, 20)), (LaplaceEvent(8.0, 9), LaplaceEvent(4.0, 9))]
    for event, doubled in pairs:
        assert epsilon(name, [event], adjacency="replace_one") == epsilon(name, [doubled])


REPLACED = [  # rate, noise, steps, delta, the second library's tight value
    (0.04, 1.5, 2250, 1e-5, 13.488479),
    (0.01, 1.0, 1000, 1e-5, 2.843446),
    (0.05, 2.0, 1000, 1e-6, 8.296676),
    (1.0, 5.0, 50, 1e-5, 15.456156),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "tight"), REPLACED)
def test_replaced_records_golden_values(rate, noise, steps, delta, tight):
    events = [GaussianEvent(rate, noise, steps)]
    assert tight - 1e-6 <= epsilon("pld", events, delta, "replace_one") <= tight + 0.004
    assert tight <= epsilon("rdp", events, delta, "replace_one") <= tight * 1.1
    # half the noise in an add/remove accountant is no bound for sampled batches: it is another pair of distributions
    if rate < 1:
        assert epsilon("rdp", [GaussianEvent(rate, noise / 2, steps)], delta) > tight * 1.2


SETTINGS = itertools.product((0.002, 0.05, 0.4, 1.0), (1.0, 6.0), (1, 200), ADJACENCIES)
LONG = tuple(itertools.product((0.002, 0.4, 1.0), (1.0,), (1, 200), ("replace_one",)))  # take seconds each
MARKS = {1: (), 200: pytest.mark.e2e}  # by the number of steps
GRID = [pytest.param(*case, marks=pytest.mark.slow if case in LONG else MARKS[case[2]]) for case in SETTINGS]


@pytest.mark.e2e
@pytest.mark.parametrize(("rate", "noise", "steps", "adjacency"), GRID)
def test_no_value_below_the_truth(rate, noise, steps, adjacency):
    events = [GaussianEvent(rate, noise, steps)]
    for delta in (1e-5, 1e-8):
        truth = lower_bound(events, delta, adjacency)
        for name in ALL:
            assert epsilon(name, events, delta, adjacency) >= truth, (name, delta)
        assert epsilon("pld", events, delta, adjacency) <= epsilon("rdp", events, delta, adjacency)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    rate=st.floats(1e-3, 0.999),
    noise=st.floats(0.5, 8.0),
    order=st.sampled_from((1.5, 3.0, 20.0)),
    angle=st.floats(0, math.pi),
    lengths=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_no_other_replacement_costs_more(rate, noise, order, angle, lengths):
    """The divergence for two contributions in the unit disc, by a sum over a plane."""
    worst = sampled_gaussian_rdp([rate], [noise], (order,), "replace_one")[0, 0]
    ours, theirs = lengths[0] * np.array([1.0, 0.0]), lengths[1] * np.array([math.cos(angle), math.sin(angle)])
    axis = np.linspace(-8 * noise - 2, 8 * noise + 2 + 2 * order, 700)
    x = np.stack(np.meshgrid(axis, axis[: len(axis) // 2 + 100], indexing="ij"), axis=-1)

    def log_density(mean):
        return -((x - mean) ** 2).sum(-1) / (2 * noise**2) - math.log(2 * math.pi * noise**2)

    rest = math.log1p(-rate) + log_density(np.zeros(2))
    p, q = (np.logaddexp(rest, math.log(rate) + log_density(mean)) for mean in (ours, theirs))
    cell = (axis[1] - axis[0]) ** 2
    divergence = math.log(np.exp(order * p + (1 - order) * q).sum() * cell) / (order - 1)
    assert divergence <= worst * (1 + 1e-6) + 1e-9


def test_sampling_never_costs_and_replacing_always_does():
    for rate, noise in itertools.product((0.001, 0.2, 0.9, 0.9999), (0.4, 1.0, 9.0)):
        replaced = sampled_gaussian_rdp([rate], [noise], ORDERS, "replace_one")[0]
        assert (replaced <= np.array(ORDERS) * 2 / noise**2 * (1 + 1e-9)).all()
        assert (replaced >= sampled_gaussian_rdp([rate], [noise], ORDERS)[0] * (1 - 1e-9)).all()


REPLACING = [(0.01, 2.5, 1.5), (1e-4, 20.0, 3.3), (0.3, 1.0, 5), (0.99, 1.0, 12), (0.2, 8.0, 200)]
ADDING = [(0.01, 2.5, 1.5), (1e-4, 20.0, 3.3), (0.5, 0.7, 1.1), (0.03, 0.3, 9.4)]
LONG_INTEGRALS = [(0.99, 1.0, 12), (0.03, 0.3, 9.4)]  # take seconds each


@pytest.mark.parametrize(
    ("rate", "noise", "order", "adjacency"),
    [
        pytest.param(*case, adjacency, marks=pytest.mark.slow if case in LONG_INTEGRALS else pytest.mark.e2e)
        for adjacency, cases in (("replace_one", REPLACING), ("add_remove", ADDING))
        for case in cases
    ],
)
def test_sampled_gaussian_rdp_is_the_integral(rate, noise, order, adjacency):
    mp = pytest.importorskip("mpmath")
    with mp.workdps(25):

        def integrand(x):
            rest = (1 - rate) * mp.npdf(x, 0, noise)
            means = (1, -1 if adjacency == "replace_one" else 0)
            one, other = (rest + rate * mp.npdf(x, mean, noise) for mean in means)
            return other * (one / other) ** order

        nodes = [-1 - 12 * noise, -2, 0, 1, *(1 + 2 * order * i / 20 for i in range(1, 21)), 2 * order + 12 * noise]
        exact = mp.log(mp.quad(integrand, nodes, method="gauss-legendre")) / (order - 1)  # quick where all is smooth
    assert sampled_gaussian_rdp([rate], [noise], (order,), adjacency)[0, 0] == pytest.approx(float(exact), rel=1e-9)


def test_both_directions_of_a_removal_are_composed(monkeypatch):
    """With the removed record left out, the value would still be right for this pair, and smaller."""
    from dpfl_lightning.privacy.accounting import losses

    events, real = [GaussianEvent(0.3, 0.8, 5)], losses.gaussian_losses
    both = Pld().epsilon(events, 1e-5)
    alone = []
    for side in (0, 1):
        monkeypatch.setattr(losses, "gaussian_losses", lambda *args, side=side: (real(*args)[side],) * 2)
        alone.append(Pld().epsilon(events, 1e-5))
    assert both == alone[0] > alone[1]


@pytest.mark.parametrize("order", [1.5, 2.0, 17.0])
@pytest.mark.parametrize("noise", [0.5, 2.0, 30.0])
def test_laplace_rdp_is_the_integral(order, noise):
    mp = pytest.importorskip("mpmath")
    with mp.workdps(25):
        density = lambda x, m: mp.exp(-abs(x - m) / noise) / (2 * noise)  # noqa: E731
        ratio = lambda x: density(x, 1) ** order * density(x, 0) ** (1 - order)  # noqa: E731
        exact = mp.log(mp.quad(ratio, [-mp.inf, 0, 1, mp.inf])) / (order - 1)
    assert laplace_rdp(noise, (order,))[0] == pytest.approx(float(exact), rel=1e-9)


def test_few_pure_releases_add_up_and_many_do_not():
    assert epsilon("rdp", [LaplaceEvent(2.0)], 1e-5) == pytest.approx(0.5, abs=2e-6)
    assert epsilon("rdp", [LaplaceEvent(2.0, 3), SelectionEvent(0.25, 2)], 0.0) == pytest.approx(2.0, abs=2e-6)
    assert epsilon("rdp", [LaplaceEvent(20.0, 400)], 1e-5) < 0.4 * 20


@pytest.mark.e2e
@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("events", [[LaplaceEvent(20.0, 400)], [LaplaceEvent(4.0, 30), GaussianEvent(0.05, 1.0, 100)]])
def test_laplace_composes_tightly(events, adjacency):
    truth = lower_bound(events, 1e-6, adjacency)
    assert truth <= epsilon("pld", events, 1e-6, adjacency) <= truth + 0.02
    assert truth <= epsilon("rdp", events, 1e-6, adjacency) <= 1.3 * truth


def test_bad_events_are_named_and_those_without_noise_cost_infinity():
    for event, words in [
        (LaplaceEvent(-1.0), "`noise_multiplier` must be at least 0, got -1"),
        (LaplaceEvent(1.0, -1), "`steps` must be at least 0"),
        (SelectionEvent(-0.1), "`selection epsilon` must be at least 0"),
    ]:
        with pytest.raises(UserError, match=words):
            epsilon("rdp", [event])
    assert epsilon("rdp", [LaplaceEvent(0.0)]) == epsilon("rdp", [SelectionEvent(math.inf)]) == math.inf


def test_unknown_relations_and_accountants_are_refused():
    with pytest.raises(UserError, match="`adjacency` must be one of add_remove, replace_one, got 'remove'"):
        get_accountant("rdp", "remove")
    with pytest.raises(UserError, match=r"must be one of pld, rdp, paper_ma, got 'rpd'. Did you mean `rdp`\?"):
        get_accountant("rpd")


def test_paper_ma_golden_values():
    """The floor of the noise-aware specification."""
    floor = classically_converted(np.array([0.0]), (64.0,), 1e-4)[0]
    assert floor == pytest.approx(0.1462, abs=1e-4)
    assert get_accountant("paper_ma").epsilon([GaussianEvent(0.01, 1e9)], 1e-4) == pytest.approx(floor, abs=2e-6)


def test_paper_ma_is_never_below_rdp():
    for rate, noise, steps in ((0.01, 1.0, 100), (0.3, 2.0, 40), (1.0, 9.0, 3)):
        events = [GaussianEvent(rate, noise, steps)]
        assert epsilon("paper_ma", events) >= epsilon("rdp", events)
