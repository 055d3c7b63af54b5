"""Noise-aware weights in runs: when they are estimated, from what, and what does not change them."""

import dataclasses
import math
import warnings

import pytest
import torch
from conftest import FIXED_KEY, PowerCut, blobs, cut_at, private
from fakes import Recorder
from torch import nn

from dpfl_lightning import strategies
from dpfl_lightning.algorithms.noise_estimators import EstimatorOptions, estimate
from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.algorithms.robust_pca import PRESETS
from dpfl_lightning.algorithms.signal_weights import most_influence
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserNotice
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware, estimate_by_group, judged_groups

pytestmark = pytest.mark.filterwarnings("ignore:strategy noise_aware.*clients count:UserWarning")
BLIND = ("rpca", "hetero_pca", "raw_norm", "mean_residual")
UNEQUAL = ClientOptions(count=4, batch_size=[4, 8, 16, 40], learning_rate=0.1)


def kept(seen):
    """Rounds in which single updates were kept."""
    return [updates.deltas is not None for updates in seen.updates]


class Cohorts(Strategy):
    """Who takes part in which round."""

    def __init__(self, *cohorts):
        self._cohorts = cohorts

    def plan_round(self, plan, view):
        return plan.only(lambda client: client in self._cohorts[view.round - 1])


def run(make_loop, *others, rounds=5, **options):
    """A loop that has run under NoiseAware with these options, the strategy, and what was seen."""
    strategy, seen = NoiseAware(**options), Recorder()
    loop = make_loop(parts=[strategy, *others, seen], rounds=rounds)
    loop.run()
    return loop, strategy, seen


def updates_of(deltas, steps=None, noise_std=None, **more):
    count = len(deltas)
    std, model_of = noise_std or (math.nan,) * count, (0,) * count
    return ClientUpdates(tuple(range(count)), tuple(steps or [3] * count), std, deltas, model_of=model_of, **more)


def some_deltas(clients=4, params=83, seed=0):
    noise = torch.linspace(0.5, 3, clients)[:, None]
    draws = torch.randn(clients + 1, params, generator=torch.Generator().manual_seed(seed))
    return draws[0] + noise * draws[1:]


@pytest.fixture
def view(make_loop):
    loop = make_loop()
    loop.plan_schedule()
    return loop.view(ServerState(loop.module.flat[None], (0,) * 4))


# ---- the length of the step


@pytest.mark.parametrize("objective", ["max_snr", "min_variance"])
def test_the_sum_goes_as_far_as_the_median_client(objective, make_loop):
    strategy, seen = NoiseAware(objective), Recorder(updates=True)
    loop = make_loop(parts=[strategy, seen], clients=UNEQUAL, rounds=2)
    models = [loop.module.flat]
    loop.run()
    models += [one[0] for one in seen.models]
    for before, after, updates, report in zip(models, models[1:], seen.updates, seen.reports, strict=False):
        share, scale = report.weights[0], 1.0
        if objective == "max_snr" and report is seen.reports[-1]:
            length = strategy._known.amplitude
            scale = float(length.quantile(0.5) / (share @ length))
        elif objective == "max_snr":
            continue
        moved = (scale * share @ updates.deltas.double()).float()
        torch.testing.assert_close(after - before, moved, rtol=1e-4, atol=1e-6)


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
    _, _, seen = run(make_loop, objective="min_variance", reestimate_every=every)
    assert kept(seen) == estimated
    last = [max(round for round in range(now + 1) if estimated[round]) for now in range(5)]
    metrics = [report.metrics for report in seen.reports]
    assert [one["rounds_since_estimate"] for one in metrics] == [now - then for now, then in enumerate(last)]
    assert ["rpca_iterations" in one for one in metrics] == estimated, "diagnostics are of a round that has some"


def test_a_streamed_round_gives_the_bits_of_a_kept_one(make_loop):
    streamed, _, seen = run(make_loop, reestimate_every=0)
    whole, _, seen_there = run(make_loop, Recorder(updates=True), reestimate_every=0)
    assert kept(seen) == [True, *[False] * 4] and kept(seen_there) == [True] * 5
    assert torch.equal(streamed.state.models, whole.state.models)


