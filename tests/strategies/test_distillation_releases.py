"""What distillation releases, what it costs, and what it gives away."""

import math

import pytest
import torch
from conftest import FIXED_KEY, private
from fakes import Recorder
from few_digits import (
    CLASSES,
    EQUAL,
    NOTICE,
    SMALL,
    UNEQUAL,
    Target,
    class_means,
    digits,
    distilled,
    few,
    images_of,
    target_of,
)
from torch import nn

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserNotice
from dpfl_lightning.federated.client.module import LocalTask
from dpfl_lightning.federated.messages.jobs import ClassGradients
from dpfl_lightning.papers.distillation.distillation import PURPOSE, Distillation
from dpfl_lightning.privacy.accounting.events import GaussianEvent, LaplaceEvent
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import ENLARGED, Gaussian
from dpfl_lightning.privacy.noise import RandomGenerator


def given_noise(noise, **options):
    return PrivacyOptions(noise_multiplier=noise, delta=1e-3, noise_key=FIXED_KEY, **options)


def events_of(loop, client=0):
    return loop.clients.budgets.ledger.events(client)


# ---- cost


@pytest.mark.slow
def test_a_round_costs_one_step_however_many_classes_and_what_is_sent_is_counted(make_loop):
    loop, _ = distilled(make_loop, privacy=private(), rounds=3, image_steps=4)
    for client in range(4):
        (noise,) = {event.noise_multiplier for event in events_of(loop, client)}
        assert events_of(loop, client) == [GaussianEvent(1.0, noise, 1)] * 3
    assert {charge.purpose for charge in read_ledger(loop.clients.folder.ledger_file)} == {PURPOSE}
    assert all(0.98 * 8.0 < spent <= 8.0 for spent in loop.clients.budgets.spent())
    matched = sum(p.numel() for p in loop.module.trainable if p.dim() >= 2)
    assert loop.totals.metrics["floats_up"] == 3 * 4 * CLASSES * matched
    assert loop.totals.metrics["floats_down"] == 3 * 4 * loop.module.num_params


@pytest.mark.slow
def test_with_laplace_noise_a_round_costs_a_pure_epsilon(make_loop):
    loop, _ = distilled(make_loop, privacy=private(300.0, delta=0.0, mechanism="laplace"), rounds=3)
    for client in range(4):
        noise = loop.schedule.clients[client].main.noise_multiplier
        assert events_of(loop, client) == [LaplaceEvent(noise, 1)] * 3
        assert 3 / noise == pytest.approx(300.0, rel=1e-3)


@pytest.mark.slow
@NOTICE
@pytest.mark.parametrize("drawn, counted", [(2, 4 * 3 * 2), (100, 4 * 12)])
def test_records_of_a_round_are_those_that_are_drawn(drawn, counted, make_loop):
    seen = Recorder()
    distilled(make_loop, digits(EQUAL), others=[seen], sampling="fixed", records_per_class=drawn)
    assert [report.records for report in seen.reports] == [counted] * 2


@pytest.mark.slow
def test_clients_that_take_part_less_often_have_less_noise(make_loop):
    loop, _ = distilled(make_loop, privacy=private(), rounds=7, participation_fraction=0.5)
    charges = read_ledger(loop.clients.folder.ledger_file)
    of_round = [{charge.client for charge in charges if charge.round == round} for round in range(1, 8)]
    assert all(len(cohort) == 2 for cohort in of_round) and len(set(map(frozenset, of_round))) > 1
    counts = [sum(client in cohort for cohort in of_round) for client in range(4)]
    noises = [loop.schedule.clients[client].main.noise_multiplier for client in range(4)]
    assert len(set(counts)) > 1
    assert [noise for _, noise in sorted(zip(counts, noises, strict=True))] == sorted(noises)
    assert all(0.98 * 8.0 < spent <= 8.0 for spent in loop.clients.budgets.spent())


