"""Which layers the fast engine supports and how, found by trying each of them on random data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpfl_lightning.errors import UserError
from dpfl_lightning.models import check_net
from dpfl_lightning.privacy.clipping.fast import clipped_sum_for


class _First(nn.Module):
    """The first of the outputs of a layer that returns several."""

    def __init__(self, layer: nn.Module, inputs: int = 1) -> None:
        super().__init__()
        self.layer, self.inputs = layer, inputs

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(*[x] * self.inputs)
        return output[0] if isinstance(output, tuple) else output


class _Scale(nn.Module):
    """A user's layer with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Adapter(nn.Module):
    """A frozen linear layer with a trainable adapter of low rank (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


_Recipe = tuple[Callable[[], nn.Module], Sequence[int]]
_IMAGE, _STEPS, _WORDS = (8, 8, 8), (6, 8), (6,)

#: layer -> how to build it, and the shape of a record
LAYERS: dict[str, _Recipe] = {
    "Linear": (lambda: nn.Linear(8, 8), (8,)),
    "Linear at each position of a sequence": (lambda: nn.Linear(8, 8), _STEPS),
    "Linear, frozen, with a low-rank adapter (LoRA)": (_Adapter, _STEPS),
    "Bilinear": (lambda: _First(nn.Bilinear(8, 8, 4), inputs=2), (8,)),
    "Conv1d": (lambda: nn.Conv1d(6, 8, 3), _STEPS),
    "Conv2d (any stride, padding, dilation and groups)": (lambda: nn.Conv2d(8, 8, 3, 2, 1, groups=2), _IMAGE),
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
    "your layer with a parameter": (_Scale, _STEPS),
}

_EXACT = "exact rule"
_VMAP_LAYER = "exact, `vmap` for this layer"
_VMAP_NET = "exact, `vmap` for the whole model"


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
    reason = clipped_sum_for(layer, loss, x, torch.zeros(0, dtype=torch.long))[1]
    if reason.startswith("vmap: "):
        return _VMAP_NET
    return _VMAP_LAYER if "but vmap for" in reason else _EXACT
