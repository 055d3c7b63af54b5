"""Selection strategies in runs: quotas and noise by formula, budgets spent to the last, slots kept, resumed."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from conftest import FIXED_KEY, blobs, break_off, private, small_net
from fakes import Absent, Recorder

from dpfl_lightning.algorithms.allocation import allocate_int, anchor_strength
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.models import PersonalInput
from dpfl_lightning.papers.baselines.uniform_selection import UniformSelection
from dpfl_lightning.privacy.accounting.gaussian import gaussian_mu
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted
from dpfl_lightning.strategies.aggregation.uniform import Uniform
from dpfl_lightning.strategies.selection.biased_selection import BiasedSelection, participation_noise

EPSILON = [0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
COUNT, COHORT, ROUNDS, DELTA = len(EPSILON), 3, 8, 1e-3
PARAMS = 83
MU = gaussian_mu(np.array(EPSILON), np.full(COUNT, DELTA))
SAMPLED = {"clients": ClientOptions(count=COUNT, batch_size=16, learning_rate=0.3), "privacy": {"accountant": "rdp"}}


def federation(make_loop, *parts, laplace=False, clients=None, privacy=(), **more):
    """Eight clients of 48 to 104 records, full batches, budgets from 0.3 to 6, accounted exactly."""
    usual = {"epsilon": EPSILON, "delta": DELTA, "noise_key": FIXED_KEY}
    if laplace:
        usual |= {"mechanism": "laplace", "delta": 0.0, "accountant": "rdp"}
    return make_loop(
        parts=parts,
        privacy=None if privacy is None else PrivacyOptions(**{**usual, **dict(privacy)}),
        clients=clients or ClientOptions(count=COUNT, batch_size=None, learning_rate=0.3),
        **{"population": blobs(num_clients=COUNT), "rounds": ROUNDS, **more},
    )


def planned(make_loop, *parts, **options):
    loop = federation(make_loop, *parts, **options)
    loop.plan_schedule()
    return loop


def exact_factor(records, laplace, sensitivity=1):
    """Noise of one participation: d (B / (mu D))^2, or 2 d (B / (epsilon D))^2."""
    if laplace:
        return 2 * PARAMS * (sensitivity / (np.array(EPSILON) * records)) ** 2
    return PARAMS * (sensitivity / (MU * records)) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("laplace", [False, True], ids=["gaussian", "laplace"])
def test_quotas_noise_and_spending_are_those_of_the_formulas(laplace, adjacency, make_loop):
    strategy, seen = BiasedSelection(COHORT), Recorder()
    loop = federation(make_loop, strategy, seen, laplace=laplace, privacy={"adjacency": adjacency})
    result = loop.run()
    records, sensitivity = np.array(loop.population.num_records), 1 + (adjacency == "replace_one")
    factor, exponent = exact_factor(records, laplace, sensitivity), 2 if laplace else 1
    anchor = anchor_strength(COUNT, ROUNDS, 0.25 if laplace else 1.0)
    quota = allocate_int(factor, COHORT * ROUNDS, exponent, upper=ROUNDS, anchor=anchor)
    assert strategy._quota.tolist() == quota.tolist() and quota[0] == 0 and quota.max() >= 5
    for client, row in enumerate(result.clients):
        assert row["releases"] == len(loop.clients.budgets.ledger.events(client)) == quota[client]
        if quota[client]:
            single = quota[client] / EPSILON[client] if laplace else math.sqrt(quota[client]) / MU[client]
            assert row["noise_multiplier"] == pytest.approx(sensitivity * single, rel=1e-5)
            assert EPSILON[client] * (1 - 2e-5) <= row["epsilon_spent"] <= EPSILON[client]
        else:
            assert row["epsilon_spent"] == 0
    cohorts = [report.clients for report in seen.reports]
    assert [len(cohort) for cohort in cohorts] == [COHORT] * ROUNDS
    assert np.bincount([n for cohort in cohorts for n in cohort], None, COUNT).tolist() == quota.tolist()
    metrics = result.metrics
    assert metrics["participations"] == metrics["quota"] == quota.tolist() and metrics["forfeited_participations"] == 0
    assert 0.1 < metrics["participation_equality"] < 1


@pytest.mark.e2e
@pytest.mark.parametrize("laplace", [False, True], ids=["gaussian", "laplace"])
def test_uniform_selection_gives_each_client_the_same_rounds(laplace, make_loop):
    result = federation(make_loop, UniformSelection(COHORT), laplace=laplace).run()
    assert [row["releases"] for row in result.clients] == [COHORT * ROUNDS // COUNT] * COUNT
    assert all(e * (1 - 2e-5) <= row["epsilon_spent"] <= e for e, row in zip(EPSILON, result.clients, strict=True))


@pytest.mark.e2e
def test_without_privacy_it_is_plain_fedsgd(make_loop):
    """One full-batch step a participation: the mean gradient of the cohort, unclipped, without noise."""
    for kind in (UniformSelection, BiasedSelection):
        seen = Recorder()
        loop = federation(make_loop, kind(COHORT), seen, privacy=None, rounds=1)
        start = loop.module.flat
        loop.run()
        cohort = seen.reports[0].clients
        assert len(cohort) == COHORT
        net, moved = small_net(), []
        for client in cohort:
            x, y = loop.population.records(client, torch.arange(loop.population.num_records[client]))
            loss = torch.nn.functional.cross_entropy(net(x), y)
            moved.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]))
        expected = start - 0.3 * torch.stack(moved).mean(dim=0)
        torch.testing.assert_close(loop.state.models[0], expected, rtol=1e-4, atol=1e-6)


def test_all_updates_of_a_round_weigh_the_same_unless_a_base_rule_is_named(make_loop):
    alone = federation(make_loop, BiasedSelection(COHORT))
    assert [type(one) for one in alone.config.strategies] == [Uniform, BiasedSelection]
    named = federation(make_loop, SizeWeighted(), BiasedSelection(COHORT))
    assert [type(one) for one in named.config.strategies] == [SizeWeighted, BiasedSelection]


@pytest.mark.slow
def test_a_cohort_holds_one_of_the_largest_budgets_where_there_is_one(make_loop):
    """Half of the clients a round, the top quarter (6 and 7): without the wish a fifth of the rounds miss both."""
    missed = {}
    for fraction in (None, 0.25):
        federation(make_loop, UniformSelection(4, top_fraction=fraction), seen := Recorder(), rounds=24).run()
        missed[fraction] = [not {6, 7} & set(report.clients) for report in seen.reports]
    assert any(missed[None][:12]) and not any(missed[0.25][:12]), "later their quotas may be used up"


# ---- reported budgets and bounds


@pytest.mark.e2e
def test_quotas_follow_reported_budgets_and_noise_the_true_ones(make_loop):
    false = {"clients": ClientOptions(count=COUNT, batch_size=None, reported_epsilon=[100.0, *EPSILON[1:]])}
    plain = planned(make_loop, BiasedSelection(COHORT, dissimilarity=0.0))
    liar = planned(make_loop, BiasedSelection(COHORT, dissimilarity=0.0), **false)
    quotas = [loop.config.strategies[-1]._quota for loop in (plain, liar)]
    assert quotas[0][0] == 0 and quotas[1][0] == ROUNDS
    schedule = liar.schedule.clients[0]
    assert schedule.target_epsilon == EPSILON[0] >= liar.config.accountant.epsilon(schedule.events(), DELTA)


@pytest.mark.e2e
def test_options_bound_quotas(make_loop):
    def quota_of(privacy=(), **options):
        return planned(make_loop, BiasedSelection(COHORT, **options), privacy=privacy).config.strategies[-1]._quota

    spread = [quota_of(dissimilarity=dissimilarity).std() for dissimilarity in (0.0, 0.1, 10.0, 1e6)]
    assert spread == sorted(spread, reverse=True) and spread[-1] == 0 < spread[1], "from least noise to equal quotas"
    assert quota_of({"epsilon": [math.inf, *EPSILON[1:]]}, dissimilarity=0.0)[0] == ROUNDS
    loop = planned(make_loop, BiasedSelection(COHORT), privacy={"reserve_rounds": 2})
    quota = loop.config.strategies[-1]._quota
    counts = [schedule.count_of("train") for schedule in loop.schedule.clients]
    assert counts == [n + 2 if n else 0 for n in quota.tolist()] and quota.max() <= ROUNDS, "a reserve comes on top"


@pytest.mark.e2e
def test_given_noise_limits_rounds_and_cannot_be_biased(make_loop):
    given = {"noise_multiplier": 4.0, "accountant": "rdp"}
    result = federation(make_loop, UniformSelection(4), privacy=given).run()
    assert all(row["epsilon_spent"] <= e for row, e in zip(result.clients, EPSILON, strict=True))
    assert result.clients[0]["releases"] < result.clients[-1]["releases"]
    words = r"`privacy\.noise_multiplier` must be null for strategy biased_selection, got 4"
    with pytest.raises(UserError, match=words):
        federation(make_loop, BiasedSelection(COHORT), privacy=given).plan_schedule()


def test_options_that_do_not_fit_the_federation_are_one_sentence(make_loop):
    words = r"`strategies\.biased_selection\.clients_per_round` must be at most the 8 clients, got 9"
    with pytest.raises(UserError, match=words):
        planned(make_loop, BiasedSelection(clients_per_round=9))


# ---- absent, lost, resumed


@pytest.mark.e2e
def test_absent_clients_keep_their_slots(make_loop):
    """Three clients miss the first three rounds: nobody exceeds a quota, and all use theirs in the end."""
    absent = Absent(dict.fromkeys((1, 2, 3), (1, 3, 5)))
    result = federation(make_loop, absent, UniformSelection(COHORT), seen := Recorder()).run()
    assert all(not {1, 3, 5} & set(report.clients) for report in seen.reports[:3])
    assert [row["releases"] for row in result.clients] == [COHORT * ROUNDS // COUNT] * COUNT


def test_slots_that_cannot_be_used_any_more_are_forfeited_and_reported(make_loop):
    loop = federation(make_loop, Absent(dict.fromkeys(range(1, ROUNDS), (7,))), BiasedSelection(COHORT))
    with pytest.warns(UserNotice, match="planned participations were not used, because clients were away"):
        result = loop.run()
    quota = loop.config.strategies[-1]._quota
    assert result.clients[7]["releases"] <= 1 < quota[7]
    assert result.metrics["forfeited_participations"] == quota[7] - result.clients[7]["releases"]
    assert all(row["releases"] == n for row, n in zip(result.clients[:7], quota[:7], strict=True))


@pytest.mark.e2e
def test_a_lost_update_has_used_its_slot(make_loop):
    """Client 7's records are broken in one round: its charge was made, so its quota is one less."""
    engine, seen = SerialEngine(), Recorder()
    loop = federation(make_loop, BiasedSelection(COHORT), seen, engine=engine)
    release, lost = engine.release, []

    def failing(client, request, *args):
        delta = release(client, request, *args)
        if client.number != 7 or lost:
            return delta
        lost.append(request.round)
        return delta * math.nan

    engine.release = failing
    with pytest.warns(UserNotice, match="are not finite"):
        result = loop.run()
    strategy = loop.config.strategies[1]
    assert result.clients[7]["releases"] == strategy._quota[7] == strategy._taken[7]
    took_part = [7 in report.clients for report in seen.reports]
    assert sum(took_part) == strategy._quota[7] - 1 and not took_part[lost[0] - 1]


