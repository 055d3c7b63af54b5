"""The fast engine beside Opacus' loop, interleaved in one run: `python -m pytest -m slow tests/test_speed.py -s`."""

from __future__ import annotations

import json
import os
import statistics
import time

import pytest
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

from dpfl_lightning import models
from dpfl_lightning.client import ClientModule
from dpfl_lightning.data import Population
from dpfl_lightning.federated.fast import FastEngine
from dpfl_lightning.federated.loop import FederatedLoop
from dpfl_lightning.federated.state import ServerState
from dpfl_lightning.options import ClientOptions, PrivacyOptions
from dpfl_lightning.privacy.noise import Streams

CLIENTS, RECORDS, BATCH, CLIP, NOISE, RATE, REPEATS = 8, 2400, 64, 3.0, 1.0, 0.01, 3


def opacus_client(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """One local epoch as Opacus' users write it: `make_private` for the client, hooks, Poisson batches."""
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    net, optimizer, loader = PrivacyEngine().make_private(
        module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=NOISE, max_grad_norm=CLIP
    )
    for batch, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(batch), labels).backward()
        optimizer.step()


@pytest.mark.slow
def test_a_round_is_at_least_half_as_fast_again_as_opacus(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(RECORDS, 1, 28, 28, generator=generator), torch.randint(10, (RECORDS,), generator=generator)
    population = Population.from_datasets([(x, y)] * CLIENTS, held_out=0.0, num_classes=10)
    module = ClientModule(models.build("cnn_small", (1, 28, 28), 10))
    loop = FederatedLoop(
        population,
        module,
        rounds=1,
        clients=ClientOptions(count=CLIENTS, batch_size=BATCH, learning_rate=RATE),
        privacy=PrivacyOptions(noise_multiplier=NOISE, clip_norm=CLIP),
        output_dir=tmp_path / "run",
        device="cpu",
    )
    loop.plan_schedule()
    engine = FastEngine()
    engine.setup(module, population, Streams(0), "poisson")
    own_threads, all_threads = torch.get_num_threads(), os.cpu_count() or 1
    state = ServerState(module.flat[None], (0,) * CLIENTS)
    plan = loop.view(state).plan()
    ours, theirs = [], []
    for _ in range(REPEATS):
        torch.set_num_threads(own_threads)
        begun = time.perf_counter()
        engine.train(plan, state, [0] * CLIENTS)
        ours.append(time.perf_counter() - begun)
        torch.set_num_threads(all_threads)
        begun = time.perf_counter()
        for _ in range(CLIENTS):
            opacus_client(models.build("cnn_small", (1, 28, 28), 10), x, y)
        theirs.append(time.perf_counter() - begun)
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    rates = {name: round(CLIENTS * RECORDS / statistics.median(t)) for name, t in (("ours", ours), ("opacus", theirs))}
    print(json.dumps({"ratio_vs_opacus": round(ratio, 2), "records_per_second": rates}))
    assert ratio >= 1.5
