"""What distillation lets out of clients, what it costs, and what it gives away."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import FIXED_KEY
from few_digits import (
    CLASSES,
    EQUAL,
    NOTICE,
    SMALL,
    UNEQUAL,
    Reports,
    Spy,
    Target,
    a_net,
    class_means,
    digits,
    distilled,
    images_of,
    new_net,
    private,
    target_of,
)
from torch import nn

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client import class_gradients
from dpfl_lightning.federated.messages.plan import ClassGradients
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, LaplaceEvent
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import ENLARGED, Gaussian
from dpfl_lightning.privacy.noise import RandomGenerator
from dpfl_lightning.strategies.distillation.distillation import PURPOSE, Distillation


@pytest.mark.slow
def test_a_round_costs_one_step_however_many_classes(make_loop):
    loop, _ = distilled(make_loop, privacy=private(), rounds=3, image_steps=4)
    for client in range(4):
        events = loop.clients.budgets.ledger.events(client)
        (noise,) = {event.noise_multiplier for event in events}
        assert events == [GaussianEvent(1.0, noise, 1)] * 3
    assert {charge.purpose for charge in read_ledger(loop.clients.folder.ledger_file)} == {PURPOSE}
    assert all(0.98 * 8.0 < spent <= 8.0 for spent in loop.clients.budgets.spent())


@pytest.mark.slow
def test_with_laplace_noise_a_round_costs_a_pure_epsilon(make_loop):
    privacy = PrivacyOptions(epsilon=300.0, delta=0.0, mechanism="laplace", noise_key=FIXED_KEY)
    loop, _ = distilled(make_loop, privacy=privacy, rounds=3)
    for client in range(4):
        assert (
            loop.clients.budgets.ledger.events(client)
            == [LaplaceEvent(loop.schedule.clients[client].main.noise_multiplier, 1)] * 3
        )
        assert 3 / loop.schedule.clients[client].main.noise_multiplier == pytest.approx(300.0, rel=1e-3)


@pytest.mark.slow
@NOTICE
@pytest.mark.parametrize("drawn, counted", [(2, 4 * 3 * 2), (100, 4 * 12)])
def test_records_of_a_round_are_those_that_are_drawn(drawn, counted, make_loop):
    seen = Reports()
    distilled(make_loop, digits(EQUAL), others=[seen], sampling="fixed", records_per_class=drawn)
    assert seen.kept == [counted] * 2


@pytest.mark.slow
def test_what_is_sent_is_counted(make_loop):
    loop, _ = distilled(make_loop, privacy=private(), rounds=2)
    matched = sum(p.numel() for p in loop.module.trainable if p.dim() >= 2)
    assert loop.totals.metrics["floats_up"] == 2 * 4 * CLASSES * matched
    assert loop.totals.metrics["floats_down"] == 2 * 4 * loop.module.num_params


@pytest.mark.slow
def test_who_takes_part_less_often_has_less_noise(make_loop):
    loop, _ = distilled(make_loop, privacy=private(), rounds=7, participation_fraction=0.5)
    charges = read_ledger(loop.clients.folder.ledger_file)
    of_round = [{charge.client for charge in charges if charge.round == round} for round in range(1, 8)]
    assert all(len(cohort) == 2 for cohort in of_round) and len(set(map(frozenset, of_round))) > 1
    counts = [sum(client in cohort for cohort in of_round) for client in range(4)]
    noises = [loop.schedule.clients[client].main.noise_multiplier for client in range(4)]
    assert len(set(counts)) > 1
    by_count = sorted(zip(counts, noises, strict=True))
    assert [noise for _, noise in by_count] == sorted(noises)
    assert all(0.98 * 8.0 < spent <= 8.0 for spent in loop.clients.budgets.spent()), (
        "planned for the rounds they are drawn for"
    )


def test_reserve_rounds_are_kept(make_loop):
    loop = make_loop(
        population=digits(UNEQUAL),
        module=a_net(),
        new_net=new_net,
        clients=ClientOptions(count=4, batch_size=8),
        parts=[Distillation(participation_fraction=0.5, **SMALL)],
        privacy=private(reserve_rounds=2),
        rounds=5,
    )
    counts = [own.count_of(PURPOSE) for own in loop.plan_schedule().clients]
    assert sum(counts) == 5 * 2 + 4 * 2


@pytest.mark.slow
def test_poisson_draws_are_amplified_and_full_batches_are_not(make_loop):
    for sampling, rate in (("poisson", 0.5), ("full", 1.0), (None, 1.0), ("fixed", 1.0)):
        loop = make_loop(
            population=digits(EQUAL),
            module=a_net(),
            new_net=new_net,
            clients=ClientOptions(count=4, batch_size=6),
            parts=[Distillation(sampling=sampling, **SMALL)],
            privacy=private(),
            rounds=2,
        )
        (event,) = {own.planned[0].event.sample_rate for own in loop.plan_schedule().clients}
        assert event == rate


@pytest.mark.slow
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


@pytest.mark.slow
def test_every_parameter_is_sent_where_it_is_used(make_loop):
    for options in ({"matching": "mse"}, {"matching": "cos"}, {"net_update": "aggregate"}):
        spy = Spy()
        loop, _ = distilled(make_loop, privacy=private(), others=[spy], rounds=1, **options)
        assert spy._updates[0].released.shape == (4, CLASSES, loop.module.num_params)


@pytest.mark.slow
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
            parts=[own],
            privacy=PrivacyOptions(noise_multiplier=300.0, delta=1e-3, noise_key=FIXED_KEY),
            rounds=1,
        )
        loop.run()
        target, present = own.kept[0]
        assert present.all()
        assert float(target.std()) == pytest.approx(own._target_noise_std, rel=0.12)


def test_the_noise_of_a_release_is_that_of_its_sum_however_many_records_were_drawn():
    """What is sent, times the public divisor, less the clipped sums: 100,000 numbers, seed 0, within 2 % (nine standard
    errors) of noise multiplier times clip norm, whatever the divisor is."""
    sums = torch.randn(10, 10_000, generator=torch.Generator().manual_seed(0))
    for drawn, expected in ((0, 10.0), (0, 640.0), (500, 640.0), (700, 640.0)):
        mechanism = Gaussian(clip_norm=0.5, noise_multiplier=3.0, sample_rate=1.0, expected_batch_size=expected)
        labels = torch.arange(drawn) % 10
        task = SimpleNamespace(mechanism=mechanism, noise=RandomGenerator(bytes(32)))
        sent = class_gradients.release(ClassGradients(10), sums, task, torch.float32, labels, labels)
        noise = sent * expected - sums
        assert float(noise.std()) == pytest.approx(3.0 * 0.5, rel=0.02)
        assert abs(float(noise.mean())) < 5 * 1.5 / math.sqrt(noise.numel())


def targeted(make_loop, population: Population, batch_size: int, noise: float, **options):
    """The strategy after a round with hardly any clipping, and the parameters that the gradients were taken at."""
    own = Target(**SMALL, **options)
    loop = make_loop(
        population=population,
        module=a_net(),
        new_net=new_net,
        clients=ClientOptions(count=4, batch_size=batch_size),
        parts=[own],
        privacy=PrivacyOptions(noise_multiplier=noise, clip_norm=1e3, delta=1e-3, noise_key=FIXED_KEY),
        rounds=1,
    )
    params = loop.module.unflatten(loop.module.flat)
    loop.run()
    return own, params


def test_with_a_public_divisor_the_target_has_the_scale_of_a_class_mean(make_loop):
    """Equal classes and hardly any noise or clipping: the target is the mean gradient of each class."""
    population = digits(EQUAL)
    own, params = targeted(make_loop, population, batch_size=12, noise=1e-9)
    torch.testing.assert_close(own.kept[0][0], torch.stack(class_means(population, params)), rtol=1e-3, atol=1e-5)


def repeated(population: Population, times: int) -> Population:
    """Every record so many times at its client: the mean of a class is that of any draw of it."""
    pairs = [
        (population.x[rows].repeat(times, 1, 1, 1), population.y[rows].repeat(times)) for rows in population.train_of
    ]
    return Population.from_datasets(pairs, held_out=0.0, num_classes=CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [2, 8, 100])
@pytest.mark.parametrize("noise", [1e-9, 300.0])
def test_a_draw_of_a_fixed_number_is_divided_by_that_number(drawn, noise, make_loop):
    """Eight records a class: hardly any noise or clipping gives the mean gradient of each class, and hardly anything
    but noise (4 x 3 x 240 numbers) the standard deviation that is told, within 12 % (false alarm below 1e-5)."""
    population = repeated(digits([[1, 1, 1]] * 4), 8)
    sampling = {"sampling": "fixed", "records_per_class": drawn}
    own, params = targeted(make_loop, population, batch_size=24, noise=noise, **sampling)
    target, _ = own.kept[0]
    if noise > 1:
        divisor = 4 * min(24, 3 * drawn)
        assert own._target_noise_std == pytest.approx(3 * 2 * 1e3 * ENLARGED * noise / divisor)
        assert float(target.std()) == pytest.approx(own._target_noise_std, rel=0.12)
    else:
        torch.testing.assert_close(target, torch.stack(class_means(population, params)), rtol=1e-3, atol=1e-5)


@NOTICE
def test_without_noise_the_divisor_is_no_matter(make_loop):
    """The exact counts beside the sums are divided alike."""
    population = repeated(digits([[1, 1, 1]] * 4), 8)
    target, _, params = target_of(make_loop, population, sampling="fixed", records_per_class=2)
    torch.testing.assert_close(target, torch.stack(class_means(population, params)), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"serial"}))
def test_every_engine_leads_to_the_same_set(make_loop, engine):
    """Also where a module has been through a Trainer, or holds a task: the server's nets are copies of it."""
    ours, theirs = (
        images_of(distilled(make_loop, digits(UNEQUAL), privacy=private(), engine=one)[1]) for one in (engine, "serial")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_noise_of_a_mean_is_charged_as_what_it_is_on_the_sum(make_loop):
    noise = PrivacyOptions(noise_multiplier=0.5, delta=1e-3, noise_key=FIXED_KEY)
    loop, own = distilled(make_loop, digits(EQUAL), privacy=noise, noise_scale="paper_mean")
    assert loop.clients.budgets.ledger.events(0)[0] == GaussianEvent(1.0, 0.5 * 12 / CLASSES, 1)
    same = PrivacyOptions(noise_multiplier=2.0, delta=1e-3, noise_key=FIXED_KEY)
    assert torch.equal(images_of(own), images_of(distilled(make_loop, digits(EQUAL), privacy=same)[1]))
    for drawn, mean_of in ((2, 2), (100, 4)):
        few, _ = distilled(
            make_loop, digits(EQUAL), privacy=noise, noise_scale="paper_mean", sampling="fixed", records_per_class=drawn
        )
        assert few.clients.budgets.ledger.events(0)[0] == GaussianEvent(1.0, 0.5 * mean_of, 1)
    exact = get_accountant("gdp").epsilon([GaussianEvent(1.0, 0.01 * 256, 500)], 1e-5)
    assert exact == pytest.approx(74.59, abs=0.01)
    with pytest.raises(UserError, match=r"noise_scale` must be sum without .*, got 'paper_mean'"):
        distilled(make_loop, privacy=private(), noise_scale="paper_mean")


def test_given_noise_beside_a_budget_stops_when_it_is_spent(make_loop):
    both = PrivacyOptions(epsilon=4.0, noise_multiplier=2.0, delta=1e-3, noise_key=FIXED_KEY)
    loop, _ = distilled(make_loop, privacy=both, rounds=40)
    assert 1 < loop.state.round < 40
    assert all(0 < spent <= 4.0 for spent in loop.clients.budgets.spent())


def test_a_run_without_noise_warns_and_has_no_guarantee(make_loop):
    with pytest.warns(UserNotice, match="without noise. Records can be reconstructed"):
        loop, _ = distilled(make_loop, privacy=PrivacyOptions(noise_multiplier=0.0, delta=1e-3))
    assert all(math.isinf(promise.epsilon) for promise in loop.clients.budgets.guarantees())


def test_clients_without_noise_beside_others_are_warned_of(make_loop):
    words = r"gradients of single classes are sent without noise from 1 of 4 clients. Records can be reconstructed"
    with pytest.warns(UserNotice, match=words):
        distilled(make_loop, privacy=private([8.0, 8.0, 8.0, math.inf]), rounds=1)


# --- what gradients give away


@pytest.mark.slow
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