@pytest.mark.e2e
def test_the_plan_keeps_reserve_rounds_and_amplifies_poisson_draws_only(make_loop):
    strategy = Distillation(participation_fraction=0.5, **SMALL)
    loop = few(make_loop, strategy, counts=UNEQUAL, privacy=private(reserve_rounds=2), rounds=5)
    assert sum(own.count_of(PURPOSE) for own in loop.plan_schedule().clients) == 5 * 2 + 4 * 2
    for sampling, rate in (("poisson", 0.5), ("full", 1.0), (None, 1.0), ("fixed", 1.0)):
        strategy = Distillation(sampling=sampling, **SMALL)
        schedule = few(make_loop, strategy, batch_size=6, privacy=private(), rounds=2).plan_schedule()
        assert {own.planned[0].event.sample_rate for own in schedule.clients} == {rate}, sampling


@pytest.mark.e2e
def test_given_noise_with_a_budget_stops_when_it_is_spent(make_loop):
    loop, _ = distilled(make_loop, privacy=private(4.0, noise_multiplier=2.0), rounds=40)
    assert 1 < loop.state.round < 40
    assert all(0 < spent <= 4.0 for spent in loop.clients.budgets.spent())


@pytest.mark.e2e
def test_releases_without_noise_are_warned_of_and_have_no_guarantee(make_loop):
    with pytest.warns(UserNotice, match="without noise. Records can be reconstructed"):
        loop, _ = distilled(make_loop, privacy=PrivacyOptions(noise_multiplier=0.0, delta=1e-3))
    assert all(math.isinf(promise.epsilon) for promise in loop.clients.budgets.guarantees())
    words = r"gradients of single classes are sent without noise from 1 of 4 clients. Records can be reconstructed"
    with pytest.warns(UserNotice, match=words):
        distilled(make_loop, privacy=private([8.0, 8.0, 8.0, math.inf]), rounds=1)


# ---- what is sent


@pytest.mark.slow
def test_what_clients_send_shows_neither_labels_nor_counts(make_loop):
    """Other numbers of records of each class, or none of some: the same blocks, divisors and coordinates."""
    shapes, divisors = set(), set()
    for counts in (UNEQUAL, [[4, 5, 8], [14, 0, 0], [0, 0, 13], [0, 17, 0]]):
        seen = Recorder(updates=True)
        loop, _ = distilled(make_loop, digits(counts), privacy=private(), others=[seen], rounds=1)
        view = loop.view(loop.state)
        shapes.add(tuple(seen.updates[0].released.shape))
        divisors.add(tuple(view.mechanism(client, PURPOSE).expected_batch_size for client in range(4)))
        matched = sum(p.numel() for p in loop.module.trainable if p.dim() >= 2)
    assert shapes == {(4, CLASSES, matched)} and divisors == {(17.0, 14.0, 13.0, 17.0)}


@pytest.mark.slow
def test_every_parameter_is_sent_where_it_is_used(make_loop):
    seen = Recorder(updates=True)
    loop, _ = distilled(make_loop, privacy=private(), others=[seen], rounds=1, matching="mse")
    assert seen.updates[0].released.shape == (4, CLASSES, loop.module.num_params)


