"""Distillation through the real loop: federated equals centralised, releases and their price, schedules, resume."""

from __future__ import annotations

import dataclasses
import math

import pytest
import reference
import torch
from conftest import FIXED_KEY, PowerCut, blobs, cut_at, small_net
from torch import nn

from dpfl_lightning import data, models
from dpfl_lightning.client import ClientModule
from dpfl_lightning.data import Population
from dpfl_lightning.data.augmentation import ClassAugmentation
from dpfl_lightning.distilled import load_distilled
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.callback import ServerCallback
from dpfl_lightning.federated.setup import ENGINES
from dpfl_lightning.options import ClientOptions, PrivacyOptions
from dpfl_lightning.privacy.accountant import get_accountant
from dpfl_lightning.privacy.events import GaussianEvent, LaplaceEvent
from dpfl_lightning.privacy.ledger import read_ledger
from dpfl_lightning.strategies.distillation import PURPOSE, Distillation, mean_of_holders
from dpfl_lightning.strategies.distillation_options import loops
from dpfl_lightning.strategies.gradient_matching import matched_names
from dpfl_lightning.strategies.server_training import public_generator, torch_seed
from dpfl_lightning.strategies.uniform import Uniform

CLASSES = 3
SHAPE = (1, 8, 8)
NOTICE = pytest.mark.filterwarnings("ignore:strategy distillation. gradients of single classes")


def digits(counts: list[list[int]], seed: int = 0) -> Population:
    """Real 8x8 digits: client i has counts[i][c] records of class c, none of them another client's."""
    dataset = data.load("digits")
    generator = torch.Generator().manual_seed(seed)
    pools = [
        rows[torch.randperm(len(rows), generator=generator)].tolist()
        for rows in ((dataset.y == label).nonzero().flatten() for label in range(CLASSES))
    ]
    pairs = []
    for own in counts:
        rows = [pools[label].pop() for label, count in enumerate(own) for _ in range(count)]
        pairs.append((dataset.x[rows], dataset.y[rows]))
    test = dataset.test_y < CLASSES
    return Population.from_datasets(pairs, (dataset.test_x[test], dataset.test_y[test]), 0.0, num_classes=CLASSES)


UNEQUAL = [[9, 3, 5], [2, 8, 4], [6, 6, 1], [3, 2, 12]]
EQUAL = [[4, 4, 4]] * 4


def together(population: Population) -> Population:
    """One client that holds everything."""
    everything, none = torch.cat(population.train_of), torch.cat(population.held_out_of)
    return dataclasses.replace(population, train_of=[everything], held_out_of=[none])


def a_net(width: int = 4, seed: int = 0) -> ClientModule:
    torch.manual_seed(seed)
    return ClientModule(models.build("convnet", SHAPE, CLASSES, width=width, depth=2))


def new_net(seed: int) -> nn.Module:
    return a_net(seed=seed).net


SMALL = {
    "images_per_class": 2,
    "net_epochs": 2,
    "min_participants": 1,
    "min_records_per_target": 1,
    "evaluation_epochs": 2,
}


class Spy(ServerCallback):
    """What arrived in each round, and what was told of it."""

    needs = "deltas"

    def __init__(self):
        self._updates, self._views, self._states, self._told = [], [], [], []

    def refine(self, state, updates, view):
        self._updates.append(updates)
        self._views.append(view)
        self._states.append(state)
        return state

    def on_round_end(self, view, report):
        self._told.append(report.told)


class Reports(ServerCallback):
    """Keeps each round's number of records."""

    def __init__(self):
        self.kept = []

    def on_round_end(self, view, report):
        self.kept.append(report.records)


def distilled(make_loop, population=None, privacy=None, rounds=2, others=(), net=new_net, engine=None, **options):
    """A finished run, its strategy."""
    own = Distillation(**{**SMALL, **options})
    population = digits(UNEQUAL) if population is None else population
    sizes = list(population.num_records)
    loop = make_loop(
        population=population,
        module=ClientModule(net(0)),
        new_net=net,
        clients=ClientOptions(count=len(sizes), batch_size=sizes),
        callbacks=[own, *others],
        privacy=privacy,
        rounds=rounds,
        evaluate_every=rounds,
        **({} if engine is None else {"engine": ENGINES[engine]()}),
    )
    loop.run()
    return loop, own


