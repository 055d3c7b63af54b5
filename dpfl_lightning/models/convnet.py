"""The ConvNet family of dataset condensation and of the distillation paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from dpfl_lightning.errors import nearest, require
from dpfl_lightning.models.cnn import classifier

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "sigmoid": nn.Sigmoid}
POOLINGS: dict[str, Callable[[int], nn.Module] | None] = {"avg": nn.AvgPool2d, "max": nn.MaxPool2d, "none": None}
NORMS = ("instance", "group", "layer", "none")


def convnet(
    input_shape: Sequence[int],
    num_classes: int,
    width: int = 128,
    depth: int = 3,
    activation: str = "relu",
    norm: str = "instance",
    pooling: str = "avg",
) -> nn.Module:
    """Return `depth` blocks of [3x3 convolution, norm, activation, 2x2 pooling], then one linear layer.

    It has 320,010 parameters for 3x32x32 and 317,706 for 1x28x28, where a first padding of 3 makes images 32x32.

    Args:
        width: channels of every convolution, a multiple of 4 for `norm: group`.
        depth: number of blocks.
        activation: relu, leaky_relu or sigmoid.
        norm: instance, group (4 groups), layer or none; each sees one record at a time.
        pooling: avg, max or none.

    Reference: Zhao, Mopuri and Bilen (2021), dataset condensation. Its fifth norm, batch, mixes records and is not
    possible with record-level privacy.
    """
    require(width >= 1 and depth >= 1, "model.width, model.depth", "be at least 1", (width, depth))
    for option, value, known in (
        ("activation", activation, ACTIVATIONS),
        ("norm", norm, NORMS),
        ("pooling", pooling, POOLINGS),
    ):
        require(value in known, f"model.{option}", f"be one of {', '.join(known)}", value, nearest(value, known))
    require(norm != "group" or width % 4 == 0, "model.width", "be a multiple of 4 for the norm `group`", width)
    channels, height, across = input_shape
    body: list[nn.Module] = []
    for block in range(depth):
        padding = 3 if block == 0 and (height, across) == (28, 28) else 1
        body.append(nn.Conv2d(channels, width, 3, padding=padding))
        channels, height, across = width, height + 2 * padding - 2, across + 2 * padding - 2
        if norm == "layer":
            body.append(nn.LayerNorm([width, height, across]))
        elif norm != "none":
            body.append(nn.GroupNorm(width if norm == "instance" else 4, width))
        body.append(ACTIVATIONS[activation]())
        pool = POOLINGS[pooling]
        if pool is not None:
            body.append(pool(2))
            height, across = height // 2, across // 2
    return classifier("convnet", body, input_shape, [num_classes])
