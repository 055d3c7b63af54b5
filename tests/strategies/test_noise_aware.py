"""Noise-aware weights in a run: when they are estimated, from what, and what they are not moved by."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch
from conftest import FIXED_KEY, PowerCut, blobs, cut_at
from noisy_updates import true_noise_var

from dpfl_lightning import strategies
from dpfl_lightning.algorithms.noise_estimators import EstimatorOptions, estimate
from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.algorithms.robust_pca import PRESETS
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.strategies.aggregation.epsilon_weighted import EpsilonWeighted
from dpfl_lightning.strategies.aggregation.learning_rate_decay import LearningRateDecay
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware, estimate_by_group, judged_groups, step_scale

pytestmark = pytest.mark.filterwarnings("ignore:strategy noise_aware.*clients count:UserWarning")


class Seen(Strategy, Callback):
    """What the round was, for a test: the reports, and the updates if they were kept."""

    def __init__(self):
        self.reports, self.updates = [], []

    def after_step(self, state, updates, view):
        self.updates.append(updates)
        return state

    def on_round_end(self, view, report):
        self.reports.append(report)


def kept(seen):
    """Rounds in which single updates were kept."""
    return [updates.deltas is not None for updates in seen.updates]


class Cohorts(Strategy):
    """Who takes part in which round."""

    def __init__(self, *cohorts):
        self._cohorts = cohorts

    def plan_round(self, plan, view):
        return plan.only(lambda client: client in self._cohorts[view.round - 1])


class ReadsUpdates(Strategy):
    def needs_updates(self, plan, view):
        return True


def run(make_loop, *others, rounds=5, **options):
    """A loop that has run under NoiseAware with these options, and what was seen."""
    own, seen = NoiseAware(**options), Seen()
    loop = make_loop(parts=[own, *others, seen], rounds=rounds)
    loop.run()
    return loop, own, seen


def updates_of(deltas, steps=None, noise_std=None, clients=None):
    clients = tuple(range(len(deltas))) if clients is None else tuple(clients)
    count = len(clients)
    return ClientUpdates(clients, tuple(steps or [3] * count), noise_std or (math.nan,) * count, deltas)


def some_deltas(clients=4, params=83, seed=0):
    noise = torch.linspace(0.5, 3, clients)[:, None]
    draws = torch.randn(clients + 1, params, generator=torch.Generator().manual_seed(seed))
    return draws[0] + noise * draws[1:]


@pytest.fixture
def view(make_loop):
    loop = make_loop()
    loop.plan_schedule()
    return loop.view(ServerState(loop.module.flat[None], (0,) * 4))


# ---- how far


UNEQUAL = ClientOptions(count=4, batch_size=[4, 8, 16, 40], learning_rate=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 0])
@pytest.mark.parametrize("objective", ["max_snr", "min_variance"])
def test_a_round_moves_as_many_local_steps_as_under_weights_by_size_within_bounds(every, objective, make_loop):
    own, seen, states = NoiseAware(objective=objective, reestimate_every=every), Seen(), []
    loop = make_loop(parts=[own, ReadsUpdates(), seen, Watch(states)], clients=UNEQUAL, rounds=2)
    start = loop.module.flat
    loop.run()
    for before, after, updates, report in zip([start, states[0]], states, seen.updates, seen.reports, strict=True):
        share, steps = report.weights[0], torch.tensor(updates.steps, dtype=torch.float64)
        records = torch.tensor(loop.facts.num_records, dtype=torch.float64)
        scale = step_scale(share, updates.steps, loop.facts.num_records) if objective == "max_snr" else 1.0
        assert scale in (1.0, 1.5) or scale == pytest.approx(float((records @ steps / records.sum()) / (share @ steps)))
        assert objective == "min_variance" or scale > 1.1
        torch.testing.assert_close(
            after - before, (scale * share @ updates.deltas.double()).float(), rtol=1e-4, atol=1e-6
        )


class Watch(Callback):
    def __init__(self, states):
        self._states = states

    def on_round_end(self, view, report):
        self._states.append(view.state.models[0].clone())


def test_equal_numbers_of_steps_leave_the_step_to_others(view):
    own = NoiseAware()
    own.weigh(updates_of(some_deltas()), view)
    assert own.step(view.state, torch.ones_like(view.state.models), view) is None


def test_each_model_has_a_scale_of_its_own(make_loop):
    own, seen = NoiseAware("raw_norm"), Seen()
    loop = make_loop(parts=[own, TwoClusters(), seen, ReadsUpdates()], clients=UNEQUAL, rounds=2)
    loop.run()
    updates, weights_of = seen.updates[1], seen.reports[1].weights
    for model, rows in ((0, [0, 2]), (1, [1, 3])):
        steps = torch.tensor(updates.steps, dtype=torch.float64)
        records = torch.tensor(loop.facts.num_records, dtype=torch.float64)[rows]
        expected = (records @ steps[rows] / records.sum()) / (weights_of[model] @ steps)
        assert float(own._scale[model]) == pytest.approx(min(1.5, float(expected)))


@pytest.mark.parametrize(
    ("share", "expected"), [([1.0, 0.0], 1.5), ([3.0, 1.0], 4 / 3), ([0.0, 0.0], 1.0), ([0.0, 1.0], 2 / 3)]
)
def test_the_scale_is_of_the_weighted_steps(share, expected):
    assert step_scale(torch.tensor(share), [10, 30], [50, 50]) == pytest.approx(expected)


# ---- when


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "estimated"),
    [
        (1, [True] * 5),
        (2, [True, False, True, False, True]),
        (3, [True, False, False, True, False]),
        (0, [True, False, False, False, False]),
        ("first_round", [True, False, False, False, False]),
    ],
)
def test_updates_are_kept_only_in_rounds_that_estimate(every, estimated, make_loop):
    _, _, seen = run(make_loop, reestimate_every=every)
    assert kept(seen) == estimated
    ages = [report.metrics["rounds_since_estimate"] for report in seen.reports]
    expected, age = [], 0
    for new in estimated:
        age = 0 if new else age + 1
        expected.append(age)
    assert ages == expected
    fresh = ["rpca_iterations" in report.metrics for report in seen.reports]
    assert fresh == estimated, "diagnostics are of a round that has some"


def test_a_streamed_round_gives_the_bits_of_a_kept_one(make_loop):
    streamed, _, seen = run(make_loop, reestimate_every=0)
    whole, _, seen_there = run(make_loop, ReadsUpdates(), reestimate_every=0)
    assert kept(seen) == [True, *[False] * 4] and kept(seen_there) == [True] * 5
    assert torch.equal(streamed.state.models, whole.state.models)


def test_a_newcomer_has_the_whole_round_estimated_anew_and_two_rounds_are_never_mixed(make_loop):
    cohorts = [(0, 1, 2), (0, 2), (0, 1, 2), (1, 2, 3), (0, 1, 2), (0, 1)]
    _, own, seen = run(make_loop, Cohorts(*cohorts), rounds=6, reestimate_every=0)
    assert kept(seen) == [True, False, False, True, True, False]
    assert own._known.round == 5 and own._known.noise_var.isnan().tolist() == [False, False, False, True]
    for report, clients in zip(seen.reports, cohorts, strict=True):
        told = report.metrics["weight"]
        assert told.isnan().tolist() == [client not in clients for client in range(4)]
        assert float(told.nansum()) == pytest.approx(1)


class MoreSteps(Strategy):
    """Twice the local steps from round 2 on, declared beforehand."""

    def plan_run(self, schedule, view):
        def change(client, own):
            (train,) = own.planned
            event = dataclasses.replace(train.event, steps=2 * train.event.steps)
            more = dataclasses.replace(train, purpose="more", event=event, count=train.count - 1)
            return dataclasses.replace(own, planned=(dataclasses.replace(train, count=1), more))

        return schedule.replan(change)

    def plan_round(self, plan, view):
        return view.plan("train" if view.round == 1 else "more")


def test_other_numbers_of_steps_have_other_noise(make_loop):
    _, _, seen = run(make_loop, MoreSteps(), rounds=4, reestimate_every=0)
    assert kept(seen) == [True, True, False, False]


class FullBatchFirst(Strategy):
    """Full batches of a noise of their own in round 1, after as many local steps as in the later rounds."""

    def __init__(self, noise_multiplier, rate):
        self._event = {"noise_multiplier": noise_multiplier, "sample_rate": rate}

    def plan_run(self, schedule, view):
        def change(client, own):
            (train,) = own.planned
            event = dataclasses.replace(train.event, sample_rate=1.0, noise_multiplier=40.0)
            first = dataclasses.replace(train, purpose="first", event=event, count=1)
            later = dataclasses.replace(train, event=dataclasses.replace(event, **self._event), count=train.count - 1)
            return dataclasses.replace(own, planned=(later, first))

        return schedule.replan(change)

    def plan_round(self, plan, view):
        return view.plan("first" if view.round == 1 else "train")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "rate", "again"), [(50.0, 1.0, True), (None, 1.0, True), (40.0, 0.5, True), (40.0, 1.0, False)]
)
def test_other_mechanisms_have_other_noise(noise, rate, again, make_loop):
    """As many steps, but another noise or batch; another line of the budget alone changes nothing."""
    _, _, seen = run(make_loop, FullBatchFirst(noise, rate), rounds=4, reestimate_every=0)
    assert len({updates.steps for updates in seen.updates}) == 1
    assert kept(seen) == [True, again, False, False]


def test_a_decaying_learning_rate_scales_all_noise_alike(make_loop):
    _, _, seen = run(make_loop, LearningRateDecay(2.0), rounds=3, reestimate_every=0)
    assert kept(seen) == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2, 0])
def test_a_resumed_run_gives_the_same_bits(every, make_loop):
    unbroken, _, _ = run(make_loop, reestimate_every=every)
    broken = make_loop(parts=[NoiseAware(reestimate_every=every), Seen()], rounds=5)
    for round in (1, 3, 4):
        cut_at(broken, round)
        with pytest.raises(PowerCut):
            broken.run(resume=round > 1)
        again = [NoiseAware(reestimate_every=every), seen := Seen()]
        broken = make_loop(parts=again, rounds=5, output_dir=broken.output_dir)
    result = broken.run(resume=True)
    assert torch.equal(broken.state.models, unbroken.state.models)
    assert kept(seen) == {1: [True, True], 2: [False, True], 0: [False, False]}[every]
    assert (
        result.metrics
        == make_loop(parts=[NoiseAware(reestimate_every=every), Seen()], rounds=5, output_dir=broken.output_dir)
        .run(resume=True)
        .metrics
    ), "a finished run tells it again"


# ---- from what


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["rpca", "hetero_pca", "raw_norm", "mean_residual"])
@pytest.mark.parametrize("objective", ["min_variance", "max_snr"])
def test_weights_are_the_pure_functions(estimator, objective, view):
    deltas, steps = some_deltas(), [10, 20, 30, 40]
    own = NoiseAware(estimator, objective, floor=1e-3, max_weight=0.6, rows=40, preset="candes")
    found = own.weigh(updates_of(deltas, steps), view)
    options = EstimatorOptions(estimator, PRESETS["candes"], rows=40)
    expected = weights(estimate(deltas, options).noise_var, steps, objective, floor=1e-3, max_weight=0.6)
    torch.testing.assert_close(found, expected)


def test_class_gradients_count_as_one_long_update(view):
    deltas = some_deltas(params=90)
    flat, stacked = (NoiseAware().weigh(updates_of(one), view) for one in (deltas, deltas.view(4, 3, 30)))
    assert torch.equal(flat, stacked)


@pytest.mark.parametrize("estimator", ["rpca", "hetero_pca", "raw_norm", "mean_residual"])
def test_what_clients_announce_of_their_noise_is_not_read(estimator, view):
    plain = NoiseAware(estimator).weigh(updates_of(some_deltas(), noise_std=(1.0, 2.0, 3.0, 4.0)), view)
    other = NoiseAware(estimator).weigh(updates_of(some_deltas(), noise_std=(9.0, 0.0, 1e9, math.nan)), view)
    assert torch.equal(plain, other)


def test_the_oracle_weighs_by_true_noise_and_the_run_says_that_it_is_a_simulation(make_loop):
    loop, _, seen = run(make_loop, estimator="oracle", objective="min_variance", rounds=1)
    std = torch.tensor([client["noise_std"] for client in loop.run(resume=True).clients], dtype=torch.float64)
    torch.testing.assert_close(seen.reports[0].weights[0], std**-2 / (std**-2).sum())
    torch.testing.assert_close(seen.reports[0].metrics["estimated_noise_std"], std)
    guarantees = loop.clients.budgets.guarantees()
    assert all("simulation" in one.words() and "oracle" in one.not_covered[-1] for one in guarantees)
    assert "simulation" in (loop.output_dir / "guarantee.html").read_text()
    honest, _, _ = run(make_loop, rounds=1)
    assert not any("oracle" in one for one in honest.clients.budgets.guarantees()[0].not_covered)


def test_the_oracle_of_a_run_without_noise_has_nothing_to_tell_apart(make_loop):
    seen = Seen()
    make_loop(parts=[NoiseAware("oracle", "min_variance"), seen], privacy=None, rounds=1).run()
    assert seen.reports[0].weights.tolist() == [[0.25] * 4]


def test_estimates_in_a_run_are_near_the_truth(make_loop):
    """Twelve clients, 2,000 parameters of mostly noise."""
    population = blobs(num_clients=12, records=40, features=400, classes=5)
    budgets = torch.linspace(0.2, 2, 12).tolist()
    loop = make_loop(
        population,
        privacy=PrivacyOptions(epsilon=budgets, delta=1e-3, noise_key=FIXED_KEY),
        clients=ClientOptions(count=12, batch_size=16, learning_rate=0.01),
        module=linear(400, 5),
        parts=[NoiseAware()],
        rounds=2,
    )
    result = loop.run()
    true = np.array([client["noise_std"] for client in result.clients])
    found = np.array(result.metrics["estimated_noise_std"])
    assert np.abs(found / true - 1).max() < 0.2
    assert found.argmin() == true.argmin() and found.argmax() == true.argmax()


def linear(features, classes):
    torch.manual_seed(0)
    return ClientModule(torch.nn.Linear(features, classes))


# ---- edges


@pytest.mark.parametrize("every", [1, 0])
def test_cohorts_of_one_and_two(every, make_loop):
    _, _, seen = run(make_loop, Cohorts((2,), (1, 3), (3,)), rounds=3, reestimate_every=every)
    shapes = [tuple(report.weights.shape) for report in seen.reports]
    assert shapes == [(1, 1), (1, 2), (1, 1)]
    assert all(float(report.weights.sum()) == pytest.approx(1) for report in seen.reports)
    assert float(seen.reports[0].weights) == 1


def test_two_updates_are_weighed_by_their_lengths(view):
    deltas = some_deltas(2)
    found = NoiseAware(objective="min_variance").weigh(updates_of(deltas), view)
    torch.testing.assert_close(found, weights((deltas.double() ** 2).sum(dim=1)))


@pytest.mark.filterwarnings("ignore:round.*not finite")
@pytest.mark.parametrize("every", [1, 0])
def test_an_update_that_is_not_finite_leaves_the_round(every, make_loop):
    """In round 1 client 1, in round 2 client 2: there it has a cached variance."""
    own, seen = NoiseAware(reestimate_every=every), Seen()
    loop = make_loop(parts=[own, seen], rounds=3)
    releases = loop.clients.engine.releases

    def broken(plan, *args):
        for row, delta in releases(plan, *args):
            bad = plan.clients[row] == plan.round and plan.round < 3
            yield row, delta * float("nan") if bad else delta

    loop.clients.engine.releases = broken
    loop.run()
    assert [report.clients for report in seen.reports] == [(0, 2, 3), (0, 1, 3), (0, 1, 2, 3)]
    assert bool(loop.state.models.isfinite().all())
    # client 1 has no variance in round 2, so the round is estimated; client 2 has none of round 2 in round 3
    assert kept(seen) == [True, True, True]


@pytest.mark.filterwarnings("ignore:round.*not finite")
def test_a_newcomer_that_is_lost_leaves_the_others_their_variances(make_loop):
    own, seen = NoiseAware(reestimate_every=0), Seen()
    loop = make_loop(parts=[own, Cohorts((0, 1, 2), (0, 1, 2, 3)), seen], rounds=2)
    releases = loop.clients.engine.releases
    loop.clients.engine.releases = lambda plan, *args: (
        (row, delta * float("nan") if plan.clients[row] == 3 else delta) for row, delta in releases(plan, *args)
    )
    loop.run()
    assert own._known.round == 1 and seen.reports[1].clients == (0, 1, 2)


def test_the_cap_holds_in_the_weights_of_the_round(make_loop):
    _, _, free = run(make_loop, rounds=1)
    _, _, seen = run(make_loop, rounds=1, max_weight=0.3)
    assert float(free.reports[0].weights.max()) > 0.3
    assert float(seen.reports[0].weights.max()) == pytest.approx(0.3)
    assert seen.reports[0].metrics["largest_weight"] == float(seen.reports[0].weights.max())


def test_a_zero_update_is_bounded_by_the_cap_alone(view):
    deltas = some_deltas()
    deltas[1] = 0
    assert float(NoiseAware().weigh(updates_of(deltas), view)[1]) > 0.99
    assert float(NoiseAware(max_weight=0.5).weigh(updates_of(deltas), view)[1]) == pytest.approx(0.5)


def test_few_clients_that_count_are_told_of_once(view):
    deltas = some_deltas(4)
    deltas[1] *= 1e-3
    own = NoiseAware()
    with pytest.warns(UserNotice, match=r"1\.0 of 4 clients count \(client 1 has 100% of the weight"):
        own.weigh(updates_of(deltas), view)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.weigh(updates_of(deltas), view)


@pytest.mark.parametrize(("partition", "batch_size", "warned"), [("shards", [8, 16, 8, 8], 1), ("shards", 8, 0)])
def test_unlike_data_beside_unlike_batches_are_warned_of(partition, batch_size, warned, make_loop):
    options = {"data": {"partition": {"name": partition}}}
    clients = ClientOptions(count=4, batch_size=batch_size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_loop(parts=[NoiseAware()], options=options, clients=clients).plan_schedule()
    assert sum("largest batches" in str(one.message) for one in caught) == warned


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"estimator": "rpac"}, r"`strategies\.noise_aware\.estimator` must be one of .*Did you mean `rpca`"),
        ({"objective": "snr"}, r"`strategies\.noise_aware\.objective` must be one of min_variance, max_snr"),
        ({"preset": "fats"}, r"`strategies\.noise_aware\.preset` must be one of .*Did you mean `fast`"),
        ({"reestimate_every": -1}, r"`strategies\.noise_aware\.reestimate_every` must be a number of rounds"),
        ({"reestimate_every": 1.5}, r"reestimate_every` must be a number of rounds or `first_round`, got 1\.5"),
        ({"reestimate_every": True}, r"reestimate_every` must"),
        ({"reestimate_every": "never"}, r"reestimate_every` must .* got 'never'"),
        ({"floor": -1.0}, r"`strategies\.noise_aware\.floor` must be >= 0"),
        ({"max_weight": 0.0}, r"`strategies\.noise_aware\.max_weight` must be in \(0, 1\]"),
        ({"rows": 0}, r"`strategies\.noise_aware\.rows` must be at least 1"),
        ({"rows": "many"}, r"`strategies\.noise_aware\.rows` must be a whole number or null, got 'many'"),
        ({"row_choice": "tail"}, r"`strategies\.noise_aware\.row_choice` must be one of random, head"),
        ({"rank": 0}, r"`strategies\.noise_aware\.rank` must be at least 1"),
    ],
)
def test_bad_options_are_one_sentence(options, words):
    with pytest.raises(UserError, match=words):
        strategies.build({"noise_aware": options})


# ---- in company


class Mask(Strategy):
    """Selection: some clients' updates do not count."""

    role = "mask"

    def weigh(self, updates, view):
        return torch.tensor([float(client != 2) for client in updates.clients])


