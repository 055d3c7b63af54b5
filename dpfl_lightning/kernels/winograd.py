"""Convolutions by Winograd's algorithm (float32, on one thread of a CPU).

Blocks of 2 x 2 outputs need 2.25 times fewer products for a kernel of 3 x 3, and 2.8 times fewer for 5 x 5. A block of
outputs is `A^T [(G w G^T) * (B^T x B)] A`, summed over the channels: x is its window of the input, and `*` multiplies
number by number. Each record is computed in the same way in every batch.

Reference: Lavin and Gray (2016), https://arxiv.org/abs/1509.09308; matrices: Winograd (1980), by Toom and Cook's method.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dpfl_lightning.kernels import LANES

#: points at which the polynomials are evaluated, by the kernel's size: the rounding error is 1 to 4 times torch's
POINTS = {3: (0.0, 1.0, -1.0), 5: (0.0, -1.0, 1.0, 2.0, -0.5)}
FEWEST_PRODUCTS = 256  # input times output channels; below this, the transforms take longer than they save


def suits(x: Tensor, weight: Tensor, stride: Any, dilation: Any, groups: int) -> bool:
    """Return whether `conv2d` is fast for x `[B, C, H, W]` and weight `[O, C, k, k]`; values do not matter."""
    out, channels, *kernel = weight.shape
    plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and groups == 1 and x.numel() > 0
    usual = tuple(stride) == tuple(dilation) == (1, 1) and kernel[0] == kernel[1] and kernel[0] in POINTS
    fewest = FEWEST_PRODUCTS if x.stride(1) == 1 else 4 * FEWEST_PRODUCTS
    whole = channels % (LANES // 2) == 0 == out % (LANES // 2) and channels * out >= fewest
    return plain and usual and whole and min(x.shape[2:]) >= 4 and torch.get_num_threads() == 1


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    """Return `F.conv2d(x, weight, bias, padding=padding)` `[B, O, H', W']` with channels last in memory."""
    return _conv2d(*_loops(weight.shape[2]), x, weight, bias, padding)


def _conv2d(loops: Any, into: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    out, channels, size, _ = weight.shape
    x_last = x.detach().permute(0, 2, 3, 1).contiguous()
    out_h, out_w = (n + 2 * p - size + 1 for n, p in zip(x.shape[2:], padding, strict=True))
    y = x.new_empty(len(x), out_h, out_w, out)
    panels = -(-out // LANES)
    transformed = weight.detach().reshape(out * channels, size * size) @ into
    transformed = F.pad(transformed.view(out, -1), (0, 0, 0, panels * LANES - out))
    packed = transformed.view(panels, LANES, channels, -1).permute(3, 0, 2, 1).contiguous()
    bias = x.new_zeros(out) if bias is None else bias.detach().contiguous()
    flat = (a.numpy().reshape(-1) for a in (x_last, packed, bias, y))
    loops(*flat, *x_last.shape, out_h, out_w, out, *padding)
    y = y.permute(0, 3, 1, 2)
    return y if x.stride(1) == 1 else y.contiguous()


def weight_gradients(x: Tensor, dy: Tensor, size: int, padding: Sequence[int]) -> Tensor:
    """Return each record's gradient of the weight, `[B, O, size, size, C]`, from x and dy `[B, O, H', W']`."""
    return _weight_gradients(_weight_loops(size), x, dy, size, padding)


def _weight_gradients(loops: Any, x: Tensor, dy: Tensor, size: int, padding: Sequence[int]) -> Tensor:
    x_last, dy_last = (a.detach().permute(0, 2, 3, 1).contiguous() for a in (x, dy))
    dw = x.new_empty(len(x), dy.shape[1], size, size, x.shape[1])
    loops(*(a.numpy().reshape(-1) for a in (x_last, dy_last, dw)), *x_last.shape, *dy_last.shape[1:], *padding)
    return dw


def matrices(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `A^T` `[2, n]`, `G` `[n, size]` and `B^T` `[n, n]` for blocks of 2 x 2 outputs, n = size + 1."""
    points, n = POINTS[size], size + 1
    outputs, weights, inputs = np.zeros((2, n)), np.zeros((n, size)), np.zeros((n, n))
    for row, point in enumerate(points):
        others = [other for other in points if other != point]
        outputs[:, row] = [1.0, point]
        weights[row] = np.power(point, np.arange(size)) / np.prod(np.subtract(point, others))
        inputs[row, :-1] = np.poly(others)[::-1]
    outputs[1, -1] = weights[-1, -1] = 1.0  # the point at infinity
    inputs[-1] = np.poly(points)[::-1]
    return outputs, weights, inputs


@functools.cache
def _loops(size: int) -> tuple[Any, Tensor]:
    """Return the compiled loops and the transform of weights `[size^2, n^2]`, after a check against torch."""
    from dpfl_lightning.kernels.winograd_loops import forward_loops  # importing numba takes half a second

    outputs, weights, inputs = matrices(size)
    into = torch.from_numpy(np.kron(weights, weights).T).float()
    loops = forward_loops(inputs.tolist(), outputs.tolist())
    x, weight, dy = _example(size)
    expected = F.conv2d(x, weight, weight[:, 0, 0, 0], padding=(1, 2))
    _check(_conv2d(loops, into, x, weight, weight[:, 0, 0, 0], (1, 2)), expected)
    return loops, into


@functools.cache
def _weight_loops(size: int) -> Any:
    """Return the compiled loops for weight gradients, after a check against torch."""
    from dpfl_lightning.kernels.winograd_loops import weight_loops

    outputs, weights, inputs = matrices(size)
    loops = weight_loops(inputs.tolist(), outputs.T.tolist(), weights.T.tolist())
    x, weight, dy = _example(size)
    expected = torch.nn.grad.conv2d_weight(x, weight.shape, dy, padding=(1, 2))
    _check(_weight_gradients(loops, x, dy, size, (1, 2)).sum(dim=0).permute(0, 3, 1, 2), expected)
    return loops


def _example(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random x, weight and gradient of the output, for padding (1, 2)."""
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 8, 7, 6), (24, 8, size, size), (3, 24, 10 - size, 11 - size)
    x, weight, dy = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, weight, dy


def _check(actual: Tensor, expected: Tensor) -> None:
    if not torch.allclose(actual, expected, rtol=1e-4, atol=1e-3):
        raise RuntimeError("compiled loops for convolutions give wrong numbers on this processor: please report it")
