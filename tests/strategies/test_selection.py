"""Selection strategies in real runs: quotas and noise by formula, budgets spent to the last, slots kept, resumed."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch
from conftest import FIXED_KEY, PowerCut, blobs, cut_at, small_net

from dpfl_lightning import strategies
from dpfl_lightning.algorithms.allocation import allocate_int, anchor_strength, noise_gain
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.models import PersonalInput
from dpfl_lightning.privacy.accounting.accountant import gaussian_mu
from dpfl_lightning.strategies.aggregation.inverse_noise import InverseNoise
from dpfl_lightning.strategies.aggregation.learning_rate_decay import LearningRateDecay
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted
from dpfl_lightning.strategies.aggregation.uniform import Uniform
from dpfl_lightning.strategies.selection.biased_selection import BiasedSelection, participation_noise
from dpfl_lightning.strategies.selection.reweighted_selection import ReweightedSelection
from dpfl_lightning.strategies.selection.uniform_selection import UniformSelection

EPSILON = [0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
COUNT, COHORT, ROUNDS, DELTA = len(EPSILON), 3, 8, 1e-3
PARAMS = 83


class Seen(Callback):
    """What happened in each round."""

    def __init__(self):
        self._rounds = []

    def on_round_end(self, view, report):
        self._rounds.append(report)


class Away(Strategy):
    """Leaves some clients out of some rounds before anybody pays; goes before the selection."""

    def __init__(self, clients, rounds):
        self._clients, self._rounds = clients, rounds

    def plan_round(self, plan, view):
        return plan.only(lambda client: view.round not in self._rounds or client not in self._clients)


def federation(make_loop, *parts, laplace=False, clients=None, rounds=ROUNDS, **more):
    """Eight clients of 48 to 104 records, full batches, budgets from 0.3 to 6, accounted exactly."""
    usual = {"epsilon": EPSILON, "delta": DELTA, "accountant": "gdp", "noise_key": FIXED_KEY}
    if laplace:
        usual |= {"mechanism": "laplace", "delta": 0.0, "accountant": "rdp"}
    options = {"parts": parts, "rounds": rounds}
    if "population" not in more:
        options["population"] = blobs(num_clients=COUNT)
    privacy = more.pop("privacy", {})
    options["privacy"] = None if privacy is None else PrivacyOptions(**{**usual, **privacy})
    options["clients"] = clients or ClientOptions(count=COUNT, batch_size=None, learning_rate=0.3)
    return make_loop(**{**options, **more})


def exact_factor(records, laplace, sensitivity=1):
    """Noise of one participation: d (B / (mu D))^2, or 2 d (B / (epsilon D))^2."""
    if laplace:
        return 2 * PARAMS * (sensitivity / (np.array(EPSILON) * records)) ** 2
    mu = gaussian_mu(np.array(EPSILON), np.full(COUNT, DELTA))
    return PARAMS * (sensitivity / (mu * records)) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("laplace", [False, True], ids=["gaussian", "laplace"])
def test_quotas_noise_and_spending_are_those_of_the_formulas(laplace, adjacency, make_loop):
    own, seen = BiasedSelection(COHORT), Seen()
    loop = federation(make_loop, own, seen, laplace=laplace, privacy={"adjacency": adjacency})
    result = loop.run()
    records, sensitivity = np.array(loop.population.num_records), 1 + (adjacency == "replace_one")
    factor, exponent = exact_factor(records, laplace, sensitivity), 2 if laplace else 1
    anchor = anchor_strength(COUNT, ROUNDS, 0.25 if laplace else 1.0)
    quota = allocate_int(factor, COHORT * ROUNDS, exponent, upper=ROUNDS, anchor=anchor)
    assert own._quota.tolist() == quota.tolist() and quota[0] == 0 and quota.max() >= 5
    mu = gaussian_mu(np.array(EPSILON), np.full(COUNT, DELTA))
    for client, row in enumerate(result.clients):
        assert row["releases"] == len(loop.clients.budgets.ledger.events(client)) == quota[client]
        if quota[client]:
            single = quota[client] / EPSILON[client] if laplace else math.sqrt(quota[client]) / mu[client]
            assert row["noise_multiplier"] == pytest.approx(sensitivity * single, rel=1e-5)
            assert EPSILON[client] * (1 - 2e-5) <= row["epsilon_spent"] <= EPSILON[client]
        else:
            assert row["epsilon_spent"] == 0
    assert [len(report.clients) for report in seen._rounds] == [COHORT] * ROUNDS
    assert np.bincount([n for report in seen._rounds for n in report.clients], None, COUNT).tolist() == quota.tolist()
    told = result.metrics
    assert told["participations"] == told["quota"] == quota.tolist() and told["forfeited_participations"] == 0
    assert 0.1 < told["participation_equality"] < 1


@pytest.mark.parametrize("laplace", [False, True], ids=["gaussian", "laplace"])
def test_uniform_selection_gives_each_client_the_same_rounds(laplace, make_loop):
    loop = federation(make_loop, UniformSelection(COHORT), laplace=laplace)
    result = loop.run()
    assert [row["releases"] for row in result.clients] == [COHORT * ROUNDS // COUNT] * COUNT
    assert all(e * (1 - 2e-5) <= row["epsilon_spent"] <= e for e, row in zip(EPSILON, result.clients, strict=True))


def test_without_privacy_it_is_plain_fedsgd(make_loop):
    """One full-batch step a participation: the mean gradient of the cohort, unclipped, without noise."""
    for kind in (UniformSelection, BiasedSelection):
        loop = federation(make_loop, kind(COHORT), Seen(), privacy=None, rounds=1)
        start = loop.module.flat
        loop.run()
        (report,) = loop.callbacks[-1]._rounds
        assert len(report.clients) == COHORT
        net = small_net()
        moved = []
        for client in report.clients:
            x, y = loop.population.records(client, torch.arange(loop.population.num_records[client]))
            loss = torch.nn.functional.cross_entropy(net(x), y)
            moved.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]))
        expected = start - 0.3 * torch.stack(moved).mean(dim=0)
        torch.testing.assert_close(loop.state.models[0], expected, rtol=1e-4, atol=1e-6)


def test_all_updates_of_a_round_weigh_the_same_unless_a_base_rule_is_named(make_loop):
    alone = federation(make_loop, BiasedSelection(COHORT))
    assert [type(callback) for callback in alone.strategies] == [Uniform, BiasedSelection]
    named = federation(make_loop, SizeWeighted(), BiasedSelection(COHORT))
    assert [type(callback) for callback in named.strategies] == [SizeWeighted, BiasedSelection]


@pytest.mark.slow
@pytest.mark.parametrize(
    "together", [{"noise_aware": {}}, {"pfa": {}}, {"epsilon_weighted": {}}, {"inverse_noise": {}}]
)
@pytest.mark.parametrize("selection", ["biased_selection", "uniform_selection"])
def test_it_goes_with_every_base_rule(together, selection, make_loop):
    built = strategies.build({**together, selection: {"clients_per_round": COHORT, "top_fraction": 0.25}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserNotice)
        result = federation(make_loop, *built, rounds=3).run()
    assert result.finished and sum(row["releases"] for row in result.clients) == 3 * COHORT


@pytest.mark.slow
def test_a_cohort_holds_one_of_the_largest_budgets_where_there_is_one(make_loop):
    """Half of the clients a round, the top quarter (6 and 7): without the wish a fifth of the rounds miss both."""
    missed = {}
    for fraction in (None, 0.25):
        seen = Seen()
        federation(make_loop, UniformSelection(4, top_fraction=fraction), seen, rounds=24).run()
        missed[fraction] = [not {6, 7} & set(report.clients) for report in seen._rounds]
    assert any(missed[None][:12]) and not any(missed[0.25][:12]), "later their quotas may be used up"


# ---- claims and bounds


def test_quotas_follow_what_is_claimed_and_noise_what_is_true(make_loop):
    plain = federation(make_loop, BiasedSelection(COHORT, dissimilarity=0.0))
    liar = federation(
        make_loop,
        BiasedSelection(COHORT, dissimilarity=0.0),
        clients=ClientOptions(count=COUNT, batch_size=None, reported_epsilon=[100.0, *EPSILON[1:]]),
    )
    capped = federation(
        make_loop,
        BiasedSelection(COHORT, dissimilarity=0.0, max_effective_epsilon=1.0),
        clients=ClientOptions(count=COUNT, batch_size=None, reported_epsilon=[100.0, *EPSILON[1:]]),
    )
    for loop in (plain, liar, capped):
        loop.plan_schedule()
    quotas = [loop.strategies[-1]._quota for loop in (plain, liar, capped)]
    assert quotas[0][0] == 0 and quotas[1][0] == ROUNDS and 0 < quotas[2][0] < ROUNDS
    for loop in (liar, capped):
        own = loop.schedule.clients[0]
        assert own.target_epsilon == EPSILON[0] and loop.accountant.epsilon(own.events(), DELTA) <= EPSILON[0]


def test_a_floor_gives_everybody_some_rounds(make_loop):
    loop = federation(make_loop, BiasedSelection(COHORT, min_participation=2))
    loop.plan_schedule()
    quota = loop.strategies[-1]._quota
    assert quota.min() == 2 and quota.sum() == COHORT * ROUNDS and quota.max() <= ROUNDS


def test_dissimilarity_leads_from_least_noise_to_equal_quotas(make_loop):
    spread = []
    for dissimilarity in (0.0, 0.1, 10.0, 1e6):
        loop = federation(make_loop, BiasedSelection(COHORT, dissimilarity=dissimilarity))
        loop.plan_schedule()
        spread.append(loop.strategies[-1]._quota.std())
    assert spread == sorted(spread, reverse=True) and spread[-1] == 0 < spread[1]


def test_a_client_without_a_budget_takes_all_the_rounds_it_may(make_loop):
    epsilon = [math.inf, *EPSILON[1:]]
    loop = federation(make_loop, BiasedSelection(COHORT, dissimilarity=0.0), privacy={"epsilon": epsilon})
    loop.plan_schedule()
    assert loop.strategies[-1]._quota[0] == ROUNDS and loop.schedule.clients[0].noise_multiplier("train") == 0


def test_given_noise_limits_rounds_and_cannot_be_biased(make_loop):
    given = {"noise_multiplier": 4.0, "accountant": "rdp"}
    loop = federation(make_loop, UniformSelection(4), privacy=given)
    result = loop.run()
    assert all(row["epsilon_spent"] <= e for row, e in zip(result.clients, EPSILON, strict=True))
    assert result.clients[0]["releases"] < result.clients[-1]["releases"]
    with pytest.raises(
        UserError, match=r"`privacy\.noise_multiplier` must be null for strategy biased_selection, got 4"
    ):
        federation(make_loop, BiasedSelection(COHORT), privacy=given).plan_schedule()


def test_reserve_comes_on_top_for_those_who_train(make_loop):
    loop = federation(make_loop, BiasedSelection(COHORT), privacy={"reserve_rounds": 2})
    loop.plan_schedule()
    quota = loop.strategies[-1]._quota
    counts = [own.count_of("train") for own in loop.schedule.clients]
    assert counts == [n + 2 if n else 0 for n in quota.tolist()] and quota.max() <= ROUNDS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients_per_round": 0}, r"`strategies\.biased_selection\.clients_per_round` must be >= 1, got 0"),
        ({"clients_per_round": 9}, r"clients_per_round` must be at most the 8 clients, got 9"),
        ({"sampler": "systematic"}, r"\.sampler` must be one of .* Did you mean `quota_systematic`"),
        ({"sampler": "with_replacement"}, r"\.sampler` must be one of"),
        ({"dissimilarity": -1.0}, r"\.dissimilarity` must be >= 0"),
        ({"min_participation": -1}, r"\.min_participation` must be >= 0"),
        ({"min_participation": 4}, r"\.min_participation` must be at most 3, the mean number of rounds"),
        ({"max_effective_epsilon": 0.0}, r"\.max_effective_epsilon` must be above 0"),
        ({"top_fraction": 1.0}, r"\.top_fraction` must be in \(0, 1\)"),
    ],
)
def test_bad_options_are_one_sentence(options, words, make_loop):
    with pytest.raises(UserError, match=words):
        federation(make_loop, BiasedSelection(**{"clients_per_round": COHORT, **options})).plan_schedule()


# ---- away, lost, resumed


def test_clients_that_are_away_keep_their_slots(make_loop):
    """Half of the clients miss the first three rounds: nobody exceeds a quota, and all use theirs in the end."""
    loop = federation(make_loop, Away({1, 3, 5}, {1, 2, 3}), UniformSelection(COHORT), Seen())
    result = loop.run()
    rounds = loop.callbacks[-1]._rounds
    assert all(not {1, 3, 5} & set(report.clients) for report in rounds[:3])
    assert [row["releases"] for row in result.clients] == [COHORT * ROUNDS // COUNT] * COUNT


def test_what_cannot_be_made_up_is_forfeited_and_said(make_loop):
    loop = federation(make_loop, Away({7}, set(range(1, ROUNDS))), BiasedSelection(COHORT))
    with pytest.warns(UserNotice, match="planned participations were not used, because clients were away"):
        result = loop.run()
    quota = loop.strategies[-1]._quota
    assert result.clients[7]["releases"] <= 1 < quota[7]
    assert result.metrics["forfeited_participations"] == quota[7] - result.clients[7]["releases"]
    assert all(row["releases"] == n for row, n in zip(result.clients[:7], quota[:7], strict=True))


def test_a_lost_update_has_used_its_slot(make_loop):
    """Client 7's records are broken in one round: its charge was made, so its quota is one less."""
    engine = SerialEngine()
    loop = federation(make_loop, BiasedSelection(COHORT), Seen(), engine=engine)
    release, lost = engine.release, []

    def failing(plan, row, *args):
        delta = release(plan, row, *args)
        if plan.clients[row] != 7 or lost:
            return delta
        lost.append(plan.round)
        return delta * math.nan

    engine.release = failing
    with pytest.warns(UserNotice, match="are not finite"):
        result = loop.run()
    assert result.clients[7]["releases"] == loop.strategies[1]._quota[7] == loop.strategies[1]._taken[7]
    took_part = [7 in report.clients for report in loop.callbacks[-1]._rounds]
    assert sum(took_part) == loop.strategies[1]._quota[7] - 1 and not took_part[lost[0] - 1]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 4])
