"""Text with LoRA on a frozen transformer: Opacus for each client, and a federated loop written by hand."""

import copy
import warnings

import torch
from example_data import library_texts
from example_transformer import pretrained
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import multiclass_accuracy

warnings.filterwarnings("ignore")  # Opacus warns of its random numbers and its hooks
ROUNDS, BATCH_SIZE, LEARNING_RATE, CLIP_NORM, DELTA = 6, 100, 1.0, 1.0, 1e-4
EPSILONS = {"berlin": 1.0, "paris": 2.0, "oslo": 4.0}
SIZES = {"berlin": 3000, "paris": 1800, "oslo": 900, "test": 1000}


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


class Client:
    """A client with its texts, its budget, and a private optimiser that counts its steps in all rounds."""

    def __init__(self, net, x, y, epsilon):
        self.num_records = len(y)
        loader = DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE)
        noise_multiplier = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=DELTA,
            sample_rate=1 / len(loader),
            steps=ROUNDS * len(loader),
            accountant="prv",
        )
        self.engine = PrivacyEngine(accountant="prv")
        self.net, self.optimizer, self.loader = self.engine.make_private(
            module=net,
            optimizer=torch.optim.SGD(trainable(net).values(), lr=LEARNING_RATE),
            data_loader=loader,  # replaced by one with Poisson batches, which may be empty
            noise_multiplier=noise_multiplier,
            max_grad_norm=CLIP_NORM,
        )

    def train(self, state):
        """One local epoch from the server's adapters."""
        self.net._module.load_state_dict(state, strict=False)
        self.net.train()
        for x, y in self.loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(x), y).backward()
            self.optimizer.step()  # adds noise to an empty batch, too
        return {name: value.detach().clone() for name, value in trainable(self.net._module).items()}


def trainable(net):
    return {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}


def weighted_mean(states, weights):
    total = sum(weights)
    return {
        name: sum(weight / total * state[name] for weight, state in zip(weights, states, strict=True))
        for name in states[0]
    }


def main():
    torch.manual_seed(0)
    texts, net = library_texts(SIZES), with_adapters(pretrained())
    clients = {name: Client(copy.deepcopy(net), *texts[name], epsilon) for name, epsilon in EPSILONS.items()}
    test_x, test_y = texts["test"]
    for round in range(1, ROUNDS + 1):
        state = {name: parameter.detach() for name, parameter in trainable(net).items()}
        states = [client.train(state) for client in clients.values()]
        means = weighted_mean(states, [client.num_records for client in clients.values()])
        net.load_state_dict(means, strict=False)
        with torch.no_grad():
            accuracy = multiclass_accuracy(net(test_x), test_y, num_classes=3, average="micro")
        print(f"round {round}: accuracy {accuracy:.3f}")
    for name, client in clients.items():
        print(f"{name}: epsilon {client.engine.get_epsilon(DELTA):.2f} of {EPSILONS[name]}")
    print(f"final accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
