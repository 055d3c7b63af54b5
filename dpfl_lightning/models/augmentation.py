"""Differentiable augmentations of images, shared by the real and the synthetic images of a class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_MOST_SCALE, _MOST_DEGREES, _CROP, _CUTOUT = 1.2, 15.0, 0.125, 0.5
NUMBERS = 3  # uniform numbers in [0, 1) that determine the augmentation of an image


def _whole(u: Tensor, many: int) -> Tensor:
    """Map each number to one of 0 .. many - 1 with equal probability; rounding to 1 in another dtype is handled."""
    return (u * many).long().clamp_max(many - 1)


def _flip(x: Tensor, u: Tensor) -> Tensor:
    return torch.where((u[:, 0] < 0.5).view(-1, 1, 1, 1), x.flip(3), x)


def _scale(x: Tensor, u: Tensor) -> Tensor:
    factors = 1 / _MOST_SCALE + u[:, :2] * (_MOST_SCALE - 1 / _MOST_SCALE)
    return _warped(x, torch.diag_embed(factors))


def _rotate(x: Tensor, u: Tensor) -> Tensor:
    angle = (u[:, 0] - 0.5) * 2 * math.radians(_MOST_DEGREES)
    cos, sin = angle.cos(), angle.sin()
    return _warped(x, torch.stack([cos, -sin, sin, cos], dim=1).view(-1, 2, 2))


def _warped(x: Tensor, matrix: Tensor) -> Tensor:
    """Sample the images at linearly transformed positions, with zeros beyond their edges."""
    affine = F.pad(matrix, (0, 1)).to(x.dtype)
    grid = F.affine_grid(affine, list(x.shape), align_corners=True)
    return F.grid_sample(x, grid, align_corners=True)


def _crop(x: Tensor, u: Tensor) -> Tensor:
    """Shift by whole pixels, and fill with zeros."""
    height, width = x.shape[2:]
    reach = [math.floor(_CROP * size + 0.5) for size in (height, width)]
    padded = F.pad(x, (reach[1], reach[1], reach[0], reach[0]))
    first = [_whole(u[:, axis], 2 * shift + 1) for axis, shift in enumerate(reach)]
    rows = first[0][:, None] + torch.arange(height, device=x.device)
    columns = first[1][:, None] + torch.arange(width, device=x.device)
    image = torch.arange(len(x), device=x.device).view(-1, 1, 1)
    return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _cutout(x: Tensor, u: Tensor) -> Tensor:
    """Set a square at a random position to zero, cut off at the edges of the image."""
    holes = []
    for axis, size in enumerate(x.shape[2:]):
        side = math.floor(_CUTOUT * size + 0.5)
        first = _whole(u[:, axis], size + 1 - side % 2) - side // 2
        distance = torch.arange(size, device=x.device) - first[:, None]
        holes.append((distance >= 0) & (distance < side))
    hole = holes[0][:, None, :, None] & holes[1][:, None, None, :]
    return torch.where(hole, 0.0, x)


def _color(x: Tensor, u: Tensor) -> Tensor:
    """Change brightness, then saturation, then contrast."""
    brightness, saturation, contrast = u.to(x.dtype).T[:, :, None, None, None]
    x = x + (brightness - 0.5)
    grey = x.mean(dim=1, keepdim=True)
    x = (x - grey) * (2 * saturation) + grey
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    return (x - mean) * (contrast + 0.5) + mean


#: (name, function of a pass, x, y) -> its results for all records, in parts; as `FixedPasses.rows`
RowsInPasses = Callable[[str, Callable[[Tensor, Tensor], Tensor], Tensor, Tensor], Iterator[Tensor]]

#: name -> function(images [B, C, H, W], uniform numbers [B, 3]) -> images; differentiable in the images
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "color": _color,
    "crop": _crop,
    "cutout": _cutout,
    "flip": _flip,
    "scale": _scale,
    "rotate": _rotate,
}


@dataclass(frozen=True)
class ClassAugmentation:
    """One operation for each class, with one set of parameters: all images of a class are changed in the same way.

    A record is mapped to one record, independently of all others, so clipping still bounds its influence. `operations`
    `[num_classes]` are names in `OPERATIONS`, `numbers` `[num_classes][3]` uniform in [0, 1) give their parameters.

    Reference: Zhao and Bilen (2021), differentiable Siamese augmentation, with parameters that a server can send.

    >>> shift = ClassAugmentation(("flip", "crop"), ((0.0, 0.0, 0.0), (0.5, 0.5, 0.0)))
    >>> shift(torch.tensor([[[[1.0, 2.0]]], [[[1.0, 2.0]]]]), torch.tensor([0, 1]))[:, 0, 0]
    tensor([[2., 1.],
            [1., 2.]])
    """

    operations: tuple[str, ...]
    numbers: tuple[tuple[float, ...], ...]

    @classmethod
    def draw(cls, generator: np.random.Generator, num_classes: int, operations: Sequence[str]) -> ClassAugmentation:
        """Draw a random operation of `operations` for each class, and its numbers."""
        chosen = generator.integers(len(operations), size=num_classes)
        numbers = generator.random((num_classes, NUMBERS))
        return cls(tuple(operations[name] for name in chosen), tuple(map(tuple, numbers.tolist())))

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Augment the images `x` `[B, C, H, W]` of the classes `y` `[B]`, shape kept; differentiable in `x`."""
        numbers = torch.tensor(self.numbers, dtype=x.dtype, device=x.device)
        changed = x
        for name in sorted(set(self.operations)):
            uses_operation = torch.tensor([operation == name for operation in self.operations], device=y.device)[y]
            rows = uses_operation.nonzero().flatten()
            if len(rows) == 0:  # a Poisson sample may be empty
                continue
            changed = changed.index_put((rows,), OPERATIONS[name](x[rows], numbers[y[rows]]))
        return changed

    def in_passes(self, x: Tensor, y: Tensor, rows: RowsInPasses) -> Tensor:
        """Return what a call does, each operation by `rows`, in passes in which records do not influence each other."""
        numbers, changed = torch.tensor(self.numbers, dtype=x.dtype, device=x.device), x
        for name in sorted(set(self.operations)):

            def work(x: Tensor, y: Tensor, name: str = name) -> Tensor:
                return OPERATIONS[name](x, numbers[y.clamp(max=len(numbers) - 1)])

            uses_operation = torch.tensor([operation == name for operation in self.operations], device=y.device)[y]
            parts = [x[:0], *rows(f"augmentation {name}", work, x, y)]
            changed = torch.where(uses_operation.view(-1, 1, 1, 1), torch.cat(parts), changed)
        return changed
