"""Text with LoRA: a transformer is trained on public sentences and frozen; clients train adapters and a new head.

The model learns which library a sentence of documentation is from. Frozen parameters are neither sent nor noised.
"""

import torch
from example_data import library_texts
from example_transformer import pretrained
from figure import save_figure
from torch import nn

from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions, Progress

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


torch.manual_seed(0)
texts = library_texts(SIZES)
test = texts.pop("test")
population = Population.from_datasets(texts, test, held_out=0, num_classes=3)
result = FederatedLoop(
    population,
    ClientModule(with_adapters(pretrained())),
    rounds=6,
    clients=ClientOptions(batch_size=100, learning_rate=1.0),
    privacy=PrivacyOptions(epsilon=EPSILONS, delta=1e-4),
    callbacks=[Progress()],
).run()
save_figure("Which library?", accuracy=result)
