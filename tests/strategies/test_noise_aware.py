"""Noise-aware weights in runs: when they are estimated, from what, and what does not change them."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from conftest import PowerCut, cut_at
from estimated_rounds import kept, some_deltas, updates_of
from fakes import Recorder

from dpfl_lightning import strategies
from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.algorithms.signal_weights import most_influence
from dpfl_lightning.algorithms.update_geometry import folded
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware
from dpfl_lightning.strategies.aggregation.robust_hdp import RobustHdp
from experiments.papers.noise_aware.ablation import best_ratio

UNEQUAL = ClientOptions(count=4, batch_size=[4, 8, 16, 40], learning_rate=0.1)


class Cohorts(Strategy):
    """Who takes part in which round."""

    def __init__(self, *cohorts):
        self._cohorts = cohorts

    def plan_round(self, plan, view):
        return plan.only(lambda client: client in self._cohorts[view.round - 1])


def run(make_loop, *others, rounds=5, **options):
    """A loop that has run under these weights, the strategy, and what was seen."""
    strategy, seen = NoiseAware(**options), Recorder()
    loop = make_loop(parts=[strategy, *others, seen], rounds=rounds)
    loop.run()
    return loop, strategy, seen


# ---- the length of the step


def steps_of(strategy, deltas, view):
    """The weighted mean of these updates in the strategy's next round, and the server's step."""
    share = strategy.weigh(updates_of(deltas), view)
    share = share / share.sum()
    mean = share.float() @ deltas
    return mean, strategy.scale(mean[None], updates_of(deltas), share[None], view)[0]


def step_of(deltas, view):
    """The server's step by these updates in a first round."""
    return steps_of(NoiseAware(), deltas, view)[1]


def signals_and_noise(noise, signal=0.3, params=20_000, seed=0):
    deltas = torch.tensor(noise)[:, None] * torch.randn(
        len(noise), params, generator=torch.Generator().manual_seed(seed)
    )
    deltas /= params**0.5
    deltas[:, 0] += signal
    return deltas


def test_the_step_does_not_depend_on_how_many_clients_have_little_noise(view):
    """With equal signals its length along them is that of each client, whatever the noise of the others."""
    of_all = dataclasses.replace(view, facts=_of(view.facts, 20))
    for quiet in (2, 3, 4, 5, 8):
        step = step_of(signals_and_noise([1.0] * quiet + [10.0] * (20 - quiet)), of_all)
        assert float(step[0]) == pytest.approx(0.3, abs=0.05), quiet


@pytest.mark.parametrize("length", [1e-3, 0.1, 3.0, 10.0, 1e3])
def test_one_client_hardly_changes_the_length_of_the_step_beside_two_kinds_of_noise(length, view):
    of_all = dataclasses.replace(view, facts=_of(view.facts, 20))
    deltas = signals_and_noise([1.0] * 5 + [10.0] * 15)
    before = float(step_of(deltas, of_all).norm())
    deltas[0] *= length
    assert 0.5 * before < float(step_of(deltas, of_all).norm()) < 2 * before


@pytest.mark.parametrize("tiny", [1, 2, 4, 8])
def test_some_tiny_updates_do_not_stop_the_training(tiny, view):
    of_all = dataclasses.replace(view, facts=_of(view.facts, 20))
    deltas = signals_and_noise(torch.linspace(1, 10, 20).tolist())
    deltas[:tiny] *= 0.01
    assert float(step_of(deltas, of_all)[0]) > 0.15


@pytest.mark.parametrize("replayed", [False, True])
def test_two_clients_with_signals_of_their_own_do_not_stop_the_training(replayed, view):
    """The signals of the other 18 are hidden in noise."""
    of_all = dataclasses.replace(view, facts=_of(view.facts, 20))
    for seed in (2, 4, 5):
        strategy, draws = NoiseAware(), torch.Generator().manual_seed(seed)
        for number in range(8):
            deltas = torch.randn(20, 2000, generator=draws) / 2000**0.5
            deltas[:, 50] += 0.03
            own = torch.eye(2, 2000)
            deltas[:2] = own if replayed else 0.3 * deltas[:2] + 0.3 * own - 0.1 * own.flip(0)
            mean, step = steps_of(strategy, deltas, of_all)
            assert 0.49 * float(mean.norm()) < float(step.norm()) < 2 * float(mean.norm()), (seed, number)


