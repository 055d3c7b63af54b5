"""Gradients that are not finite contribute nothing, and are counted for their client alone."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import pytest
import torch
from conftest import FIXED_KEY, PowerCut, blobs, cut_at, small_net
from reference import summed
from rich.console import Console

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.plan import ClassGradients
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.reference import VmapClippedSum
from dpfl_lightning.privacy.sampling import draw_steps
from dpfl_lightning.reporting.progress import Progress

#: client -> its broken records, and what they hold
BROKEN = {1: {0: math.nan, 7: math.inf, 30: -math.inf}, 3: {2: math.nan}}
PRIVACY = PrivacyOptions(noise_multiplier=1.0, delta=1e-3, noise_key=FIXED_KEY)
SAMPLED = ClientOptions(count=4, batch_size=16, learning_rate=0.3)
FULL = ClientOptions(count=4, batch_size=[48, 56, 64, 72], learning_rate=0.3)  # one step: clients side by side
FULL_TWICE = dataclasses.replace(FULL, local_epochs=2)


def with_broken_records() -> Population:
    population = blobs()
    x = population.x.clone()
    for client, records in BROKEN.items():
        for row, value in records.items():
            x[population.train_of[client][row]] = value
    return dataclasses.replace(population, x=x)


def expected(loop, steps: int | None = None) -> list[dict]:
    """From the run's own draws, one broken record after the other."""
    rows = []
    for client, own in enumerate(loop.settings):
        drawn = broken = 0
        for round in range(1, loop.rounds + 1):
            generator = loop.clients.engine.streams.generator("sampling", round, client)
            for batch in draw_steps("poisson", own.num_records, own.sample_rate, steps or own.steps, generator):
                drawn += len(batch)
                broken += sum(int(row) in BROKEN.get(client, {}) for row in batch)
        rows.append({"client": client, "gradients": drawn, "not_finite": broken})
    return rows


def noted(loop) -> list[dict]:
    """What `private.json` says, but for the clipped ones."""
    rows = json.loads((loop.output_dir / "private.json").read_text())["clients"]
    assert all(0 <= row["clipped"] <= row["gradients"] - row["not_finite"] for row in rows)
    return [{name: row[name] for name in ("client", "gradients", "not_finite")} for row in rows]


@pytest.mark.parametrize("clients", [SAMPLED, FULL, FULL_TWICE], ids=["sampled", "one step", "two full steps"])
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_every_engine_counts_them_and_trains_on(engine, clients, make_loop):
    loop = make_loop(with_broken_records(), engine=ENGINES[engine](), clients=clients, privacy=PRIVACY, rounds=2)
    loop.run()
    assert loop.state.models.isfinite().all()
    due = expected(loop)
    assert noted(loop) == due and [row["not_finite"] > 0 for row in due] == [False, True, False, True]
    if clients is not SAMPLED:
        assert [row["not_finite"] for row in due] == [0, 3 * 2 * clients.local_epochs, 0, 1 * 2 * clients.local_epochs]


class EachClass(Strategy):
    """One draw a round, its sums class by class."""

    def plan_run(self, schedule, view):
        def change(client, own):
            line = own.planned[0]
            once = dataclasses.replace(line, event=dataclasses.replace(line.event, steps=1))
            return dataclasses.replace(own, planned=(once,))

        return schedule.replan(change)

    def plan_round(self, plan, view):
        return view.plan(job=ClassGradients(view.facts.num_classes))

    def step(self, state, combined, view):
        return dataclasses.replace(state, models=state.models - combined.sum(dim=1))