def test_a_resumed_run_has_the_same_cohorts_and_bits(cut, make_loop, tmp_path):
    def loop(name):
        return federation(make_loop, BiasedSelection(COHORT), output_dir=tmp_path / name)

    whole = loop("whole")
    whole.run()
    first = loop("cut")
    cut_at(first, cut)
    with pytest.raises(PowerCut):
        first.run()
    again = loop("cut")
    result = again.run(resume=True)
    assert torch.equal(again.state.models, whole.state.models)
    assert [row["releases"] for row in result.clients] == again.strategies[-1]._quota.tolist()


def test_a_run_that_was_broken_off_pays_from_its_reserve(make_loop, tmp_path):
    def loop():
        privacy = {"noise_key": None, "reserve_rounds": 1}
        return federation(make_loop, BiasedSelection(COHORT), privacy=privacy, output_dir=tmp_path / "run")

    first = loop()
    cut_at(first, 3)
    with pytest.raises(PowerCut):
        first.run()
    again = loop()
    result = again.run(resume=True)
    quota = again.strategies[-1]._quota
    assert again.strategies[-1]._taken.tolist() == quota.tolist()
    assert sum(row["releases"] for row in result.clients) == quota.sum() + COHORT
    assert all(row["epsilon_spent"] <= e for row, e in zip(result.clients, EPSILON, strict=True))


