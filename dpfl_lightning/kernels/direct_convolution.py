"""A convolution whose second derivative consists of convolutions with the same kernel size.

Torch computes the slope of a kernel's gradient along the input as a convolution with a kernel as large as the image,
which is the slowest part of a matching step.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_X, _KERNEL, _DY = range(3)


class DirectConvolution(nn.Module):
    """Replaces a `Conv2d`, with its parameters."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.geometry = (list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups)

    def forward(self, x: Tensor) -> Tensor:
        y = _Slope.apply(_DY, self.geometry, x, self.weight, None)
        return y if self.bias is None else y + self.bias[:, None, None]


def takes(layer: nn.Conv2d) -> bool:
    """Return whether `DirectConvolution` can replace the layer."""
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


class _Slope(torch.autograd.Function):
    """The slope of `<dy, convolution of x with the kernel>` along one of the three tensors, whose values are not used.

    Along dy it is the convolution. It is linear in the two others, so its slopes are of the same kind.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(along: int, geometry: Any, x: Tensor, weight: Tensor, dy: Tensor | None) -> Tensor:
        if along == _DY:
            return F.conv2d(x, weight, None, *geometry)
        stride, padding, dilation, groups = geometry
        needed = [along == _X, along == _KERNEL, False]
        return torch.ops.aten.convolution_backward(
            dy, x, weight, None, stride, padding, dilation, False, [0, 0], groups, needed
        )[along]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.along, ctx.geometry, *three = inputs
        three[ctx.along] = None
        ctx.save_for_backward(*three)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        three = list(ctx.saved_tensors)
        three[ctx.along] = slope
        needed = [which != ctx.along and ctx.needs_input_grad[2 + which] for which in (_X, _KERNEL, _DY)]
        slopes = [_Slope.apply(which, ctx.geometry, *three) if need else None for which, need in enumerate(needed)]
        return None, None, *slopes