def test_beside_a_selection_the_rest_keep_their_ratios(make_loop):
    _, _, free = run(make_loop, rounds=1)
    _, _, masked = run(make_loop, Mask(), rounds=1)
    own, left = free.reports[0].weights[0], [0, 1, 3]
    assert float(masked.reports[0].weights[0, 2]) == 0
    torch.testing.assert_close(masked.reports[0].weights[0, left], own[left] / own[left].sum())


class TwoClusters(Strategy):
    """From the first round on odd and even clients have models of their own."""

    def plan_round(self, plan, view):
        return dataclasses.replace(plan, model_of=tuple(client % len(view.state.models) for client in plan.clients))

    def after_step(self, state, updates, view):
        count = view.facts.num_clients
        if len(state.models) == 2:
            return state
        model_of = tuple(client % 2 for client in range(count))
        return dataclasses.replace(state, models=state.models.repeat(2, 1), model_of=model_of)


def many(make_loop, count, parts, **options):
    return make_loop(
        blobs(num_clients=count, records=30),
        privacy=PrivacyOptions(epsilon=8.0, delta=1e-3, noise_key=FIXED_KEY),
        clients=ClientOptions(count=count, batch_size=[8, 16, 8, 24][:1] * count, learning_rate=0.1),
        parts=parts,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, 16])