# ---- sampled batches, weights, what is said


@pytest.mark.slow
def test_growth_of_noise_is_found_where_batches_are_sampled(make_loop):
    loop = federation(
        make_loop,
        BiasedSelection(COHORT),
        clients=ClientOptions(count=COUNT, batch_size=16, learning_rate=0.3),
        privacy={"accountant": "rdp"},
    )
    result = loop.run()
    noise = loop.strategies[-1]._noise
    assert 0.5 < noise.exponent < 1.2
    assert all(row["epsilon_spent"] <= e for row, e in zip(result.clients, EPSILON, strict=True))
    for client, own in enumerate(loop.schedule.clients):
        count = own.count_of("train")
        if count:
            std, steps = result.clients[client]["noise_std"], own.main.steps
            ours = PARAMS * (std / (0.3 * steps)) ** 2
            assert ours == pytest.approx(noise.factor[client] * count**noise.exponent, rel=0.5), "a power law, roughly"


def test_laplace_noise_at_a_delta_grows_slower_than_pure_noise(make_loop):
    loop = federation(make_loop, UniformSelection(COHORT), laplace=True, privacy={"delta": DELTA}, rounds=60)
    loop.plan_schedule()
    schedule = dataclasses.replace(loop.schedule)
    unsolved = schedule.replan(
        lambda _, own: dataclasses.replace(
            own,
            planned=tuple(
                dataclasses.replace(line, event=dataclasses.replace(line.event, noise_multiplier=None), count=60)
                for line in own.planned
            ),
        )
    )
    view = loop.view(ServerState(loop.module.flat[None], (0,) * COUNT))
    assert 1 < participation_noise(unsolved, view, mean_quota=15.0).exponent < 2


