"""Memory of large federations and models, each in a separate process: `pytest -m slow tests/test_scale.py`."""

import json
import subprocess
import sys

import pytest

from experiments.speed.clients import client_times

pytestmark = pytest.mark.e2e


def run(script: str, tmp_path) -> dict:
    words = [sys.executable, "-c", script, str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_memory_does_not_grow_with_clients():
    few, many = client_times(print, clients=(100, 2000), cohort=None, rounds=1)["of"].values()
    assert many["peak_mib"] < 1.1 * few["peak_mib"]


COHORTS = """
import json, sys
from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.loop import build_loop

class Memory(Callback):
    "Resident MiB after each round."
    def __init__(self):
        self._mib = []
    def on_round_end(self, view, report):
        status = open("/proc/self/status").read().splitlines()
        self._mib.append(next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024)

memory = Memory()
loop = build_loop(
    from_mapping(
        {
            "rounds": 12,
            "data": {"name": "digits", "records_per_client": 24, "partition": {"name": "overlapping"}},
            "model": {"name": "logistic"},
            "clients": {"count": 100_000, "batch_size": None},
            "privacy": {
                "epsilon": {"name": "uniform", "low": 0.5, "high": 8}, "delta": 1e-3
            },
            "strategies": {"biased_selection": {"clients_per_round": 100}},
            "evaluation": {"every": 12},
            "engine": {"device": "cpu"},
            "tracking": None,
            "output_dir": sys.argv[1],
        }
    ),
    [memory],
)
result = loop.run()
releases = sum(row["releases"] for row in result.clients)
print(json.dumps({"mib": memory._mib, "finished": result.finished, "releases": releases}))
"""


@pytest.mark.slow
def test_cohorts_of_a_hundred_thousand_clients_leave_memory_flat(tmp_path):
    """After the first round; what is planned for each client and its ledger are a few kB."""
    result = run(COHORTS, tmp_path)
    assert result["finished"] and result["releases"] == 12 * 100
    assert max(result["mib"]) < result["mib"][0] + 20 and result["mib"][0] < 1500
    assert (tmp_path / "run/ledger.jsonl").stat().st_size < 8e6