def test_what_a_client_sends_for_personal_parameters_changes_no_weight(view):
    net = torch.nn.Sequential(torch.nn.Linear(40, 50, bias=False), torch.nn.Linear(50, 40, bias=False))
    module = ClientModule(net, personal=["1.weight"])
    of_all = dataclasses.replace(view, facts=_of(view.facts, 8), module=module)
    deltas = torch.zeros(8, 4000)
    deltas[:, :2000] = torch.randn(8, 2000, generator=torch.Generator().manual_seed(0)) / 2000**0.5
    honest = NoiseAware().weigh(updates_of(deltas), of_all)
    deltas[0, 2000:] = 1e-6
    assert torch.equal(NoiseAware().weigh(updates_of(deltas), of_all), honest)


@pytest.mark.parametrize("noise", [1.0, 4.0])
def test_signals_that_clients_have_alone_count_in_the_length_of_the_step(noise, view):
    """Half of the clients share a signal, and all signals are equally long."""
    of_all, strategy = dataclasses.replace(view, facts=_of(view.facts, 12)), NoiseAware()
    for number in range(8):
        deltas = noise * torch.randn(12, 5000, generator=torch.Generator().manual_seed(number)) / 5000**0.5
        deltas[:6, 0] += 1.0
        deltas[range(6, 12), range(6, 12)] += 1.0
        mean, step = steps_of(strategy, deltas, of_all)
    assert float(step.norm() / mean.norm()) == pytest.approx(1.0, abs=0.15)


# ---- when


def test_a_streamed_round_gives_the_bits_of_a_kept_one(make_loop):
    streamed, _, seen = run(make_loop, reestimate_every=0)
    whole, _, seen_there = run(make_loop, Recorder(updates=True), reestimate_every=0)
    assert kept(seen) == [True, *[False] * 4] and kept(seen_there) == [True] * 5
    assert torch.equal(streamed.state.models, whole.state.models)


def test_a_newcomer_has_the_whole_round_estimated_anew_and_two_rounds_are_never_mixed(make_loop):
    cohorts = [(0, 1, 2), (0, 2), (0, 1, 2), (1, 2, 3), (0, 1, 2), (0, 1)]
    _, strategy, seen = run(make_loop, Cohorts(*cohorts), rounds=6, reestimate_every=0)
    assert kept(seen) == [True, False, False, True, True, False]
    assert strategy._known.round == 5 and strategy._known.estimates["noise_var"].isnan().tolist() == [
        False,
        False,
        False,
        True,
    ]
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


def test_a_client_whose_first_update_was_empty_is_estimated_when_it_has_one(view):
    strategy, deltas = NoiseAware(reestimate_every="first_round"), signals_and_noise([1.0, 2.0, 3.0, 4.0])
    plan = view.plan()
    for first, again in ((torch.tensor([[0.0], [1.0], [1.0], [1.0]]) * deltas, True), (deltas, False)):
        updates = dataclasses.replace(ClientUpdates.announced(plan), deltas=first)
        strategy.weigh(updates, view)
        assert strategy.needs_updates(plan, view) is again
    assert bool((strategy.weigh(updates, view) > 0).all())


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


@pytest.mark.parametrize("rule", [NoiseAware, RobustHdp])
def test_false_claims_of_budget_records_batch_and_steps_change_no_bit(rule, view):
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
        strategy, seen = rule(), dataclasses.replace(view, facts=known)
        for _ in range(2):
            shares.append(strategy.weigh(updates, seen))
            scaled.append(strategy.scale(deltas[:1], updates, shares[-1][None] / shares[-1].sum(), seen))
    assert torch.equal(shares[0], shares[2]) and torch.equal(shares[1], shares[3])
    assert torch.equal(scaled[0], scaled[2]) and torch.equal(scaled[1], scaled[3])
    assert rule is RobustHdp or float(scaled[0].norm()) != float(deltas[0].norm()), "the length was chosen"


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


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_a_signal_that_lasts_over_rounds_is_found_without_any_claim(scale, view):
    """The last of four clients sends the same signal in every round, which nobody shares; the others share one."""
    draws = torch.Generator().manual_seed(0)
    with_signal, resumed, share = NoiseAware(), NoiseAware(), []
    for _ in range(6):
        deltas = torch.randn(4, 2000, generator=draws) / 2000**0.5
        deltas[:3, 0] += 1.0
        deltas[3, 1] += 1.0
        updates = updates_of(scale * deltas)
        share.append(scale * float(with_signal.weigh(updates, view)[3]))
    assert share[0] < 0.03 and 0.13 < share[-1] <= 0.27
    resumed.load_state_dict(with_signal.state_dict())
    assert torch.equal(resumed.weigh(updates, view), with_signal.weigh(updates, view))


