"""Every client's one settings, and the plan that follows from them."""

import dataclasses
import math

import pytest

from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.server.settings import (
    client_settings,
    default_schedule,
    reported_epsilons,
    solved,
)
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.accounting.planned import Planned


def test_each_client_has_settings_of_its_own_and_a_budget_or_noise():
    clients = ClientOptions(batch_size=[10, 30], local_epochs=[1, 2], learning_rate=[0.1, 0.2])
    privacy = PrivacyOptions(epsilon=[1.0, 4.0], delta=[1e-3, 1e-4], clip_norm=[1.0, 2.0], reserve_rounds=3)
    one, two = settings = client_settings((95, 300), clients, privacy, seed=0)
    assert (one.steps, two.steps) == (10, 20)
    assert (one.sample_rate, two.sample_rate) == (10 / 95, 0.1)
    assert (one.epsilon, two.delta, two.clip_norm, two.learning_rate) == (1.0, 1e-4, 2.0, 0.2)
    assert one.noise_multiplier is None
    assert default_schedule(settings, privacy, 10).clients[0].planned[0].count == 13, "reserve rounds are planned"
    (plain,) = client_settings((50,), ClientOptions(batch_size=50), None, seed=0)
    found = plain.noise_multiplier, plain.clip_norm, plain.epsilon, plain.sample_rate
    assert found == (0.0, math.inf, math.inf, 1.0), "without privacy"
    with pytest.raises(UserError, match=r"privacy\.epsilon.*privacy=None"):
        client_settings((50,), ClientOptions(batch_size=10), PrivacyOptions(), seed=0)


def test_claims_are_the_truth_unless_they_are_said_to_be_false():
    privacy = PrivacyOptions(epsilon=[1.0, 4.0])

    def claimed(value):
        clients = ClientOptions(count=2, reported_epsilon=value)
        settings = client_settings((95, 300), clients, privacy, seed=0)
        assert [one.epsilon for one in settings] == [1.0, 4.0]
        return reported_epsilons(clients, settings, seed=0)

    assert claimed(None) == (1.0, 4.0) and claimed([9, 4]) == (9.0, 4.0) and claimed(3.0) == (3.0, 3.0)
    assert all(0.2 <= claim <= 1.0 for claim in claimed({"name": "dist7", "source": "sampled"}))
    for wrong in ([1.0], [0.0, 1.0], "high"):
        with pytest.raises(UserError, match=r"`clients\.reported_epsilon` must"):
            claimed(wrong)


def test_what_strategies_plan_beside_given_noise_is_paid_first():
    privacy = PrivacyOptions(epsilon=4.0, noise_multiplier=2.0, delta=1e-3)
    settings = client_settings((100,) * 3, ClientOptions(batch_size=20), privacy, seed=0)
    judge = get_accountant(privacy.accountant)

    def change(client, one):
        (train,) = one.planned
        full = Planned("full", GaussianEvent(1.0, 3.0), 5)
        quiet = dataclasses.replace(train, event=GaussianEvent(1.0, 2.0), count=1000)
        return dataclasses.replace(one, planned=((full, train), (train, full), (quiet,))[client])

    schedule = solved(default_schedule(settings, privacy, rounds=1000).replan(change), judge)
    counts = [{line.purpose: line.count for line in one.planned} for one in schedule.clients]
    assert counts[0] == counts[1] and counts[0]["full"] == 5 and 1 <= counts[0]["train"] < 1000
    assert 1 <= counts[2]["train"] < 10, "full batches cost more than those that were counted on by default"
    assert all(judge.epsilon(one.events(), 1e-3) <= 4.0 for one in schedule.clients)
    loud = default_schedule(settings, privacy, rounds=5).replan(
        lambda _, one: dataclasses.replace(one, planned=(Planned("full", GaussianEvent(1.0, 0.1), 2), *one.planned))
    )
    with pytest.raises(UserError, match=r"`epsilon` must be above .*, the cost of full with the given noise.* got 4"):
        solved(loud, judge)
