"""Convolutions of float32 with many channels, on one thread of a CPU.

Kernels of 3 x 3 and 5 x 5 use Winograd's algorithm: a block of 2 x 2 outputs is
`A^T [(G w G^T) * (B^T x B)] A`, summed over the channels, where x is its window of the input and `*` multiplies number
by number. That takes 2.25 and 2.8 times fewer products. Every record is computed in the same way in every batch.

Without it, a training step takes 1.23 times as long (ConvNet), 1.18 to 1.23 (ResNet-20) and 1.05 (ResNet-18).

Reference: Lavin and Gray (2016), https://arxiv.org/abs/1509.09308.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from dpfl_lightning.privacy.clipping.convolutions import Convolutions, Pair, output_size
from dpfl_lightning.runtime.loops import LANES, check_loops

#: where the algorithm evaluates polynomials, by the kernel's size: rounding errors are 1 to 4 times torch's
POINTS = {3: (0.0, 1.0, -1.0), 5: (0.0, -1.0, 1.0, 2.0, -0.5)}
FEWEST_PRODUCTS = 256  # input times output channels; below this, its transforms take longer than they save
IN_OTHER_FORMAT = 4  # times this, if x does not have channels last in memory
SMALLEST_MAP = 4  # rows and columns of the input


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    count: int | None = None,
) -> Tensor:
    """Return `F.conv2d` of these arguments, without a graph, in the memory format of x.

    Where loops compute it, the outputs of all but the first `count` records (None: all) are zeros.
    """
    count = len(x) if count is None else count
    if _by_blocks(x, weight, stride, dilation, groups) and _fits(x, weight, bias, padding):
        return _in_blocks(*_block_loops(weight.shape[2]), x, weight, bias, padding, count)
    return Convolutions().forward(x, weight, bias, (stride, padding, dilation, groups), count)


def input_gradient(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    count: int | None = None,
) -> Tensor:
    """Return the gradient of x from that of the output, `dy` `[B, O, H', W']`; as `conv2d` for the first `count`."""
    count = len(x) if count is None else count
    if _by_blocks(dy, weight.transpose(0, 1), stride, dilation, groups) and max(padding) < weight.shape[2]:
        size = weight.shape[2]
        flipped, padding = weight.flip(2, 3).transpose(0, 1), [size - 1 - n for n in padding]
        return _in_blocks(*_block_loops(size), dy, flipped, None, padding, count)
    return Convolutions().input_gradient(x, weight, dy, (stride, padding, dilation, groups), count)


def weight_gradients(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    count: int | None = None,
) -> Tensor | None:
    """Return the gradients of the weight of the first `count` records, `[count, O, size, size, C]`.

    None if there is no fast way.
    """
    if dy.dtype != x.dtype or not _by_blocks(x, weight, stride, dilation, groups):
        return None
    if list(dy.shape[2:]) != output_size(x, weight, stride, padding, dilation):  # of a user's forward pass
        return None
    return _weights_in_blocks(_weight_loops(weight.shape[2]), x[:count], dy[:count], weight.shape[2], padding)


def gains_in_blocks(layer: nn.Module) -> bool:
    """Return whether a layer's convolution is computed in blocks if its input has channels last."""
    if not isinstance(layer, nn.Conv2d) or not _has_blocks(layer.weight, layer.stride, layer.dilation):
        return False
    return layer.groups == 1 and layer.in_channels * layer.out_channels >= FEWEST_PRODUCTS


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> bool:
    """Return whether torch accepts these arguments of a convolution in blocks; the loops check nothing."""
    if min(padding) < 0 or x.shape[1] != weight.shape[1]:
        return False
    matches = bias is None or (bias.dtype == weight.dtype and bias.shape == weight.shape[:1])
    return matches and min(output_size(x, weight, (1, 1), padding, (1, 1))) > 0


def _by_blocks(x: Tensor, weight: Tensor, stride: Pair, dilation: Pair, groups: int) -> bool:
    """Return whether loops on one thread suit these tensors; it depends on shapes, dtype and device alone."""
    if torch.get_num_threads() > 1 or groups > 1 or x.dim() != 4 or x.device.type != "cpu":
        return False
    fewest = FEWEST_PRODUCTS if x.stride(1) == 1 else IN_OTHER_FORMAT * FEWEST_PRODUCTS
    if not _has_blocks(weight, stride, dilation) or weight.shape[0] * weight.shape[1] < fewest:
        return False
    if torch.is_autocast_enabled("cpu") or not x.dtype == weight.dtype == torch.float32:
        return False
    return len(x) > 0 and min(x.shape[2:]) >= SMALLEST_MAP


