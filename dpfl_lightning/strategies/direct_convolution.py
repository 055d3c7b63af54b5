"""A convolution whose second derivative is made of convolutions of the kernel's own size.

The slope of a kernel's gradient along the input is the input's gradient for another kernel. Torch computes it as a
convolution with the output's gradient for a kernel, as large as the image: the slowest part of a matching step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DirectConvolution(nn.Module):
    """Takes the place of a `Conv2d`, with its parameters."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.geometry = (list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups)

    def forward(self, x: Tensor) -> Tensor:
        y = _Forward.apply(x, self.weight, self.geometry)
        return y if self.bias is None else y + self.bias[:, None, None]


def takes(layer: nn.Conv2d) -> bool:
    """Whether `DirectConvolution` can take the layer's place."""
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _convolution(x: Tensor, weight: Tensor, geometry: Any) -> Tensor:
    return F.conv2d(x, weight, None, *geometry)


def _gradients(x: Tensor, weight: Tensor, dy: Tensor, geometry: Any, wanted: Sequence[bool]) -> tuple[Any, Any]:
    """Of the input and of the kernel, each if wanted."""
    stride, padding, dilation, groups = geometry
    found = torch.ops.aten.convolution_backward(
        dy, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [*wanted, False]
    )
    return found[0], found[1]


class _Forward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, geometry: Any) -> Tensor:
        return _convolution(x, weight, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.geometry = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = _InputGradient.apply(x, weight, dy, ctx.geometry) if ctx.needs_input_grad[0] else None
        dw = _KernelGradient.apply(x, weight, dy, ctx.geometry) if ctx.needs_input_grad[1] else None
        return dx, dw, None


class _InputGradient(torch.autograd.Function):
    """Linear in the kernel and in dy; of x only the shape counts."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, dy: Tensor, geometry: Any) -> Tensor:
        return _gradients(x, weight, dy, geometry, (True, False))[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, weight, dy, ctx.geometry = inputs
        ctx.save_for_backward(weight, dy)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        weight, dy = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        to_weight = _KernelGradient.apply(slope, weight, dy, ctx.geometry) if wanted[1] else None
        to_dy = _Forward.apply(slope, weight, ctx.geometry) if wanted[2] else None
        return None, to_weight, to_dy, None


class _KernelGradient(torch.autograd.Function):
    """Linear in x and in dy; of the kernel only the shape counts."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, dy: Tensor, geometry: Any) -> Tensor:
        return _gradients(x, weight, dy, geometry, (False, True))[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, _, dy, ctx.geometry = inputs
        ctx.save_for_backward(x, dy)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, dy = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        to_x = _InputGradient.apply(x, slope, dy, ctx.geometry) if wanted[0] else None
        to_dy = _Forward.apply(x, slope, ctx.geometry) if wanted[2] else None
        return to_x, None, to_dy, None
