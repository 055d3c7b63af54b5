"""A module's loss for nets that a server trains or matches by itself, with layers that are faster on a CPU."""

from __future__ import annotations

import copy
import threading

import torch
from torch import Tensor, nn

from dpfl_lightning.client import ClientModule
from dpfl_lightning.privacy.clipping import Params
from dpfl_lightning.strategies import direct_convolution
from dpfl_lightning.strategies.direct_convolution import DirectConvolution
from dpfl_lightning.strategies.fused_planes import FusedPlanes


class FastLoss:
    """`module.sample_loss`, which several threads may call at a time, with faster layers if it is on a CPU.

    In the sequential parts of its net a convolution is a `DirectConvolution`, and an instance norm, a ReLU and a 2x2
    mean pooling in a row are `FusedPlanes`. The same numbers up to rounding, and the same names of parameters.
    Derivatives of third order are refused where planes are fused.

    Args:
        module: copied; a forward pass swaps a net's parameters in, so every thread has a copy of its own.
        second_order: whether slopes of gradients are wanted, for which convolutions are replaced; it does not speed up
            plain gradients.
    """

    def __init__(self, module: ClientModule, second_order: bool = True) -> None:
        self.module = copy.deepcopy(module)
        for part in _sequential(self.module.net):
            for at, layers in _faster(part, second_order).items():
                for place, layer in enumerate(layers, start=at):
                    part[place] = layer
        self._own = threading.local()

    def __call__(self, params: Params, x: Tensor, y: Tensor) -> Tensor:
        if not hasattr(self._own, "module"):
            self._own.module = copy.deepcopy(self.module)
        return self._own.module.sample_loss(params, x, y)


def _sequential(net: nn.Module) -> list[nn.Sequential]:
    return [part for part in net.modules() if type(part) is nn.Sequential]


def _faster(part: nn.Sequential, second_order: bool) -> dict[int, list[nn.Module]]:
    """Layers that can take the place of some in a row, by the place of the first."""
    found: dict[int, list[nn.Module]] = {}
    layers = list(part)
    for at, layer in enumerate(layers):
        if not all(own.device.type == "cpu" for own in layer.parameters()):
            continue
        if second_order and type(layer) is nn.Conv2d and direct_convolution.takes(layer):
            found[at] = [DirectConvolution(layer)]
        elif type(layer) is nn.GroupNorm and _can_be_fused(layer, layers[at + 1 : at + 3]):
            found[at] = [FusedPlanes(layer), nn.Identity(), nn.Identity()]
    return found


def _can_be_fused(norm: nn.GroupNorm, following: list[nn.Module]) -> bool:
    if (
        norm.num_groups != norm.num_channels
        or not norm.affine
        or norm.weight.dtype not in (torch.float32, torch.float64)
    ):
        return False
    if [type(layer) for layer in following] != [nn.ReLU, nn.AvgPool2d]:
        return False
    pooling = following[1]
    assert isinstance(pooling, nn.AvgPool2d)
    return (
        (pooling.kernel_size, pooling.stride, pooling.padding) == (2, 2, 0)
        and not pooling.ceil_mode
        and pooling.divisor_override is None
    )
