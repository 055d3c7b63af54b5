"""One clipped sum over a single layer, beside the same sum of Opacus' per-record gradients."""

from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from torch import Tensor, nn

from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.privacy.clipping.stateless import call
from dpfl_lightning.runtime.memory import keep_freed_memory
from dpfl_lightning.runtime.threads import one_thread_an_operator
from experiments.speed.cases import CLIP_NORM
from experiments.speed.measure import Step, in_turns

BATCHES = (16, 64)
WORDS, STEPS, WIDTH = 1000, 32, 128  # of sequences


class Attention(nn.Module):
    """Self-attention without weights."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """The outputs of all steps of a recurrent layer."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class LowRank(nn.Module):
    """A frozen linear layer with a trainable adapter of rank 8."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Scale(nn.Module):
    """A layer that no library knows, with a factor for each feature."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _stacked_lstm(kind: type[nn.Module]) -> nn.Module:
    module = Recurrent(kind)
    module.layer = kind(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
    return module


SEQUENCE, IMAGE, VOLUME = (STEPS, WIDTH), (32, 16, 16), (8, 8, 8, 8)
Build = Callable[[], nn.Module]
#: layers that Opacus takes as they are, and the shape of a record
_SAME: dict[str, tuple[Build, tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(512, 256), (512,)),
    "Linear at 32 positions": (lambda: nn.Linear(WIDTH, WIDTH), SEQUENCE),
    "Linear with an adapter of rank 8": (LowRank, SEQUENCE),
    "Conv1d": (lambda: nn.Conv1d(STEPS, 32, 3, padding=1), SEQUENCE),
    "Conv2d": (lambda: nn.Conv2d(32, 32, 3, padding=1), IMAGE),
    "Conv3d": (lambda: nn.Conv3d(8, 8, 3, padding=1), VOLUME),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(32, 16, 3, padding=1), IMAGE),
    "Embedding": (lambda: nn.Embedding(WORDS, WIDTH), (STEPS,)),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), SEQUENCE),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), SEQUENCE),
    "GroupNorm": (lambda: nn.GroupNorm(4, 32), IMAGE),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(32, affine=True), IMAGE),
    "PReLU": (lambda: nn.PReLU(32), IMAGE),
    "your layer with a parameter": (Scale, SEQUENCE),
}
#: layer, its equivalent in Opacus, and the shape of a record
LAYERS: dict[str, tuple[Build, Build, tuple[int, ...]]] = {
    **{name: (build, build, shape) for name, (build, shape) in _SAME.items()},
    "LSTM": (lambda: Recurrent(nn.LSTM), lambda: Recurrent(DPLSTM), SEQUENCE),
    "LSTM, two layers, both directions": (lambda: _stacked_lstm(nn.LSTM), lambda: _stacked_lstm(DPLSTM), SEQUENCE),
    "GRU": (lambda: Recurrent(nn.GRU), lambda: Recurrent(DPGRU), SEQUENCE),
    "RNN": (lambda: Recurrent(nn.RNN), lambda: Recurrent(DPRNN), SEQUENCE),
    "MultiheadAttention": (lambda: Attention(nn.MultiheadAttention), lambda: Attention(DPMultiheadAttention), SEQUENCE),
}


def layer_times(repeats: int, device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """For every layer and batch, as `in_turns` beside Opacus, on one thread: `{layer: {batch: times}}`."""
    keep_freed_memory()
    with one_thread_an_operator():
        return {name: {str(batch): _times(name, batch, repeats, device, say) for batch in BATCHES} for name in LAYERS}


def _times(name: str, batch: int, repeats: int, device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    build, build_for_opacus, _ = LAYERS[name]
    x = records(name, batch).to(device)
    contestants = ours(build().to(device), x), opacus(build_for_opacus().to(device), x)
    return in_turns(f"{name}, batch {batch}", *contestants, repeats, steps=5, say=say, rival="opacus")


def records(name: str, batch: int) -> Tensor:
    """Random records `[batch, *shape]`, the same every time."""
    generator, shape = torch.Generator().manual_seed(0), (batch, *LAYERS[name][2])
    if name == "Embedding":
        return torch.randint(WORDS, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def ours(layer: nn.Module, x: Tensor) -> Step:
    """The clipped sum `[1, P]`."""
    labels = torch.zeros(len(x), device=x.device)

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return _losses(call(layer, params, {}, (x,)))

    params = {name: p.detach() for name, p in layer.named_parameters() if p.requires_grad}
    clipped_sum = clipped_sum_for(layer, loss, x[:0], labels[:0])[0]
    request = ClipRequest(CLIP_NORM, expected=len(x))  # as a run with this batch size asks
    return lambda: clipped_sum(params, x, labels, request)[0]


def opacus(layer: nn.Module, x: Tensor) -> Step:
    """The clipped sum `[P]`, as Opacus' optimizer computes it."""
    private = GradSampleModule(layer, loss_reduction="sum")
    params = [p for p in private.parameters() if p.requires_grad]

    def step() -> Tensor:
        private.zero_grad()
        _losses(private(x)).sum().backward()
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in params], dim=1).norm(dim=1)
        factors = (CLIP_NORM / (norms + 1e-6)).clamp(max=1.0)
        return torch.cat([torch.einsum("i,i...", factors, p.grad_sample).flatten() for p in params])

    return step


def _losses(outputs: Tensor) -> Tensor:
    return outputs.flatten(1).square().mean(dim=1)
