"""A module's loss for nets that a server trains or matches by itself, with layers that are faster on a CPU."""

from __future__ import annotations

import copy
import threading

import torch
from torch import Tensor, nn

from dpfl_lightning.kernels import direct_convolution
from dpfl_lightning.kernels.direct_convolution import DirectConvolution
from dpfl_lightning.kernels.fused_planes import FusedPlanes
from dpfl_lightning.models.model import Model
from dpfl_lightning.privacy.clipping.fast import random_example
from dpfl_lightning.privacy.clipping.reference import Params

_ALIKE = 1e-3  # relative: rounding in float32 is far below, another net far above


class FastLoss:
    """`module.sample_loss`, which several threads may call at a time, with faster layers if it is on a CPU.

    In the sequential parts of its net a convolution is a `DirectConvolution`, and an instance norm, a ReLU and a 2x2
    mean pooling in a row are `FusedPlanes`. The same numbers up to rounding, and the same names of parameters.
    Derivatives of third order are refused where planes are fused. A net that computes something else with such layers,
    for it slices its sequential parts or hooks a layer of them, keeps its own.

    Args:
        module: copied; a forward pass swaps a net's parameters in, so every thread has a copy of its own.
        x, y: records and labels `[B, ...]`, B >= 0; only shape and dtype are read, for random ones on which the two
            nets are compared.
        second_order: whether slopes of gradients are wanted, for which convolutions are replaced; it does not speed up
            plain gradients.
    """

    def __init__(self, module: Model, x: Tensor, y: Tensor, second_order: bool = True) -> None:
        self.module = copy.deepcopy(module)
        replaced = False
        for part in _sequential(self.module.net):
            for at, layers in _faster(part, second_order).items():
                replaced = True
                for place, layer in enumerate(layers, start=at):
                    part[place] = layer
        if replaced and not _alike(self.module, module, x, y):
            self.module = copy.deepcopy(module)
        self._own = threading.local()

    def __call__(self, params: Params, x: Tensor, y: Tensor) -> Tensor:
        if not hasattr(self._own, "module"):
            self._own.module = copy.deepcopy(self.module)
        return self._own.module.sample_loss(params, x, y)


def _alike(fast: Model, plain: Model, x: Tensor, y: Tensor) -> bool:
    """Whether losses of random records and their gradients are the same up to rounding."""
    _, x, y = random_example(plain.net, x, y, plain.flat.dtype)
    plain = copy.deepcopy(plain)  # what a forward pass leaves in a net is not left in the caller's
    expected = _losses_and_slope(plain, x, y)
    try:
        found = _losses_and_slope(fast, x, y)
    except Exception:  # a user's forward may raise anything when a layer is not the one it knows
        return False
    return all(_close(*pair) for pair in zip(found, expected, strict=True))


def _losses_and_slope(module: Model, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """`[B]`, and the gradient of their sum `[P]`; dropout falls alike each time."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        theta = module.flat.requires_grad_()
        losses = module.sample_loss(module.unflatten(theta), x, y)
        return losses.detach(), torch.autograd.grad(losses.sum(), theta)[0]


def _close(found: Tensor, expected: Tensor) -> bool:
    """By their lengths: single numbers may be nothing but rounding, as the slope of a bias before a norm is."""
    return found.shape == expected.shape and bool((found - expected).norm() <= _ALIKE * expected.norm())


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
