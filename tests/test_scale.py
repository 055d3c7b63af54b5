"""Memory of large federations and models, each in a process of its own: `pytest -m slow tests/test_scale.py`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dpfl_lightning.benchmark.memory import peak_memory

ALL_UPDATES = """
import json, resource, sys, torch
from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions, ServerCallback
from dpfl_lightning import models

class Median(ServerCallback):
    "Needs every update."
    def combine(self, updates, weights, view):
        parts = [part.median(dim=0).values for part in updates.released.split(1 << 20, dim=1)]
        return torch.cat(parts)[None]

pairs = [(torch.randn(4, 3, 32, 32), torch.randint(10, (4,))) for _ in range(20)]
loop = FederatedLoop(
    Population.from_datasets(pairs, held_out=0.0, num_classes=10),
    ClientModule(models.build("resnet18", (3, 32, 32), 10)),
    rounds=2,
    clients=ClientOptions(count=20, batch_size=4),
    privacy=PrivacyOptions(epsilon=8.0, delta=1e-2),
    callbacks=[Median()],
    output_dir=sys.argv[1],
    device="cpu",
)
loop.run()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
finite = bool(loop.state.models.isfinite().all())
print(json.dumps({"parameters": loop.module.num_params, "finite": finite, "gib": peak}))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_clients():
    assert peak_memory(print, clients=(100, 2000), data="digits")["growth"] < 0.1


@pytest.mark.slow
def test_all_updates_of_a_model_of_eleven_million_parameters_fit(tmp_path):
    """Twenty updates of 45 MB are 0.9 GB; 24 GiB are plenty."""
    done = subprocess.run(
        [sys.executable, "-c", ALL_UPDATES, str(tmp_path / "run")], capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    print(told)
    assert told["parameters"] > 11_000_000 and told["finite"] and told["gib"] < 8
