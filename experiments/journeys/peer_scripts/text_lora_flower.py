"""Text with LoRA on a frozen transformer: Flower, whose clients train with Opacus."""

import os
import warnings
from pathlib import Path

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")  # read when flwr and ray are imported

import torch
from example_data import library_texts
from example_transformer import Transformer, pretrained
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
from torchmetrics.functional.classification import multiclass_accuracy

ROUNDS, BATCH_SIZE, LEARNING_RATE, CLIP_NORM, DELTA = 6, 100, 1.0, 1.0, 1e-4
EPSILONS = {"berlin": 1.0, "paris": 2.0, "oslo": 4.0}
SIZES = {"berlin": 3000, "paris": 1800, "oslo": 900, "test": 1000}
NET, TEXTS = Path("net.pt").absolute(), Path("texts.pt").absolute()

client_app, server_app = ClientApp(), ServerApp()


class LoRA(nn.Module):
    """A frozen linear layer plus a trainable product of rank 4."""

    def __init__(self, frozen, rank=4):
        super().__init__()
        self.frozen, self.down = frozen, nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


def with_adapters(net):
    """Freeze the net, and add adapters and a new head, which are trained."""
    net.requires_grad_(False)
    net.query, net.value, net.expand = LoRA(net.query), LoRA(net.value), LoRA(net.expand)
    net.head = nn.Linear(net.head.in_features, 3)
    return net


def trainable(net):
    return {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}


def arrays_of(net):
    return ArrayRecord({name: parameter.detach() for name, parameter in trainable(net).items()})


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One local epoch from the server's adapters. What a client has spent is kept in its context."""
    warnings.filterwarnings("ignore")  # Opacus warns of its random numbers and its hooks
    torch.set_num_threads(1)
    number = context.node_config["partition-id"]
    name = list(EPSILONS)[number]
    x, y = torch.load(TEXTS)[name]
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
    net = with_adapters(Transformer())
    net.load_state_dict(torch.load(NET))
    net.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(trainable(net).values(), lr=LEARNING_RATE),
        data_loader=loader,  # replaced by one with Poisson batches, which may be empty
        noise_multiplier=spent["noise_multiplier"],
        max_grad_norm=CLIP_NORM,
    )
    private.train()
    for batch, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(private(batch), labels).backward()
        optimizer.step()  # adds noise to an empty batch, too
    spent["steps"] += len(loader)
    accountant = PRVAccountant()
    accountant.history = [(spent["noise_multiplier"], sample_rate, spent["steps"])]
    metrics = {"num-examples": len(y), "client": number, "epsilon": accountant.get_epsilon(DELTA)}
    content = RecordDict({"arrays": arrays_of(net), "metrics": MetricRecord(metrics)})
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
    net = with_adapters(Transformer())
    net.load_state_dict(torch.load(NET))
    test_x, test_y = torch.load(TEXTS)["test"]

    def evaluate(server_round, arrays):
        net.load_state_dict(arrays.to_torch_state_dict(), strict=False)
        with torch.no_grad():
            accuracy = multiclass_accuracy(net(test_x), test_y, num_classes=3, average="micro")
        print(f"round {server_round}: accuracy {accuracy:.3f}")
        return MetricRecord({"accuracy": accuracy.item()})

    count = len(EPSILONS)
    strategy = FedAvgWithEpsilons(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    result = strategy.start(grid, arrays_of(net), num_rounds=ROUNDS, evaluate_fn=evaluate)
    for number, (name, budget) in enumerate(EPSILONS.items()):
        print(f"{name}: epsilon {strategy.epsilons[number]:.2f} of {budget}")
    print(f"final accuracy {result.evaluate_metrics_serverapp[ROUNDS]['accuracy']:.3f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save(library_texts(SIZES), TEXTS)
    torch.save(with_adapters(pretrained()).state_dict(), NET)
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server_app, client_app, num_supernodes=len(EPSILONS), backend_config=backend)