def test_in_clusters_weights_are_those_of_each_cluster_by_itself(count, make_loop):
    """Six clients are judged together, twice eight apart; a cap holds in each cluster."""
    seen = Seen()
    own = NoiseAware("raw_norm", max_weight=0.35)
    many(make_loop, count, [own, TwoClusters(), seen, ReadsUpdates()], rounds=2).run()
    report, updates = seen.reports[1], seen.updates[1]
    squares = (updates.deltas.double() ** 2).sum(dim=1)
    for model in (0, 1):
        rows = [client for client in range(count) if client % 2 == model]
        expected = weights(squares[rows], [updates.steps[row] for row in rows], "max_snr", max_weight=0.35)
        torch.testing.assert_close(report.weights[model, rows], expected)
    assert float(report.metrics["weight"].sum()) == pytest.approx(2)
    assert report.metrics["effective_clients"] == pytest.approx(float((1 / report.weights.square().sum(dim=1)).sum()))
    assert len(own._known.group.unique()) == (2 if count == 16 else 1)


class Regroup(TwoClusters):
    """In round 4 client 0 changes its cluster."""

    def plan_round(self, plan, view):
        plan = super().plan_round(plan, view)
        return dataclasses.replace(plan, model_of=(int(view.round >= 4), *plan.model_of[1:]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "estimated"),
    [
        (0, [True, False, False, False, False]),  # all together in round 1: variances of one estimate serve any cluster
        (2, [True, False, True, True, False]),  # apart in round 3: client 0 has no variance beside its new company
    ],
)
def test_clients_that_were_judged_apart_are_not_mixed_later(every, estimated, make_loop):
    seen = Seen()
    many(make_loop, 18, [NoiseAware("raw_norm", reestimate_every=every), Regroup(), seen], rounds=5).run()
    assert kept(seen) == estimated


