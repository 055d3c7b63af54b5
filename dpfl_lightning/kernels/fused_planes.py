"""Instance norm, ReLU and 2x2 mean pooling as one operation that can be differentiated twice (on a CPU).

Gradient matching moves images along a second derivative, for which torch needs some thirty operations on whole tensors
and their slopes. Here a plane is read once and stays in the L1 cache: see `plane_loops.py`.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class FusedPlanes(nn.Module):
    """Replaces an instance norm, a ReLU and a 2x2 mean pooling: `[B, C, H, W]` to `[B, C, H // 2, W // 2]`.

    Raises:
        RuntimeError: the compiled loops do not reproduce torch's numbers on this machine.
    """

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        _held_to_torch()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, y: Tensor) -> Tensor:
        scale, shift = (parameter.expand(y.shape[:2]) for parameter in (self.weight, self.bias))
        return norm_relu_pool(y, scale, shift, self.eps)


def norm_relu_pool(y: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return the mean over 2x2 of `max(scale * x + shift, 0)`, with x the normalised plane: `[*, H // 2, W // 2]`.

    `y` is `[*, H, W]` on a CPU, float32 or float64; `scale` and `shift` are `[*]`; `eps` is added to the variance.
    """
    return _Forward.apply(y, scale, shift, eps)


class _OnPlanes(torch.autograd.Function):
    """Base class of the operations, whose last argument is eps."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @classmethod
    def vmap(cls, info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        """Move the dimension of `vmap` to the front, where the loops treat it as another dimension of planes."""
        size = info.batch_size
        moved = [
            a if not isinstance(a, Tensor) else a.expand(size, *a.shape) if dim is None else a.movedim(dim, 0)
            for a, dim in zip(arguments, in_dims, strict=True)
        ]
        return cls.apply(*moved), 0


class _Forward(_OnPlanes):
    @staticmethod
    def forward(y: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        return _run("forward", (y, scale, shift), eps)[0]

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Any:
        return (*_FirstOrder.apply(*ctx.saved_tensors, dz, ctx.eps), None)


class _FirstOrder(_OnPlanes):
    """Gradient of `_Forward`."""

    @staticmethod
    def forward(y: Tensor, scale: Tensor, shift: Tensor, dz: Tensor, eps: float) -> tuple[Tensor, ...]:
        return _run("first_order", (y, scale, shift, dz), eps)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        to_y, to_scale, to_dz = _SecondOrder.apply(*ctx.saved_tensors, *slopes, ctx.eps)
        return to_y, to_scale, torch.zeros_like(to_scale), to_dz, None


class _SecondOrder(_OnPlanes):
    """Gradient of `_FirstOrder`, without that of the shift, which is zero."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        *tensors, eps = arguments
        return _run("second_order", tensors, eps)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        raise NotImplementedError("fused planes have no third derivative: use the module's `sample_loss`")


#: kinds of arrays that each loop reads and writes: whole planes, pooled planes, one number for each plane
_SHAPES = {
    "forward": (("plane", "number", "number"), ("pooled",)),
    "first_order": (("plane", "number", "number", "pooled"), ("plane", "number", "number")),
    "second_order": (
        ("plane", "number", "number", "pooled", "plane", "number", "number"),
        ("plane", "number", "pooled"),
    ),
}


def _run(name: str, inputs: Sequence[Tensor], eps: float) -> tuple[Tensor, ...]:
    """Run one of the compiled loops over all planes, and return its outputs."""
    from dpfl_lightning.kernels import plane_loops

    y, before = inputs[0], inputs[1].shape
    height, width = y.shape[-2:]
    shapes: dict[str, tuple[int, ...]] = {"plane": (height, width), "pooled": (height // 2, width // 2), "number": ()}
    reads, writes = _SHAPES[name]
    outputs = tuple(y.new_empty(*before, *shapes[kind]) for kind in writes)
    as_rows = {**shapes, "plane": (height * width,)}
    arrays = [
        tensor.detach().contiguous().numpy().reshape(before.numel(), *as_rows[kind])
        for tensor, kind in zip((*inputs, *outputs), (*reads, *writes), strict=True)
    ]
    number = np.dtype(str(y.dtype).removeprefix("torch.")).type
    constants = tuple(map(number, (0.0, 1.0, 0.25, 1.0 / (height * width), eps)))
    loop: Callable[..., None] = getattr(plane_loops, name)
    loop(*arrays[: len(inputs)], constants, width, *arrays[len(inputs) :], before.numel())
    return outputs


def as_torch(y: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Slow reference of `norm_relu_pool`, by torch's operators."""
    mean = y.mean(dim=(-2, -1), keepdim=True)
    x = (y - mean) / ((y - mean).square().mean(dim=(-2, -1), keepdim=True) + eps).sqrt()
    a = (scale[..., None, None] * x + shift[..., None, None]).relu()
    height, width = (size // 2 * 2 for size in y.shape[-2:])
    return a[..., :height, :width].unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).mean(dim=(-3, -1))


@functools.cache
def _held_to_torch() -> None:
    """Compile the loops, and check them on a small example, in another thread: this one may be inside `torch.func`."""
    with ThreadPoolExecutor(1) as outside:
        outside.submit(_check).result()


def _check() -> None:
    generator = torch.Generator().manual_seed(0)
    y, scale, shift, along, slope = (
        torch.randn(shape, generator=generator) for shape in ((3, 5, 4), (3,), (3,), (3, 2, 2), (3, 5, 4))
    )

    def both_orders(operation: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        inputs = [tensor.clone().requires_grad_() for tensor in (y, scale, shift, along)]
        z = operation(*inputs[:3], 1e-5)
        first = torch.autograd.grad((z * inputs[3]).sum(), inputs[:3], create_graph=True)
        total = (first[0] * slope).sum() + first[1].sum() + first[2].square().sum()
        return (z, *first, *torch.autograd.grad(total, inputs))

    with torch.enable_grad():
        pairs = list(zip(both_orders(_Forward.apply), both_orders(as_torch), strict=True))
    if not all(torch.allclose(fused, expected, rtol=1e-3, atol=1e-4) for fused, expected in pairs):
        raise RuntimeError("compiled loops give wrong norms of planes on this processor: please report it")
