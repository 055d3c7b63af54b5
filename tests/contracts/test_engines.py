"""Every engine, by registration, against the reference: same noise, same draws, same parameters."""

from __future__ import annotations

import dataclasses

import pytest
import reference
import torch
from conftest import FIXED_KEY, small_net
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning.client import ClientModule
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated import aggregate
from dpfl_lightning.federated.callback import ServerCallback
from dpfl_lightning.federated.engine import SerialEngine
from dpfl_lightning.federated.fast import FastEngine
from dpfl_lightning.federated.setup import ENGINES
from dpfl_lightning.federated.state import ClassGradients, ServerState
from dpfl_lightning.options import ClientOptions, PrivacyOptions
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.strategies.fedprox import FedProx


class TableStreams(Streams):
    """Real sampling streams, noise from a fixed table."""

    def generator(self, purpose, round, client, attempt=0):
        if purpose == "noise":
            return reference.TableNoise(seed=1000 * round + client)
        return super().generator(purpose, round, client, attempt)


def released(engine_name: str, make_loop, job=None, module=None, population=None, **options) -> torch.Tensor:
    engine = ENGINES[engine_name]()
    loop = make_loop(engine=engine, module=module or ClientModule(small_net()), population=population, **options)
    loop.plan_schedule()
    engine.setup(loop.module, loop.population, TableStreams(7), "poisson")
    state = ServerState(loop.module.flat[None], (0,) * loop.population.num_clients)
    view = loop.view(state)
    plan = view.plan(job=job)
    for callback in loop.callbacks:
        plan = callback.plan_round(plan, view)
    return engine.train(plan, state, [0] * len(plan.clients)).released


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"serial"}))
def test_engine_equals_the_reference(engine, make_loop):
    torch.testing.assert_close(released(engine, make_loop), released("serial", make_loop), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"serial"}))
def test_engine_equals_the_reference_on_a_convolutional_net(engine, make_loop):
    generator = torch.Generator().manual_seed(3)
    pairs = [
        (torch.randn(20, 1, 8, 8, generator=generator), torch.randint(4, (20,), generator=generator)) for _ in range(4)
    ]
    population = Population.from_datasets(pairs, held_out=0.0, num_classes=4)

    def module():
        torch.manual_seed(0)
        nn = torch.nn
        layers = [
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 4),
        ]
        return ClientModule(nn.Sequential(*layers))

    options = {"population": population, "clients": ClientOptions(count=4, batch_size=8)}
    ours = released(engine, make_loop, module=module(), **options)
    torch.testing.assert_close(ours, released("serial", make_loop, module=module(), **options), rtol=1e-5, atol=1e-5)


LAPLACE = {
    "privacy": PrivacyOptions(epsilon=[4.0, 6.0, 8.0, 10.0], delta=0.0, mechanism="laplace", clip_norm=2.0),
    "clients": ClientOptions(count=4, batch_size=None, learning_rate=0.3, local_epochs=2),
}


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"serial"}))
@pytest.mark.parametrize("local_epochs", [1, 2])
@pytest.mark.parametrize("job", [None, ClassGradients(3)], ids=["training", "class gradients"])
def test_engine_adds_laplace_noise_to_sums_clipped_in_l1_as_the_reference(engine, local_epochs, job, make_loop):
    clients = dataclasses.replace(LAPLACE["clients"], local_epochs=local_epochs)
    options = {**LAPLACE, "clients": clients, "job": job}
    torch.testing.assert_close(
        released(engine, make_loop, **options), released("serial", make_loop, **options), rtol=1e-5, atol=1e-5
    )


def test_the_reference_is_plain_autograd_with_laplace_noise(make_loop):
    """One full batch a client: what the slow form gives, with the same table of noise."""
    options = {**LAPLACE, "clients": dataclasses.replace(LAPLACE["clients"], local_epochs=1)}
    ours, loop = released("serial", make_loop, **options), make_loop(**options)
    loop.plan_schedule()
    net, count = small_net(), loop.module.num_params
    for client, own in enumerate(loop.settings):
        scale = 2.0 * loop.schedule.clients[client].noise_multiplier("train")
        x, y = loop.population.records(client, torch.arange(own.num_records))
        clipped = reference.clipped_sum(net, dict(net.named_parameters()), x, y, 2.0, order=1)
        noise = torch.from_numpy(reference.TableNoise(seed=1000 + client).laplace(0.0, scale, count)).float()
        expected = -0.3 * (clipped + noise) / own.num_records
        torch.testing.assert_close(ours[client], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"serial"}))
