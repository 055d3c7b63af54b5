"""Backward pass of a convolution whose output gradient is mostly zeros, as after max-pooling (float32, on a CPU).

Both gradients of a convolution are sums of weighted windows, one for each non-zero number:

    dW_j[o] = sum over (h, w) of    dy_j[o, h, w] * the window of x_j at (h, w)
    dx_j    = sum over (o, h, w) of dy_j[o, h, w] * W[o], at that window

A window is `kernel height` runs of `kernel width * channels` contiguous numbers, which fill vector registers. The loops
in `windows.py` are compiled when a kernel shape first occurs, which takes a second, and are then checked against torch.

Without it, a training step takes 1.86 times as long (the papers' CNN, batch 64), 1.64 (batch 16) and 1.64 (LeNet-5).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpfl_lightning.kernels.dense_conv import nhwc
from dpfl_lightning.runtime.loops import LANES, check_loops

MOSTLY_ZEROS = 0.4  # largest share of non-zero numbers for which this beats a dense convolution
SMALLEST_WINDOW = 16  # numbers in a window; smaller ones do not use vector registers well

Gradients = tuple[Tensor, Tensor, Tensor | None]


def suits(layer: nn.Conv2d, x: Tensor, pooled: bool = False) -> bool:
    """Return whether `sparse_backward` supports the layer and input; depends on shapes, dtype and device alone."""
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and layer.groups == 1 and layer.dilation == (1, 1)
    fills_vectors = layer.out_channels % LANES == 0 and math.prod(layer.weight.shape[1:]) >= SMALLEST_WINDOW
    return plain and len(x) > 0 and (fills_vectors or pooled)


def mostly_zeros(dy: Tensor) -> bool:
    """Return whether `dy` has few enough non-zero numbers for `sparse_backward`; never use it on private records."""
    return int(dy.count_nonzero()) <= MOSTLY_ZEROS * dy.numel()


def sparse_backward(
    layer: nn.Conv2d,
    weight: Tensor,
    x: Tensor,
    dy: Tensor,
    need_dx: bool,
    winners: Tensor | None = None,
    count: int | None = None,
) -> Gradients:
    """Return gradients of weight `[count, O, kh, kw, C]` and bias `[count, O]`, and that of x or None.

    They are those of the first `count` records (None: all); the gradient of x is zero for others.

    `weight` is `[O, C, kh, kw]`, `x` `[B, C, H, W]` (fastest with channels last in memory), `dy` `[B, O, H', W']`. With
    `winners` of `pooling.max_relu`, `dy` is the gradient of the pooled map, `[B, O, H' // 2, W' // 2]`.
    """
    _, channels, rows, columns = weight.shape
    loops = _loops(rows, columns, channels)
    return _backward(
        loops, weight, layer.stride, layer.padding, x, dy, need_dx, winners, len(x) if count is None else count
    )


def _backward(
    loops: Callable[..., None],
    weight: Tensor,
    stride: Any,
    padding: Any,
    x: Tensor,
    dy: Tensor,
    need_dx: bool,
    winners: Tensor | None,
    count: int,
) -> Gradients:
    out, channels, rows, columns = weight.shape
    x_last, dy_last, w_last = nhwc(x), nhwc(dy), nhwc(weight)
    places = np.empty(0, np.uint8) if winners is None else winners.numpy()
    dw, db = np.empty((count, out, rows, columns, channels), np.float32), np.empty((count, out), np.float32)
    dx = np.empty(x_last.shape if need_dx else 0, np.float32)
    dx[count:] = 0.0
    flat = (a.reshape(-1) for a in (x_last, dy_last, places, w_last, dw, db, dx))
    scale = 1 if winners is None else 2
    loops(*flat, count, *x_last.shape[1:], *(scale * n for n in dy_last.shape[1:3]), out, *stride, *padding)
    return torch.from_numpy(dw), torch.from_numpy(db), torch.from_numpy(dx).permute(0, 3, 1, 2) if need_dx else None


@functools.cache
def _loops(rows: int, columns: int, channels: int) -> Callable[..., None]:
    """Return the compiled loops for one kernel shape, after checking them against torch."""
    from dpfl_lightning.kernels.windows import convolution_backward  # importing numba takes half a second

    loops = convolution_backward(rows, columns * channels)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, channels, rows + 2, columns + 1, generator=generator)
    weight = torch.randn(LANES, channels, rows, columns, generator=generator)
    dy = torch.randn(1, LANES, 3, 2, generator=generator)
    dy[torch.rand(dy.shape, generator=generator) < 0.7] = 0.0
    dw, db, dx = _backward(loops, weight, (1, 1), (0, 0), x, dy, True, None, len(x))
    true_dx, true_dw, _ = torch.ops.aten.convolution_backward(
        dy, x, weight, None, (1, 1), (0, 0), (1, 1), False, [0, 0], 1, [True, True, False]
    )
    assert dx is not None
    pairs = (dw[0].permute(0, 3, 1, 2), true_dw), (db[0], dy[0].sum(dim=(1, 2))), (dx, true_dx)
    check_loops("gradients of convolutions", pairs, tolerance=1e-4)
    return loops