@pytest.mark.e2e
def test_a_run_that_was_broken_off_pays_from_its_reserve(make_loop):
    options = {"privacy": {"noise_key": None, "reserve_rounds": 1}}
    first = break_off(federation(make_loop, BiasedSelection(COHORT), **options), 3)
    again = federation(make_loop, BiasedSelection(COHORT), output_dir=first.output_dir, **options)
    result = again.run(resume=True)
    quota = again.config.strategies[-1]._quota
    assert again.config.strategies[-1]._taken.tolist() == quota.tolist()
    assert sum(row["releases"] for row in result.clients) == quota.sum() + COHORT
    assert all(row["epsilon_spent"] <= e for row, e in zip(result.clients, EPSILON, strict=True))


# ---- sampled batches, weights, descriptions


@pytest.mark.slow
def test_growth_of_noise_is_solved_where_batches_are_sampled(make_loop):
    loop = federation(make_loop, BiasedSelection(COHORT), **SAMPLED)
    result = loop.run()
    noise = loop.config.strategies[-1]._noise
    assert ((noise.exponent > 0.3) & (noise.exponent < 1.2)).all()
    assert all(row["epsilon_spent"] <= e for row, e in zip(result.clients, EPSILON, strict=True))
    for client, schedule in enumerate(loop.schedule.clients):
        count = schedule.count_of("train")
        if count:
            ours = PARAMS * (result.clients[client]["noise_std"] / (0.3 * schedule.main.steps)) ** 2
            assert ours == pytest.approx(noise.factor[client] * count ** noise.exponent[client], rel=0.05), (
                "a power law, roughly"
            )


