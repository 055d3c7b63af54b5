"""A personal input transformation before a shared net, as in PRIVATEFL."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class InputTransform(nn.Module):
    """`scale * x + shift`: one scale for each channel (of images) or feature, one shift for each number.

    It begins as the identity. It has 785 parameters for 1x28x28, 3,075 for 3x32x32, 20 for ten features.

    Reference: Yang et al. (2023), PRIVATEFL.
    """

    def __init__(self, input_shape: Sequence[int]) -> None:
        super().__init__()
        image = len(input_shape) == 3
        self.scale = nn.Parameter(torch.ones(input_shape[0], 1, 1) if image else torch.ones(*input_shape))
        self.shift = nn.Parameter(torch.zeros(*input_shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


class PersonalInput(nn.Sequential):
    """A net with a separate input transformation for each client, whose parameters (`personal`) stay there.

    **Privacy** Personal parameters are part of what a client's step clips and noises: without noise they would carry
    records from round to round into the shared release, which no composition covers.

    >>> net = PersonalInput(nn.Flatten(), (1, 28, 28))
    >>> sum(parameter.numel() for parameter in net.parameters()), net.personal
    (785, ('input.scale', 'input.shift'))
    """

    personal = ("input.scale", "input.shift")

    def __init__(self, net: nn.Module, input_shape: Sequence[int]) -> None:
        super().__init__(OrderedDict(input=InputTransform(input_shape), shared=net))
