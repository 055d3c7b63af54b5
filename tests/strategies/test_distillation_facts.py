"""What distillation sends and when it pays; the paper's epsilon and true ones."""

import math

import pytest
from conftest import FIXED_KEY, private
from few_digits import EQUAL, NOTICE, SMALL, UNEQUAL, few

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.runtime.text import at_most
from dpfl_lightning.strategies.distillation.costs import (
    Sent,
    paper_epsilon,
    paper_epsilon_words,
    participations,
    traffic,
    traffic_words,
)
from dpfl_lightning.strategies.distillation.distillation import PURPOSE, Distillation

EXACT = get_accountant("pld")


def planned(make_loop, privacy, counts=EQUAL, rounds=6, **options):
    strategy = Distillation(**SMALL | options)
    loop = few(make_loop, strategy, counts=counts, privacy=privacy, rounds=rounds, evaluate_every=rounds)
    loop.plan_schedule()
    return loop


# --- traffic


def test_a_set_pays_from_as_many_trainings_as_the_formula_says():
    """500 rounds, ten classes, and as many clients and parameters in both: T I (d + C d_m) over 2 R J d."""
    for training_rounds, expected in ((100, 28.5), (200, 14.75), (500, 6.5), (1000, 3.75)):
        of_set, of_training = traffic(500 * 25, 7, 10 * 7), traffic(training_rounds * 25, 7, 7)
        assert 1 + of_set.total / of_training.total == expected == 1 + 500 * (1 + 10) / (2 * training_rounds)
        trainings = [math.floor(expected), math.floor(expected) + 1]
        less, more = (n * of_training.total - (of_set.total + of_training.total) for n in trainings)
        assert less <= 0 < more
    rounds, cohort, params, matched, classes, training_rounds, training_cohort = 30, 4, 50, 40, 3, 8, 16
    of_set = traffic(rounds * cohort, params, classes * matched)
    of_training = traffic(training_rounds * training_cohort, params, params)
    assert 1 + of_set.total / of_training.total == 1 + 30 * 4 * (50 + 3 * 40) / (2 * 8 * 16 * 50)


GIVEN = PrivacyOptions(epsilon=[3.0, 9.0, 9.0, 9.0], noise_multiplier=3.0, delta=1e-3, noise_key=FIXED_KEY)


@pytest.mark.slow
@NOTICE
@pytest.mark.filterwarnings("ignore:round:dpfl_lightning.errors.UserNotice")
@pytest.mark.parametrize(
    ("privacy", "options"),
    [
        (None, {}),
        (None, {"participation_fraction": 0.5}),
        (private(), {"matching": "mse"}),
        (private(reserve_rounds=2), {"participation_fraction": 0.5}),
        (GIVEN, {"participation_fraction": 0.5, "min_participants": 2, "rounds": 30}),
    ],
    ids=["counts", "half and counts", "all parameters", "half and reserve", "budgets that run out"],
)
def test_the_description_has_what_will_be_sent(privacy, options, make_loop):
    loop = planned(make_loop, privacy, **options)
    words = loop.describe()
    loop.run()
    sent = Sent(int(loop.totals.metrics["floats_down"]), int(loop.totals.metrics["floats_up"]))
    size, params = 2 if "participation_fraction" in options else 4, loop.module.num_params
    assert words == [traffic_words(sent, traffic(size, params, params), size)]
    all_rounds = options.get("rounds", 6) * size * params
    assert sent.down < all_rounds if privacy is GIVEN else sent.down == all_rounds
    rounds = sent.total / (2 * size * params)
    assert f"{rounds:,.1f}".removesuffix(".0") in words[0]


def test_rounds_of_few_and_clients_without_budget_send_nothing():
    cohorts = [{0, 1, 2}, {0, 1}, {0, 2}, {1, 2}]
    assert participations(cohorts, [4, 4, 4], fewest=1) == 9
    assert participations(cohorts, [1, 4, 4], fewest=1) == 3 + 1 + 1 + 2
    assert participations(cohorts, [1, 4, 4], fewest=2) == 3 + 2
    assert participations(cohorts, [4, 4, 4], fewest=4) == 0


# --- the paper's epsilon