def test_a_newcomer_has_the_whole_round_estimated_anew_and_two_rounds_are_never_mixed(make_loop):
    cohorts = [(0, 1, 2), (0, 2), (0, 1, 2), (1, 2, 3), (0, 1, 2), (0, 1)]
    _, strategy, seen = run(make_loop, Cohorts(*cohorts), rounds=6, reestimate_every=0)
    assert kept(seen) == [True, False, False, True, True, False]
    assert strategy._known.round == 5 and strategy._known.noise_var.isnan().tolist() == [False, False, False, True]
    for report, clients in zip(seen.reports, cohorts, strict=True):
        weight = report.metrics["weight"]
        assert weight.isnan().tolist() == [client not in clients for client in range(4)]
        assert float(weight.nansum()) == pytest.approx(1)


class OtherLater(Strategy):
    """The first round and later ones have releases of two purposes, which differ in their events."""

    def __init__(self, first=(), later=()):
        self._first, self._later = dict(first), dict(later)

    def plan_run(self, schedule, view):
        def change(client, own):
            (train,) = own.planned
            event = dataclasses.replace(train.event, **self._first)
            later = dataclasses.replace(event, **self._later)
            if self._later.get("steps"):
                later = dataclasses.replace(event, steps=self._later["steps"] * event.steps)
            lines = (
                dataclasses.replace(train, event=later, count=train.count - 1),
                dataclasses.replace(train, purpose="first", event=event, count=1),
            )
            return dataclasses.replace(own, planned=lines)

        return schedule.replan(change)

    def plan_round(self, plan, view):
        return view.plan("first" if view.round == 1 else "train")


FULL = {"sample_rate": 1.0, "noise_multiplier": 40.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "later", "again"),
    [
        ({}, {"steps": 2}, True),
        (FULL, {"noise_multiplier": 50.0}, True),
        (FULL, {"noise_multiplier": None}, True),
        (FULL, {"sample_rate": 0.5}, True),
        (FULL, {}, False),
    ],
)
def test_other_steps_noise_or_batches_have_other_noise(first, later, again, make_loop):
    """Another line of the budget alone changes nothing."""
    _, _, seen = run(make_loop, OtherLater(first, later), rounds=4, reestimate_every=0)
    assert kept(seen) == [True, again, False, False]


def test_a_decaying_learning_rate_scales_all_noise_alike(make_loop):
    clients = ClientOptions(count=4, batch_size=16, learning_rate=0.3, schedule={"name": "inverse", "half_after": 2.0})
    seen = Recorder()
    make_loop(parts=[NoiseAware(reestimate_every=0), seen], clients=clients).run()
    assert kept(seen) == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2, 0])
def test_a_resumed_run_gives_the_same_bits(every, make_loop):
    unbroken, _, _ = run(make_loop, reestimate_every=every)

    def again(**more):
        return make_loop(parts=[NoiseAware(reestimate_every=every), Recorder()], rounds=5, **more)

    broken = again()
    for round in (1, 3, 4):
        cut_at(broken, round)
        with pytest.raises(PowerCut):
            broken.run(resume=round > 1)
        broken = again(output_dir=broken.output_dir)
    result = broken.run(resume=True)
    assert torch.equal(broken.state.models, unbroken.state.models)
    assert kept(broken.strategies[-1]) == {1: [True, True], 2: [False, True], 0: [False, False]}[every]
    finished = again(output_dir=broken.output_dir).run(resume=True)
    assert result.metrics == finished.metrics, "a finished run reports them again"


# ---- from what


@pytest.mark.parametrize("estimator", BLIND)
def test_weights_of_least_noise_are_the_pure_functions_and_reported_noise_is_not_read(estimator, view):
    deltas, rule = some_deltas(), {"floor": 1e-3, "max_weight": 0.6}
    expected = weights(estimate(deltas, EstimatorOptions(estimator, PRESETS["candes"], rows=40)).noise_var, **rule)
    plain, other = (
        NoiseAware("min_variance", estimator=estimator, rows=40, preset="candes", **rule).weigh(
            updates_of(deltas, noise_std=noise_std), view
        )
        for noise_std in ((1.0, 2.0, 3.0, 4.0), (9.0, 0.0, 1e9, math.nan))
    )
    torch.testing.assert_close(plain, expected)
    assert torch.equal(plain, other)