def images_of(own: Distillation) -> torch.Tensor:
    return own.state_dict()["images"]


def class_means(population: Population, params, rows_of=None) -> list[torch.Tensor]:
    """The gradient of each class's mean loss over all clients' records, of matrices only, `[d]`."""
    rows = torch.cat(population.train_of) if rows_of is None else population.train_of[rows_of]
    found = []
    for label in range(CLASSES):
        own = rows[population.y[rows] == label]
        if len(own) == 0:
            found.append(None)
            continue
        gradients = reference.class_gradient(a_net().net, params, population.x[own], label)
        found.append(torch.cat([g.flatten() for g in gradients if g.dim() >= 2]))
    return found


class Target(Distillation):
    """Keeps the targets of its rounds."""

    def _target(self, combined):
        found = super()._target(combined)
        self.__dict__.setdefault("kept", []).append(found)
        return found


def target_of(make_loop, population, **options):
    """The target of a first round without noise, `[num_classes, d]`, and which classes are there."""
    own = Target(**{**SMALL, **options})
    sizes = list(population.num_records)
    clients = ClientOptions(count=len(sizes), batch_size=sizes)
    loop = make_loop(
        population=population, module=a_net(), new_net=new_net, clients=clients, callbacks=[own], privacy=None, rounds=1
    )
    start = loop.module.unflatten(loop.module.flat)
    loop.run()
    return *own.kept[0], {name: value.clone() for name, value in start.items()}


# --- federated and centralised


@NOTICE
@pytest.mark.parametrize("sampling", ["full", "fixed"])
def test_sums_of_all_records_are_the_gradient_of_their_union(sampling, make_loop):
    population = digits(UNEQUAL)
    target, present, params = target_of(make_loop, population, sampling=sampling)
    assert present.all()
    torch.testing.assert_close(target, torch.stack(class_means(population, params)), rtol=1e-5, atol=1e-6)


@NOTICE
def test_means_of_clients_count_as_the_aggregation_says(make_loop):
    population = digits([*UNEQUAL[:3], [3, 2, 0]])
    uniform, _, params = target_of(make_loop, population, aggregation="uniform")
    each = [class_means(population, params, client) for client in range(4)]
    holders = [[own[label] for own in each if own[label] is not None] for label in range(CLASSES)]
    assert list(map(len, holders)) == [4, 4, 3]
    expected = torch.stack([torch.stack(rows).mean(dim=0) for rows in holders])
    torch.testing.assert_close(uniform, expected, rtol=1e-4, atol=1e-6)
    union = torch.stack(class_means(population, params))
    assert float((uniform - union).norm() / union.norm()) > 0.01
    by_count, _, _ = target_of(make_loop, population, aggregation="class_count")
    torch.testing.assert_close(by_count, union, rtol=1e-4, atol=1e-6)
    median, _, _ = target_of(make_loop, population, aggregation="median")
    expected = torch.stack([torch.stack(rows).quantile(0.5, dim=0) for rows in holders])
    torch.testing.assert_close(median, expected, rtol=1e-4, atol=1e-6)


@NOTICE
def test_equal_counts_make_uniform_and_sampled_the_same(make_loop):
    population = digits(EQUAL)
    uniform, _, _ = target_of(make_loop, population, aggregation="uniform")
    sampled, _, _ = target_of(make_loop, population)
    torch.testing.assert_close(uniform, sampled, rtol=1e-4, atol=1e-6)


def reference_run(population, rounds, steps, reinit_every, epochs, augmented=False):
    """Centralised condensation, class by class, with torch's optimisers and the run's public seeds."""
    theta, net = a_net().flat, a_net().net
    seed = torch_seed(public_generator(0, "images"))
    start = torch.randn(CLASSES, 2, *SHAPE, generator=torch.Generator().manual_seed(seed))
    images = [one.clone().requires_grad_() for one in start]
    optimizers = [torch.optim.SGD([leaf], lr=0.1, momentum=0.5) for leaf in images]
    rows = torch.cat(population.train_of)
    for round in range(1, rounds + 1):
        real = {label: population.x[rows[population.y[rows] == label]] for label in range(CLASSES)}
        for _ in range(steps):
            reference.condensation_round(net, theta, optimizers, images, real)
        if round % reinit_every == 0:
            theta = a_net(seed=torch_seed(public_generator(0, "initialisation", round))).flat
        else:
            x, y = torch.cat([leaf.detach() for leaf in images]), torch.arange(CLASSES).repeat_interleave(2)
            theta = reference.sgd_epochs(net, theta, x, y, epochs, 0.01, torch_seed(public_generator(0, "net", round)))
    return torch.stack([leaf.detach() for leaf in images]), theta, start


