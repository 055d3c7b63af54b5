"""Tabular data of hospitals from a CSV: Opacus for each client, and a federated loop written by hand."""

import warnings
from pathlib import Path

import pandas
import torch
from example_data import FEATURES, hospital_csv
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import binary_accuracy, binary_auroc

warnings.filterwarnings("ignore")  # Opacus warns of its random numbers and its hooks
ROUNDS, BATCH_SIZE, LEARNING_RATE, CLIP_NORM, DELTA = 15, 32, 0.5, 1.0, 1e-3
EPSILONS = {"berlin": 1.0, "paris": 2.0, "oslo": 4.0}


class Client:
    """A hospital with its records, its budget, and a private optimiser that counts its steps in all rounds."""

    def __init__(self, x, y, epsilon):
        self.num_records = len(y)
        loader = DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE)
        noise_multiplier = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=DELTA,
            sample_rate=1 / len(loader),
            steps=ROUNDS * len(loader),
            accountant="prv",
        )
        net = make_net()
        self.engine = PrivacyEngine(accountant="prv")
        self.net, self.optimizer, self.loader = self.engine.make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=LEARNING_RATE),
            data_loader=loader,  # replaced by one with Poisson batches, which may be empty
            noise_multiplier=noise_multiplier,
            max_grad_norm=CLIP_NORM,
        )

    def train(self, state):
        """One local epoch from the server's parameters."""
        self.net._module.load_state_dict(state)
        self.net.train()
        for x, y in self.loader:
            self.optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(self.net(x).squeeze(1), y).backward()
            self.optimizer.step()  # adds noise to an empty batch, too
        return {name: value.clone() for name, value in self.net._module.state_dict().items()}


def make_net():
    return nn.Sequential(nn.Linear(len(FEATURES), 16), nn.ReLU(), nn.Linear(16, 1))


def read(frame):
    center, spread = zip(*FEATURES.values(), strict=True)
    x = torch.tensor(((frame[list(FEATURES)] - center) / spread).to_numpy(), dtype=torch.float32)
    return x, torch.tensor((frame["diagnosis"] == "malignant").to_numpy(), dtype=torch.float32)


def weighted_mean(states, weights):
    total = sum(weights)
    return {
        name: sum(weight / total * state[name] for weight, state in zip(weights, states, strict=True))
        for name in states[0]
    }


def main():
    torch.manual_seed(0)
    frame = pandas.read_csv(hospital_csv(Path("hospitals.csv")))
    clients = {name: Client(*read(frame[frame["hospital"] == name]), epsilon) for name, epsilon in EPSILONS.items()}
    test_x, test_y = read(frame[frame["hospital"] == "test"])
    net = make_net()
    for round in range(1, ROUNDS + 1):
        state = net.state_dict()
        states = [client.train(state) for client in clients.values()]
        net.load_state_dict(weighted_mean(states, [client.num_records for client in clients.values()]))
        with torch.no_grad():
            output = net(test_x).squeeze(1)
        accuracy, auroc = binary_accuracy(output, test_y.int()), binary_auroc(output, test_y.int())
        print(f"round {round}: accuracy {accuracy:.3f}, auroc {auroc:.3f}")
    for name, client in clients.items():
        print(f"{name}: epsilon {client.engine.get_epsilon(DELTA):.2f} of {EPSILONS[name]}")
    print(f"final accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
