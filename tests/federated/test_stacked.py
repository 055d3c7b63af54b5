"""Many clients as one padded batch: what every client releases alone, whatever the shapes."""

import dataclasses
import itertools
import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from conftest import small_net
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.func import vmap

from dpfl_lightning.config.published import BATCH_SIZES
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.engines import stacked
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.engines.stacked import (
    SIZES,
    StackedEngine,
    captured,
    padded_width,
    stacks,
    useful_share,
)
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.plan import ClassGradients, LocalTraining, RoundPlan
from dpfl_lightning.privacy.clipping.reference import ClipRequest, VmapClippedSum
from dpfl_lightning.privacy.clipping.stacked import stacked_clipped_sums
from dpfl_lightning.privacy.mechanism import Gaussian
from dpfl_lightning.privacy.noise import Streams

DTYPES = {torch.float32: 1e-5, torch.float64: 1e-10}


@dataclasses.dataclass(frozen=True)
class Client:
    """One client of a plan, all of it unlike the others'."""

    records: int = 20
    rate: float = 0.3
    steps: int = 2
    clip_norm: float = 1.0
    noise: float = 1.0
    learning_rate: float = 0.5
    model: int = 0

    @property
    def mechanism(self) -> Gaussian:
        return Gaussian(self.clip_norm, self.noise, self.rate, expected_batch_size=self.rate * self.records)


RAGGED = (
    Client(records=1, rate=0.05, steps=3),  # most draws are empty
    Client(records=40, rate=1.0, steps=1, clip_norm=0.1),
    Client(records=25, rate=0.5, steps=4, clip_norm=5.0, learning_rate=0.1, noise=0.3),
    Client(records=9, rate=0.4, steps=2, noise=0.0),
    Client(records=30, rate=0.2, steps=3, clip_norm=math.inf, noise=0.0, learning_rate=0.02),
)


def population_of(clients, dtype=torch.float32, seed=0) -> Population:
    generator = torch.Generator().manual_seed(seed)

    def records(count):
        return torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)

    population = Population.from_datasets([records(one.records) for one in clients], held_out=0.0, num_classes=3)
    return dataclasses.replace(population, x=population.x.to(dtype))


def plan_of(clients, **more) -> RoundPlan:
    columns = {"model_of": "model", "mechanism_of": "mechanism", "steps": "steps", "learning_rate_of": "learning_rate"}
    values = {column: tuple(getattr(one, name) for one in clients) for column, name in columns.items()}
    return RoundPlan(round=1, clients=tuple(range(len(clients))), **values, **more)


def set_up(engine, clients, dtype=torch.float32, population=None, module=None, streams=None):
    module = module or ClientModule(small_net().to(dtype))
    engine.setup(module, population or population_of(clients, dtype), streams or Streams(bytes(32)), "poisson")
    return engine


