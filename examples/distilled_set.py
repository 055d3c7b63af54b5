"""A distilled set: hospitals release noisy sums once, and anybody trains a Lightning model on the images made of them.

The second half needs only the folder of the set: no client, and no further privacy budget.
"""

import sys
from pathlib import Path

import lightning as L
import torch
from matplotlib.figure import Figure
from torch import nn

from dpfl_lightning import ClientModule, DistilledDataModule, FederatedLoop, Population, PrivacyOptions
from dpfl_lightning.data import load
from dpfl_lightning.papers.distillation.feature_means import FeatureMeans


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(512, 10))


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


hospitals = Population.partitioned(load("digits"), num_clients=4)
privacy, once = PrivacyOptions(epsilon=[4.0, 4.0, 8.0, 8.0], delta=1e-3), FeatureMeans()
run = FederatedLoop(hospitals, ClientModule(net()), rounds=1, privacy=privacy, strategies=[once], new_net=net).run()
for client in run.clients:
    print(f"{client['name']}: epsilon {client['epsilon_spent']} of {client['epsilon_budget']}")

data = DistilledDataModule(run.output_dir)
trainer = L.Trainer(max_epochs=100, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(model := Classifier(), data)
(scores,) = trainer.test(model, data, verbose=False)
print(f"final accuracy {scores['accuracy']:.3f} on {len(data.test_dataloader().dataset)} test records")

figure = Figure(figsize=(4, 4), layout="constrained", dpi=80)
figure.subplots().set(title="The distilled set", xticks=[], yticks=[])
figure.axes[0].imshow(data.distilled.grid().squeeze(2), cmap="gray")
figure.savefig(path := Path(*sys.argv[1:2] or [Path(run.output_dir) / "figure.png"]))
print("figure:", path)