def test_laplace_noise_at_a_delta_grows_slower_than_pure_noise(make_loop):
    loop = planned(make_loop, UniformSelection(COHORT), laplace=True, privacy={"delta": DELTA}, rounds=60)

    def free(client, schedule):
        (line,) = schedule.planned
        event = dataclasses.replace(line.event, noise_multiplier=None)
        return dataclasses.replace(schedule, planned=(dataclasses.replace(line, event=event, count=60),))

    view = loop.view(ServerState(loop.module.flat[None], (0,) * COUNT))
    growth = participation_noise(loop.schedule.replan(free), view, np.full(COUNT, 15)).exponent
    assert bool(((growth > 1) & (growth < 2)).all())


@pytest.mark.e2e
def test_personal_inputs_stay_with_the_selected_clients(make_loop):
    """PRIVATEFL with biased selection: clipped and noised with the rest, sent by nobody, moved only where selected."""
    module = ClientModule(PersonalInput(small_net(), (6,)))
    loop = federation(make_loop, BiasedSelection(COHORT), module=module)
    start, personal = module.flat, module.personal_mask
    loop.run()
    model = loop.state.models[0]
    assert int(personal.sum()) == 12 and torch.equal(model[personal], start[personal])
    assert not torch.equal(model[~personal], start[~personal])
    for client, quota in enumerate(loop.config.strategies[-1]._quota):
        trained = loop.clients.engine.personalised(model, client)[personal]
        assert torch.equal(trained, start[personal]) == (quota == 0)