def released(engine, plan, seed=5) -> torch.Tensor:
    size, dtype = engine.module.num_params, engine.module.flat.dtype
    models = 0.3 * torch.randn(3, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    rows = dict(engine.releases(plan, models, [0] * len(plan.clients)))
    return torch.stack([rows[row] for row in sorted(rows)])


def assert_as_serial(clients, dtype=torch.float32, population=None, module=None, **more):
    plan = plan_of(clients, **more)
    ours, theirs = (
        released(set_up(engine, clients, dtype, population, module), plan)
        for engine in (StackedEngine(), SerialEngine())
    )
    torch.testing.assert_close(ours, theirs, rtol=DTYPES[dtype], atol=DTYPES[dtype])
    return ours


# --- equal to the reference


@settings(max_examples=25, deadline=None)
@given(
    clients=st.lists(
        st.builds(
            Client,
            records=st.integers(1, 30),
            rate=st.sampled_from([0.02, 0.3, 0.7, 1.0]),
            steps=st.integers(1, 4),
            clip_norm=st.sampled_from([0.05, 1.0, 20.0]),
            noise=st.sampled_from([0.0, 1.0]),
            learning_rate=st.sampled_from([0.01, 0.5]),
            model=st.integers(0, 1),
        ),
        min_size=1,
        max_size=7,
    ),
    deviations=st.sampled_from([-20.0, 0.0, 3.0]),
    budget=st.sampled_from([1, 80_000, 1 << 26]),
    job=st.sampled_from([LocalTraining(), ClassGradients(3)]),
)
def test_ragged_clients_release_what_they_release_alone(clients, deviations, budget, job):
    """Empty draws, draws wider than the padding, clients that are done, any split into stacks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacked, "DEVIATIONS", deviations)
        patch.setattr(stacked, "CPU_BYTES", budget)
        assert_as_serial(clients, torch.float64, job=job)  # float32 may step across a kink


@pytest.mark.parametrize("dtype", DTYPES)
def test_anchors_pull_each_client_to_its_own(dtype):
    anchors = torch.randn(2, 83, generator=torch.Generator().manual_seed(1), dtype=dtype)
    anchored = {"anchors": anchors, "anchor_of": (0, 1, 1, 0, 1), "pull": 0.7}
    pulled = assert_as_serial(RAGGED, dtype, **anchored)
    assert not torch.allclose(pulled, assert_as_serial(RAGGED, dtype))


def test_personal_parameters_stay_with_their_client():
    own = ClientModule(small_net(), personal=["0.bias", "2.weight"])
    ours, theirs = (set_up(kind_of(), RAGGED, module=deepcopy(own)) for kind_of in (StackedEngine, SerialEngine))
    for round in (1, 2):
        plan = dataclasses.replace(plan_of(RAGGED), round=round)
        deltas = released(ours, plan)
        torch.testing.assert_close(deltas, released(theirs, plan), rtol=1e-5, atol=1e-5)
        assert (deltas[:, ours.module.personal_mask] == 0).all()
    for client in range(len(RAGGED)):
        mine, true = (engine.state_dict()["personal"][client] for engine in (ours, theirs))
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-5)


# --- stacks and their shapes


@settings(max_examples=200, deadline=None)
@given(widths=st.lists(st.integers(1, 400), min_size=1, max_size=40), most=st.integers(1, 5000), data=st.data())
def test_stacks_keep_within_the_memory_and_passes_shrink_as_clients_end(widths, most, data):
    steps = data.draw(st.lists(st.integers(1, 9), min_size=len(widths), max_size=len(widths)))
    plan = plan_of([Client(steps=count) for count in steps])
    layouts = list(stacks(plan, range(len(widths)), widths, most))
    assert sorted(itertools.chain.from_iterable(layout.rows for layout in layouts)) == list(range(len(widths)))
    for layout in layouts:
        assert [steps[row] for row in layout.rows] == sorted((steps[row] for row in layout.rows), reverse=True)
        sizes = [layout.size(active) for active in range(1, len(layout.rows) + 1)]
        assert set(sizes) <= set(SIZES) and layout.width in SIZES and sizes[-1] * layout.width <= most
        for active, size in enumerate(sizes, start=1):
            needed = sum(layout.slots[:active])
            assert needed <= size <= 2 * needed
        assert sizes[-1] <= 1.25 * sum(layout.slots)
        for row, slots in zip(layout.rows, layout.slots, strict=True):
            all_fit = slots * layout.width >= widths[row]
            assert all_fit or SIZES[SIZES.index(slots) + 1] * max(layout.width, 2) > most


@pytest.mark.parametrize(
    ("batch_sizes", "at_least"),
    [
        ([64] * 20, 0.70),  # the common round
        (BATCH_SIZES[20], 0.50),  # of the main job
        ([16, 32, 64, 128] * 5, 0.56),
    ],
)
def test_most_places_of_a_round_hold_records(batch_sizes, at_least):
    """Clients of 2,400 records; a stack as wide and as long as its largest client would use 55, 21 and 7 %."""
    clients = [Client(records=2400, rate=size / 2400, steps=math.ceil(2400 / size)) for size in batch_sizes]
    widths = [padded_width(client.mechanism, client.records) for client in clients]
    plan = plan_of(clients)
    layouts = list(stacks(plan, range(len(clients)), widths, most=2047))  # convolutions of 32 channels on CUDA
    assert at_least <= useful_share(plan, layouts) < at_least + 0.02
    assert len({layout.size(active + 1) for layout in layouts for active in range(len(layout.rows))}) <= 8


def test_a_pass_of_convolutions_fits_a_grid_of_cuda():
    engine = StackedEngine()
    engine.bytes, engine.module = 1 << 40, ClientModule(nn.Sequential(nn.Conv2d(1, 16, 5), nn.Conv2d(16, 32, 5)))
    assert engine.most_gradients() == 65_535 // 32
    engine.bytes = 0
    assert engine.most_gradients() == 1


def test_a_width_covers_nearly_every_draw_and_is_no_draw():
    mechanism = Gaussian(1.0, 1.0, sample_rate=0.1, expected_batch_size=60.0)
    width = padded_width(mechanism, num_records=600)
    draws = np.random.default_rng(0).binomial(600, 0.1, size=10_000)
    assert 0 < (draws > width).mean() < 0.005
    assert padded_width(dataclasses.replace(mechanism, sample_rate=1.0), 600) == 600
    assert padded_width(dataclasses.replace(mechanism, sample_rate=1e-9), 600) == 1


@pytest.mark.parametrize("deviations", [-20.0, 3.0])
def test_passes_have_the_shapes_that_public_facts_give(deviations, monkeypatch):
    monkeypatch.setattr(stacked, "DEVIATIONS", deviations)
    shapes = []
    for key in (1, 2):
        engine = set_up(StackedEngine(), RAGGED, streams=Streams(bytes([key] * 32)))
        sums, seen = engine.sums, set()
        engine.sums = lambda params, x, *more, sums=sums, seen=seen: seen.add(x.shape) or sums(params, x, *more)
        released(engine, plan_of(RAGGED))
        shapes.append(seen)
    assert shapes[0] == shapes[1] and len(shapes[0]) <= 3, "records that were drawn must not show in a shape"


# --- the pass


def a_pass(module, seed=0, size=3, width=5):
    generator = torch.Generator().manual_seed(seed)
    theta = module.flat + 0.1 * torch.randn(size, module.num_params, generator=generator)
    x, y = torch.randn(size, width, 6, generator=generator), torch.randint(3, (size, width), generator=generator)
    mask = torch.rand(size, width, generator=generator) < 0.6
    clip_norm = torch.rand(size, generator=generator) + 0.05
    return stacked_clipped_sums(module.sample_loss), vmap(module.unflatten)(theta), x, y, mask, clip_norm


def test_padding_contributes_exactly_nothing():
    sums, params, x, y, mask, clip_norm = a_pass(ClientModule(small_net()))
    expected, norms = sums(params, x, y, mask, clip_norm)
    assert torch.equal(norms == -1, ~mask)
    for junk in (0.0, 1e30, math.nan, math.inf):
        padded = torch.where(mask[..., None], x, junk)
        ours, their_norms = sums(params, padded, torch.where(mask, y, 2), mask, clip_norm)
        assert torch.equal(ours, expected) and torch.equal(their_norms, norms)
    assert torch.equal(sums(params, x, y, mask & False, clip_norm)[0], torch.zeros_like(expected))


def test_a_record_changes_its_own_client_only():
    sums, params, x, y, mask, clip_norm = a_pass(ClientModule(small_net()))
    mask[1, 2] = True
    before, _ = sums(params, x, y, mask, clip_norm)
    x[1, 2] = -100.0 * x[1, 2]
    after, _ = sums(params, x, y, mask, clip_norm)
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert 0 < float((after - before).norm()) <= 2 * float(clip_norm[1]) * (1 + 1e-6)


def test_rows_are_the_clipped_sums_of_the_reference():
    module = ClientModule(small_net())
    sums, params, x, y, mask, clip_norm = a_pass(module)
    rows, _ = sums(params, x, y, mask, clip_norm)
    for s, keep in enumerate(mask):
        theta, request = {name: p[s] for name, p in params.items()}, ClipRequest(float(clip_norm[s]))
        expected, _ = VmapClippedSum(module.sample_loss)(theta, x[s][keep], y[s][keep], request)
        torch.testing.assert_close(rows[s], expected[0])


# --- one graph


@pytest.mark.e2e
def test_the_pass_is_one_graph_a_shape():
    """What a GPU captures, traced on a CPU: equal, and not compiled again in another step, stack or round."""
    counter, counts = CompileCounter(), []
    plain, traced = (set_up(StackedEngine(), RAGGED) for _ in range(2))
    traced.sums = captured(stacked_clipped_sums(traced.module.sample_loss), backend=counter)
    for round in (1, 2):
        plan = dataclasses.replace(plan_of(RAGGED), round=round)
        torch.testing.assert_close(released(traced, plan, round), released(plain, plan, round), rtol=1e-6, atol=1e-7)
        counts.append(counter.frame_count)
    assert counts == [3, 3], "a client with 4 steps, clients with 3, and all"


@pytest.mark.e2e
def test_gradients_of_a_convolutional_net_are_one_graph():
    layers = [nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3)]
    sums, params, _, y, mask, clip_norm = a_pass(ClientModule(nn.Sequential(*layers)))
    x = torch.randn(3, 5, 1, 5, 5)
    with torch.no_grad():
        traced = captured(sums, backend="aot_eager")(params, x, y, mask, clip_norm)
        torch.testing.assert_close(traced, sums(params, x, y, mask, clip_norm))


class Breaks(nn.Linear):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_net_that_is_not_one_graph_or_cannot_be_stacked_is_refused_before_anybody_pays():
    words = r"`engine\.name` must be fast or serial for a model .* got 'stacked'"
    engine = set_up(StackedEngine(), RAGGED, module=ClientModule(Breaks(6, 3)))
    with pytest.raises(UserError, match=words):
        engine.check(captured(stacked_clipped_sums(engine.module.sample_loss), backend="eager"))
    net = nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 3))  # fails on several records of several clients
    with pytest.raises(UserError, match=words):
        set_up(StackedEngine(), RAGGED, module=ClientModule(net))


def test_a_missing_compiler_is_found_before_anybody_pays(monkeypatch):
    """The check runs what the run will use, not only its trace."""

    def no_compiler(graph, inputs):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(stacked, "as_run", lambda sums, device: captured(sums, backend=no_compiler))
    with pytest.raises(UserError, match=r"got 'stacked': .*Failed to find C compiler"):
        set_up(StackedEngine(), RAGGED)


def test_the_plan_says_what_runs(make_loop):
    loop = make_loop(engine=StackedEngine(), rounds=1)
    loop.run()
    assert loop.info.engine.startswith("stacked (vmap over clients and records")