def some_updates(loop, clients):
    plan = loop.view(ServerState(loop.module.flat[None], (0,) * COUNT)).plan(clients=clients)
    deltas = torch.randn(len(clients), PARAMS, generator=torch.Generator().manual_seed(0))
    return dataclasses.replace(ClientUpdates.announced(plan), deltas=deltas)


def test_inverse_noise_weighs_by_the_noise_that_is_added(make_loop):
    own = InverseNoise()
    loop = federation(make_loop, own, UniformSelection(COHORT))
    loop.plan_schedule()
    updates = some_updates(loop, (0, 3, 7))
    weights = own.weigh(updates, None)
    mu, records = gaussian_mu(np.array(EPSILON), np.full(COUNT, DELTA)), np.array(loop.population.num_records)
    expected = ((mu * records) ** 2)[[0, 3, 7]]
    assert weights.numpy() == pytest.approx(expected / expected.sum(), rel=1e-5)
    assert InverseNoise().weigh(dataclasses.replace(updates, noise_std=(0.0,) * 3), None).tolist() == [1 / 3] * 3


def test_reweighting_takes_the_bias_out_and_the_gain_with_it(make_loop):
    own = ReweightedSelection(COHORT, min_participation=1)
    loop = federation(make_loop, own)
    loop.plan_schedule()
    updates = some_updates(loop, (2, 5, 7))
    combined = own.combine(updates, torch.full((1, 3), 1 / 3), loop.view(loop._one_model()))
    factor = ROUNDS / (COUNT * own._quota[[2, 5, 7]])
    torch.testing.assert_close(combined, (torch.from_numpy(factor) @ updates.deltas.double())[None].float())
    # expected noise of the combined update, per parameter: sum_n pi_n (1 / (N pi_n))^2 v_n
    share = own._quota / ROUNDS

    def noise_of(loop):
        schedules = loop.schedule.clients
        multipliers = np.array([s.noise_multiplier("train") for s in schedules])
        return (multipliers / np.array(loop.population.num_records)) ** 2

    equal = federation(make_loop, UniformSelection(COHORT))
    equal.plan_schedule()
    biased = (noise_of(loop) / (share * COUNT**2)).sum()
    uniform = (noise_of(equal) / (COHORT / COUNT * COUNT**2)).sum()
    assert biased == pytest.approx(uniform, rel=1e-4), "with Gaussian noise quotas do not matter"


