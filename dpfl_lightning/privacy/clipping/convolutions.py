"""Convolutions and max-pooling of a pass without a graph: by torch's operators, or by faster ones of `kernels`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl_lightning.privacy.clipping.kernels import kernel

LOSER = 4  # the number of a place in a 2 x 2 window that passes no gradient on

Pair = Sequence[int]
Form = tuple[Pair, Pair, Pair, int]  # stride, padding, dilation, groups
SparseGradients = tuple[Tensor, Tensor, Tensor | None]


class Convolutions:
    """Convolutions and pooling of `[B, C, H, W]` by torch; subclasses give the same numbers faster.

    They may compute the results of the first `count` records only: those of others are then zeros, or missing.
    """

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form, count: int) -> Tensor:
        return F.conv2d(x, weight, bias, *form)

    def input_gradient(self, x: Tensor, weight: Tensor, dy: Tensor, form: Form, count: int) -> Tensor:
        """Return the gradient of `x` from that of the output, `dy` `[B, O, H', W']`."""
        stride, padding, dilation, groups = form
        rest = (stride, padding, dilation, False, [0, 0], groups, [True, False, False])  # of the input alone
        return torch.ops.aten.convolution_backward(dy, x, weight, None, *rest)[0]

    def weight_gradients(self, x: Tensor, weight: Tensor, dy: Tensor, form: Form, count: int) -> Tensor | None:
        """Return the gradients of the weight, `[count, O, kh, kw, C]`; None if there is no faster way than products."""
        return None

    def gains_from_channels_last(self, layer: nn.Module) -> bool:
        return False

    def sparse_backward(
        self,
        layer: nn.Conv2d,
        weight: Tensor,
        x: Tensor,
        dy: Tensor,
        need_dx: bool,
        winners: Tensor | None,
        count: int,
    ) -> SparseGradients | None:
        """Return gradients of weight `[count, O, kh, kw, C]`, bias `[count, O]` and x, for a `dy` of mostly zeros.

        With `winners` of `max_relu`, `dy` is the gradient of the pooled map. None if there is no faster way.
        """
        return None

    def is_sparse(self, dy: Tensor) -> bool:
        """Return whether `dy` has few enough non-zero numbers for `sparse_backward`; `dy` must be public."""
        return False

    def max_relu(self, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return `max_pool2d(relu(y), 2)` `[B, C, H // 2, W // 2]` and uint8 winners `[B, H // 2, W // 2, C]`.

        A winner 0, 1, 2 or 3 is the place of the first largest number, row by row; it is LOSER if ReLU passes no
        gradient on. As in torch, what is not a number wins.
        """
        pooled, places = F.max_pool2d(y.relu(), 2, return_indices=True)
        row, column = places // y.shape[3] % 2, places % y.shape[3] % 2
        winners = (2 * row + column).masked_fill(pooled <= 0, LOSER).permute(0, 2, 3, 1)
        return pooled, winners.to(torch.uint8).contiguous()


@functools.cache
def convolutions() -> Convolutions:
    """Return the fastest convolutions of this installation."""
    faster = kernel("convolutions")
    return Convolutions() if faster is None else faster.CompiledConvolutions()  # type: ignore[no-any-return]


def channels_last(x: Tensor) -> Tensor:
    """Return `x` `[B, C, H, W]` with channels last in memory, in which pooling on a CPU is several times as fast."""
    if x.shape[1] > 1:
        return x.contiguous(memory_format=torch.channels_last)
    height, width = x.shape[2:]  # a tensor with one channel needs the strides set explicitly
    return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))


def spread(dy: Tensor, winners: Tensor, size: Sequence[int]) -> Tensor:
    """Return the gradient of `y`, whose height and width are `size`, from the gradient `dy` of `max_relu`'s result."""
    spread_dy = dy.new_zeros(*dy.shape[:2], *size)
    height, width = (2 * n for n in dy.shape[2:])
    for winner in range(4):
        wins = winners.permute(0, 3, 1, 2) == winner
        spread_dy[:, :, winner // 2 : height : 2, winner % 2 : width : 2] = dy.masked_fill(~wins, 0.0)
    return spread_dy


def output_size(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> list[int]:
    """Return height and width of a convolution's output."""
    forms = zip(x.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True)
    return [(size + 2 * pad - apart * (kernel - 1) - 1) // step + 1 for size, pad, apart, kernel, step in forms]
