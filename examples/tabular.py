"""Tabular data: three unequal hospitals in one CSV file, each with its own privacy budget.

The model learns whether a tumour is malignant, and a fourth hospital, `test`, evaluates it. Features are normalised by
public constants, because a mean of the records would be a release without noise.
"""

from pathlib import Path

import pandas
import torch
from example_data import FEATURES, hospital_csv
from figure import save_figure
from torch import nn

from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions, Progress

EPSILONS = {"berlin": 1.0, "paris": 2.0, "oslo": 4.0}


torch.manual_seed(0)
frame = pandas.read_csv(hospital_csv(Path("hospitals.csv")))
is_test = frame["hospital"] == "test"
population = Population.from_dataframe(
    frame[~is_test],
    client="hospital",
    label="diagnosis",
    classes=["benign", "malignant"],
    columns={name: {"scale": scale} for name, scale in FEATURES.items()},
    test=frame[is_test],
    held_out=0,
)
net = nn.Sequential(nn.Linear(len(FEATURES), 16), nn.ReLU(), nn.Linear(16, 1))
result = FederatedLoop(
    population,
    ClientModule(net, task="binary", metrics=["auroc"]),
    rounds=15,
    clients=ClientOptions(batch_size=32, learning_rate=0.5),
    privacy=PrivacyOptions(epsilon=EPSILONS, delta=1e-3),
    callbacks=[Progress()],
).run()
print(f"AUROC {result.test_metrics['auroc']:.3f}")
save_figure("Is a tumour malignant?", accuracy=result)