@pytest.mark.parametrize("minority", [2, 5])
def test_a_minority_is_kept_in_every_round_though_signals_are_drawn_anew(minority, view):
    """All clients share one signal, and each of two kinds has another one."""
    kind = np.repeat([0, 1], [20 - minority, minority])
    signals = np.column_stack([np.ones(20), np.eye(2)[kind]])
    noise = np.exp(np.random.default_rng(2).uniform(-2, 0.5, 20))
    draws, strategy = torch.Generator().manual_seed(2), NoiseAware()
    of_all = dataclasses.replace(view, facts=_of(view.facts, 20))
    for number in range(12):
        directions = torch.nn.functional.normalize(torch.randn(3, 2000, generator=draws), dim=1)
        deltas = torch.from_numpy(noise)[:, None] * torch.randn(20, 2000, generator=draws) / 2000**0.5
        deltas += torch.from_numpy(signals) @ directions.double()
        share = strategy.weigh(updates_of(deltas.float()), of_all).numpy()
        of_kinds = share @ np.eye(2)[kind] / share.sum()
        assert of_kinds[1] == pytest.approx(minority / 20, abs=0.05), number


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("length", [1e-3, 0.5])
def test_a_client_whose_noise_becomes_short_does_not_change_the_weights_of_the_others(length, seed, view):
    """It is honest in the first round and sends a short noise later; all others share one signal."""
    noise = torch.tensor([2.0] + [1.0] * 8 + [4.0] * 11, dtype=torch.float64)
    draws, of_all = torch.Generator().manual_seed(seed), dataclasses.replace(view, facts=_of(view.facts, 20))
    strategy, variance = NoiseAware(), noise[1:].numpy() ** 2
    best = best_ratio(np.ones(19), variance, most_influence(19))
    for number in range(4):
        deltas = noise[:, None] * torch.randn(20, 5000, generator=draws) / 5000**0.5
        deltas[:, 0] += 1.0
        if number > 0:
            deltas[0] = length * torch.randn(5000, generator=draws) / 5000**0.5
        weight = strategy.weigh(updates_of(deltas.float()), of_all)[1:].numpy()
        assert weight.sum() ** 2 / (weight**2 @ variance) > 0.97 * best, number


def test_folded_updates_keep_their_products():
    draws = torch.Generator().manual_seed(0)
    one, noise = torch.randn(2, 100_003, generator=draws)
    rows = torch.stack([one, one + noise])
    assert folded(rows, 100_003) is rows
    (first, product), (_, second) = (short := folded(rows, 4096)).double() @ short.double().T
    assert short.shape == (2, 4096) and float(product / (first * second).sqrt()) == pytest.approx(0.5**0.5, abs=0.05)


# ---- edges


@pytest.mark.parametrize("every", [1, 0])
def test_cohorts_of_one_and_two(every, make_loop, view):
    _, _, seen = run(make_loop, Cohorts((2,), (1, 3), (3,)), rounds=3, reestimate_every=every)
    assert [tuple(report.weights.shape) for report in seen.reports] == [(1, 1), (1, 2), (1, 1)]
    assert all(float(report.weights.sum()) == pytest.approx(1) for report in seen.reports)
    deltas = some_deltas(2)
    by_length = RobustHdp().weigh(updates_of(deltas), view)
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


@pytest.mark.parametrize("against", [False, True])
def test_an_update_gains_nothing_by_its_length_and_hardly_changes_that_of_the_step(against, view):
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
    assert max(parts[3:]) <= 1.2 * parts[2] and max(parts) < 0.12
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
        assert float(strategy._known.estimates["influence"][:count].max()) <= most_influence(count) * (1 + 1e-9)
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