@pytest.mark.slow
@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"serial"}))
def test_every_engine_leads_to_the_same_set(make_loop, engine):
    """Also where a module has been through a Trainer, or holds a task: the server's nets are copies of it."""
    ours, theirs = (
        images_of(distilled(make_loop, digits(UNEQUAL), privacy=private(), engine=one)[1]) for one in (engine, "serial")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


# ---- noise and divisors


def test_the_noise_of_a_release_is_that_of_its_sum_however_many_records_were_drawn():
    """What is sent, times the public divisor, less the clipped sums: 100,000 numbers, seed 0, within 2 % (nine standard
    errors) of noise multiplier times clip norm, whatever the divisor is."""
    sums = torch.randn(10, 10_000, generator=torch.Generator().manual_seed(0))
    for drawn, expected in ((0, 10.0), (0, 640.0), (500, 640.0), (700, 640.0)):
        mechanism = Gaussian(clip_norm=0.5, noise_multiplier=3.0, sample_rate=1.0, expected_batch_size=expected)
        labels = torch.arange(drawn) % 10
        task = LocalTask(None, mechanism, RandomGenerator(bytes(32)), learning_rate=0.1)
        sent = task.class_gradients(ClassGradients(10), sums, torch.float32, labels, labels)
        noise = sent * expected - sums
        assert float(noise.std()) == pytest.approx(3.0 * 0.5, rel=0.02)
        assert abs(float(noise.mean())) < 5 * 1.5 / math.sqrt(noise.numel())


def targeted(make_loop, noise, clip_norm=1e3, options=None, **more):
    """The strategy after one round, and the parameters that the gradients were taken at."""
    strategy = Target(**SMALL | (options or {}))
    loop = few(make_loop, strategy, privacy=given_noise(noise, clip_norm=clip_norm), rounds=1, **more)
    params = loop.module.unflatten(loop.module.flat)
    loop.run()
    return strategy, params


@pytest.mark.slow
def test_the_noise_of_the_target_is_known(make_loop):
    """Hardly anything but noise, 3 x 240 numbers: its standard deviation within 12 % (false alarm below 1e-5)."""
    for counts in (EQUAL, UNEQUAL):
        strategy, _ = targeted(make_loop, 300.0, clip_norm=1.0, counts=counts)
        target, present = strategy.kept[0]
        assert present.all()
        assert float(target.std()) == pytest.approx(strategy.noise_std, rel=0.12)


def test_with_a_public_divisor_the_target_has_the_scale_of_a_class_mean(make_loop):
    """Equal classes and hardly any noise or clipping: the target is the mean gradient of each class."""
    strategy, params = targeted(make_loop, 1e-9)
    means = torch.stack(class_means(digits(EQUAL), params))
    torch.testing.assert_close(strategy.kept[0][0], means, rtol=1e-3, atol=1e-5)


def eight_times() -> Population:
    """Four clients with eight times the same record of each class: the mean of a class is that of any draw of it."""
    population = digits([[1, 1, 1]] * 4)
    pairs = [(population.x[rows].repeat(8, 1, 1, 1), population.y[rows].repeat(8)) for rows in population.train_of]
    return Population.from_datasets(pairs, held_out=0.0, num_classes=CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [2, 8, 100])
def test_a_draw_of_a_fixed_number_is_divided_by_that_number(drawn, make_loop):
    """Hardly any noise or clipping gives the mean gradient of each class, and hardly anything but noise (4 x 3 x 240
    numbers) the standard deviation that is reported, within 12 % (false alarm below 1e-5)."""
    population, options = eight_times(), {"sampling": "fixed", "records_per_class": drawn}
    clients = {"counts": [[8, 8, 8]] * 4, "population": population, "options": options}
    strategy, params = targeted(make_loop, 1e-9, **clients)
    means = torch.stack(class_means(population, params))
    torch.testing.assert_close(strategy.kept[0][0], means, rtol=1e-3, atol=1e-5)
    strategy, _ = targeted(make_loop, 300.0, **clients)
    divisor = 4 * min(24, 3 * drawn)
    assert strategy.noise_std == pytest.approx(3 * 2 * 1e3 * ENLARGED * 300.0 / divisor)
    assert float(strategy.kept[0][0].std()) == pytest.approx(strategy.noise_std, rel=0.12)


@NOTICE
def test_without_noise_the_divisor_does_not_matter(make_loop):
    """The exact counts that are sent with the sums are divided in the same way."""
    population = eight_times()
    target, _, params = target_of(make_loop, population, sampling="fixed", records_per_class=2)
    torch.testing.assert_close(target, torch.stack(class_means(population, params)), rtol=1e-4, atol=1e-6)


# ---- what gradients give away


def sigmoid_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, CLASSES))


@pytest.mark.slow
@NOTICE
def test_an_unprotected_gradient_of_one_record_gives_it_away_and_a_noised_one_does_not(make_loop):
    """The server's ordinary work with one participant, one record and many steps is gradient inversion."""
    population = digits([[1, 1, 1]])
    record = population.x[population.train_of[0]][population.y[population.train_of[0]].argsort()]
    options = {"images_per_class": 1, "image_steps": 100, "rounds": 1, "net_epochs": 0, "net": sigmoid_net}

    def likeness(privacy):
        _, strategy = distilled(make_loop, population, privacy=privacy, **options)
        pairs = torch.stack([images_of(strategy)[:, 0].flatten(1), record.flatten(1)], dim=1)
        return [float(torch.corrcoef(pair)[0, 1]) for pair in pairs]

    assert min(likeness(None)) > 0.95
    assert max(likeness(private())) < 0.5
