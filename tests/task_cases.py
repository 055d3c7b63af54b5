"""Records, a population and a small net for each task."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpfl_lightning import ClientModule, Population
from dpfl_lightning.models.tasks import TASKS

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


@dataclass(frozen=True)
class TaskCase:
    """A small net of a task, what makes x and y of N records, and the number of classes."""

    net: Callable[[], nn.Module]
    records: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    num_classes: int | None


def of_numbers(label: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """Records of four numbers, whose labels follow from them."""

    def records(g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(N, 4, generator=g)
        return x, label(x)

    return records


def masks(g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(N, 1, 5, 5, generator=g)
    y = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    y[:, 0] = -100
    return x, y


def tokens(g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(V, (N, T), generator=g)
    y = (x + 1) % V
    y[0, 1:], y[1] = -100, -100
    return x, y


def text(g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(V, (N, T), generator=g)
    return x, x.clone()


def levels(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] > 0).long() + (x[:, 0] > 1).long()


#: task of `TASKS` -> its example
CASES = {
    "multiclass": TaskCase(lambda: nn.Linear(4, K), of_numbers(lambda x: (x[:, :2] > 0).long().sum(dim=1)), K),
    "binary": TaskCase(lambda: nn.Linear(4, 1), of_numbers(lambda x: (x[:, 0] > 0).long()), 2),
    "multilabel": TaskCase(lambda: nn.Linear(4, K), of_numbers(lambda x: (x[:, :K] > 0).long()), K),
    "regression": TaskCase(lambda: nn.Linear(4, 1), of_numbers(lambda x: x[:, 0] * 2 + x[:, 1]), None),
    "quantile_regression": TaskCase(lambda: nn.Linear(4, 1), of_numbers(lambda x: x[:, 0] * 2 + x[:, 1]), None),
    "segmentation": TaskCase(lambda: convolutions(K), masks, K),
    "language_modeling": TaskCase(Attention, tokens, V),
    "causal_lm": TaskCase(Attention, text, V),
    "survival": TaskCase(
        lambda: nn.Linear(4, K), of_numbers(lambda x: torch.stack([levels(x), (x[:, 1] > 0).long()], dim=1)), K
    ),
}
NETS = {name: case.net for name, case in CASES.items()}


def records(task: str) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """x, y and num_classes of some records."""
    return *CASES[task].records(torch.Generator().manual_seed(1)), CASES[task].num_classes


def module_of(task: str, **options: Any) -> ClientModule:
    """A module of the task, which is named if shapes do not tell it."""
    return ClientModule(CASES[task].net(), task=None if TASKS[task].inferred else task, **options)


def population(task: str) -> Population:
    x, y, classes = records(task)
    rows = torch.arange(N).split([10, 10, 10, 5, 5])
    return Population(x, y, list(rows[:3]), [*rows[3:], rows[0][:0]], torch.arange(30, N), classes or 1)
