"""A module's loss with layers that are faster on a CPU, for nets that the server trains or matches."""

import copy
import threading

import torch
from torch import Tensor, nn

from dpfl_lightning.kernels.fused_planes import FusedPlanes
from dpfl_lightning.models.model import Model
from dpfl_lightning.privacy.clipping.checked import random_example
from dpfl_lightning.privacy.clipping.inputs import Inputs
from dpfl_lightning.privacy.clipping.reference import Params

_ALIKE = 1e-3  # relative tolerance: far above float32 rounding, far below the difference to another net


class FastLoss:
    """Thread-safe `module.sample_loss`, with faster layers on a CPU; equal up to rounding, names unchanged.

    In the sequential parts of the net, each sequence of instance norm, ReLU and 2x2 mean pooling becomes `FusedPlanes`,
    which have no derivatives of third order. If the result differs on random records shaped like x and y `[B, ...]`,
    B >= 0, because the net slices its parts or hooks their layers, nothing is replaced. Every thread uses a copy of the
    module.
    """

    def __init__(self, module: Model, x: Inputs, y: Tensor) -> None:
        self.module = copy.deepcopy(module)
        parts = [part for part in self.module.net.modules() if type(part) is nn.Sequential]
        replaced = [fuse_planes(part) for part in parts]
        if any(replaced) and not _alike(self.module, module, x, y):
            self.module = copy.deepcopy(module)
        self._of_thread = threading.local()

    def __call__(self, params: Params, x: Inputs, y: Tensor) -> Tensor:
        if not hasattr(self._of_thread, "module"):
            self._of_thread.module = copy.deepcopy(self.module)
        return self._of_thread.module.sample_loss(params, x, y)


def fuse_planes(part: nn.Sequential) -> bool:
    """Replace the layers, not those inside of them, that `FusedPlanes` can compute; return whether there were any."""
    replaced, layers = False, list(part)
    for position, layer in enumerate(layers):
        if isinstance(layer, nn.GroupNorm) and _can_be_fused(layer, layers[position + 1 : position + 3]):
            for index, new in enumerate((FusedPlanes(layer), nn.Identity(), nn.Identity()), start=position):
                part[index] = new
            replaced = True
    return replaced


def _alike(fast: Model, original: Model, x: Inputs, y: Tensor) -> bool:
    """Return whether the losses of random records and their gradients are equal up to rounding."""
    _, x, y = random_example(original.net, x, y, original.flat.dtype)
    original = copy.deepcopy(original)  # a forward pass may change the state of a net
    expected = _losses_and_slope(original, x, y)
    try:
        actual = _losses_and_slope(fast, x, y)
    except Exception:  # a user's forward pass may raise anything for an unexpected layer
        return False
    return all(_close(*pair) for pair in zip(actual, expected, strict=True))


def _losses_and_slope(module: Model, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses `[B]` and the gradient of their sum `[P]`, with the same dropout each time."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        theta = module.flat.requires_grad_()
        losses = module.sample_loss(module.unflatten(theta), x, y)
        return losses.detach(), torch.autograd.grad(losses.sum(), theta)[0]


def _close(actual: Tensor, expected: Tensor) -> bool:
    """Compare by norm, because single numbers may be pure rounding, such as the slope of a bias before a norm."""
    return actual.shape == expected.shape and bool((actual - expected).norm() <= _ALIKE * expected.norm())


def _can_be_fused(norm: nn.GroupNorm, following: list[nn.Module]) -> bool:
    if type(norm) is not nn.GroupNorm or norm.num_groups != norm.num_channels or not norm.affine:
        return False
    if norm.weight.device.type != "cpu" or norm.weight.dtype not in (torch.float32, torch.float64):
        return False
    if [type(layer) for layer in following] != [nn.ReLU, nn.AvgPool2d]:
        return False
    pooling = following[1]
    assert isinstance(pooling, nn.AvgPool2d)
    plain = not pooling.ceil_mode and pooling.divisor_override is None
    return plain and (pooling.kernel_size, pooling.stride, pooling.padding) == (2, 2, 0)