@NOTICE
@pytest.mark.parametrize("steps", [1, 2])
def test_one_client_is_centralised_condensation(steps, make_loop):
    """Five rounds, a new net after each second one, against loops over classes with torch's own optimisers."""
    population = together(digits([[5, 3, 4]]))
    options = {"image_steps": steps, "image_learning_rate": 0.1, "reinit_every": 2, "net_epochs": 3}
    loop, own = distilled(make_loop, population, rounds=5, **options)
    images, theta, start = reference_run(population, 5, steps, reinit_every=2, epochs=3)
    torch.testing.assert_close(images_of(own), images, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loop.state.models[0], theta, rtol=1e-4, atol=1e-5)
    assert float((images - start).abs().max()) > 0.01


@NOTICE
@pytest.mark.parametrize("counts", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("augmentation", ["none", "dsa"])
def test_clients_are_as_good_as_one_that_holds_everything(counts, augmentation, make_loop):
    population = digits(counts)
    options = {"rounds": 4, "reinit_every": 3, "augmentation": augmentation, "image_steps": 2}
    many, one = (distilled(make_loop, own, **options)[1] for own in (population, together(population)))
    torch.testing.assert_close(images_of(many), images_of(one), rtol=1e-3, atol=1e-4)


@NOTICE
def test_sums_are_streamed_and_single_updates_are_kept_for_who_needs_them(make_loop):
    for aggregation, kept in (("sampled", False), ("uniform", True), ("class_count", True), ("median", True)):
        loop = make_loop(
            population=digits(EQUAL),
            module=a_net(),
            new_net=new_net,
            callbacks=[Distillation(aggregation=aggregation, **SMALL)],
            privacy=None,
            rounds=1,
            clients=ClientOptions(count=4, batch_size=12),
        )
        seen, train = [], loop.engine.train

        def spy(plan, state, attempts, say, seen=seen, train=train):
            seen.append(say is None)
            return train(plan, state, attempts, say)

        loop.engine.train = spy
        loop.run()
        assert seen == [kept]


@NOTICE
@pytest.mark.parametrize("privacy", [None, PrivacyOptions(noise_multiplier=1.0, delta=1e-3, noise_key=FIXED_KEY)])
def test_who_else_reads_updates_changes_nothing(privacy, make_loop):
    (_, alone), (_, beside) = (distilled(make_loop, privacy=privacy, others=others) for others in ([], [Spy()]))
    assert torch.equal(images_of(alone), images_of(beside))


# --- releases and their price


def private(epsilon=8.0, **options) -> PrivacyOptions:
    return PrivacyOptions(epsilon=epsilon, delta=1e-3, noise_key=FIXED_KEY, **options)


def test_a_round_costs_one_step_however_many_classes(make_loop):
    loop, _ = distilled(make_loop, privacy=private(), rounds=3, image_steps=4)
    for client in range(4):
        events = loop.budgets.ledger.events(client)
        (noise,) = {event.noise_multiplier for event in events}
        assert events == [GaussianEvent(1.0, noise, 1)] * 3
    assert {charge.purpose for charge in read_ledger(loop.folder.ledger_file)} == {PURPOSE}
    assert all(0.98 * 8.0 < spent <= 8.0 for spent in loop.budgets.spent())


def test_with_laplace_noise_a_round_costs_a_pure_epsilon(make_loop):
    privacy = PrivacyOptions(epsilon=300.0, delta=0.0, mechanism="laplace", noise_key=FIXED_KEY)
    loop, _ = distilled(make_loop, privacy=privacy, rounds=3)
    for client in range(4):
        assert loop.budgets.ledger.events(client) == [LaplaceEvent(loop.budgets.noise_multiplier(client), 1)] * 3
        assert 3 / loop.budgets.noise_multiplier(client) == pytest.approx(300.0, rel=1e-3)


@NOTICE
@pytest.mark.parametrize("drawn, counted", [(2, 4 * 3 * 2), (100, 4 * 12)])
def test_records_of_a_round_are_those_that_are_drawn(drawn, counted, make_loop):
    seen = Reports()
    distilled(make_loop, digits(EQUAL), others=[seen], sampling="fixed", records_per_class=drawn)
    assert seen.kept == [counted] * 2


def test_what_is_sent_is_counted(make_loop):
    loop, _ = distilled(make_loop, privacy=private(), rounds=2)
    matched = sum(p.numel() for p in loop.module.trainable if p.dim() >= 2)
    assert loop.told["floats_up"] == 2 * 4 * CLASSES * matched
    assert loop.told["floats_down"] == 2 * 4 * loop.module.num_params


def test_who_takes_part_less_often_has_less_noise(make_loop):
    loop, _ = distilled(make_loop, privacy=private(), rounds=7, participation_fraction=0.5)
    charges = read_ledger(loop.folder.ledger_file)
    of_round = [{charge.client for charge in charges if charge.round == round} for round in range(1, 8)]
    assert all(len(cohort) == 2 for cohort in of_round) and len(set(map(frozenset, of_round))) > 1
    counts = [sum(client in cohort for cohort in of_round) for client in range(4)]
    noises = [loop.budgets.noise_multiplier(client) for client in range(4)]
    assert len(set(counts)) > 1
    by_count = sorted(zip(counts, noises, strict=True))
    assert [noise for _, noise in by_count] == sorted(noises)
    assert all(0.98 * 8.0 < spent <= 8.0 for spent in loop.budgets.spent()), "planned for the rounds they are drawn for"


def test_reserve_rounds_are_kept(make_loop):
    loop = make_loop(
        population=digits(UNEQUAL),
        module=a_net(),
        new_net=new_net,
        clients=ClientOptions(count=4, batch_size=8),
        callbacks=[Distillation(participation_fraction=0.5, **SMALL)],
        privacy=private(reserve_rounds=2),
        rounds=5,
    )
    counts = [own.count_of(PURPOSE) for own in loop.plan_schedule().clients]
    assert sum(counts) == 5 * 2 + 4 * 2


def test_poisson_draws_are_amplified_and_full_batches_are_not(make_loop):
    for sampling, rate in (("poisson", 0.5), ("full", 1.0), (None, 1.0), ("fixed", 1.0)):
        loop = make_loop(
            population=digits(EQUAL),
            module=a_net(),
            new_net=new_net,
            clients=ClientOptions(count=4, batch_size=6),
            callbacks=[Distillation(sampling=sampling, **SMALL)],
            privacy=private(),
            rounds=2,
        )
        (event,) = {own.planned[0].event.sample_rate for own in loop.plan_schedule().clients}
        assert event == rate


def test_what_clients_send_shows_neither_labels_nor_counts(make_loop):
    """Other numbers of records of each class, or none of some: the same blocks, divisors and coordinates."""
    shapes, divisors = set(), set()
    for counts in (UNEQUAL, [[4, 5, 8], [14, 0, 0], [0, 0, 13], [0, 17, 0]]):
        spy = Spy()
        loop, _ = distilled(make_loop, digits(counts), privacy=private(), others=[spy], rounds=1)
        shapes.add(tuple(spy._updates[0].released.shape))
        divisors.add(tuple(spy._views[0].mechanism(client, PURPOSE).expected_batch_size for client in range(4)))
        matched = sum(p.numel() for p in loop.module.trainable if p.dim() >= 2)
    assert shapes == {(4, CLASSES, matched)} and divisors == {(17.0, 14.0, 13.0, 17.0)}


def test_every_parameter_is_sent_where_it_is_used(make_loop):
    for options in ({"matching": "mse"}, {"matching": "cos"}, {"net_update": "aggregate"}):
        spy = Spy()
        loop, _ = distilled(make_loop, privacy=private(), others=[spy], rounds=1, **options)
        assert spy._updates[0].released.shape == (4, CLASSES, loop.module.num_params)


def test_the_noise_of_the_target_is_known(make_loop):
    """Hardly anything but noise, 3 x 240 numbers: its standard deviation within 12 % (false alarm below 1e-5)."""
    for counts in (EQUAL, UNEQUAL):
        own = Target(**SMALL)
        sizes = [sum(own_counts) for own_counts in counts]
        loop = make_loop(
            population=digits(counts),
            module=a_net(),
            new_net=new_net,
            clients=ClientOptions(count=4, batch_size=sizes),
            callbacks=[own],
            privacy=PrivacyOptions(noise_multiplier=300.0, delta=1e-3, noise_key=FIXED_KEY),
            rounds=1,
        )
        loop.run()
        target, present = own.kept[0]
        assert present.all()
        assert float(target.std()) == pytest.approx(own._target_noise_std, rel=0.12)


def test_with_a_public_divisor_the_target_has_the_scale_of_a_class_mean(make_loop):
    """Equal classes and hardly any noise or clipping: the target is the mean gradient of each class."""
    population = digits(EQUAL)
    own = Target(**SMALL)
    loop = make_loop(
        population=population,
        module=a_net(),
        new_net=new_net,
        clients=ClientOptions(count=4, batch_size=12),
        callbacks=[own],
        privacy=PrivacyOptions(noise_multiplier=1e-9, clip_norm=1e3, delta=1e-3, noise_key=FIXED_KEY),
        rounds=1,
    )
    params = loop.module.unflatten(loop.module.flat)
    loop.run()
    torch.testing.assert_close(own.kept[0][0], torch.stack(class_means(population, params)), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"serial"}))
