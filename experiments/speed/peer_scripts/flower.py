"""Rounds of Flower's simulation (Ray) whose clients train with Opacus, as in Flower's Opacus example.

Run by `speed/peers.py` in an environment with flwr[simulation], opacus and torch, without this package. One CPU and one
torch thread a client, as many clients side by side as there are CPUs, no evaluation. A round is from the server's
choice of clients, for which it waits on standard input, to the end of its aggregation.
"""

import json
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")  # read when flwr and ray are imported

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

JOB = json.loads(Path(sys.argv[1]).read_text())
FOLDER = Path(sys.argv[1]).parent

client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One local epoch of DPSGD from the server's parameters."""
    warnings.filterwarnings("ignore")  # Opacus on its random numbers and its hooks, for every client
    torch.set_num_threads(1)
    net = torch.load(FOLDER / "net.pt", weights_only=False)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = torch.load(FOLDER / f"client_{context.node_config['partition-id']}.pt")
    private, optimizer, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=JOB["learning_rate"]),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=JOB["batch_size"]),
        noise_multiplier=JOB["noise_multiplier"],
        max_grad_norm=JOB["clip_norm"],
    )
    for batch, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(private(batch), labels).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


class FedAvgOnRequest(FedAvg):
    """`FedAvg` that begins a round when it is asked to, and says when it is done."""

    def configure_train(self, *args: Any, **options: Any) -> Iterable[Message]:
        if not sys.stdin.readline():
            raise RuntimeError("nobody asks for a round any more")
        return super().configure_train(*args, **options)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        if len(replies) < JOB["clients"] or any(reply.has_error() for reply in replies):
            raise RuntimeError("clients failed")
        mean = super().aggregate_train(server_round, replies)
        print("DONE", flush=True)
        return mean


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    net = torch.load(FOLDER / "net.pt", weights_only=False)
    strategy = FedAvgOnRequest(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=JOB["clients"])
    strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=JOB["rounds"])


if __name__ == "__main__":
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": JOB["cores"]}}
    run_simulation(server_app, client_app, num_supernodes=JOB["clients"], backend_config=backend)