#: sigma -> eq. 41 at clip norm 1 and delta 1e-5, and exact epsilons of 500 and 250 rounds of full batches
TABLE = {
    0.01: (969, 2.51e6, 1.26e6),
    0.1: (96.9, 25_953, 13_173),
    1: (9.69, 344.5, 191.5),
    2: (4.84, 109.3, 64.2),
    5: (1.94, 28.4, 17.9),
    10: (0.969, 11.48, 7.51),
    100: (0.0969, 0.82, 0.56),
}


def test_the_papers_epsilon_is_far_below_the_true_one():
    for sigma, (of_paper, *true) in TABLE.items():
        assert paper_epsilon(sigma, 1e-5) == pytest.approx(of_paper, rel=2e-3)
        exact = [EXACT.epsilon([GaussianEvent(1.0, sigma, rounds)], 1e-5) for rounds in (500, 250)]
        assert exact == pytest.approx(true, rel=5e-3)
        assert exact[0] > 8 * paper_epsilon(sigma, 1e-5)


def test_the_papers_epsilon_follows_the_clip_norm_and_the_true_one_does_not(make_loop):
    """Noise follows the clip norm, too, so that a plan of another clip norm costs the same."""
    true = []
    for clip_norm in (0.5, 1.0, 3.0):
        assert paper_epsilon(10.0, 1e-5, clip_norm) == pytest.approx(clip_norm * paper_epsilon(10.0, 1e-5), rel=1e-15)
        privacy = PrivacyOptions(noise_multiplier=10.0, clip_norm=clip_norm, delta=1e-5, noise_key=FIXED_KEY)
        loop = planned(make_loop, privacy, mode="paper_literal", sampling="full")
        true.append(EXACT.epsilon(loop.schedule.clients[0].events(), 1e-5))
        assert loop.describe()[1] == paper_epsilon_words(10.0, 1e-5, clip_norm)
        assert f"epsilon {at_most(paper_epsilon(10.0, 1e-5, clip_norm))} " in loop.describe()[1]
    assert len(set(true)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "noise", "clip_norm"),
    [
        ({"sampling": "full"}, 2.0, 0.8),
        ({}, 4.0, 0.4),  # draws of a fixed number clip to half: the same noise is twice the multiplier
        ({"sampling": "full", "noise_scale": "paper_mean"}, 2.0, 0.8),
        ({"noise_scale": "paper_mean", "records_per_class": 2}, 4.0, 0.4),
    ],
    ids=["full", "fixed", "full, on the mean", "fixed, on the mean"],
)
def test_the_papers_mode_reports_the_papers_epsilon_as_its_sigma_is_meant(options, noise, clip_norm, make_loop):
    given = PrivacyOptions(noise_multiplier=2.0, clip_norm=0.8, delta=1e-3, noise_key=FIXED_KEY)
    loop = planned(make_loop, given, UNEQUAL, mode="paper_literal", **options)
    assert loop.describe()[1:] == [paper_epsilon_words(noise, 1e-3, clip_norm)]


@pytest.mark.slow
@NOTICE
def test_other_modes_do_not_report_the_papers_epsilon(make_loop):
    laplace = private(300.0, delta=0.0, mechanism="laplace")
    for privacy, mode in ((private(), "default"), (None, "paper_literal"), (laplace, "paper_literal")):
        assert len(planned(make_loop, privacy, mode=mode).describe()) == 1


def test_of_unequal_budgets_the_largest_epsilon_is_reported(make_loop):
    loop = planned(make_loop, private([4.0, 6.0, 10.0, 8.0]), mode="paper_literal", sampling="full")
    noise = loop.schedule.clients[2].noise_multiplier(PURPOSE)
    assert loop.describe()[1] == paper_epsilon_words(noise, 1e-3, 1.0)


def test_numbers_out_of_range_are_named():
    for wrong, words in (
        ((0.0, 1e-5, 1.0), "`noise_multiplier` must be above 0, got 0.0"),
        ((1.0, 0.0, 1.0), r"`delta` must be in \(0, 1\), got 0.0"),
        ((1.0, 1e-5, -1.0), "`clip_norm` must be above 0, got -1.0"),
    ):
        with pytest.raises(UserError, match=words):
            paper_epsilon(*wrong)
