"""The papers' models: plain and residual convolutional networks, the ConvNet family, linear models, personal input."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor, nn

from dpfl_lightning.errors import UserError, require

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "sigmoid": nn.Sigmoid}
POOLINGS: dict[str, Callable[[int], nn.Module] | None] = {"avg": nn.AvgPool2d, "max": nn.MaxPool2d, "none": None}
ResidualNorm = Literal["group", "none"]


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
    first, second = _stage(input_shape[0], 8, 5, padding=2), _stage(8, 16, 5, padding=0)
    body = [first[0], nn.GroupNorm(2, 8), *first[1:], second[0], nn.GroupNorm(2, 16), *second[1:]]
    return _classifier("cnn_femnist", body, input_shape, [120, 84, num_classes])


def convnet(
    input_shape: Sequence[int],
    num_classes: int,
    width: Annotated[int, Interval(ge=1, le=100_000)] = 128,
    depth: Annotated[int, Interval(ge=1, le=100)] = 3,
    activation: Literal["relu", "leaky_relu", "sigmoid"] = "relu",
    norm: Literal["instance", "group", "layer", "none"] = "instance",
    pooling: Literal["avg", "max", "none"] = "avg",
) -> nn.Module:
    """Return `depth` blocks of [3x3 convolution, norm, activation, 2x2 pooling], then one linear layer.

    It has 320,010 parameters for 3x32x32 and 317,706 for 1x28x28, where a first padding of 3 makes images 32x32.

    Args:
        width: channels of every convolution, a multiple of 4 for `norm: group`.
        depth: number of blocks.
        activation: of each block.
        norm: each sees one record at a time; group has 4 groups.
        pooling: of each block.

    Reference: Zhao, Mopuri and Bilen (2021), dataset condensation. Its fifth norm, batch, mixes records and is not
    possible with record-level privacy.
    """
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


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut: the identity, or a 1x1 convolution if the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: str) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *_convolution(channels_in, channels_out, 3, stride, norm),
            nn.ReLU(),
            *_convolution(channels_out, channels_out, 3, 1, norm),
        )
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Sequential(*([] if same else _convolution(channels_in, channels_out, 1, stride, norm)))
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, H, W] -> [B, out, H / stride, W / stride]."""
        return self.activation(self.residual(x) + self.shortcut(x))


def resnet18(input_shape: Sequence[int], num_classes: int, norm: ResidualNorm = "group") -> nn.Module:
    """ResNet-18 with the ImageNet stem and GroupNorm: 11,181,642 parameters for 3 channels and 10 classes.

    `norm` is group (two groups, as many parameters as BatchNorm), or none.

    Reference: He et al. (2016). The noise-aware and clustered papers use it for CIFAR-10, with GroupNorm.
    """
    return _resnet(_imagenet_stem(input_shape[0], norm), (64, 128, 256, 512), (2, 2, 2, 2), num_classes, norm)


def resnet34(input_shape: Sequence[int], num_classes: int, norm: ResidualNorm = "group") -> nn.Module:
    """ResNet-34, otherwise like `resnet18`.

    `norm: none` with 10 outputs has the 21,272,778 parameters that the noise-aware paper reports for CIFAR-100.
    """
    return _resnet(_imagenet_stem(input_shape[0], norm), (64, 128, 256, 512), (3, 4, 6, 3), num_classes, norm)


def resnet20(input_shape: Sequence[int], num_classes: int, norm: ResidualNorm = "group") -> nn.Module:
    """The CIFAR ResNet-20 with 1x1-convolution shortcuts: 272,474 parameters for 3x32x32 and 10 classes.

    Reference: He et al. (2016), section 4.2 with option B; the selection paper's model for CIFAR-10.
    """
    stem = [*_convolution(input_shape[0], 16, 3, 1, norm), nn.ReLU()]
    return _resnet(stem, (16, 32, 64), (3, 3, 3), num_classes, norm)


def _imagenet_stem(channels: int, norm: str) -> list[nn.Module]:
    return [*_convolution(channels, 64, 7, 2, norm), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]


def _resnet(
    stem: list[nn.Module], widths: Sequence[int], blocks: Sequence[int], num_classes: int, norm: str
) -> nn.Sequential:
    """Return `stem`, stages of basic blocks that halve the image from the second on, image mean, linear layer."""
    body, channels = list(stem), widths[0]
    for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            body.append(BasicBlock(channels, width, stride, norm))
            channels = width
    net = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
    return net.apply(_initialise)


def _convolution(channels_in: int, channels_out: int, kernel_size: int, stride: int, norm: str) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, channels_out, kernel_size, stride, padding=kernel_size // 2, bias=False)
    return [conv, nn.GroupNorm(2, channels_out)] if norm == "group" else [conv]


def _initialise(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


class InputTransform(nn.Module):
    """`scale * x + shift`: one scale for each channel (of images) or feature, one shift for each number.

    It begins as the identity (Yang et al., 2023, PRIVATEFL): 785 parameters for 1x28x28, 20 for ten features.
    """

    def __init__(self, input_shape: Sequence[int]) -> None:
        super().__init__()
        image = len(input_shape) == 3
        self.scale = nn.Parameter(torch.ones(input_shape[0], 1, 1) if image else torch.ones(*input_shape))
        self.shift = nn.Parameter(torch.zeros(*input_shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


class PersonalInput(nn.Sequential):
    """A model with a separate input transformation for each client, whose parameters (`personal`) stay there.

    **Privacy** Personal parameters are part of what a client's step clips and noises: without noise they would carry
    records from round to round into the shared release, which no composition covers.

    >>> net = PersonalInput(nn.Flatten(), (1, 28, 28))
    >>> sum(parameter.numel() for parameter in net.parameters()), net.personal
    (785, ('input.scale', 'input.shift'))
    """

    personal = ("input.scale", "input.shift")

    def __init__(self, net: nn.Module, input_shape: Sequence[int]) -> None:
        super().__init__(OrderedDict(input=InputTransform(input_shape), shared=net))