@pytest.mark.parametrize("objective", ["max_snr", "min_variance"])
def test_false_claims_of_budget_records_batch_and_steps_change_no_bit(objective, view):
    """The same updates, announced otherwise; both the weights and the length of the step are equal."""
    deltas, scaled, shares = some_deltas(8, 500), [], []
    facts = view.facts
    lies = dataclasses.replace(
        facts,
        num_records=(10**6, *facts.num_records[1:]),
        batch_size=(1, *facts.batch_size[1:]),
        reported_epsilon=(1e6, *facts.reported_epsilon[1:]),
    )
    mechanism = view.mechanism(0)
    honest = updates_of(deltas[:4], [3] * 4, (1.0,) * 4, mechanism_of=(mechanism,) * 4)
    false = dataclasses.replace(mechanism, noise_multiplier=1e-6, expected_batch_size=1)
    liar = updates_of(deltas[:4], [10**6, 3, 3, 3], (1e-9, 1.0, 1.0, 1.0), mechanism_of=(false, *[mechanism] * 3))
    for known, updates in ((facts, honest), (lies, liar)):
        strategy, seen = NoiseAware(objective), dataclasses.replace(view, facts=known)
        for _ in range(2):
            shares.append(strategy.weigh(updates, seen))
            scaled.append(strategy.scale(deltas[:1], updates, shares[-1][None] / shares[-1].sum(), seen))
    assert torch.equal(shares[0], shares[2]) and torch.equal(shares[1], shares[3])
    assert torch.equal(scaled[0], scaled[2]) and torch.equal(scaled[1], scaled[3])
    assert objective == "min_variance" or float(scaled[0].norm()) != float(deltas[0].norm()), "the length was chosen"


def test_cosines_of_all_rounds_are_remembered_and_resumed(view):
    rounds = [some_deltas(4, 500, seed) for seed in range(4)]
    whole, broken = NoiseAware(), NoiseAware()
    weights_of = [whole.weigh(updates_of(deltas), view) for deltas in rounds]
    for deltas in rounds[:3]:
        broken.weigh(updates_of(deltas), view)
    resumed = NoiseAware()
    resumed.load_state_dict(broken.state_dict())
    assert torch.equal(resumed.weigh(updates_of(rounds[3]), view), weights_of[3])
    assert not torch.equal(NoiseAware().weigh(updates_of(rounds[3]), view), weights_of[3])


def test_the_oracle_weighs_by_true_noise_and_the_run_says_that_it_is_a_simulation(make_loop):
    loop, _, seen = run(make_loop, objective="min_variance", estimator="oracle", rounds=1)
    std = torch.tensor([client["noise_std"] for client in loop.run(resume=True).clients], dtype=torch.float64)
    torch.testing.assert_close(seen.reports[0].weights[0], std**-2 / (std**-2).sum())
    torch.testing.assert_close(seen.reports[0].metrics["estimated_noise_std"], std)
    guarantees = loop.clients.budgets.guarantees()
    assert all("simulation" in one.words() and "oracle" in one.not_covered[-1] for one in guarantees)
    assert "simulation" in (loop.output_dir / "guarantee.html").read_text()
    honest, _, _ = run(make_loop, rounds=1)
    assert not any("oracle" in one for one in honest.clients.budgets.guarantees()[0].not_covered)
    silent = Recorder()
    make_loop(parts=[NoiseAware("min_variance", estimator="oracle"), silent], privacy=None, rounds=1).run()
    assert silent.reports[0].weights.tolist() == [[0.25] * 4]


# ---- edges


@pytest.mark.parametrize("every", [1, 0])
def test_cohorts_of_one_and_two(every, make_loop, view):
    _, _, seen = run(make_loop, Cohorts((2,), (1, 3), (3,)), rounds=3, reestimate_every=every)
    assert [tuple(report.weights.shape) for report in seen.reports] == [(1, 1), (1, 2), (1, 1)]
    assert all(float(report.weights.sum()) == pytest.approx(1) for report in seen.reports)
    deltas = some_deltas(2)
    by_length = NoiseAware("min_variance").weigh(updates_of(deltas), view)
    torch.testing.assert_close(by_length, weights((deltas.double() ** 2).sum(dim=1)))


def spoil(loop, is_bad):
    """Updates of these rounds and clients are not finite."""
    releases = loop.clients.engine.releases

    def broken(plan, *args):
        for row, delta in releases(plan, *args):
            yield row, delta * math.nan if is_bad(plan.round, plan.clients[row]) else delta

    loop.clients.engine.releases = broken