def test_engine_pulls_to_anchors_as_the_reference(engine, make_loop):
    pulled, plain = (released(engine, make_loop, callbacks=[FedProx(pull)]) for pull in (2.0, 0.0))
    torch.testing.assert_close(pulled, released("serial", make_loop, callbacks=[FedProx(2.0)]), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(pulled, plain)


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"serial"}))
def test_engine_gives_the_class_gradients_of_the_reference(engine, make_loop):
    job = ClassGradients(3)
    ours = released(engine, make_loop, job=job)
    assert ours.shape[:2] == (4, 3)
    torch.testing.assert_close(ours, released("serial", make_loop, job=job), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_no_noise_and_no_clipping_is_plain_fedavg(engine, make_loop):
    loop = make_loop(engine=ENGINES[engine](), privacy=None, rounds=1)
    net, start = small_net(), loop.module.flat
    loop.run()
    streams = loop.engine.streams
    clients = []
    for client, own in enumerate(loop.settings):
        from dpfl_lightning.privacy.sampling import draw_steps

        generator = streams.generator("sampling", 1, client)
        draws = draw_steps("poisson", own.num_records, own.sample_rate, own.steps, generator)
        clients.append([loop.population.records(client, torch.from_numpy(rows)) for rows in draws])
    expected = reference.fedavg_round(
        net,
        start,
        clients,
        [own.learning_rate for own in loop.settings],
        [own.batch_size for own in loop.settings],
        [own.num_records for own in loop.settings],
    )
    torch.testing.assert_close(loop.state.models[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_an_empty_batch_still_takes_a_noisy_step(engine, make_loop):
    loop = make_loop(engine=ENGINES[engine](), clients=ClientOptions(count=4, batch_size=1), rounds=1)
    loop.plan_schedule()
    loop.engine.setup(loop.module, loop.population, EmptyDraws(7), "poisson")
    state = ServerState(loop.module.flat[None], (0,) * 4)
    plan = loop.view(state).plan()
    plan = dataclasses.replace(plan, steps=(1,) * 4)
    deltas = loop.engine.train(plan, state, [0] * 4).released
    expected = [m.noise_std(1, rate) for m, rate in zip(plan.mechanism_of, plan.learning_rate_of, strict=True)]
    for delta, std in zip(deltas, expected, strict=True):
        assert 0.7 * std < float(delta.std()) < 1.3 * std  # 83 values: false alarm below 1e-3


class EmptyDraws(Streams):
    def generator(self, purpose, round, client, attempt=0):
        generator = super().generator(purpose, round, client, attempt)
        return Nobody() if purpose == "sampling" else generator


class Nobody:
    def binomial(self, n, p):
        return 0

    def choice(self, n, size, replace, shuffle):
        import numpy as np

        return np.zeros(0, dtype=np.int64)


@pytest.mark.parametrize("engine", ["fast", "stacked"])
@pytest.mark.parametrize("hook", ["training_step", "configure_optimizers"])
def test_an_engine_refuses_what_it_would_not_run(hook, engine, make_loop):
    own = type("Own", (ClientModule,), {hook: lambda self, *args: None})
    with pytest.raises(UserError, match=f"`{hook}`, got '{engine}'"):
        make_loop(engine=ENGINES[engine](), module=own(small_net())).run()


def test_the_bits_do_not_depend_on_the_number_of_workers(make_loop):
    one, two, three = (make_loop(engine=FastEngine(workers)) for workers in (1, 2, 3))
    for loop in (one, two, three):
        loop.run()
    assert torch.equal(one.state.models, two.state.models) and torch.equal(one.state.models, three.state.models)


def test_an_error_in_a_worker_reaches_the_user(make_loop):
    loop = make_loop(engine=FastEngine(2))
    release = SerialEngine.release

    def failing(self, plan, row, *args):
        if plan.clients[row] == 2:
            raise ZeroDivisionError("client 2")
        return release(self, plan, row, *args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError, match="client 2"):
        patch.setattr(SerialEngine, "release", failing)
        loop.run()


def test_huge_noise_ruins_accuracy(make_loop):
    quiet, loud = (
        make_loop(privacy=PrivacyOptions(noise_multiplier=z, delta=1e-3, noise_key=FIXED_KEY), rounds=5)
        .run()
        .test_accuracy
        for z in (0.5, 1000.0)
    )
    assert quiet > 0.9 and loud < 0.6


class Backwards(ServerCallback):
    """The same round with its clients named in the opposite order."""

    def plan_round(self, plan, view):
        columns = ("clients", "model_of", "mechanism_of", "steps", "learning_rate_of")
        return dataclasses.replace(plan, **{name: getattr(plan, name)[::-1] for name in columns})


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_order_of_clients_does_not_matter(engine, make_loop):
    forwards, backwards = (make_loop(engine=ENGINES[engine](), callbacks=own) for own in ([], [Backwards()]))
    forwards.run(), backwards.run()
    torch.testing.assert_close(backwards.state.models, forwards.state.models, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("job", [None, ClassGradients(3)], ids=["training", "class gradients"])
def test_streamed_updates_add_up_to_those_that_are_kept(engine, job, make_loop):
    loop = make_loop(engine=ENGINES[engine]())
    loop.plan_schedule()
    loop.engine.setup(loop.module, loop.population, Streams(7), "poisson")
    state = ServerState(loop.module.flat[None], (0,) * 4)
    plan = loop.view(state).plan(job=job)
    say = torch.tensor([[1.0, 2.0, 0.0, 4.0], [0.0, 0.0, 3.0, 0.0]], dtype=torch.float64)
    kept = loop.engine.train(plan, state, [0] * 4)
    streamed = loop.engine.train(plan, state, [0] * 4, say)
    assert streamed.deltas is None and streamed.clients == kept.clients and streamed.noise_std == kept.noise_std
    combined = aggregate.combine(say, streamed)
    assert torch.equal(combined, aggregate.combine(say, kept))
    expected = torch.tensordot(aggregate.normalised(say), kept.released.double(), dims=1)
    torch.testing.assert_close(combined.double(), expected, rtol=1e-6, atol=1e-9)


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
