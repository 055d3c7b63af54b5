"""ReLU with 2 x 2 max-pooling, `max(0, max of the window)`, for float32 on a CPU.

The place of each window's winner is kept in a byte. torch keeps it in eight bytes, and its backward passes write a
gradient that is mostly zeros; `sparse_conv.py` reads the winners instead.

Without it, a training step takes 1.33 times as long (the papers' CNN, batch 64), 1.29 (batch 16) and 1.40 (LeNet-5).
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dpfl_lightning.kernels import LOSER, check_loops
from dpfl_lightning.kernels.dense_conv import nhwc


def channels_last(x: Tensor) -> Tensor:
    """Return `x` `[B, C, H, W]` with channels last in memory, in which pooling on a CPU is several times as fast."""
    if x.shape[1] > 1:
        return x.contiguous(memory_format=torch.channels_last)
    height, width = x.shape[2:]  # a tensor with one channel needs the strides set explicitly
    return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))


def max_relu(y: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Return `max_pool2d(relu(y), 2)` `[B, C, H // 2, W // 2]` and uint8 winners `[B, H // 2, W // 2, C]`.

    Compiled loops compute those of the first `count` records (None: all) only; the others are 0, without winners.

    `y` is `[B, C, H, W]` (fastest with channels last in memory, as the result). A winner 0, 1, 2 or 3 is the place of
    the first largest number, row by row; it is 4 if ReLU passes no gradient on. As in torch, what is not a number wins.
    """
    if y.dtype != torch.float32 or min(y.shape[2:]) < 2:
        return _by_torch(y)
    return _by_loops(_loops(), y, len(y) if count is None else count)


def spread(dy: Tensor, winners: Tensor, size: Sequence[int]) -> Tensor:
    """Return the gradient of `y`, whose height and width are `size`, from the gradient `dy` of `max_relu`'s result."""
    spread_dy = dy.new_zeros(*dy.shape[:2], *size)
    height, width = (2 * n for n in dy.shape[2:])
    for winner in range(4):
        wins = winners.permute(0, 3, 1, 2) == winner
        spread_dy[:, :, winner // 2 : height : 2, winner % 2 : width : 2] = dy.masked_fill(~wins, 0.0)
    return spread_dy


def _by_torch(y: Tensor) -> tuple[Tensor, Tensor]:
    pooled, places = F.max_pool2d(y.relu(), 2, return_indices=True)
    row, column = places // y.shape[3] % 2, places % y.shape[3] % 2
    return pooled, (2 * row + column).masked_fill(pooled <= 0, LOSER).permute(0, 2, 3, 1).to(torch.uint8).contiguous()


def _by_loops(loops: Callable[..., None], y: Tensor, count: int) -> tuple[Tensor, Tensor]:
    y_last = nhwc(y)
    records, height, width, channels = y_last.shape
    shape = (records, height // 2, width // 2, channels)
    pooled, winners = np.empty(shape, np.float32), np.empty(shape, np.uint8)
    loops(*(a.reshape(-1) for a in (y_last, pooled, winners)), count, height, width, channels)
    pooled[count:], winners[count:] = 0.0, LOSER
    return torch.from_numpy(pooled).permute(0, 3, 1, 2), torch.from_numpy(winners)


@functools.cache
def _loops() -> Callable[..., None]:
    """Return the compiled loops, after checking them against torch."""
    from dpfl_lightning.kernels.pool_loops import max_relu  # importing numba takes half a second

    for channels in (3, 16):
        y = torch.randint(-2, 3, (2, channels, 5, 7), generator=torch.Generator().manual_seed(0)).float()  # with ties
        check_loops("max-pooling", zip(_by_loops(max_relu, y, len(y)), _by_torch(y), strict=True), tolerance=0.0)
    return max_relu
