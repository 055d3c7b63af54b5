"""Clients with one step from one model are one batch: what each releases alone."""

import dataclasses
import itertools

import pytest
import torch
from conftest import blobs, small_net
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning.federated.client.channel import send_round
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.engines import engine, one_batch
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.jobs import ClassGradients, LocalTraining, ProximalTraining
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.requests import charged_requests
from dpfl_lightning.federated.transport.threads import Threads
from dpfl_lightning.privacy.mechanism import Gaussian
from dpfl_lightning.privacy.noise import Streams

CLIENTS = 12
POPULATION = blobs(num_clients=CLIENTS, records=10)


def plan_of(steps=1, models=2, **more) -> RoundPlan:
    sizes = POPULATION.num_records
    return RoundPlan(
        round=1,
        clients=tuple(range(CLIENTS)),
        model_of=tuple(client % models for client in range(CLIENTS)),
        mechanism_of=tuple(Gaussian((0.5, 2.0)[i % 3 == 0], 0.4 * (i % 4), 0.3, 0.3 * n) for i, n in enumerate(sizes)),
        steps=(steps,) * CLIENTS,
        learning_rate_of=tuple(0.1 + 0.1 * client for client in range(CLIENTS)),
        **more,
    )


def released(engine, plan, dtype=torch.float32) -> torch.Tensor:
    population = dataclasses.replace(POPULATION, x=POPULATION.x.to(dtype))
    channel = Threads(engine)
    channel.setup(ClientModule(small_net().to(dtype)), HeldClients(population), Streams(bytes(32)), "poisson")
    flat = engine.module.flat
    return send_round(channel, plan, torch.stack([flat, 2 * flat]), list(range(CLIENTS))).updates().released


def groups(plan, module):
    numbers = range(len(plan.clients))
    return one_batch.groups(charged_requests(plan, torch.zeros(CLIENTS, module.num_params), numbers), module)


@pytest.mark.parametrize("job", [LocalTraining(), ClassGradients(3)], ids=["training", "class gradients"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_a_group_releases_what_its_clients_release_alone(job, dtype, tolerance, monkeypatch):
    anchors = torch.linspace(-1, 1, 83, dtype=dtype)[None]
    if job.trains:
        job = ProximalTraining(0.7, anchors, dict.fromkeys(range(CLIENTS), 0))
    plan = plan_of(job=job)
    theirs = released(SerialEngine(), plan, dtype)
    monkeypatch.setattr(one_batch, "MOST_CLIENTS", 12)
    monkeypatch.setattr(SerialEngine, "release", None)  # all are in groups: nobody is trained in another way
    ours = released(FastEngine(), plan, dtype)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_bits_do_not_depend_on_workers(monkeypatch):
    monkeypatch.setattr(one_batch, "MOST_CLIENTS", 6)
    one, two, three = (released(FastEngine(workers), plan_of()) for workers in (1, 2, 3))
    assert torch.equal(one, two) and torch.equal(one, three)


def test_groups_cover_the_plan_within_their_limits():
    plan = plan_of()
    for name, value, largest in (("MOST_CLIENTS", 6, 2), ("FEW_RECORDS", 25.0, 3), ("MOST_BYTES", 83 * 8 * 9, 3)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine if name == "FEW_RECORDS" else one_batch, name, value)
            found = groups(plan, ClientModule(small_net()))
        assert sorted(itertools.chain.from_iterable(found)) == list(range(CLIENTS)), name
        assert max(map(len, found)) == largest, name
        for rows in found:
            assert len({(plan.model_of[row], plan.mechanism_of[row].clip_norm) for row in rows}) == 1, name


@settings(max_examples=50, deadline=None)
@given(
    most=st.integers(1, 8),
    kept=st.sets(st.integers(0, CLIENTS - 1)),
    steps=st.lists(st.integers(1, 2), min_size=CLIENTS, max_size=CLIENTS),
)
def test_a_group_does_not_depend_on_the_others_of_the_plan(most, kept, steps):
    """Parts of a plan may be trained elsewhere, as long as they are whole groups."""
    module = ClientModule(small_net())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_batch, "MOST_CLIENTS", most)
        plan = dataclasses.replace(plan_of(), steps=tuple(steps))
        whole = [[plan.clients[row] for row in rows] for rows in groups(plan, module)]
        left = [clients for number, clients in enumerate(whole) if number in kept]
        part = plan.only(lambda client: any(client in clients for clients in left))
        assert [[part.clients[row] for row in rows] for rows in groups(part, module)] == left


def test_nothing_is_grouped_that_is_not_one_step_from_one_start():
    alone = [[row] for row in range(CLIENTS)]
    assert groups(plan_of(steps=2), ClientModule(small_net())) == alone
    assert groups(plan_of(models=CLIENTS), ClientModule(small_net())) == alone
    assert groups(plan_of(), ClientModule(small_net(), personal=["0.bias"])) == alone
