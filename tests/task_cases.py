"""Records, a population and a small net for each task."""

import torch
from torch import nn

from dpfl_lightning import Population

N, T, V, K = 40, 4, 7, 3


class Attention(nn.Module):
    """A language model with its own attention: tokens [B, T] -> [B, T, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(V, 8), nn.LayerNorm(8)
        self.keys, self.head = nn.Linear(8, 8), nn.Linear(8, V)

    def forward(self, tokens):
        x = self.embedding(tokens)
        scores = (x @ self.keys(x).transpose(1, 2)).softmax(dim=-1)
        return self.head(self.norm(x + scores @ x))


def convolutions(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, outputs, 1))


def records(task: str):
    """x, y and num_classes of some records."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, 4, generator=g)
    if task == "multiclass":
        return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), K
    if task == "binary":
        return x, (x[:, 0] > 0).long(), 2
    if task == "multilabel":
        return x, (x[:, :K] > 0).long(), K
    if task == "regression":
        return x, x[:, 0] * 2 + x[:, 1], None
    if task == "segmentation":
        x = torch.randn(N, 1, 5, 5, generator=g)
        y = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
        y[:, 0] = -100
        return x, y, K
    x = torch.randint(V, (N, T), generator=g)
    y = (x + 1) % V
    y[0, 1:], y[1] = -100, -100
    return x, y, V


def population(task: str) -> Population:
    x, y, classes = records(task)
    rows = torch.arange(N).split([10, 10, 10, 5, 5])
    return Population(x, y, list(rows[:3]), [*rows[3:], rows[0][:0]], torch.arange(30, N), classes or 1)


NETS = {
    "multiclass": lambda: nn.Linear(4, K),
    "binary": lambda: nn.Linear(4, 1),
    "multilabel": lambda: nn.Linear(4, K),
    "regression": lambda: nn.Linear(4, 1),
    "segmentation": lambda: convolutions(K),
    "language_modeling": Attention,
}