@pytest.mark.filterwarnings("ignore:round.*not finite")
@pytest.mark.parametrize("every", [1, 0])
def test_an_update_that_is_not_finite_leaves_the_round(every, make_loop):
    """In round 1 client 1, in round 2 client 2: there it has a cached variance."""
    loop = make_loop(parts=[NoiseAware(reestimate_every=every), seen := Recorder()], rounds=3)
    spoil(loop, lambda round, client: client == round < 3)
    loop.run()
    assert [report.clients for report in seen.reports] == [(0, 2, 3), (0, 1, 3), (0, 1, 2, 3)]
    assert bool(loop.state.models.isfinite().all())
    # client 1 has no variance in round 2, so the round is estimated; client 2 has none of round 2 in round 3
    assert kept(seen) == [True, True, True]


@pytest.mark.filterwarnings("ignore:round.*not finite")
def test_a_newcomer_that_is_lost_leaves_the_others_their_variances(make_loop):
    strategy, seen = NoiseAware(reestimate_every=0), Recorder()
    loop = make_loop(parts=[strategy, Cohorts((0, 1, 2), (0, 1, 2, 3)), seen], rounds=2)
    spoil(loop, lambda round, client: client == 3)
    loop.run()
    assert strategy._known.round == 1 and seen.reports[1].clients == (0, 1, 2)


def test_the_cap_holds_in_the_weights_of_the_round_and_bounds_a_zero_update(make_loop, view):
    _, _, free = run(make_loop, objective="min_variance", rounds=1)
    _, _, seen = run(make_loop, objective="min_variance", rounds=1, max_weight=0.3)
    assert float(free.reports[0].weights.max()) > 0.3
    assert float(seen.reports[0].weights.max()) == pytest.approx(0.3)
    assert seen.reports[0].metrics["largest_weight"] == float(seen.reports[0].weights.max())
    deltas = some_deltas()
    deltas[1] = 0
    assert float(NoiseAware("min_variance").weigh(updates_of(deltas), view)[1]) > 0.99
    assert float(NoiseAware("min_variance", max_weight=0.5).weigh(updates_of(deltas), view)[1]) == pytest.approx(0.5)
    assert float(NoiseAware().weigh(updates_of(deltas), view)[1]) == 0


@pytest.mark.parametrize("against", [False, True])
def test_an_update_gains_nothing_by_its_length_and_does_not_change_that_of_the_step(against, view):
    """One client sends noise, or an update against the others, of any length: tiny ones have less than usual ones."""
    deltas, of_all = some_deltas(20, 2000), dataclasses.replace(view, facts=_of(view.facts, 20))
    deltas[0] = -deltas[1:].mean(dim=0) if against else some_deltas(1, 2000, seed=9)[0]
    parts, steps = [], []
    for length in (1e-9, 1e-3, 1.0, 1e3, 1e9):  # of the longest one of the others
        changed = deltas.clone()
        changed[0] *= length * deltas[1:].norm(dim=1).max() / deltas[0].norm()
        strategy = NoiseAware()
        share = strategy.weigh(updates_of(changed), of_all)
        share = share / share.sum()
        moved = strategy.scale((share.float() @ changed)[None], updates_of(changed), share[None], of_all)[0]
        parts.append(float((share[0] * changed[0].norm()) / (share * changed.norm(dim=1)).sum()))
        steps.append(float(moved.norm()))
    assert max(parts[3:]) < 1.2 * parts[2] and max(parts) < 0.12
    assert max(steps) < 1.5 * min(steps)


def opposed(deltas, length):
    deltas[0] = 0
    deltas[0, 0] = -length


def colluding(deltas, length):
    deltas[:2] = length * torch.randn(deltas.shape[1], generator=torch.Generator().manual_seed(8))


def denormal(deltas, length):
    deltas[0] = 0
    deltas[0, 0] = 1.4e-45


