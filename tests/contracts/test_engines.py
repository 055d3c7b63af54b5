"""Every engine, by registration, against the reference: same noise, same draws, same parameters."""

import copy
import dataclasses
import itertools
from functools import partial

import numpy as np
import pytest
import reference
import task_cases
import torch
from conftest import EVERY_ENGINE, FIXED_KEY, small_net
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.channel import send_round
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.jobs import ClassGradients
from dpfl_lightning.federated.server import aggregate
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.models.augmentation import ClassAugmentation
from dpfl_lightning.models.tasks import TASKS
from dpfl_lightning.privacy.mechanism import Gaussian, Laplace, Mechanism
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.privacy.sampling import poisson_rows, rows_of_each_class
from dpfl_lightning.strategies.aggregation.fedprox import FedProx

#: the same for every engine
STREAMS = Streams(bytes(32))
OTHERS = sorted(set(ENGINES) - {"serial"})


def set_up(loop, streams=STREAMS):
    """The state that the first round of the loop begins with, and its view."""
    loop.plan_schedule()
    loop.clients.channel.setup(loop.module, HeldClients(loop.population), streams, "poisson")
    state = ServerState(loop.module.flat[None], (0,) * loop.population.num_clients)
    return state, loop.view(state)


def released(engine_name: str, make_loop, job=None, module=None, population=None, **options) -> torch.Tensor:
    engine = ENGINES[engine_name]()
    loop = make_loop(engine=engine, module=module or ClientModule(small_net()), population=population, **options)
    state, view = set_up(loop)
    plan = view.plan(job=job)
    for strategy in loop.config.strategies:
        plan = strategy.plan_round(plan, view)
    return trained(loop, plan, state).released


def trained(loop, plan, state, weights=None):
    """The updates of a plan."""
    return send_round(loop.clients.channel, plan, state.models, [0] * len(plan.clients), weights).updates()


def assert_as_serial(engine: str, make_loop, **options) -> torch.Tensor:
    ours = released(engine, make_loop, **options)
    torch.testing.assert_close(ours, released("serial", make_loop, **options), rtol=1e-5, atol=1e-5)
    return ours


def images(records: int) -> Population:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(4, records, 1, 8, 8, generator=generator), torch.randint(3, (4, records), generator=generator)
    return Population.from_datasets(list(zip(x, y, strict=True)), held_out=0.0, num_classes=3)


def image_module() -> ClientModule:
    torch.manual_seed(0)
    return ClientModule(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)))


def pooled_module() -> ClientModule:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return ClientModule(nn.Sequential(*layers, nn.Linear(64, 3)))


def test_every_engine_has_its_registered_name():
    assert {name: kind.name for name, kind in ENGINES.items()} == {name: name for name in ENGINES}