def test_of_several_groups_the_worst_is_told():
    deltas = torch.cat([some_deltas(9, 200), some_deltas(9, 200, seed=1)])
    options = EstimatorOptions()
    apart = estimate_by_group(deltas, (0,) * 9 + (1,) * 9, options)
    one, two = (estimate(part, options) for part in (deltas[:9], deltas[9:]))
    torch.testing.assert_close(apart.noise_var, torch.cat([one.noise_var, two.noise_var]))
    assert apart.diagnostics["iterations"] == max(one.diagnostics["iterations"], two.diagnostics["iterations"])
    deltas[9:16] = math.nan  # two are left, by their lengths, and have nothing to tell
    assert estimate_by_group(deltas, (0,) * 9 + (1,) * 9, options).diagnostics == one.diagnostics


def test_judged_apart_where_every_model_has_enough():
    assert judged_groups((0,) * 9) == (0,) * 9 and judged_groups((3,) * 9) == (3,) * 9
    assert judged_groups((0, 1) * 8) == (0, 1) * 8 and judged_groups((0, 1) * 7) == (0,) * 14


# ---- why the default


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dist", "ratios"),
    [
        ("dist1", {"equal": 6759, "min_variance": 7492, "weiavg": 9247, "max_snr": 11729}),
        ("dist7", {"equal": 464, "weiavg": 878, "min_variance": 971, "max_snr": 1320}),
    ],
)
def test_signal_to_noise_of_the_published_lists(dist, ratios):
    """In formulas, without training: `(sum w_i E_i)^2 / sum w_i^2 v_i`, each of E_i steps bringing as much signal."""
    steps = [math.ceil(2400 / batch) for batch in BATCH_SIZES[20]]
    noise_var, signal = true_noise_var(dist, 1.0, num_params=1), torch.tensor(steps, dtype=torch.float64)
    share = {
        "equal": torch.ones(20, dtype=torch.float64),
        "weiavg": torch.tensor(EPSILONS[dist][20], dtype=torch.float64),
        "min_variance": weights(noise_var),
        "max_snr": weights(noise_var, steps, "max_snr"),
    }
    found = {name: float((w * signal).sum() ** 2 / (w**2 * noise_var).sum()) for name, w in share.items()}
    assert found == pytest.approx(ratios, rel=0.01)
    assert sorted(found, key=found.__getitem__) == list(ratios)