def test_every_engine_leads_to_the_same_set(make_loop, engine):
    """Also where a module has been through a Trainer, or holds a task: the server's nets are copies of it."""
    ours, theirs = (
        images_of(distilled(make_loop, digits(UNEQUAL), privacy=private(), engine=one)[1]) for one in (engine, "serial")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_noise_of_a_mean_is_charged_as_what_it_is_on_the_sum(make_loop):
    noise = PrivacyOptions(noise_multiplier=0.5, delta=1e-3, noise_key=FIXED_KEY)
    loop, own = distilled(make_loop, digits(EQUAL), privacy=noise, noise_scale="paper_mean")
    assert loop.budgets.ledger.events(0)[0] == GaussianEvent(1.0, 0.5 * 12 / CLASSES, 1)
    same = PrivacyOptions(noise_multiplier=2.0, delta=1e-3, noise_key=FIXED_KEY)
    assert torch.equal(images_of(own), images_of(distilled(make_loop, digits(EQUAL), privacy=same)[1]))
    for drawn, mean_of in ((2, 2), (100, 4)):
        few, _ = distilled(
            make_loop, digits(EQUAL), privacy=noise, noise_scale="paper_mean", sampling="fixed", records_per_class=drawn
        )
        assert few.budgets.ledger.events(0)[0] == GaussianEvent(1.0, 0.5 * mean_of, 1)
    exact = get_accountant("gdp").epsilon([GaussianEvent(1.0, 0.01 * 256, 500)], 1e-5)
    assert exact == pytest.approx(74.6, abs=0.06)
    with pytest.raises(UserError, match=r"noise_scale` must be sum here, got 'paper_mean'"):
        distilled(make_loop, privacy=private(), noise_scale="paper_mean")


def test_given_noise_beside_a_budget_stops_when_it_is_spent(make_loop):
    both = PrivacyOptions(epsilon=4.0, noise_multiplier=2.0, delta=1e-3, noise_key=FIXED_KEY)
    loop, _ = distilled(make_loop, privacy=both, rounds=40)
    assert 1 < loop.state.round < 40
    assert all(0 < spent <= 4.0 for spent in loop.budgets.spent())


def test_a_run_without_noise_warns_and_has_no_guarantee(make_loop):
    with pytest.warns(UserNotice, match="without noise: whoever sees them can reconstruct"):
        loop, _ = distilled(make_loop, privacy=PrivacyOptions(noise_multiplier=0.0, delta=1e-3))
    assert all(math.isinf(promise.epsilon) for promise in loop.budgets.guarantees())


# --- the server's own work


@NOTICE
def test_classes_that_nobody_has_keep_their_images(make_loop):
    population = digits([[9, 3, 0], [2, 8, 0], [6, 6, 0]])
    spy = Spy()
    _, own = distilled(make_loop, population, rounds=3, others=[spy])
    seed = torch_seed(public_generator(0, "images"))
    noise = torch.randn(CLASSES, 2, *SHAPE, generator=torch.Generator().manual_seed(seed))
    state = own.state_dict()
    assert torch.equal(state["images"][2], noise[2]) and not state["velocity"][2].any()
    assert not torch.equal(state["images"][:2], noise[:2])
    assert [told["classes_left_out"] for told in spy._told] == [1.0] * 3


@NOTICE
def test_targets_of_few_records_are_left_out_without_noise_only(make_loop):
    counts = [[9, 3, 5], [2, 8, 4], [6, 6, 1]]  # 17, 17, 10
    for options, left_out in (({}, 1.0), ({"aggregation": "uniform"}, 1.0), ({"privacy": private()}, 0.0)):
        spy = Spy()
        distilled(make_loop, digits(counts), rounds=1, others=[spy], min_records_per_target=12, **options)
        assert [told["classes_left_out"] for told in spy._told] == [left_out]


@NOTICE
def test_the_net_begins_again_as_often_as_it_should(make_loop):
    def ages(**options):
        spy = Spy()
        distilled(make_loop, rounds=5, others=[spy], **options)
        return [told["net_reinitialised"] for told in spy._told], spy

    fresh, spy = ages(reinit_every=2)
    assert fresh == [0, 1, 0, 1, 0]
    seed = torch_seed(public_generator(0, "initialisation", 4))
    assert torch.equal(spy._states[3].models[0], a_net(seed=seed).flat)
    assert ages(images_per_class=1)[0] == [1] * 5 and loops(1)[0] == 1
    assert ages(reinit_every=0)[0] == ages(mode="paper_literal", images_per_class=1)[0] == [0] * 5


@NOTICE
def test_the_net_may_follow_the_released_gradients(make_loop):
    population, own = digits(UNEQUAL), Target(net_update="aggregate", net_learning_rate=0.3, **SMALL)
    loop = make_loop(
        population=population,
        module=a_net(),
        new_net=new_net,
        callbacks=[own],
        privacy=None,
        rounds=1,
        clients=ClientOptions(count=4, batch_size=8),
    )
    start = loop.module.flat
    loop.run()
    torch.testing.assert_close(loop.state.models[0], start - 0.3 * own.kept[0][0].mean(dim=0))
    assert not torch.equal(loop.state.models[0], start)


@NOTICE
def test_evaluation_changes_nothing_and_gives_the_same_net_for_the_same_set(make_loop):
    found = []
    for every in (1, 4):
        own = Distillation(**SMALL)
        loop = make_loop(
            population=digits(EQUAL),
            module=a_net(),
            new_net=new_net,
            callbacks=[own],
            privacy=None,
            rounds=4,
            evaluate_every=every,
            clients=ClientOptions(count=4, batch_size=12),
        )
        loop.run()
        found.append((images_of(own), loop.delivered(loop.state).models))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("privacy", [None, private()], ids=["plain", "private"])
@NOTICE
def test_resumed_equals_unbroken(privacy, make_loop):
    options = {"reinit_every": 3, "augmentation": "dsa", "participation_fraction": 0.5, **SMALL}

    def run(**more):
        return make_loop(
            population=digits(EQUAL),
            module=a_net(),
            new_net=new_net,
            callbacks=[Distillation(**options)],
            privacy=privacy,
            rounds=6,
            clients=ClientOptions(count=4, batch_size=12),
            evaluate_every=6,
            **(more or {}),
        )

    unbroken = run()
    unbroken.run()
    broken = run(checkpoint_seconds=0.0)
    for round in (2, 5):
        cut_at(broken, round)
        with pytest.raises(PowerCut):
            broken.run(resume=round > 2)
        broken = run(output_dir=broken.output_dir, checkpoint_seconds=0.0)
    broken.run(resume=True)
    ours, theirs = (loop.callbacks[0].state_dict() for loop in (broken, unbroken))
    assert torch.equal(ours["images"], theirs["images"]) and torch.equal(ours["velocity"], theirs["velocity"])
    assert torch.equal(broken.state.models, unbroken.state.models) and ours["age"] == theirs["age"]


def test_another_rule_may_weigh(make_loop):
    spy = Spy()
    loop, own = distilled(make_loop, privacy=private(), others=[Uniform(), spy], aggregation="by_base_rule", rounds=1)
    assert own.role == "correction"
    combined = spy._updates[0].released.mean(dim=0)
    assert combined.shape == (CLASSES, sum(p.numel() for p in loop.module.trainable if p.dim() >= 2))
    with pytest.raises(UserError, match="exactly one base rule"):
        distilled(make_loop, privacy=private(), others=[Uniform()])


@NOTICE
def test_a_set_of_real_digits_teaches_a_net(make_loop):
    """Six images a class in place of 60 records: most test records of three classes are told apart."""
    population = digits([[15, 15, 15]] * 4)
    options = {
        "images_per_class": 6,
        "evaluation_epochs": 100,
        "net_epochs": 10,
        "net": lambda seed: a_net(8, seed).net,
    }
    loop, _ = distilled(make_loop, population, rounds=10, image_steps=10, reinit_every=4, **options)
    assert loop.evaluated[10].test.accuracy > 0.75
    told = loop.told
    assert 0 < told["matching_loss_per_row"] < 2
    assert told["matching_loss"] == pytest.approx(told["matching_loss_per_row"] * CLASSES * (8 + 8 + 3), rel=1e-5)


def test_a_run_leaves_its_set_and_says_how_it_was_made(make_loop):
    loop, own = distilled(make_loop, privacy=private(), rounds=2)
    left = load_distilled(loop.output_dir)
    assert torch.equal(left.x, images_of(own).flatten(0, 1)) and left.y.tolist() == [0, 0, 1, 1, 2, 2]
    card = left.card
    assert 0.98 * 8 < card["epsilon_max"] <= 8 and card["delta_max"] == 1e-3
    assert card["guarantee"].startswith("(8, 0.001)-differential privacy per record")
    assert (card["clients"], card["records"], card["rounds"]) == (4, 61, 2)
    assert card["options"]["images_per_class"] == 2 and card["ledger"] == loop.budgets.ledger.head.as_dict()


@NOTICE
def test_a_set_made_without_noise_has_no_epsilon(make_loop):
    loop, _ = distilled(make_loop, rounds=1)
    card = load_distilled(loop.output_dir).card
    assert card["epsilon_max"] is None and card["guarantee"].startswith("No differential privacy")


def test_an_unfinished_run_leaves_no_set(make_loop):
    loop = make_loop(
        population=digits(EQUAL),
        module=a_net(),
        new_net=new_net,
        callbacks=[Distillation(**SMALL)],
        privacy=private(),
        clients=ClientOptions(count=4, batch_size=12),
    )
    cut_at(loop, 2)
    with pytest.raises(PowerCut):
        loop.run()
    with pytest.raises(UserError, match="be a folder with a distilled set"):
        load_distilled(loop.output_dir)


# --- what gradients give away


@NOTICE
def test_an_unprotected_gradient_of_one_record_gives_it_away_and_a_noised_one_does_not(make_loop):
    """The server's ordinary work with one participant, one record and many steps is gradient inversion."""
    population = digits([[1, 1, 1]])
    record = population.x[population.train_of[0]][population.y[population.train_of[0]].argsort()]
    options = {
        "images_per_class": 1,
        "image_steps": 100,
        "rounds": 1,
        "net_epochs": 0,
        "net": sigmoid_net,
    }
    found = {}
    for name, privacy in (("plain", None), ("private", private())):
        _, own = distilled(make_loop, population, privacy=privacy, **options)
        pairs = torch.stack([images_of(own)[:, 0].flatten(1), record.flatten(1)], dim=1)
        found[name] = min(float(torch.corrcoef(pair)[0, 1]) for pair in pairs)
        found[f"most {name}"] = max(float(torch.corrcoef(pair)[0, 1]) for pair in pairs)
    assert found["plain"] > 0.95
    assert found["most private"] < 0.5


def sigmoid_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, CLASSES))