@pytest.mark.slow
def test_full_batches_are_not_called_samples(make_loop):
    """Before the first release, at the end, and of a client that took no part."""
    words = []

    class Start(Callback):
        def on_fit_start(self, view):
            words.extend(one.sampling for one in view.guarantees())

    result = federation(make_loop, BiasedSelection(COHORT), Start()).run()
    assert "full batches" in str(result.guarantee) and not any(
        "Poisson" in one for one in [*words, str(result.guarantee)]
    )
    sampled = federation(make_loop, BiasedSelection(COHORT), **SAMPLED, rounds=2).run()
    assert "Poisson sampling" in sampled.guarantee.sampling


def test_without_a_number_a_round_has_a_fifth_of_the_clients_or_the_fewest_if_noise_grows_fast(make_loop):
    more = {"population": blobs(num_clients=20), "rounds": 10, "clients": ClientOptions(count=20, batch_size=None)}
    for laplace, delta, rounds, size in (
        (False, DELTA, 10, 4),
        (True, 0.0, 10, 2),
        (True, 0.0, 6, 4),
    ):
        options = {**more, "rounds": rounds, "privacy": {"epsilon": 2.0, "delta": delta}}
        described = planned(make_loop, UniformSelection(), laplace=laplace, **options).describe()
        assert described[0].startswith(f"{size} of 20 clients a round")
    one = make_loop(
        population=blobs(num_clients=1),
        clients=ClientOptions(count=1, batch_size=None),
        privacy=private(2.0),
        parts=[BiasedSelection()],
    )
    assert one.run().clients[0]["releases"] == 3
