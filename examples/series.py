"""Series of different lengths: an LSTM reads the packed vital signs of each patient, and is scored by AUROC.

The model learns who is in shock at the end of the stay. Records are tuples: a series filled up with zeros, its length,
and the label.
"""

import torch
from example_data import vital_signs
from figure import save_figure
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions, Progress

SIZES = {"berlin": 1200, "paris": 600, "oslo": 300, "test": 500}
EPSILONS = {"berlin": 2.0, "paris": 4.0, "oslo": 8.0}


class LastState(nn.Module):
    """Series [B, hours, 3] and lengths [B] to outputs [B, 1]."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, series, lengths):
        packed = pack_padded_sequence(series, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        return self.head(last[-1])


torch.manual_seed(0)
patients = vital_signs(SIZES)
test = patients.pop("test")
result = FederatedLoop(
    Population.from_datasets(patients, test, held_out=0, num_classes=2),
    ClientModule(LastState(), task="binary", metrics=["auroc"]),
    rounds=10,
    clients=ClientOptions(batch_size=64, learning_rate=0.01, optimizer={"name": "adam"}),
    privacy=PrivacyOptions(epsilon=EPSILONS, delta=1e-4),
    callbacks=[Progress()],
).run()
print(f"AUROC {result.test_metrics['auroc']:.3f}")
save_figure("Is a patient in shock?", accuracy=result)
