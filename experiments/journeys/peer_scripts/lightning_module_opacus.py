"""A LightningModule with Adam and a schedule: Opacus for each client, and a federated loop written by hand."""

import warnings

import lightning as L
import torch
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.functional.classification import multiclass_accuracy

warnings.filterwarnings("ignore")  # Opacus warns of its random numbers and its hooks
ROUNDS, CLIP_NORM, DELTA = 15, 1.0, 1e-3
EPSILONS = {"berlin": 2.0, "paris": 4.0, "oslo": 8.0}


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


class Client:
    """A site with its records, its budget, and a private optimiser that counts its steps in all rounds."""

    def __init__(self, loader, epsilon):
        self.num_records = len(loader.dataset)
        noise_multiplier = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=DELTA,
            sample_rate=1 / len(loader),
            steps=ROUNDS * len(loader),
            accountant="prv",
        )
        self.module, self.engine = Classifier(), PrivacyEngine(accountant="prv")
        (optimizer,), (self.scheduler,) = self.module.configure_optimizers()
        self.private, self.optimizer, self.loader = self.engine.make_private(
            module=self.module,
            optimizer=optimizer,  # the scheduler still sets its learning rate
            data_loader=loader,  # replaced by one with Poisson batches, which may be empty
            noise_multiplier=noise_multiplier,
            max_grad_norm=CLIP_NORM,
        )

    def train(self, state):
        """One local epoch from the server's parameters."""
        self.module.load_state_dict(state)
        self.private.train()
        for number, batch in enumerate(self.loader):
            self.optimizer.zero_grad()
            self.module.training_step(batch, number).backward()
            self.optimizer.step()  # adds noise to an empty batch, too
        self.scheduler.step()
        return {name: value.clone() for name, value in self.module.state_dict().items()}


def weighted_mean(states, weights):
    total = sum(weights)
    return {
        name: sum(weight / total * state[name] for weight, state in zip(weights, states, strict=True))
        for name in states[0]
    }


def main():
    torch.manual_seed(0)
    data = Digits()
    data.setup()
    clients = {site: Client(loader, EPSILONS[site]) for site, loader in data.train_dataloader().items()}
    test_x, test_y = next(iter(data.test_dataloader()))
    module = Classifier()
    for round in range(1, ROUNDS + 1):
        state = module.state_dict()
        states = [client.train(state) for client in clients.values()]
        module.load_state_dict(weighted_mean(states, [client.num_records for client in clients.values()]))
        with torch.no_grad():
            accuracy = multiclass_accuracy(module(test_x), test_y, num_classes=10, average="micro")
        print(f"round {round}: accuracy {accuracy:.3f}")
    for site, client in clients.items():
        print(f"{site}: epsilon {client.engine.get_epsilon(DELTA):.2f} of {EPSILONS[site]}")
    print(f"final accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
