"""A table with categories: each category has a trained vector (an entity embedding), beside scaled numbers.

The model learns which patients are readmitted. Categories become whole numbers by public lists, because a list made of
the records would reveal them; an unknown category would be number 0.
"""

import pandas
import torch
from example_data import CATEGORIES, admissions
from figure import save_figure
from torch import nn

from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions, Progress

SIZES = {"berlin": 3000, "paris": 1500, "oslo": 700, "test": 1500}
EPSILONS = {"berlin": 1.0, "paris": 2.0, "oslo": 4.0}
SCALE = {"age": (55, 20), "days": (7, 7)}  # public means and standard deviations


class EntityEmbeddings(nn.Module):
    """Categories [B, 3] and numbers [B, 2] to outputs [B, 1]."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1 + len(values), 8) for values in CATEGORIES.values())
        self.head = nn.Sequential(nn.Linear(8 * len(CATEGORIES) + len(SCALE), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, categories, numbers):
        vectors = [table(column) for table, column in zip(self.tables, categories.unbind(1), strict=True)]
        return self.head(torch.cat([*vectors, numbers], dim=1))


def records(frame):
    columns = [1 + frame[name].astype(pandas.CategoricalDtype(values)).cat.codes for name, values in CATEGORIES.items()]
    categories = torch.tensor(pandas.concat(columns, axis=1).to_numpy(), dtype=torch.long)
    numbers = [(frame[name] - mean) / deviation for name, (mean, deviation) in SCALE.items()]
    numbers = torch.tensor(pandas.concat(numbers, axis=1).to_numpy(), dtype=torch.float32)
    return {"categories": categories, "numbers": numbers, "label": torch.tensor(frame["readmitted"].to_numpy())}


torch.manual_seed(0)
hospitals = {name: records(frame) for name, frame in admissions(SIZES).items()}
test = hospitals.pop("test")
result = FederatedLoop(
    Population.from_datasets(hospitals, test, held_out=0, num_classes=2),
    ClientModule(EntityEmbeddings(), task="binary", metrics=["auroc"]),
    rounds=15,
    clients=ClientOptions(batch_size=128, learning_rate=0.01, optimizer={"name": "adam"}),
    privacy=PrivacyOptions(epsilon=EPSILONS, delta=1e-4),
    callbacks=[Progress()],
).run()
print(f"AUROC {result.test_metrics['auroc']:.3f}")
save_figure("Is a patient readmitted?", accuracy=result)