def test_reweighting_is_of_the_clients_of_each_model(make_loop):
    """Everybody moves its model by 1 in every round: so does each model, however many clients it has."""
    own = ReweightedSelection(COUNT)
    loop = federation(make_loop, own, privacy=None)
    loop.plan_schedule()
    view, updates = loop.view(loop._one_model()), some_updates(loop, range(COUNT))
    updates = dataclasses.replace(updates, deltas=torch.ones_like(updates.deltas))
    for model_of in ((0,) * COUNT, (0, 1) * 4, (0, 1, 2, 2, 2, 2, 2, 2)):
        models = torch.zeros(max(model_of) + 1, PARAMS)
        weights = torch.nn.functional.one_hot(torch.tensor(model_of)).T.double()
        state = ServerState(models, model_of)
        now = dataclasses.replace(updates, model_of=model_of)
        combined = own.combine(now, weights, dataclasses.replace(view, state=state))
        torch.testing.assert_close(combined, torch.ones_like(models))


def test_who_moves_another_model_now_belongs_there(make_loop):
    own = ReweightedSelection(COUNT // 2)
    loop = federation(make_loop, own, privacy=None)
    loop.plan_schedule()
    updates = some_updates(loop, (1, 2, 3))
    updates = dataclasses.replace(updates, deltas=torch.ones_like(updates.deltas))
    weights = torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])  # client 3 has no say
    state = ServerState(torch.zeros(3, PARAMS), (0, 0, 1, 1, 1, 0, 0, 0))
    combined = own.combine(updates, weights, dataclasses.replace(loop.view(loop._one_model()), state=state))
    assert combined[:, 0].tolist() == [0, 2 * 2 / 4, 0], "2 of 4 clients, each in half of the rounds"


