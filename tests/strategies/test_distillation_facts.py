"""What distillation sends and when it pays."""

import math

import pytest
from conftest import FIXED_KEY, private
from few_digits import EQUAL, NOTICE, SMALL, few

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.papers.distillation.costs import (
    Sent,
    participations,
    traffic,
    traffic_words,
)
from dpfl_lightning.papers.distillation.distillation import Distillation


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
