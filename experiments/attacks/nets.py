"""Small models with one number as output, one for each kind of layer, whose weights a server may choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dpfl_lightning.privacy.clipping.reference import Params, SampleLoss

WORDS = 11  # rows of tables


class Net(nn.Module):
    """A layer, whose outputs two matrices read: the pairs of units of the first one may cancel in the second."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], words: bool = False) -> None:
        super().__init__()
        self.layer = layer
        example = torch.zeros(1, *shape, dtype=torch.long if words else torch.float32)
        with torch.no_grad():
            features = self._features(example).shape[1]
        self.head = nn.Sequential(nn.Linear(features, 15), nn.ReLU(), nn.Linear(15, 1))

    def _features(self, x: Tensor) -> Tensor:
        output = self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        return (output[0] if isinstance(output, tuple) else output).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._features(x))[:, 0]


class Wise(nn.Module):
    """Numbers of a matrix of odd width, each through a function."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 33) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(21, width), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


class TimeFirst(nn.Module):
    """Outputs of a matrix, with time in front of the records, through a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(7, 13), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x).transpose(0, 1).contiguous())


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]  # the layer
    shape: tuple[int, ...]  # of a record
    words: bool = False  # whether records are rows of a table
    dtype: torch.dtype = torch.float32

    def net(self) -> Net:
        torch.manual_seed(0)
        return Net(self.make(), self.shape, self.words).to(self.dtype)

    def records(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (count, *self.shape)
        x = torch.randn(shape, generator=generator)
        words = torch.randint(WORDS, shape, generator=generator)
        return words if self.words else x.to(self.dtype), torch.randn(count, generator=generator)


def loss_of(net: nn.Module) -> SampleLoss:
    """Return the squared error of each record."""

    def sample_loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(net, dict(params), (x,)) - y).square()

    return sample_loss


def power(x: Tensor) -> Tensor:
    return x.abs().add(0.1).pow(1.7)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "power": power,
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "silu": F.silu,
    "gelu": F.gelu,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "product": lambda x: x.unflatten(1, (11, 3)).prod(2),
    "softmax": partial(torch.softmax, dim=1),
}
_BLOCK = partial(nn.TransformerEncoderLayer, 8, 2, 13, dropout=0.0, batch_first=True)

NETS: Mapping[str, Case] = {
    **{
        f"linear {width}-{units}": Case(partial(nn.Linear, width, units), (width,))
        for width, units in ((64, 32), (33, 7), (63, 17), (128, 127), (5, 3))
    },
    "linear over positions": Case(partial(nn.Linear, 9, 5), (7, 9)),
    "bilinear": Case(lambda: Squared(7, 5), (7,)),
    "conv1d": Case(partial(nn.Conv1d, 3, 5, 3), (3, 17)),
    "conv1d, grouped, strided": Case(partial(nn.Conv1d, 4, 6, 3, stride=2, groups=2), (4, 16)),
    "conv1d, dilated": Case(partial(nn.Conv1d, 2, 4, 3, dilation=3, padding=2), (2, 19)),
    "conv2d": Case(partial(nn.Conv2d, 3, 8, 3, padding=1), (3, 8, 8)),
    "conv2d, one channel": Case(partial(nn.Conv2d, 1, 5, 5), (1, 11, 9)),
    "conv2d, grouped": Case(partial(nn.Conv2d, 4, 8, 3, groups=4), (4, 7, 7)),
    "conv2d, dilated, strided": Case(partial(nn.Conv2d, 2, 6, 3, dilation=2, stride=2, padding=3), (2, 9, 9)),
    "conv2d, pooled": Case(
        lambda: nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)),
        (1, 10, 10),
    ),
    "conv3d": Case(partial(nn.Conv3d, 2, 3, 2), (2, 4, 5, 4)),
    "transposed conv1d": Case(partial(nn.ConvTranspose1d, 3, 4, 3, stride=2), (3, 7)),
    "transposed conv2d": Case(partial(nn.ConvTranspose2d, 2, 3, 3), (2, 5, 5)),
    "layer norm": Case(lambda: nn.Sequential(nn.Linear(21, 17), nn.LayerNorm(17)), (21,)),
    "rms norm": Case(lambda: nn.Sequential(nn.Linear(21, 17), nn.RMSNorm(17)), (21,)),
    "group norm": Case(lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6)), (2, 7, 7)),
    "instance norm": Case(lambda: nn.Sequential(nn.Conv2d(2, 5, 3), nn.InstanceNorm2d(5, affine=True)), (2, 7, 7)),
    "lstm": Case(partial(nn.LSTM, 5, 7, batch_first=True), (6, 5)),
    "lstm, two ways": Case(partial(nn.LSTM, 4, 3, num_layers=2, bidirectional=True, batch_first=True), (5, 4)),
    "gru": Case(partial(nn.GRU, 5, 7, batch_first=True), (6, 5)),
    "rnn": Case(partial(nn.RNN, 5, 7, batch_first=True), (6, 5)),
    "attention": Case(partial(nn.MultiheadAttention, 8, 2, batch_first=True), (6, 8)),
    "transformer": Case(_BLOCK, (5, 8)),
    "embedding": Case(partial(nn.Embedding, WORDS, 6), (7,), words=True),
    "embedding bag": Case(partial(nn.EmbeddingBag, WORDS, 6), (7,), words=True),
    "mean pooling": Case(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.AvgPool2d(2)), (1, 10, 10)),
    "adaptive pooling": Case(lambda: nn.Sequential(nn.Conv2d(1, 7, 3), nn.AdaptiveAvgPool2d(3)), (1, 11, 11)),
    "power pooling": Case(lambda: nn.Sequential(nn.Conv1d(2, 5, 3), nn.LPPool1d(2, 3)), (2, 17)),
    **{name: Case(partial(Wise, function), (21,)) for name, function in _FUNCTIONS.items()},
    "sum over time": Case(lambda: TimeFirst(lambda x: x.sum(0)), (9, 7)),
    "softmax over time": Case(lambda: TimeFirst(lambda x: x.softmax(0).transpose(0, 1)), (9, 7)),
    "linear in bfloat16": Case(partial(nn.Linear, 33, 13), (33,), dtype=torch.bfloat16),
    "gelu in bfloat16": Case(partial(Wise, F.gelu), (21,), dtype=torch.bfloat16),
    "sum over time in bfloat16": Case(lambda: TimeFirst(lambda x: x.sum(0)), (9, 7), dtype=torch.bfloat16),
}


class Squared(nn.Module):
    """A bilinear layer of a record and itself."""

    def __init__(self, width: int, units: int) -> None:
        super().__init__()
        self.pair = nn.Bilinear(width, width, units)

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x, x)