# --- options


def test_the_mode_decides_what_is_left_out_and_nothing_else():
    literal = {"aggregation": "uniform", "sampling": "fixed", "reinit_every": 0, "image_learning_rate": 0.1}
    default = {"aggregation": "sampled", "sampling": None, "reinit_every": None, "image_learning_rate": 1.0}
    same = {
        "matching": "layerwise_cosine",
        "net_update": "synthetic",
        "image_steps": 1,
        "image_momentum": 0.5,
        "records_per_class": 256,
        "noise_scale": "sum",
    }
    for mode, expected in (("default", default), ("paper_literal", literal)):
        own = Distillation(mode=mode)._switches
        assert {name: own[name] for name in (*expected, *same)} == expected | same
        assert own["net_epochs"] is None and Distillation(mode=mode)._between.epochs == loops(10)[1]
    other = {"aggregation": "median", "sampling": "full", "reinit_every": 7, "image_learning_rate": 0.3}
    overridden = Distillation(mode="paper_literal", **other)._switches
    assert {name: overridden[name] for name in literal} == other
    for name, value in other.items():
        own = Distillation(mode="paper_literal", **{name: value})._switches
        assert own[name] == value and all(own[one] == literal[one] for one in literal if one != name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "paper"}, r"mode` must be one of default, paper_literal, got 'paper'"),
        ({"matching": "cosine"}, r"matching` must be one of .* got 'cosine'. Did you mean `cos`"),
        ({"aggregation": "medium"}, r"aggregation` must .*Did you mean `median`"),
        ({"images_per_class": 0}, r"images_per_class` must be >= 1, got 0"),
        ({"image_learning_rate": 0.0}, r"image_learning_rate` must be above 0"),
        ({"image_momentum": 1.0}, r"image_momentum` must be in \[0, 1\)"),
        ({"participation_fraction": 0.0}, r"participation_fraction` must be in \(0, 1\]"),
        ({"row_weights": "noise_aware", "matching": "mse"}, r"row_weights` must be equal unless"),
        ({"row_weights": "noise_aware", "aggregation": "median"}, r"row_weights` must be equal unless"),
        ({"reinit_every": -1}, r"reinit_every` must be >= 0"),
    ],
)
def test_bad_options_are_one_sentence(options, words):
    with pytest.raises(UserError, match=r"`strategies\.distillation\." + words):
        Distillation(**options)


