"""Seconds a round of one run in three places: a simulation, nodes at sockets, nodes behind Flower."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dpfl_lightning.loop import build_loop
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from experiments.flower.federation import ROOT, SITES, TEST_KEY, Federation, options_of

ROUNDS = 3
DATA, SLOT, SIZE = "fashion_mnist", 0.1, 28938  # records, seconds, parameters of cnn_small
CONFIG = (
    f"--rounds {ROUNDS} --data.name fashion_mnist --model.name cnn_small --clients.count 3 --clients.batch_size 256 "
    "--privacy.epsilon [1,2,4] --privacy.delta 1e-5 --strategies '{size_weighted: {}}' --engine.name fast"
)


def simulation(folder: Path) -> dict[str, Any]:
    """Simulate the run in `folder/simulated`, unless it is there."""
    run = folder / "simulated"
    if not (run / "result.json").is_file():
        build_loop(options_of(f"{CONFIG} --tracking null --privacy.noise_key {TEST_KEY} --output_dir {run}")).run()
    return {"seconds": _seconds(run), "load": os.getloadavg()[0]}


def sockets(folder: Path) -> dict[str, Any]:
    """Run it over nodes at Unix sockets."""
    with Federation(folder / "sockets", DATA, SLOT).running(flower=False) as sites:
        sites.plan(CONFIG, "plan")
        nodes = " ".join(f"{site}/socket" for site in SITES)
        command = f"dpfl fit {CONFIG} --tracking null --plan plan.json --nodes {nodes} --output_dir run"
        if sites.start("fit", command).wait():
            raise RuntimeError(sites.log("fit"))
        return {"seconds": _seconds(sites.folder / "run"), "load": os.getloadavg()[0]}


def flower(folder: Path) -> dict[str, Any]:
    """Run it over nodes behind Flower; return whether models and ledgers are equal, and what a node needs, too."""
    simulation(folder)
    expected = read_ledger(folder / "simulated" / "ledger.jsonl")
    with Federation(folder / "flower", DATA, SLOT).running() as sites:
        terms, run = sites.plan(CONFIG, "plan"), sites.folder / "run"
        if sites.fit("fit", f"{CONFIG} --plan plan.json --output_dir run").wait():
            raise RuntimeError(sites.log("fit"))
        ledgers = [[one for one in expected if one.client == client] for client in range(len(SITES))]
        pids = {name: sites.processes[f"{name} berlin"].pid for name in ("node", "supernode")}
        return {
            "seconds": _seconds(run),
            "load": os.getloadavg()[0],
            "equal": same_model(folder / "simulated", run),
            "ledgers_equal": [sites.charges(site, terms) for site in SITES] == ledgers,
            "epsilons": [one["epsilon_spent"] for one in json.loads((run / "result.json").read_text())["clients"]],
            "parameters": SIZE,
            "memory": {name: _peak_memory(pid) for name, pid in pids.items()},
            "tracking": _tracked(sites.folder),
        }


def minimal(folder: Path) -> dict[str, Any]:
    """Run Flower's FedAvg of an array of the same size, which nobody trains."""
    file, app = folder / "minimal.txt", ROOT / "experiments/flower/peer_scripts/minimal"
    with Federation(folder / "minimal", DATA, SLOT).running(nodes=False) as sites:
        if sites.run("minimal", app, {"rounds": ROUNDS, "size": SIZE, "file": str(file)}).wait():
            raise RuntimeError(sites.log("minimal"))
        return {"seconds": float(file.read_text()) / ROUNDS, "load": os.getloadavg()[0]}


CASES = {one.__name__: one for one in (simulation, sockets, flower, minimal)}


def same_model(first: Path, second: Path) -> bool:
    """Whether two runs have saved the same bits."""
    models = [load_file(folder / "model.safetensors") for folder in (first, second)]
    return models[0].keys() == models[1].keys() and all(
        torch.equal(models[0][key], models[1][key]) for key in models[0]
    )


def _seconds(run: Path) -> float:
    """Return the mean seconds of a round, scoring included."""
    return float(json.loads((run / "result.json").read_text())["training_seconds"]) / ROUNDS


def _peak_memory(pid: int) -> int:
    """Return the largest resident memory of a process so far, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def _tracked(folder: Path) -> dict[str, int]:
    """Return how much MLflow has of the only run of a store."""
    from dpfl_lightning.reporting.mlflow.store import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiments = [one.experiment_id for one in client.search_experiments()]
    (run,) = [one for one in client.search_runs(experiments) if one.info.status == "FINISHED"]
    artifacts = client.list_artifacts(run.info.run_id)
    return {"parameters": len(run.data.params), "metrics": len(run.data.metrics), "artifacts": len(artifacts)}