# ---- false claims


CLAIMS = [0.95, 2, 5, 10, 20, 50, 100]


def test_weiavg_believes_a_liar(view):
    """Section 5's experiment in formulas: client 12 of Dist5, counted from the smallest budget, overstates its own."""
    honest, truth = list(EPSILONS["dist5"][20]), true_noise_var("dist5", 1.0, num_params=1)
    liar = honest.index(0.95)
    updates = ClientUpdates(tuple(range(20)), (1,) * 20, (0.0,) * 20)
    shares, noises = [], []
    for claim in CLAIMS:
        claims = tuple(claim if client == liar else own for client, own in enumerate(honest))
        said = dataclasses.replace(view, facts=dataclasses.replace(view.facts, reported_epsilon=claims))
        own = EpsilonWeighted().weigh(updates, said)
        shares.append(float(own[liar] / own.sum()))
        noises.append(float(((own / own.sum()) ** 2 * truth).sum()))
    assert shares == pytest.approx([0.055, 0.109, 0.235, 0.381, 0.551, 0.754, 0.860], abs=6e-4)
    assert noises == pytest.approx([4.59, 4.43, 5.04, 7.45, 12.61, 22.03, 28.34], rel=0.005)
    assert float((weights(truth) ** 2 * truth).sum()) == pytest.approx(0.39, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("reestimate_every", [1, 0])
def test_noise_aware_weights_are_bit_identical_whatever_is_claimed(reestimate_every, make_loop):
    budgets = [4.0, 6.0, 8.0, 10.0]

    def outcome(claim, name, **options):
        seen = Seen()
        claims = None if claim is None else [claim, *budgets[1:]]
        clients = ClientOptions(count=4, batch_size=16, learning_rate=0.3, reported_epsilon=claims)
        loop = make_loop(parts=[*strategies.build({name: options}), seen], clients=clients, rounds=2)
        result = loop.run()
        paid = [charge.event for charge in read_ledger(loop.clients.folder.ledger_file)]
        promised = [one.words() for one in loop.clients.budgets.guarantees()]
        spent = [(client["epsilon_spent"], client["epsilon_budget"]) for client in result.clients]
        return torch.cat([report.weights for report in seen.reports]), loop.state.models, (paid, promised, spent)

    options = {"reestimate_every": reestimate_every}
    weights_then, models_then, account_then = outcome(None, "noise_aware", **options)
    assert [budget for _, budget in account_then[2]] == budgets
    for claim in CLAIMS:
        weights_now, models_now, account_now = outcome(claim, "noise_aware", **options)
        assert torch.equal(weights_now, weights_then) and torch.equal(models_now, models_then)
        assert account_now == account_then, "noise, ledger and guarantees follow the true budget"
    believed, _, account = outcome(100, "epsilon_weighted")
    assert float(believed[0, 0]) == pytest.approx(100 / 124) and account == account_then
