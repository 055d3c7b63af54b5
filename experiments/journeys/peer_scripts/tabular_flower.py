"""Tabular data of hospitals from a CSV: Flower, whose clients train with Opacus."""

import os
import warnings
from pathlib import Path

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")  # read when flwr and ray are imported

import pandas
import torch
from example_data import FEATURES, hospital_csv
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant
from opacus.accountants.utils import get_noise_multiplier
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import binary_accuracy, binary_auroc

ROUNDS, BATCH_SIZE, LEARNING_RATE, CLIP_NORM, DELTA = 15, 32, 0.5, 1.0, 1e-3
EPSILONS = {"berlin": 1.0, "paris": 2.0, "oslo": 4.0}
CSV = Path("hospitals.csv").absolute()

client_app, server_app = ClientApp(), ServerApp()


def make_net():
    return nn.Sequential(nn.Linear(len(FEATURES), 16), nn.ReLU(), nn.Linear(16, 1))


def read(frame):
    center, spread = zip(*FEATURES.values(), strict=True)
    x = torch.tensor(((frame[list(FEATURES)] - center) / spread).to_numpy(), dtype=torch.float32)
    return x, torch.tensor((frame["diagnosis"] == "malignant").to_numpy(), dtype=torch.float32)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One local epoch from the server's parameters. What a client has spent is kept in its context."""
    warnings.filterwarnings("ignore")  # Opacus warns of its random numbers and its hooks
    torch.set_num_threads(1)
    number = context.node_config["partition-id"]
    name = list(EPSILONS)[number]
    frame = pandas.read_csv(CSV)
    x, y = read(frame[frame["hospital"] == name])
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE)
    sample_rate = 1 / len(loader)
    if "privacy" not in context.state:
        noise_multiplier = get_noise_multiplier(
            target_epsilon=EPSILONS[name],
            target_delta=DELTA,
            sample_rate=sample_rate,
            steps=ROUNDS * len(loader),
            accountant="prv",
        )
        context.state["privacy"] = ConfigRecord({"noise_multiplier": noise_multiplier, "steps": 0})
    spent = context.state["privacy"]
    net = make_net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    private, optimizer, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=LEARNING_RATE),
        data_loader=loader,  # replaced by one with Poisson batches, which may be empty
        noise_multiplier=spent["noise_multiplier"],
        max_grad_norm=CLIP_NORM,
    )
    for batch, labels in loader:
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(private(batch).squeeze(1), labels).backward()
        optimizer.step()  # adds noise to an empty batch, too
    spent["steps"] += len(loader)
    accountant = PRVAccountant()
    accountant.history = [(spent["noise_multiplier"], sample_rate, spent["steps"])]
    metrics = {"num-examples": len(y), "client": number, "epsilon": accountant.get_epsilon(DELTA)}
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


class FedAvgWithEpsilons(FedAvg):
    """`FedAvg` that remembers what each client has spent; a client that failed ends the run."""

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        if len(replies) < len(EPSILONS) or any(reply.has_error() for reply in replies):
            raise RuntimeError("a client failed")
        metrics = [reply.content["metrics"] for reply in replies]
        self.epsilons = {one["client"]: one["epsilon"] for one in metrics}
        return super().aggregate_train(server_round, replies)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    frame = pandas.read_csv(CSV)
    test_x, test_y = read(frame[frame["hospital"] == "test"])
    net = make_net()

    def evaluate(server_round, arrays):
        net.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            output = net(test_x).squeeze(1)
        accuracy, auroc = binary_accuracy(output, test_y.int()), binary_auroc(output, test_y.int())
        print(f"round {server_round}: accuracy {accuracy:.3f}, auroc {auroc:.3f}")
        return MetricRecord({"accuracy": accuracy.item(), "auroc": auroc.item()})

    count = len(EPSILONS)
    strategy = FedAvgWithEpsilons(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    result = strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=ROUNDS, evaluate_fn=evaluate)
    for number, (name, budget) in enumerate(EPSILONS.items()):
        print(f"{name}: epsilon {strategy.epsilons[number]:.2f} of {budget}")
    print(f"final accuracy {result.evaluate_metrics_serverapp[ROUNDS]['accuracy']:.3f}")


if __name__ == "__main__":
    hospital_csv(CSV)
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server_app, client_app, num_supernodes=len(EPSILONS), backend_config=backend)