def test_populations_that_do_not_fit_are_refused(make_loop):
    def planned(population=None, module=None, privacy=None, more=None, **options):
        loop = make_loop(
            population=population,
            module=module,
            callbacks=[Distillation(**options)],
            privacy=privacy or private(),
            **(more or {}),
        )
        loop.plan_schedule()

    with pytest.raises(UserError, match=r"min_participants` must be at most the 4 clients of a round, got 5"):
        planned()
    with pytest.raises(UserError, match=r"augmentation` must be none for these data, got 'dsa'"):
        planned(augmentation="dsa", min_participants=1)
    with pytest.raises(UserError, match=r"aggregation` must not be class_count where clients add noise"):
        planned(aggregation="class_count", min_participants=1)
    own = type("Own", (ClientModule,), {"personal": ("0.bias",)})
    with pytest.raises(UserError, match="`personal` must be empty"):
        planned(module=own(small_net()), min_participants=1)
    with pytest.raises(UserError, match="`new_net` must be a function, got None"):
        planned(min_participants=1, more={"new_net": None})
    pairs = [(torch.randn(20, 6), torch.randn(20)) for _ in range(4)]
    with pytest.raises(UserError, match="must have records of classes, got '1 class'"):
        planned(Population.from_datasets(pairs), ClientModule(nn.Linear(6, 1)), min_participants=1)


