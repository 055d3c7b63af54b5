"""ReLU with 2 x 2 max-pooling, `max(0, max of the window)`, for float32 on a CPU.

The place of each window's winner is kept in a byte. torch keeps it in eight bytes, and its backward passes write a
gradient that is mostly zeros; `sparse_conv.py` reads the winners instead.

Without it, a training step takes 1.33 times as long (the papers' CNN, batch 64), 1.29 (batch 16) and 1.40 (LeNet-5).
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.kernels.dense_conv import nhwc
from dpfl_lightning.privacy.clipping.convolutions import LOSER, Convolutions
from dpfl_lightning.runtime.loops import check_loops


def max_relu(y: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Return `max_pool2d(relu(y), 2)` `[B, C, H // 2, W // 2]` and uint8 winners `[B, H // 2, W // 2, C]`.

    Compiled loops compute those of the first `count` records (None: all) only; the others are 0, without winners.

    `y` is `[B, C, H, W]` (fastest with channels last in memory, as the result). A winner 0, 1, 2 or 3 is the place of
    the first largest number, row by row; it is 4 if ReLU passes no gradient on. As in torch, what is not a number wins.
    """
    if y.dtype != torch.float32 or min(y.shape[2:]) < 2:
        return Convolutions().max_relu(y, len(y))
    return _by_loops(_loops(), y, len(y) if count is None else count)


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
        both = zip(_by_loops(max_relu, y, len(y)), Convolutions().max_relu(y, len(y)), strict=True)
        check_loops("max-pooling", both, tolerance=0.0)
    return max_relu
