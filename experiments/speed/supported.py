"""The page of supported layers, optimisers and tasks. Each is tried on random data; speeds are the bench's."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpfl_lightning.build import ENGINES, build_engine
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.loop import FederatedLoop
from dpfl_lightning.models import check_net
from dpfl_lightning.models.tasks import TASKS
from dpfl_lightning.privacy.clipping import checked
from experiments.pages import RESULTS, markdown, written
from experiments.speed.layers import BATCHES, LowRank, Scale

PAGE = RESULTS / "supported.md"


_OF_USERS = "your layer with a parameter"


class _First(nn.Module):
    """The first of the outputs of a layer that returns several."""

    def __init__(self, layer: nn.Module, inputs: int = 1) -> None:
        super().__init__()
        self.layer, self.inputs = layer, inputs

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(*[x] * self.inputs)
        return output[0] if isinstance(output, tuple) else output


_Recipe = tuple[Callable[[], nn.Module], Sequence[int]]
_IMAGE, _STEPS, _WORDS = (8, 8, 8), (32, 8), (32,)

#: layer -> how to build it, and the shape of a record
LAYERS: dict[str, _Recipe] = {
    "Linear": (lambda: nn.Linear(8, 8), (8,)),
    "Linear at 32 positions": (lambda: nn.Linear(8, 8), _STEPS),
    "Linear with an adapter of rank 8": (lambda: LowRank(8), _STEPS),
    "Bilinear": (lambda: _First(nn.Bilinear(8, 8, 4), inputs=2), (8,)),
    "Conv1d": (lambda: nn.Conv1d(32, 8, 3), _STEPS),
    "Conv2d": (lambda: nn.Conv2d(8, 8, 3, 2, 1, groups=2), _IMAGE),
    "Conv3d": (lambda: nn.Conv3d(2, 4, 2), (2, 4, 4, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(8, 4, 3), _IMAGE),
    "Embedding": (lambda: nn.Embedding(9, 8), _WORDS),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(9, 8), _WORDS),
    "LayerNorm": (lambda: nn.LayerNorm(8), _STEPS),
    "RMSNorm": (lambda: nn.RMSNorm(8), _STEPS),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), _IMAGE),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(8, affine=True), _IMAGE),
    "InstanceNorm2d with running statistics": (
        lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        _IMAGE,
    ),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8), _IMAGE),
    "LSTM": (lambda: _First(nn.LSTM(8, 8, batch_first=True)), _STEPS),
    "LSTM, two layers, both directions": (
        lambda: _First(nn.LSTM(8, 8, num_layers=2, bidirectional=True, batch_first=True)),
        _STEPS,
    ),
    "GRU": (lambda: _First(nn.GRU(8, 8, batch_first=True)), _STEPS),
    "RNN": (lambda: _First(nn.RNN(8, 8, batch_first=True)), _STEPS),
    "MultiheadAttention": (lambda: _First(nn.MultiheadAttention(8, 2, batch_first=True), inputs=3), _STEPS),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), _STEPS),
    "PReLU": (lambda: nn.PReLU(8), _IMAGE),
    _OF_USERS: (lambda: Scale(8), _STEPS),
}

_EXACT = "exact rule"
_VMAP_NET = "exact, `vmap` for the whole model"
_LOOP = "exact, one record at a time"


def support_of(name: str) -> str:
    """Return how the fast engine computes the clipped gradients of a layer of `LAYERS`, or why it is refused."""
    build, shape = LAYERS[name]
    layer = build()
    try:
        check_net(layer)
    except UserError as error:
        return f"refused: {str(error).partition(', which ')[2]}"

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return functional_call(layer, dict(params), (x,)).flatten(1).square().mean(dim=1)

    x = torch.zeros(0, *shape, dtype=torch.long if shape == _WORDS else torch.float32)
    of_users = (
        checked.code_of_users if name == _OF_USERS else lambda net, loss: ""
    )  # what stands around a layer is ours
    with mock.patch.object(checked, "code_of_users", of_users):
        reason = checked.clipped_sum_for(layer, loss, x, torch.zeros(0, dtype=torch.long))[1]
    if reason.startswith("loop: "):
        return _LOOP
    if reason.startswith("vmap: "):
        return _VMAP_NET
    return _EXACT


# ---- optimisers and tasks

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


def _own_labels(records: int) -> TaskCase:
    model, x, _, num_classes = _tokens(records)
    return model, x, x, num_classes


#: task -> a model, random x and y of so many records, and the number of classes
TASK_CASES: dict[str, Callable[[int], TaskCase]] = {
    "multiclass": _on_a_table(10, lambda records: torch.randint(10, (records,)), 10),
    "binary": _on_a_table(1, lambda records: torch.randint(2, (records,)), 2),
    "multilabel": _on_a_table(20, lambda records: torch.randint(2, (records, 20)), 20),
    "regression": _on_a_table(1, torch.randn, None),
    "quantile_regression": _on_a_table(1, torch.randn, None),
    "segmentation": _segmentation,
    "language_modeling": _tokens,
    "causal_lm": _own_labels,
    "survival": _on_a_table(10, lambda records: torch.stack([torch.arange(records), torch.arange(records) % 2], 1), 10),
}


def runs_with(engine: str, task: str, optimizer: Mapping[str, Any]) -> str:
    """Return "yes" if an engine trains a small model of a task with an optimiser, or else why not."""
    net, x, y, num_classes = TASK_CASES[task](8)
    with tempfile.TemporaryDirectory() as folder:
        try:
            FederatedLoop(
                Population.from_datasets([(x, y)] * 2, held_out=0.0, num_classes=num_classes),
                ClientModule(net, task=task),
                clients=ClientOptions(batch_size=4, optimizer=dict(optimizer)),
                output_dir=Path(folder, "run"),
                rounds=1,
                privacy=PrivacyOptions(noise_multiplier=1.0),
                engine=build_engine(engine),
            ).run()
        except UserError as error:
            return f"no: {str(error).partition(', got')[0].replace('`', '')}"
    return "yes"


# ---- the page


def report(measured: Mapping[str, Any]) -> str:
    """Return the page in Markdown, with the speeds beside Opacus of what `experiments.speed` measured."""
    layers = [[name, support_of(name), *(_ratio(measured, name, batch) for batch in BATCHES)] for name in LAYERS]
    optimizers = [
        [name, *(runs_with(engine, "multiclass", options) for engine in ENGINES)]
        for name, options in OPTIMIZER_CASES.items()
    ]
    tasks = [
        [name, task.expects, *(runs_with(engine, name, {"name": "sgd"}) for engine in ENGINES)]
        for name, task in TASKS.items()
    ]
    engines = [f"engine {name}" for name in ENGINES]
    return "\n\n".join(
        [
            "## Layers",
            markdown(["layer", "gradients of single records", *(f"speed, batch {batch}" for batch in BATCHES)], layers),
            "## Optimisers",
            markdown(["`clients.optimizer`", *engines], optimizers),
            "## Tasks",
            markdown(["`task`", "labels and outputs", *engines], tasks),
            f"Speeds were measured on {measured['date']}, on {measured['machine']['cores']} cores of "
            f"{measured['machine']['cpu']}.",
        ]
    )


def _ratio(measured: Mapping[str, Any], layer: str, batch: int) -> str:
    times = measured["layers"].get(layer)
    return f"{times[str(batch)]['ratio_vs_opacus']:.1f} x" if times else "-"


def main(words: Sequence[str]) -> int:
    """Print the tables, or write them beside the speeds."""
    parser = argparse.ArgumentParser(prog="python -m experiments.speed supported", description=__doc__)
    parser.add_argument("--page", action="store_true", help="write experiments/results/supported.md")
    options = parser.parse_args(words)
    text = report(json.loads((RESULTS / "layers.json").read_text()))
    if options.page:
        PAGE.write_text(
            written("Supported layers, optimisers and tasks", "python -m experiments.speed supported --page", text)
        )
    else:
        print(text)
    return 0