@pytest.mark.parametrize(
    ("attack", "count"), [*((one, count) for one in (opposed, denormal) for count in (2, 5, 12)), (colluding, 12)]
)
@pytest.mark.parametrize("length", [1e-6, 1e6])
def test_no_client_has_more_than_its_bound_or_changes_the_length_of_the_step(attack, length, count, view):
    """Weak signals, ten rounds, and a crafted update in each: as cosines are remembered, early rounds say little."""
    strategy, of_all = NoiseAware(), dataclasses.replace(view, facts=_of(view.facts, count))
    attackers = 2 if attack is colluding else 1
    for number in range(10):
        generator = torch.Generator().manual_seed(number)
        deltas = torch.randn(count, 5000, generator=generator) / 5000**0.5
        deltas[:, 0] += 0.05
        attack(deltas, length)
        updates = updates_of(deltas)
        share = strategy.weigh(updates, of_all)
        share = share / share.sum()
        parts = share * deltas.double().norm(dim=1)
        step = strategy.scale((share @ deltas.double()).float()[None], updates, share[None], of_all)[0]
        assert bool(step.isfinite().all())
        assert float(strategy._known.influence[:count].max()) <= most_influence(count) * (1 + 1e-9)
        assert count == 2 or float(parts[:attackers].max()) <= float(parts[attackers:].sum()) * (1 + 1e-6)
        assert float(step.norm()) < 5


def test_the_bound_holds_for_the_clients_of_a_round_without_an_estimate(view):
    strategy, of_all = NoiseAware(reestimate_every=0), dataclasses.replace(view, facts=_of(view.facts, 20))
    deltas = torch.linspace(1, 10, 20)[:, None] * torch.randn(20, 2000, generator=torch.Generator().manual_seed(0))
    strategy.weigh(updates_of(deltas), of_all)
    few = ClientUpdates((0, 18, 19), (3,) * 3, (math.nan,) * 3, model_of=(0,) * 3)
    share = strategy.weigh(few, of_all)
    parts = share * deltas[[0, 18, 19]].double().norm(dim=1)
    assert float(parts.max() / parts.sum()) <= 0.5 + 1e-6


@pytest.mark.filterwarnings("ignore:round.*not finite")
def test_a_client_may_be_lost_in_a_round_without_an_estimate(make_loop):
    loop = make_loop(parts=[NoiseAware(reestimate_every=3), seen := Recorder()], rounds=3)
    spoil(loop, lambda round, client: client == 0 and round == 2)
    loop.run()
    assert kept(seen)[:2] == [True, False] and seen.reports[1].clients == (1, 2, 3)


def _of(facts, count):
    """The facts of this many clients."""
    columns = {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}
    longer = {name: (one * count)[:count] for name, one in columns.items() if isinstance(one, tuple) and len(one) == 4}
    return dataclasses.replace(facts, **longer)


def test_users_are_warned_once_that_few_clients_count(view):
    deltas = some_deltas(4)
    deltas[1] *= 1e-3
    strategy = NoiseAware("min_variance")
    with pytest.warns(UserNotice, match=r"1\.0 of 4 clients count \(client 1 has 100% of the weight"):
        strategy.weigh(updates_of(deltas), view)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.weigh(updates_of(deltas), view)
        NoiseAware().weigh(updates_of(deltas), view)


@pytest.mark.parametrize(("batch_size", "warned"), [([8, 16, 8, 8], 1), (8, 0)])
@pytest.mark.parametrize("data", [{"partition": {"name": "shards"}}, {"groups": {"name": "rotation", "count": 2}}])
def test_users_are_warned_of_unlike_data_with_unlike_batches(data, batch_size, warned, make_loop):
    clients = ClientOptions(count=4, batch_size=batch_size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_loop(parts=[NoiseAware("min_variance")], options={"data": data}, clients=clients).plan_schedule()
        make_loop(parts=[NoiseAware()], options={"data": data}, clients=clients).plan_schedule()
    assert sum("largest batches" in str(one.message) for one in caught) == warned


# ---- with other strategies


class Mask(Strategy):
    """Selection: some clients' updates do not count."""

    role = "mask"

    def weigh(self, updates, view):
        return torch.tensor([float(client != 2) for client in updates.clients])


def test_with_a_selection_the_rest_keep_their_ratios(make_loop):
    _, _, free = run(make_loop, rounds=1)
    _, _, masked = run(make_loop, Mask(), rounds=1)
    before, left = free.reports[0].weights[0], [0, 1, 3]
    assert float(masked.reports[0].weights[0, 2]) == 0
    torch.testing.assert_close(masked.reports[0].weights[0, left], before[left] / before[left].sum())


class TwoClusters(Strategy):
    """After the first round odd and even clients have two models; from round 4 client 0 may change its cluster."""

    def __init__(self, regroup=False):
        self._regroup = regroup

    def plan_round(self, plan, view):
        model_of = [client % len(view.state.models) for client in plan.clients]
        if self._regroup and view.round >= 4:
            model_of[0] = 1
        return dataclasses.replace(plan, model_of=tuple(model_of))

    def after_step(self, state, updates, view):
        if len(state.models) == 2:
            return state
        model_of = tuple(client % 2 for client in range(view.facts.num_clients))
        return dataclasses.replace(state, models=state.models.repeat(2, 1), model_of=model_of)


def many(make_loop, count, parts, **options):
    return make_loop(
        blobs(num_clients=count, records=30),
        privacy=private(),
        clients=ClientOptions(count=count, batch_size=8, learning_rate=0.1),
        parts=parts,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, 16])
