"""The fast engine beside Opacus' loop, interleaved in one run: `python -m pytest -m slow tests/test_speed.py -s`."""

from __future__ import annotations

import json
import statistics
import time
import warnings

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: F401 (proves that Opacus is whole)
from torch.utils.data import DataLoader, TensorDataset

from dpfl_lightning import models
from dpfl_lightning.client import ClientModule
from dpfl_lightning.config import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.fast import FastEngine
from dpfl_lightning.federated.loop import FederatedLoop
from dpfl_lightning.federated.state import ServerState
from dpfl_lightning.privacy.noise import Streams

RECORDS, BATCH, CLIP, NOISE, RATE = 2400, 64, 3.0, 1.0, 0.01


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
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(RECORDS, 1, 28, 28, generator=generator), torch.randint(10, (RECORDS,), generator=generator))
    ] * 8
    population = Population.from_datasets(pairs, held_out=0.0, num_classes=10)
    module = ClientModule(models.build("cnn_small", (1, 28, 28), 10))
    loop = FederatedLoop(
        population,
        module,
        rounds=1,
        clients=ClientOptions(count=8, batch_size=BATCH, learning_rate=RATE),
        privacy=PrivacyOptions(noise_multiplier=NOISE, clip_norm=CLIP),
        output_dir=tmp_path / "run",
        device="cpu",
    )
    loop.plan_schedule()
    engine = FastEngine()
    engine.setup(module, population, Streams(0), "poisson")
    state = ServerState(module.flat[None], (0,) * 8)
    view = loop.view(state)
    ours, theirs = [], []
    for client in range(8):
        plan = view.plan(clients=[client])
        begun = time.perf_counter()
        engine.train(plan, state, [0])
        ours.append(time.perf_counter() - begun)
        net = models.build("cnn_small", (1, 28, 28), 10)
        begun = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opacus_client(net, *pairs[client])
        theirs.append(time.perf_counter() - begun)
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    rates = {"ours": RECORDS / statistics.median(ours), "opacus": RECORDS / statistics.median(theirs)}
    print(
        json.dumps({"ratio_vs_opacus": round(ratio, 2), "records_per_second": {k: round(v) for k, v in rates.items()}})
    )
    assert ratio >= 1.5
