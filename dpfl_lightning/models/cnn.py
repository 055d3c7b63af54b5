"""The papers' plain convolutional nets and two linear models, each an `nn.Sequential`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from dpfl_lightning.errors import UserError, require


def cnn_small(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """The CNN of the noise-aware and clustered papers: two 5x5 convolutions (16, 32) and one linear layer.

    It has 28,938 parameters for 1x28x28 and 10 classes. The outputs have no activation: we take the ReLU in the tables
    of the papers (Malekmohammadi et al.) for a mistake.
    """
    body = [*_stage(input_shape[0], 16, 5, padding=2), *_stage(16, 32, 5, padding=2)]
    return classifier("cnn_small", body, input_shape, [num_classes])


def cnn_tiny(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """The selection paper's CNN for MNIST: two 3x3 convolutions (4, 8) and one linear layer.

    It has 4,266 parameters for 1x28x28 and 10 classes; the paper states this number, not the layout.
    """
    body = [*_stage(input_shape[0], 4, 3, padding=1), *_stage(4, 8, 3, padding=1)]
    return classifier("cnn_tiny", body, input_shape, [num_classes])


def lenet5(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max-pooling: 61,706 parameters for 1x28x28 and 10 classes."""
    body = [*_stage(input_shape[0], 6, 5, padding=2), *_stage(6, 16, 5, padding=0)]
    return classifier("lenet5", body, input_shape, [120, 84, num_classes])


def cnn_femnist(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """The selection paper's CNN for FEMNIST: two normalised 5x5 convolutions (8, 16) and three linear layers.

    It has 67,026 parameters for 1x28x28 and 62 classes. Group norm replaces the paper's batch norm, which mixes
    records; the number of parameters is the same.
    """
    body = []
    for layers, channels in ((_stage(input_shape[0], 8, 5, padding=2), 8), (_stage(8, 16, 5, padding=0), 16)):
        body += [layers[0], nn.GroupNorm(2, channels), *layers[1:]]
    return classifier("cnn_femnist", body, input_shape, [120, 84, num_classes])


def logistic(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Softmax regression on the flattened input; returns one logit for each class."""
    advice = "Use linear for a regression."
    require(num_classes >= 2, "num_classes", "be at least 2 for logistic", num_classes, advice)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def linear(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Linear regression on the flattened input: one output [B, 1]; 11 parameters for ten features."""
    advice = "Use logistic for classes."
    require(num_classes == 1, "num_classes", "be 1 for linear, a regression", num_classes, advice)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 1))


def classifier(name: str, body: list[nn.Module], input_shape: Sequence[int], widths: Sequence[int]) -> nn.Sequential:
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