@pytest.mark.parametrize("engine", OTHERS)
def test_engine_equals_the_reference(engine, make_loop):
    assert_as_serial(engine, make_loop)
    options = {"population": images(20), "clients": ClientOptions(4, batch_size=8)}
    ours = released(engine, make_loop, module=pooled_module(), **options)
    theirs = released("serial", make_loop, module=pooled_module(), **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    pulled, plain = assert_as_serial(engine, make_loop, parts=[FedProx(2.0)]), released(engine, make_loop)
    assert not torch.allclose(pulled, plain)


@pytest.mark.e2e
@pytest.mark.parametrize("task", TASKS)
def test_engines_equal_the_reference_for_each_task(task, make_loop):
    torch.manual_seed(0)
    net, options = task_cases.module_of(task), {"population": task_cases.population(task)}
    options |= {"privacy": PrivacyOptions(noise_multiplier=0.5), "clients": ClientOptions(3, 4, learning_rate=0.3)}
    expected = released("serial", make_loop, module=copy.deepcopy(net), **options)
    for engine in OTHERS:
        actual = released(engine, make_loop, module=copy.deepcopy(net), **options)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


LAPLACE = {
    "privacy": PrivacyOptions(epsilon=[4.0, 6.0, 8.0, 10.0], delta=0.0, mechanism="laplace", clip_norm=2.0),
    "clients": ClientOptions(count=4, batch_size=None, learning_rate=0.3, local_epochs=2),
}


@pytest.mark.e2e
@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize("local_epochs", [1, 2])
def test_engine_adds_laplace_noise_to_sums_clipped_in_l1_as_the_reference(engine, local_epochs, make_loop):
    clients = dataclasses.replace(LAPLACE["clients"], local_epochs=local_epochs)
    for job in (None, ClassGradients(3), ClassGradients(3, parameters=("0.weight",), most_records=4)):
        assert_as_serial(engine, make_loop, **{**LAPLACE, "clients": clients, "job": job})


def noise(mechanism: Mechanism, client: int, numbers: int) -> torch.Tensor:
    """The client's noise in the first round, float32."""
    generator, step = STREAMS.generator("noise", 1, client), mechanism.grid(numbers)
    draw = generator.integer_laplace if mechanism.clip_order == 1 else generator.integer_normals
    return torch.from_numpy(step * draw(numbers, mechanism.noise_scale(numbers) / step)).float()


@pytest.mark.e2e
def test_the_reference_is_plain_autograd_with_laplace_noise(make_loop):
    """One full batch a client: what the slow form gives, with the same noise."""
    options = {**LAPLACE, "clients": dataclasses.replace(LAPLACE["clients"], local_epochs=1)}
    ours, loop = released("serial", make_loop, **options), make_loop(**options)
    loop.plan_schedule()
    net, count = small_net(), loop.module.num_params
    for client, row in enumerate(loop.config.settings):
        multiplier = loop.schedule.clients[client].noise_multiplier("train")
        x, y = loop.population.records(client, torch.arange(row.num_records))
        clipped = reference.clipped_sum(net, dict(net.named_parameters()), x, y, 2.0, order=1)
        expected = -0.3 * (clipped + noise(Laplace(2.0, multiplier, 1.0, 1.0), client, count)) / row.num_records
        torch.testing.assert_close(ours[client], expected, rtol=1e-5, atol=1e-5)


TURNED = ClassAugmentation(("rotate", "crop", "rotate"), ((0.1, 0.2, 0.3),) * 3)
CLASS_JOBS = {
    "all": ClassGradients(3),
    "some parameters": ClassGradients(3, parameters=("0.weight", "3.weight")),
    "augmented": ClassGradients(3, augmentation=TURNED),
    "few of each class": ClassGradients(3, most_records=4),
    "counted": ClassGradients(3, most_records=4, counts=True, parameters=("3.weight",)),
}


@pytest.mark.e2e
@pytest.mark.parametrize("job", CLASS_JOBS.values(), ids=CLASS_JOBS)
@pytest.mark.parametrize("records", [20, 150], ids=["together", "alone"])
@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_engine_gives_the_class_gradients_of_the_reference(engine, records, job, make_loop):
    """Record by record through plain autograd, with the noise and the draws of the same streams."""
    population, clients = images(records), ClientOptions(count=4, batch_size=records if job.most_records else 15)
    noise_multiplier = 0.0 if job.counts else 0.7
    privacy = PrivacyOptions(noise_multiplier=noise_multiplier, clip_norm=0.8, delta=1e-3, noise_key=FIXED_KEY)
    options = {"population": population, "clients": clients, "privacy": privacy}
    ours = released(engine, make_loop, job=job, module=image_module(), **options)
    net = image_module().net
    params = {name: p.detach() for name, p in net.named_parameters()}
    wanted = [name for name in params if job.parameters is None or name in job.parameters]
    for client, update in enumerate(ours):
        sampling = STREAMS.generator("sampling", 1, client)
        x, y = population.records(client, torch.arange(records))
        if job.most_records:
            rows = rows_of_each_class(y.numpy(), job.most_records, sampling)
            assert min(4, *y.bincount().tolist()) == min(y[rows].bincount().tolist())
        else:
            rows = poisson_rows(records, 15 / records, sampling)
        seen, labels = x[rows], y[rows]
        seen = seen if job.augmentation is None else TURNED(seen, labels)
        sums = torch.zeros(3, sum(params[name].numel() for name in wanted))
        for record, label in zip(seen, labels, strict=True):
            gradients = reference.class_gradient(net, params, record[None], int(label))
            kept = [g.flatten() for name, g in zip(params, gradients, strict=True) if name in wanted]
            gradient = torch.cat(kept)
            clip_norm = 0.4 if job.most_records else 0.8
            sums[label] += gradient * min(1.0, clip_norm / float(gradient.norm()))
        if not job.counts:
            sums += noise(Gaussian(0.8, 0.7, 1.0, 1.0), client, sums.numel()).view_as(sums)
        divisor = records if job.most_records else 15
        if job.counts:
            numbers = [labels.bincount(minlength=3), y.bincount(minlength=3)]
            sums = torch.cat([sums, torch.stack(numbers, dim=1)], dim=1)
        torch.testing.assert_close(update, sums / divisor, rtol=1e-4, atol=1e-6)


@pytest.mark.e2e
def test_a_job_that_its_event_does_not_cover_is_no_plan(make_loop):
    loop = make_loop()
    _, view = set_up(loop)
    with pytest.raises(ValueError, match="exact counts beside noisy sums"):
        view.plan(job=ClassGradients(3, counts=True))
    with pytest.raises(ValueError, match="not amplified"):
        view.plan(job=ClassGradients(3, most_records=2))


def test_class_gradients_have_the_noise_that_is_announced(make_loop):
    """Noise of 249 numbers a client: a standard deviation within 20 % (false alarm below 1e-5)."""
    loud = PrivacyOptions(noise_multiplier=500.0, delta=1e-3, noise_key=FIXED_KEY)
    loop = make_loop(privacy=loud, clients=ClientOptions(count=4, batch_size=16, learning_rate=0.01))
    state, view = set_up(loop)
    updates = trained(loop, view.plan(job=ClassGradients(3)), state)
    for delta, noise_std in zip(updates.released, updates.noise_std, strict=True):
        assert 0.8 * noise_std < float(delta.std()) < 1.2 * noise_std


@pytest.mark.e2e
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_no_noise_and_no_clipping_is_plain_fedavg(engine, make_loop):
    loop = make_loop(engine=ENGINES[engine](), privacy=None, rounds=1)
    net, start = small_net(), loop.module.flat
    loop.run()
    streams = loop.clients.engine.streams
    clients = []
    for client, row in enumerate(loop.config.settings):
        generator = streams.generator("sampling", 1, client)
        draws = [poisson_rows(row.num_records, row.sample_rate, generator) for _ in range(row.steps)]
        clients.append([loop.population.records(client, torch.from_numpy(rows)) for rows in draws])
    names = ("learning_rate", "batch_size", "num_records")
    columns = [[getattr(row, name) for row in loop.config.settings] for name in names]
    expected = reference.fedavg_round(net, start, clients, *columns)
    torch.testing.assert_close(loop.state.models[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.e2e
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_an_empty_batch_still_takes_a_noisy_step(engine, make_loop):
    loop = make_loop(engine=ENGINES[engine](), clients=ClientOptions(count=4, batch_size=1), rounds=1)
    state, view = set_up(loop, EmptyDraws(bytes(32)))
    plan = dataclasses.replace(view.plan(), steps=(1,) * 4)
    deltas = trained(loop, plan, state).released
    expected = [m.noise_std(1, rate) for m, rate in zip(plan.mechanism_of, plan.learning_rate_of, strict=True)]
    for delta, std in zip(deltas, expected, strict=True):
        assert 0.7 * std < float(delta.std()) < 1.3 * std  # 83 values: false alarm below 1e-3


class EmptyDraws(Streams):
    def generator(self, purpose, round, client, number=0):
        generator = super().generator(purpose, round, client, number)
        if purpose == "sampling":
            generator.coins = lambda count, heads: np.zeros(count, dtype=bool)
        return generator


ADAM = partial(torch.optim.Adam, lr=0.3)


class Lookahead(torch.optim.SGD):
    """Slow weights, which it keeps from the start, follow its steps."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.kept = list(parameters)
        self.slow = [parameter.detach().clone() for parameter in parameters]

    def step(self, closure=None):
        super().step()
        for slow, parameter in zip(self.slow, self.kept, strict=True):
            slow.lerp_(parameter.detach(), 0.5)
            parameter.data.copy_(slow)


def bounded(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.3)
    optimizer.register_step_post_hook(lambda *_: [one.data.clamp_(-0.1, 0.1) for one in parameters])
    return optimizer


@pytest.mark.e2e
@pytest.mark.parametrize(
    "engine, optimizer, batch_size",
    [
        *itertools.product(["fast", "trainer"], [ADAM], [8, None]),
        ("fast", partial(Lookahead, lr=0.3), 8),
        ("fast", bounded, 8),
    ],
)
def test_engines_use_the_optimiser_of_a_module(engine, optimizer, batch_size, make_loop):
    options = {"clients": ClientOptions(count=4, batch_size=batch_size, learning_rate=0.3)}
    ours, reference, sgd = (
        released(name, make_loop, module=ClientModule(small_net(), optimizer=one), **options)
        for name, one in ((engine, optimizer), ("serial", optimizer), ("serial", None))
    )
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(reference, sgd, rtol=1e-2)


OPTIMIZERS = [
    {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"name": "adam", "betas": [0.8, 0.9], "eps": 1e-6},
    {"name": "adamw"},
]


@pytest.mark.e2e
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one["name"])
def test_optimisers_are_those_of_torch_in_every_engine(optimizer, make_loop):
    clients = ClientOptions(count=4, batch_size=16, learning_rate=0.05, optimizer=optimizer)
    for engine in ("fast", "trainer"):
        assert_as_serial(engine, make_loop, clients=clients, parts=[FedProx(0.5)])
    ours = released("serial", make_loop, clients=clients, privacy=None)
    loop, options = make_loop(clients=clients, privacy=None), {k: v for k, v in optimizer.items() if k != "name"}
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer["name"]]
    for client, row in enumerate(loop.config.settings):
        net, generator = small_net(), STREAMS.generator("sampling", 1, client)
        start, torchs = loop.module.flat, kind(net.parameters(), lr=0.05, foreach=False, **options)
        for _ in range(row.steps):
            rows = poisson_rows(row.num_records, row.sample_rate, generator)
            x, y = loop.population.records(client, torch.from_numpy(rows))
            torchs.zero_grad()
            (nn.functional.cross_entropy(net(x), y, reduction="sum") / row.batch_size).backward()
            torchs.step()
        torch.testing.assert_close(ours[client], ClientModule(net).flat - start, rtol=1e-4, atol=1e-5)


@pytest.mark.e2e
def test_nets_that_do_not_fit_a_piece_of_noise_get_the_same_noise(make_loop):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 600), nn.Linear(600, 3))
    options = {"population": images(20), "clients": ClientOptions(4, batch_size=8)}
    ours, theirs = (released(name, make_loop, module=ClientModule(net), **options) for name in ("fast", "serial"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.e2e
def test_the_bits_do_not_depend_on_the_number_of_workers(make_loop):
    one, two, three = (make_loop(engine=FastEngine(workers)) for workers in (1, 2, 3))
    for loop in (one, two, three):
        loop.run()
    assert torch.equal(one.state.models, two.state.models) and torch.equal(one.state.models, three.state.models)


@pytest.mark.e2e
def test_huge_noise_ruins_accuracy(make_loop):
    accuracy = []
    for z in (0.5, 1000.0):
        privacy = PrivacyOptions(noise_multiplier=z, delta=1e-3, noise_key=FIXED_KEY)
        accuracy.append(make_loop(privacy=privacy, rounds=5).run().test_accuracy)
    assert accuracy[0] > 0.9 and accuracy[1] < 0.6


class Order(Strategy):
    """The same round with its clients named in this or the opposite order."""

    def __init__(self, way):
        self.way = way

    def plan_round(self, plan, view):
        columns = ("clients", "model_of", "mechanism_of", "steps", "learning_rate_of")
        return dataclasses.replace(plan, **{name: getattr(plan, name)[:: self.way] for name in columns})


@pytest.mark.e2e
@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_order_of_clients_does_not_matter(engine, make_loop):
    forwards, backwards = (make_loop(engine=ENGINES[engine](), parts=[Order(way)]) for way in (1, -1))
    forwards.run(), backwards.run()
    torch.testing.assert_close(backwards.state.models, forwards.state.models, rtol=1e-6, atol=1e-7)


@pytest.mark.e2e
@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("job", [None, ClassGradients(3)], ids=["training", "class gradients"])
def test_streamed_updates_add_up_to_those_that_are_kept(engine, job, make_loop):
    loop = make_loop(engine=ENGINES[engine]())
    state, view = set_up(loop)
    plan = view.plan(job=job)
    raw_weights = torch.tensor([[1.0, 2.0, 0.0, 4.0], [0.0, 0.0, 3.0, 0.0]], dtype=torch.float64)
    kept, streamed = trained(loop, plan, state), trained(loop, plan, state, raw_weights)
    assert streamed.deltas is None and streamed.clients == kept.clients and streamed.noise_std == kept.noise_std
    combined = aggregate.combine(raw_weights, streamed)
    assert torch.equal(combined, aggregate.combine(raw_weights, kept))
    expected = torch.tensordot(aggregate.normalised(raw_weights), kept.released.double(), dims=1)
    torch.testing.assert_close(combined.double(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.e2e
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_a_weighted_sum_has_the_same_bits_in_any_order_and_any_grouping(seed, clients):
    generator = torch.Generator().manual_seed(seed)
    deltas = torch.randn(clients, 500, generator=generator) * 10.0 ** torch.randint(
        -6, 7, (clients, 1), generator=generator
    )
    weights = torch.rand(2, clients, generator=generator, dtype=torch.float64)
    sums = []
    for groups in (1, 2, 3):
        order = torch.randperm(clients, generator=generator).tolist()
        parts = [aggregate.WeightedSum(weights) for _ in range(groups)]
        for place, column in enumerate(order):
            parts[place % groups].add(column, deltas[column])
        total = aggregate.WeightedSum(weights)
        for part in parts:
            total.merge(part)
        sums.append(total.rounded())
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
    torch.testing.assert_close(sums[0], (weights @ deltas.double()).float(), rtol=1e-6, atol=1e-6)


def test_sums_keep_what_doubles_would_lose():
    """2^60 and back: in float64 the ones between would be gone."""
    deltas = torch.tensor([[2.0**60], *[[1.0]] * 64, [-(2.0**60)]])
    total = aggregate.WeightedSum(torch.ones(1, 66))
    for column, delta in enumerate(deltas):
        total.add(column, delta)
    assert float(total.rounded()) == 64.0
