"""Seconds a round of one run in three places: a simulation, nodes at sockets, nodes behind Flower."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from dpfl_lightning.build import build_loop
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from experiments.flower.federation import ROOT, SITES, TEST_KEY, Federation, options_of

ROUNDS = 3
CONFIG = (
    f"--rounds {ROUNDS} --data.name fashion_mnist --model.name cnn_small --clients.count 3 --clients.batch_size 256 "
    "--privacy.epsilon [1,2,4] --privacy.delta 1e-5 --strategies '{size_weighted: {}}' --engine.name fast"
)


def measure(folder: Path) -> dict[str, Any]:
    """Return seconds a round, whether models and ledgers are equal, and what a node needs."""
    quiet = "--tracking null"
    simulated = build_loop(
        options_of(f"{CONFIG} {quiet} --privacy.noise_key {TEST_KEY} --output_dir {folder / 'simulated'}")
    )
    simulated.run()
    results: dict[str, Any] = {"load": os.getloadavg()[0], "cores": os.cpu_count(), "rounds": ROUNDS}
    results["simulation"] = _seconds(folder / "simulated")
    with Federation(folder / "sockets", "fashion_mnist:{}/3", 0.1).running(flower=False) as sites:
        sites.plan(CONFIG, "plan")
        nodes = " ".join(f"{site}/socket" for site in SITES)
        command = f"dpfl fit {CONFIG} {quiet} --plan plan.json --nodes {nodes} --output_dir run"
        if sites.start("fit", command).wait():
            raise RuntimeError(sites.log("fit"))
        results["sockets"] = _seconds(sites.folder / "run")
    with Federation(folder / "flower", "fashion_mnist:{}/3", 0.1).running() as sites:
        file = sites.folder / "minimal"
        size = simulated.state.models.numel()
        if sites.run(
            "minimal",
            ROOT / "experiments/flower/peer_scripts/minimal",
            {"rounds": ROUNDS, "size": size, "file": str(file)},
        ).wait():
            raise RuntimeError(sites.log("minimal"))
        results["minimal"] = float(file.read_text()) / ROUNDS
        terms = sites.plan(CONFIG, "plan")
        if sites.fit("fit", f"{CONFIG} --plan plan.json --output_dir run").wait():
            raise RuntimeError(sites.log("fit"))
        results["flower"] = _seconds(sites.folder / "run")
        results["equal"] = same_model(folder / "simulated", sites.folder / "run")
        expected = read_ledger(folder / "simulated" / "ledger.jsonl")
        results["ledgers_equal"] = all(
            sites.charges(site, terms) == [one for one in expected if one.client == client]
            for client, site in enumerate(SITES)
        )
        results["epsilons"] = [
            one["epsilon_spent"] for one in json.loads((sites.folder / "run/result.json").read_text())["clients"]
        ]
        results["parameters"] = size
        pids = {name: sites.processes[f"{name} berlin"].pid for name in ("node", "supernode")}
        results["memory"] = {name: _peak_memory(pid) for name, pid in pids.items()}
        results["tracking"] = _tracked(sites.folder)
    return results


def same_model(first: Path, second: Path) -> bool:
    """Whether two runs have saved the same bits."""
    models = [torch.load(folder / "model.pt", weights_only=True) for folder in (first, second)]
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
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiments = [one.experiment_id for one in client.search_experiments()]
    (run,) = [one for one in client.search_runs(experiments) if one.info.status == "FINISHED"]
    artifacts = client.list_artifacts(run.info.run_id)
    return {"parameters": len(run.data.params), "metrics": len(run.data.metrics), "artifacts": len(artifacts)}
