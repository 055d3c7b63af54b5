"""Your LightningDataModule and LightningModule, as for a Trainer, with Adam and a learning rate schedule.

`train_dataloader` returns a loader for each client. Batches are drawn by Poisson sampling, and an epoch of the schedule
is a round.
"""

import lightning as L
import torch
from figure import save_figure
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from dpfl_lightning import ClientOptions, FederatedLoop, Population, PrivacyOptions, Progress

ROUNDS, EPSILONS = 15, {"berlin": 2.0, "paris": 4.0, "oslo": 8.0}


class Digits(L.LightningDataModule):
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
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=ROUNDS)]


torch.manual_seed(0)
result = FederatedLoop(
    Population.from_datamodule(Digits(), held_out=0, num_classes=10),
    Classifier(),
    rounds=ROUNDS,
    clients=ClientOptions(batch_size=32),
    privacy=PrivacyOptions(epsilon=EPSILONS, delta=1e-3),
    callbacks=[Progress()],
).run()
save_figure("Which digit?", accuracy=result)