@pytest.mark.parametrize("clients", [SAMPLED, FULL], ids=["sampled", "full"])
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_class_gradients_are_counted_too(engine, clients, make_loop):
    """Groups are classes there, or classes of clients side by side."""
    loop = make_loop(
        with_broken_records(),
        engine=ENGINES[engine](),
        clients=clients,
        privacy=PRIVACY,
        parts=[EachClass()],
    )
    loop.run()
    due = expected(loop, steps=1)
    assert noted(loop) == due and due[1]["not_finite"] > 0


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_clipped_are_those_whose_norm_exceeds_the_clip_norm(engine, make_loop):
    """One round of one step with all records: each record's gradient by plain autograd at the start."""
    privacy = dataclasses.replace(PRIVACY, clip_norm=4.0)
    loop = make_loop(blobs(), engine=ENGINES[engine](), clients=FULL, privacy=privacy, rounds=1)
    due = []
    for client in range(4):
        x, y = loop.population.records(client, torch.arange(loop.population.num_records[client]))
        net, norms = small_net(), []
        for record, label in zip(x, y, strict=True):
            net.zero_grad()
            torch.nn.functional.cross_entropy(net(record[None]), label[None]).backward()
            norms.append(float(torch.cat([p.grad.flatten() for p in net.parameters()]).norm()))
        due.append([len(norms), sum(norm > 4.0 for norm in norms), 0])
    loop.run()
    assert loop.clients.engine.state_dict()["counts"].tolist() == due and all(
        0 < clipped < every for every, clipped, _ in due
    )


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"serial"}))
def test_engines_agree_on_what_was_clipped(engine, make_loop):
    counts = []
    for name in (engine, "serial"):
        loop = make_loop(with_broken_records(), engine=ENGINES[name](), privacy=PRIVACY)
        loop.run()
        counts.append(loop.clients.engine.state_dict()["counts"])
    gradients, clipped = counts[0][:, 0], counts[0][:, 1]
    assert torch.equal(*counts) and ((clipped > 0) & (clipped < gradients)).all()


@pytest.mark.parametrize("kind", [VmapClippedSum, FastClippedSum])
def test_norms_are_noted_in_the_order_of_the_records(kind):
    net = small_net()
    module = ClientModule(net)
    clipped_sum = kind(module.sample_loss, chunk=4) if kind is VmapClippedSum else kind(net, chunk=4)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(11, 6, generator=generator), torch.randint(3, (11,), generator=generator)
    x[5], x[9] = math.nan, math.inf
    alone, together = [], []
    for row in range(11):
        summed(clipped_sum, module.unflatten(module.flat), x[row : row + 1], y[row : row + 1], 0.5, norms=alone)
    summed(clipped_sum, module.unflatten(module.flat), x, y, 0.5, y, 3, together)
    torch.testing.assert_close(torch.cat(together), torch.cat(alone), equal_nan=True)
    assert torch.cat(together).isfinite().logical_not().nonzero().flatten().tolist() == [5, 9]
    assert summed(clipped_sum, module.unflatten(module.flat), x[:0], y[:0], 0.5, norms=together).abs().sum() == 0


def test_a_resumed_run_counts_on(make_loop):
    unbroken = make_loop(with_broken_records(), privacy=PRIVACY)
    unbroken.run()
    broken = make_loop(with_broken_records(), privacy=PRIVACY)
    for round in (2, 3):
        cut_at(broken, round)
        with pytest.raises(PowerCut):
            broken.run(resume=round > 2)
        so_far = noted(broken)
        assert 0 < so_far[1]["not_finite"] < expected(unbroken)[1]["not_finite"], "what the kept rounds came to"
        broken = make_loop(with_broken_records(), privacy=PRIVACY, output_dir=broken.output_dir)
    broken.run(resume=True)
    assert noted(broken) == noted(unbroken) == expected(unbroken)
    again = make_loop(with_broken_records(), privacy=PRIVACY, output_dir=broken.output_dir)
    again.run(resume=True)
    assert noted(again) == noted(unbroken)


def test_counts_stay_with_the_client(make_loop):
    """The file is its owner's alone; what others see is the same whatever the counts are."""
    told = []
    for population in (with_broken_records(), blobs()):
        paper = Console(file=io.StringIO(), width=200)
        loop = make_loop(population, privacy=PRIVACY, parts=[Progress(paper)])
        loop.run()
        path = loop.output_dir / "private.json"
        assert path.stat().st_mode & 0o777 == 0o600 and "Do not share" in path.read_text()
        others = [loop.output_dir / name for name in ("result.json", "guarantees.json", "ledger.jsonl", "options.yaml")]
        assert not any("not_finite" in file.read_text() for file in others)
        lines = paper.file.getvalue().replace(str(loop.output_dir), "FOLDER").splitlines()
        told.append([line for line in lines if "finite" in line])
    assert told[0] == told[1] and len(told[0]) == 1 and "FOLDER/private.json" in told[0][0]