def test_in_clusters_weights_are_those_of_each_cluster_by_itself(count, make_loop):
    """Six clients are judged together, twice eight apart; a cap holds in each cluster."""
    strategy, seen = NoiseAware("min_variance", estimator="raw_norm", max_weight=0.35), Recorder(updates=True)
    many(make_loop, count, [strategy, TwoClusters(), seen], rounds=2).run()
    report, updates = seen.reports[1], seen.updates[1]
    squares = (updates.deltas.double() ** 2).sum(dim=1)
    for model in (0, 1):
        rows = [client for client in range(count) if client % 2 == model]
        expected = weights(squares[rows], max_weight=0.35)
        torch.testing.assert_close(report.weights[model, rows], expected)
    assert float(report.metrics["weight"].sum()) == pytest.approx(2)
    assert report.metrics["effective_clients"] == pytest.approx(float((1 / report.weights.square().sum(dim=1)).sum()))
    assert len(strategy._known.group.unique()) == (2 if count == 16 else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "estimated"),
    [
        (0, [True, False, False, False, False]),  # all together in round 1: variances of one estimate serve any cluster
        (2, [True, False, True, True, False]),  # apart in round 3: client 0 has no variance in its new cluster
    ],
)
def test_clients_that_were_judged_apart_are_not_mixed_later(every, estimated, make_loop):
    seen = Recorder()
    parts = [NoiseAware("min_variance", estimator="raw_norm", reestimate_every=every), TwoClusters(regroup=True), seen]
    many(make_loop, 18, parts, rounds=5).run()
    assert kept(seen) == estimated


def test_groups_are_estimated_apart_where_every_model_has_enough_and_the_worst_is_reported():
    apart, together = [list(range(8)), list(range(8, 16))], [list(range(8)), list(range(8, 15))]
    assert judged_groups(apart, 16) == apart and judged_groups(together, 15) == [list(range(15))]
    deltas = torch.cat([some_deltas(9, 200), some_deltas(9, 200, seed=1)])
    options, models = EstimatorOptions(), [list(range(9)), list(range(9, 18))]
    judged = estimate_by_group(deltas, models, options)
    one, two = (estimate(part, options) for part in (deltas[:9], deltas[9:]))
    torch.testing.assert_close(judged.noise_var, torch.cat([one.noise_var, two.noise_var]))
    assert judged.diagnostics["iterations"] == max(one.diagnostics["iterations"], two.diagnostics["iterations"])
    deltas[9:16] = math.nan  # two are left, are taken by their lengths, and have no diagnostics
    assert estimate_by_group(deltas, models, options).diagnostics == one.diagnostics


