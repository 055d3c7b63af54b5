"""The papers' plain convolutional nets, the ConvNet family and two linear models, each an `nn.Sequential`."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from dpfl_lightning.errors import UserError, nearest, require

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "sigmoid": nn.Sigmoid}
POOLINGS: dict[str, Callable[[int], nn.Module] | None] = {"avg": nn.AvgPool2d, "max": nn.MaxPool2d, "none": None}
NORMS = ("instance", "group", "layer", "none")


def cnn_small(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """The CNN of the noise-aware and clustered papers: two 5x5 convolutions (16, 32) and one linear layer.

    It has 28,938 parameters for 1x28x28 and 10 classes. The outputs have no activation: we take the ReLU in the tables
    of the papers (Malekmohammadi et al.) for a mistake.
    """
    body = [*_stage(input_shape[0], 16, 5, padding=2), *_stage(16, 32, 5, padding=2)]
    return _classifier("cnn_small", body, input_shape, [num_classes])


def cnn_tiny(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """The selection paper's CNN for MNIST: two 3x3 convolutions (4, 8) and one linear layer.

    It has 4,266 parameters for 1x28x28 and 10 classes; the paper states this number, not the layout.
    """
    body = [*_stage(input_shape[0], 4, 3, padding=1), *_stage(4, 8, 3, padding=1)]
    return _classifier("cnn_tiny", body, input_shape, [num_classes])


def lenet5(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max-pooling: 61,706 parameters for 1x28x28 and 10 classes."""
    body = [*_stage(input_shape[0], 6, 5, padding=2), *_stage(6, 16, 5, padding=0)]
    return _classifier("lenet5", body, input_shape, [120, 84, num_classes])


def cnn_femnist(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """The selection paper's CNN for FEMNIST: two normalised 5x5 convolutions (8, 16) and three linear layers.

    It has 67,026 parameters for 1x28x28 and 62 classes. Group norm replaces the paper's batch norm, which mixes
    records; the number of parameters is the same.
    """
    body = []
    for layers, channels in ((_stage(input_shape[0], 8, 5, padding=2), 8), (_stage(8, 16, 5, padding=0), 16)):
        body += [layers[0], nn.GroupNorm(2, channels), *layers[1:]]
    return _classifier("cnn_femnist", body, input_shape, [120, 84, num_classes])


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
    return _classifier("convnet", body, input_shape, [num_classes])


def logistic(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Softmax regression on the flattened input; returns one logit for each class."""
    must, advice = "be at least 2 for logistic", "Use linear for a regression."
    require(num_classes >= 2, "num_classes", must, num_classes, advice)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def linear(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Linear regression on the flattened input: one output [B, 1]; 11 parameters for ten features."""
    must, advice = "be 1 for linear, a regression", "Use logistic for classes."
    require(num_classes == 1, "num_classes", must, num_classes, advice)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 1))


def _classifier(name: str, body: list[nn.Module], input_shape: Sequence[int], widths: Sequence[int]) -> nn.Sequential:
    """Return `body`, then linear layers of the given output widths with ReLU between them."""
    layers = [*body, nn.Flatten()]
    try:
        with torch.no_grad():
            features = nn.Sequential(*layers)(torch.zeros(1, *input_shape)).shape[1]
    except (RuntimeError, ValueError) as error:
        got = f"{tuple(input_shape)}: {error}"
        raise UserError(f"`input_shape` must be large enough for {name}, got {got}. Use a smaller model.") from error
    for width in widths:
        layers += [nn.Linear(features, width), nn.ReLU()]
        features = width
    return nn.Sequential(*layers[:-1])


def _stage(channels_in: int, channels_out: int, kernel_size: int, padding: int) -> list[nn.Module]:
    # max(ReLU(x)) = ReLU(max(x)): in this order ReLU processes a quarter of the numbers
    return [nn.Conv2d(channels_in, channels_out, kernel_size, padding=padding), nn.MaxPool2d(2), nn.ReLU()]