def _has_blocks(weight: Tensor, stride: Pair, dilation: Pair) -> bool:
    out, channels, rows, columns = weight.shape
    whole = channels % (LANES // 2) == 0 == out % (LANES // 2)
    return whole and rows == columns and rows in POINTS and tuple(stride) == tuple(dilation) == (1, 1)


def _in_blocks(
    loops: Any, weight_transform: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair, count: int
) -> Tensor:
    out, channels, size, _ = weight.shape
    x_last = nhwc(x)
    y = np.empty((len(x_last), *output_size(x, weight, (1, 1), padding, (1, 1)), out), np.float32)
    y[count:] = 0.0
    panels = -(-out // LANES)
    if out % LANES:
        weight = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, panels * LANES - out))
    packed = weight.detach().reshape(panels, LANES, channels, size * size).permute(3, 0, 2, 1).reshape(size * size, -1)
    arrays = x_last, (weight_transform @ packed).resolve_neg().numpy(), _bias(out, bias), y
    loops(*(a.reshape(-1) for a in arrays), count, *x_last.shape[1:], *y.shape[1:], *padding)
    return _in_format_of(x, y)


def _weights_in_blocks(loops: Any, x: Tensor, dy: Tensor, size: int, padding: Pair) -> Tensor:
    x_last, dy_last = nhwc(x), nhwc(dy)
    dw = np.empty((len(x_last), dy.shape[1], size, size, x.shape[1]), np.float32)
    loops(*(a.reshape(-1) for a in (x_last, dy_last, dw)), *x_last.shape, *dy_last.shape[1:], *padding)
    return torch.from_numpy(dw)


def nhwc(x: Tensor) -> np.ndarray:
    """Return x `[B, C, H, W]` as an array `[B, H, W, C]`, without a copy if its memory is in that order."""
    return x.detach().permute(0, 2, 3, 1).contiguous().resolve_neg().numpy()


def _bias(out: int, bias: Tensor | None) -> np.ndarray:
    return np.zeros(out, np.float32) if bias is None else bias.detach().contiguous().resolve_neg().numpy()


def _in_format_of(x: Tensor, y_last: np.ndarray) -> Tensor:
    y = torch.from_numpy(y_last).permute(0, 3, 1, 2)
    return y if x.stride(1) == 1 else y.contiguous()


def matrices(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `A^T` `[2, n]`, `G` `[n, size]` and `B^T` `[n, n]` for blocks of 2 x 2 outputs, n = size + 1.

    The result of a one-dimensional convolution is a product of polynomials, which is interpolated from its values at
    the `POINTS` and at infinity (Toom and Cook's method, transposed).
    """
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


# ---- compiled loops, each checked against torch before its first use


@functools.cache
def _block_loops(size: int) -> tuple[Any, Tensor]:
    """Return the loops, and the transform of weights `[n^2, size^2]`."""
    from dpfl_lightning.kernels.dense_loops import forward_loops  # importing numba takes half a second

    outputs, weights, inputs = matrices(size)
    weight_transform = torch.from_numpy(np.kron(weights, weights)).float()
    loops = forward_loops(inputs.tolist(), outputs.tolist())
    x, weight, _ = _example(8, size)
    bias = weight[:, 0, 0, 0]
    actual = _in_blocks(loops, weight_transform, x, weight, bias, (1, 2), len(x))
    check_loops("convolutions", [(actual, F.conv2d(x, weight, bias, padding=(1, 2)))], tolerance=1e-3)
    return loops, weight_transform


@functools.cache
def _weight_loops(size: int) -> Any:
    from dpfl_lightning.kernels.dense_loops import weight_loops

    outputs, weights, inputs = matrices(size)
    loops = weight_loops(inputs.tolist(), outputs.T.tolist(), weights.T.tolist())
    x, weight, dy = _example(8, size)
    expected = conv2d_weight(x, weight.shape, dy, padding=(1, 2))
    actual = _weights_in_blocks(loops, x, dy, size, (1, 2)).sum(dim=0).permute(0, 3, 1, 2)
    check_loops("convolutions", [(actual, expected)], tolerance=1e-3)
    return loops


def _example(channels: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random x, weight and gradient of the output, for padding (1, 2)."""
    generator = torch.Generator().manual_seed(0)
    shapes = (3, channels, 7, 6), (24, channels, size, size), (3, 24, 10 - size, 11 - size)
    x, weight, dy = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, weight, dy