def test_vectors_of_numbers_are_distilled_too(make_loop):
    loop = make_loop(callbacks=[Distillation(**SMALL)], population=blobs())
    assert loop.run().finished


def test_shares_of_nobody_are_zeros():
    blocks = torch.arange(6.0).view(2, 1, 3).expand(2, 2, 3)
    found = mean_of_holders(blocks, torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    assert found.tolist() == [[2.25, 3.25, 4.25], [0.0, 0.0, 0.0]]


def test_augmentations_of_a_round_are_in_its_job(make_loop):
    loop = make_loop(
        population=digits(EQUAL),
        module=a_net(),
        new_net=new_net,
        clients=ClientOptions(count=4, batch_size=12),
        privacy=private(),
        callbacks=[Distillation(augmentation="dsa_without_flip", **SMALL)],
    )
    jobs, train = [], loop.engine.train

    def spy(plan, *rest):
        jobs.append(plan.job)
        return train(plan, *rest)

    loop.engine.train = spy
    loop.run()
    drawn = [job.augmentation for job in jobs]
    assert all(isinstance(one, ClassAugmentation) and "flip" not in one.operations for one in drawn)
    assert len(set(drawn)) == 3
    assert {job.parameters for job in jobs} == {
        matched_names({n: tuple(p.shape) for n, p in a_net().named_trainable.items()}, "layerwise_cosine")
    }
