"""Optimisers and tasks beside Opacus: a client's round with each optimiser, and a clipped sum of a net of each task."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.models.optimizers import build_optimizer
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.runtime.memory import keep_freed_memory
from dpfl_lightning.runtime.threads import one_thread_an_operator
from experiments.speed.baselines import build_net, opacus_epoch, our_round, random_records, rivals_round
from experiments.speed.cases import CASES, CLIP_NORM, LEARNING_RATE
from experiments.speed.layers import clipped_by_opacus
from experiments.speed.matching import in_turns

#: name on the page -> `clients.optimizer`
OPTIMIZER_CASES: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd"},
    "sgd with momentum": {"name": "sgd", "momentum": 0.9},
    "adam": {"name": "adam"},
    "adamw": {"name": "adamw"},
}


class TokenModel(nn.Module):
    """One block of causal self-attention over 16 tokens: [B, 16] -> [B, 16, 500]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(500, 64), nn.LayerNorm(64)
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 500)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 8
        scores = scores + torch.full((16, 16), -1e9, device=x.device).triu(1)
        return self.head(self.norm(x + scores.softmax(dim=-1) @ self.value(x)))


def _table(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, outputs))


TaskCase = tuple[nn.Module, Tensor, Tensor, int | None]


def _on_a_table(outputs: int, label: Callable[[int], Tensor], num_classes: int | None) -> Callable[[int], TaskCase]:
    return lambda records: (_table(outputs), torch.randn(records, 64), label(records), num_classes)


def _segmentation(records: int) -> TaskCase:
    body = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 1)
    return nn.Sequential(*body), torch.randn(records, 3, 24, 24), torch.randint(4, (records, 24, 24)), 4


def _tokens(records: int) -> TaskCase:
    x = torch.randint(500, (records, 16))
    return TokenModel(), x, x.roll(-1, dims=1), 500


#: task -> a net, random x and y of so many records, and the number of classes
TASK_CASES: dict[str, Callable[[int], TaskCase]] = {
    "multiclass": _on_a_table(10, lambda records: torch.randint(10, (records,)), 10),
    "binary": _on_a_table(1, lambda records: torch.randint(2, (records,)), 2),
    "multilabel": _on_a_table(20, lambda records: torch.randint(2, (records, 20)), 20),
    "regression": _on_a_table(1, torch.randn, None),
    "segmentation": _segmentation,
    "language_modeling": _tokens,
}


def task_times(repeats: int, device: torch.device, say: Callable[[str], None], batch: int = 64) -> dict[str, Any]:
    """A clipped sum over a batch of each task, ours and that of Opacus' gradients, on one thread: `in_turns`."""
    keep_freed_memory()
    with one_thread_an_operator():
        return {name: _task_times(name, repeats, device, say, batch) for name in TASK_CASES}


def _task_times(
    name: str, repeats: int, device: torch.device, say: Callable[[str], None], batch: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    net, x, y, _ = TASK_CASES[name](batch)
    module, x, y = ClientModule(net, task=name).to(device), x.to(device), y.to(device)
    clipped_sum = clipped_sum_for(module.net, module.sample_loss, x[:0], y[:0])[0]
    params = {key: p.detach() for key, p in module.named_trainable.items()}
    rival = GradSampleModule(deepcopy(module.net), loss_reduction="sum")
    theirs = clipped_by_opacus(rival, lambda net: module.loss(net(x), y))
    return in_turns(
        name,
        lambda: clipped_sum(params, x, y, ClipRequest(CLIP_NORM))[0],
        theirs,
        repeats,
        steps=20,
        say=say,
        rival="opacus",
    )


def optimizer_times(repeats: int, device: torch.device, say: Callable[[str], None], clients: int = 4) -> dict[str, Any]:
    """A round of some clients of the common case with each optimiser, ours and that of Opacus' loop: `in_turns`."""
    case = CASES["common"].scaled(clients / CASES["common"].clients)
    net, pairs, found = build_net(case), random_records(case), {}
    for name, options in OPTIMIZER_CASES.items():
        ours = our_round(case, net, pairs, device, FastEngine(), options)

        def epoch(net: nn.Module, x: Tensor, y: Tensor, batch_size: int, options: dict[str, Any] = options) -> None:
            opacus_epoch(net, x, y, batch_size, build_optimizer(options).over(net.parameters(), LEARNING_RATE))

        theirs = rivals_round(net.to(device), pairs, case.sizes, epoch)
        found[name] = in_turns(name, ours, theirs, repeats, steps=1, say=say, rival="opacus")
    return found
