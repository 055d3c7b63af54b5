"""A LightningModule with Adam and a schedule: Flower, whose clients train with Opacus."""

import os
import warnings

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")  # read when flwr and ray are imported

import lightning as L
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant
from opacus.accountants.utils import get_noise_multiplier
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.functional.classification import multiclass_accuracy

ROUNDS, CLIP_NORM, DELTA = 15, 1.0, 1e-3
EPSILONS = {"berlin": 2.0, "paris": 4.0, "oslo": 8.0}

client_app, server_app = ClientApp(), ServerApp()


class Digits(L.LightningDataModule):
    """Images of digits at three unequal sites."""

    def setup(self, stage=None):
        x, y = load_digits(return_X_y=True)
        records = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
        *sites, self.test = random_split(records, [800, 400, 200, 397], torch.Generator().manual_seed(0))
        self.sites = dict(zip(EPSILONS, sites, strict=True))

    def train_dataloader(self):
        return {site: DataLoader(records, batch_size=32, shuffle=True) for site, records in self.sites.items()}

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=397)


class Classifier(L.LightningModule):
    """A classifier as for a Trainer: Adam, whose learning rate follows a cosine over the epochs."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=ROUNDS)]


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One local epoch from the server's parameters. What a client has spent is kept in its context."""
    warnings.filterwarnings("ignore")  # Opacus warns of its random numbers and its hooks
    torch.set_num_threads(1)
    number = context.node_config["partition-id"]
    site = list(EPSILONS)[number]
    data = Digits()
    data.setup()
    loader = data.train_dataloader()[site]
    sample_rate = 1 / len(loader)
    if "privacy" not in context.state:
        noise_multiplier = get_noise_multiplier(
            target_epsilon=EPSILONS[site],
            target_delta=DELTA,
            sample_rate=sample_rate,
            steps=ROUNDS * len(loader),
            accountant="prv",
        )
        context.state["privacy"] = ConfigRecord({"noise_multiplier": noise_multiplier, "steps": 0})
    spent = context.state["privacy"]
    module = Classifier()
    (optimizer,), (scheduler,) = module.configure_optimizers()
    for _ in range(1, message.content["config"]["server-round"]):
        scheduler.step()  # clients are new in every round, so the schedule is repeated up to here
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    private, optimizer, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=optimizer,
        data_loader=loader,  # replaced by one with Poisson batches, which may be empty
        noise_multiplier=spent["noise_multiplier"],
        max_grad_norm=CLIP_NORM,
    )
    private.train()
    for batch_number, batch in enumerate(loader):
        optimizer.zero_grad()
        module.training_step(batch, batch_number).backward()
        optimizer.step()  # adds noise to an empty batch, too
    spent["steps"] += len(loader)
    accountant = PRVAccountant()
    accountant.history = [(spent["noise_multiplier"], sample_rate, spent["steps"])]
    metrics = {"num-examples": len(data.sites[site]), "client": number, "epsilon": accountant.get_epsilon(DELTA)}
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord(metrics)})
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
    data = Digits()
    data.setup()
    test_x, test_y = next(iter(data.test_dataloader()))
    module = Classifier()

    def evaluate(server_round, arrays):
        module.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            accuracy = multiclass_accuracy(module(test_x), test_y, num_classes=10, average="micro")
        print(f"round {server_round}: accuracy {accuracy:.3f}")
        return MetricRecord({"accuracy": accuracy.item()})

    count = len(EPSILONS)
    strategy = FedAvgWithEpsilons(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    result = strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=ROUNDS, evaluate_fn=evaluate)
    for number, (site, budget) in enumerate(EPSILONS.items()):
        print(f"{site}: epsilon {strategy.epsilons[number]:.2f} of {budget}")
    print(f"final accuracy {result.evaluate_metrics_serverapp[ROUNDS]['accuracy']:.3f}")


if __name__ == "__main__":
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server_app, client_app, num_supernodes=len(EPSILONS), backend_config=backend)
