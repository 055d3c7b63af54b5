"""Residual nets of basic blocks whose norm layers do not mix records."""

from collections.abc import Sequence

from torch import Tensor, nn

from dpfl_lightning.errors import nearest, require

NORMS = ("group", "none")


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


def resnet18(input_shape: Sequence[int], num_classes: int, norm: str = "group") -> nn.Module:
    """ResNet-18 with the ImageNet stem and GroupNorm: 11,181,642 parameters for 3 channels and 10 classes.

    `norm` is group (two groups, as many parameters as BatchNorm), or none.

    Reference: He et al. (2016). The noise-aware and clustered papers use it for CIFAR-10, with GroupNorm.
    """
    return _resnet(_imagenet_stem(input_shape[0], norm), (64, 128, 256, 512), (2, 2, 2, 2), num_classes, norm)


def resnet34(input_shape: Sequence[int], num_classes: int, norm: str = "group") -> nn.Module:
    """ResNet-34, otherwise like `resnet18`.

    `norm: none` with 10 outputs has the 21,272,778 parameters that the noise-aware paper reports for CIFAR-100.
    """
    return _resnet(_imagenet_stem(input_shape[0], norm), (64, 128, 256, 512), (3, 4, 6, 3), num_classes, norm)


def resnet20(input_shape: Sequence[int], num_classes: int, norm: str = "group") -> nn.Module:
    """The CIFAR ResNet-20 with 1x1-convolution shortcuts: 272,474 parameters for 3x32x32 and 10 classes.

    Reference: He et al. (2016), section 4.2 with option B; the selection paper's net for CIFAR-10.
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
    require(norm in NORMS, "model.norm", f"be one of {', '.join(NORMS)}", norm, nearest(norm, NORMS))
    conv = nn.Conv2d(channels_in, channels_out, kernel_size, stride, padding=kernel_size // 2, bias=False)
    return [conv, nn.GroupNorm(2, channels_out)] if norm == "group" else [conv]


def _initialise(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