def test_models_that_are_judged_together_show_a_direction_each():
    """Four models of five clients: with one direction for all, signals of the others would count as noise."""
    models, noise = [list(range(model, 20, 4)) for model in range(4)], torch.linspace(1, 3, 20)
    draws = torch.randn(24, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 4000**0.5
    deltas = 3 * draws[:4][torch.arange(20) % 4] + noise[:, None] * draws[4:]
    share = weights(estimate_by_group(deltas, models, EstimatorOptions("hetero_pca")).noise_var)
    excess = float((share**2 * noise**2).sum() * (1 / noise**2).sum())
    assert excess < 1.05


def test_beside_kmeans_weights_are_those_within_the_clusters(make_loop):
    """Each client has a separate model there; weights that were scaled for each start model would all be equal."""
    loops = {}
    for base in ("noise_aware", "uniform"):
        parts = [*strategies.build({base: None, "kmeans_clusters": {"num_clusters": 1}}), seen := Recorder()]
        loops[base] = make_loop(parts=parts, clients=UNEQUAL, rounds=2), seen
        loops[base][0].run()
    weights_of = {base: seen.reports[1].weights for base, (_, seen) in loops.items()}
    torch.testing.assert_close(weights_of["uniform"], torch.full((4, 4), 0.25, dtype=torch.float64))
    assert bool((weights_of["noise_aware"] == weights_of["noise_aware"][:1]).all()), "one cluster has one rule"
    assert float(weights_of["noise_aware"].max()) > 0.3
    assert not torch.equal(*(loop.state.models for loop, _ in loops.values()))


@pytest.mark.slow
@pytest.mark.parametrize("reestimate_every", [1, 0])
def test_false_budgets_change_no_bit_of_noise_aware_weights(reestimate_every, make_loop):
    budgets = [4.0, 6.0, 8.0, 10.0]

    def outcome(claim, name, **options):
        claims = None if claim is None else [claim, *budgets[1:]]
        clients = ClientOptions(count=4, batch_size=16, learning_rate=0.3, reported_epsilon=claims)
        loop = make_loop(parts=[*strategies.build({name: options}), seen := Recorder()], clients=clients, rounds=2)
        result = loop.run()
        paid = [charge.event for charge in read_ledger(loop.clients.folder.ledger_file)]
        promised = [one.words() for one in loop.clients.budgets.guarantees()]
        spent = [(client["epsilon_spent"], client["epsilon_budget"]) for client in result.clients]
        return torch.cat([report.weights for report in seen.reports]), loop.state.models, (paid, promised, spent)

    options = {"reestimate_every": reestimate_every}
    weights_then, models_then, account_then = outcome(None, "noise_aware", **options)
    assert [budget for _, budget in account_then[2]] == budgets
    for claim in (0.95, 5, 100):
        weights_now, models_now, account_now = outcome(claim, "noise_aware", **options)
        assert torch.equal(weights_now, weights_then) and torch.equal(models_now, models_then)
        assert account_now == account_then, "noise, ledger and guarantees follow the true budget"
    believed, _, account = outcome(100, "epsilon_weighted")
    assert float(believed[0, 0]) == pytest.approx(100 / 124) and account == account_then


NUM_PARAMS = 1200
EPOCHS = (2, 3, 4)  # local steps of the three clients, each on all records
CENTRES = (1.0, 2.0, 4.0)  # in every coordinate
CLIP_NORM, NOISE = 8.0 * NUM_PARAMS, (0.1, 0.2, 0.4)  # gradients are never so long


def test_the_noise_of_the_sum_is_that_of_its_parts(make_loop):
    """Independent noises: `sum_i w_i^2 v_i` without a factor of clients (Lemma D.4), v_i with the steps' feedback.

    1,200 coordinates: 16 % of a variance is four standard deviations, and so is the bound on the mean.
    """
    lr, scale = 0.1, math.sqrt(NUM_PARAMS / 2)
    net = nn.Linear(NUM_PARAMS, 1, bias=False)
    nn.init.zeros_(net.weight)
    pairs = [(scale * torch.eye(NUM_PARAMS), torch.full((NUM_PARAMS,), scale * centre)) for centre in CENTRES]
    make_loop(
        Population.from_datasets(pairs, held_out=0),
        ClientModule(net),
        PrivacyOptions(noise_multiplier=NOISE, clip_norm=CLIP_NORM, delta=1e-4, noise_key=FIXED_KEY),
        ClientOptions(count=3, batch_size=NUM_PARAMS, local_epochs=EPOCHS, learning_rate=lr),
        parts=[NoiseAware("min_variance", estimator="oracle"), seen := Recorder()],
        rounds=1,
    ).run()
    model, weights, steps = seen.models[0][0].double(), seen.reports[0].weights[0], torch.tensor(EPOCHS).double()
    step_var = [(lr * CLIP_NORM * noise / NUM_PARAMS) ** 2 for noise in NOISE]
    true = torch.tensor(step_var, dtype=torch.float64) * steps
    torch.testing.assert_close(weights, (1 / true) / (1 / true).sum())
    pull = [1 - (1 - lr) ** count for count in EPOCHS]
    mean = sum(float(w) * part * centre for w, part, centre in zip(weights, pull, CENTRES, strict=True))
    kept = [sum((1 - lr) ** (2 * k) for k in range(count)) for count in EPOCHS]
    variance = sum(float(w) ** 2 * step_var[i] * kept[i] for i, w in enumerate(weights))
    assert float(model.var()) == pytest.approx(variance, rel=0.16)
    assert float(model.mean()) == pytest.approx(mean, abs=4 * math.sqrt(variance / NUM_PARAMS))