def test_learning_rates_decay_from_round_to_round(make_loop):
    loop = federation(make_loop, Uniform(), LearningRateDecay(half_after=4.0), privacy=None, rounds=4)
    loop.plan_schedule()
    rates = []
    for finished in range(4):
        view = loop.view(ServerState(loop.module.flat[None], (0,) * COUNT, finished))
        rates.append(loop.strategies[-1].plan_round(view.plan(), view).learning_rate_of)
    assert rates == [(pytest.approx(0.3 / (1 + t / 4)),) * COUNT for t in (1, 2, 3, 4)]
    with pytest.raises(UserError, match=r"`strategies\.learning_rate_decay\.half_after` must be above 0"):
        LearningRateDecay(0.0)


def test_personal_inputs_stay_with_the_selected_clients(make_loop):
    """PRIVATEFL with biased selection: clipped and noised with the rest, sent by nobody, moved only where selected."""
    module = ClientModule(PersonalInput(small_net(), (6,)))
    loop = federation(make_loop, BiasedSelection(COHORT), module=module)
    start = module.flat
    loop.run()
    personal = module.personal_mask
    assert int(personal.sum()) == 12 and torch.equal(loop.state.models[0][personal], start[personal])
    assert not torch.equal(loop.state.models[0][~personal], start[~personal])
    for client, quota in enumerate(loop.strategies[-1]._quota):
        own = loop.clients.engine.personalised(loop.state.models[0], client)[personal]
        assert torch.equal(own, start[personal]) == (quota == 0)


@pytest.mark.slow
@pytest.mark.parametrize("laplace", [False, True], ids=["gaussian", "laplace"])
def test_full_batches_are_not_called_samples(laplace, make_loop):
    """Before the first release, at the end, and of a client that took no part."""
    loop = federation(make_loop, BiasedSelection(COHORT), laplace=laplace, clients=None)
    said = []

    class Start(Callback):
        def on_fit_start(self, view):
            said.extend(one.sampling for one in view.guarantees())

    loop.callbacks.append(Start())
    result = loop.run()
    said.append(result.guarantee)
    assert "full batches" in result.guarantee and not [words for words in said if "Poisson" in words]
    sampled = federation(
        make_loop,
        BiasedSelection(COHORT),
        clients=ClientOptions(count=COUNT, batch_size=16, learning_rate=0.3),
        privacy={"accountant": "rdp"},
        rounds=2,
    ).run()
    assert "Poisson sampling" in sampled.guarantee


def test_the_outline_says_quotas_and_gain(make_loop):
    loop = federation(make_loop, BiasedSelection(COHORT))
    loop.plan_schedule()
    own = loop.strategies[-1]
    quotas, noise = loop.describe()
    assert quotas.startswith(f"3 of 8 clients a round; quotas from 0 to {own._quota.max()} of 8 rounds, median ")
    factor = exact_factor(np.array(loop.population.num_records), laplace=False)
    gain = noise_gain(own._quota, factor)
    assert gain > 1.2 and f"(a gain of {gain:.3g})" in noise and "to the power 1." in noise
    silent = federation(make_loop, BiasedSelection(COHORT), privacy=None)
    silent.plan_schedule()
    assert "No client adds noise" in silent.describe()[1]


def test_a_run_tells_its_outline_also_when_it_goes_on(make_loop, tmp_path):
    class Watcher(Callback):
        def on_fit_start(self, view):
            told.append(view.run.strategy_notes)

    told: list[tuple[str, ...]] = []
    for resume in (False, True):
        loop = federation(make_loop, BiasedSelection(COHORT), Watcher(), output_dir=tmp_path / "run")
        if not resume:
            cut_at(loop, 2)
            with pytest.raises(PowerCut):
                loop.run()
        else:
            loop.run(resume=True)
    assert told[0] == told[1] == tuple(loop.describe()) and len(told[0]) == 2


def test_more_clients_than_a_fifth_is_said_not_assumed(make_loop):
    loop = federation(make_loop, UniformSelection())
    loop.plan_schedule()
    assert loop.describe()[0].startswith("2 of 8 clients a round")
    one = make_loop(
        population=blobs(num_clients=1),
        module=ClientModule(small_net()),
        clients=ClientOptions(count=1, batch_size=None),
        privacy=PrivacyOptions(epsilon=2.0, delta=DELTA, accountant="gdp", noise_key=FIXED_KEY),
        parts=[BiasedSelection()],
    )
    assert one.run().clients[0]["releases"] == 3
