"""Stages of a model that a pass on a CPU computes as one layer: a convolution, ReLU and 2 x 2 max-pooling."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dpfl_lightning.privacy.clipping.layer_rules import has_special_backward

ComputeStage = Callable[[nn.Conv2d, Tensor], Tensor]  # the stage's convolution and input -> its output


def stages_of(sequence: nn.Sequential, convolutions: Collection[nn.Module]) -> list[int]:
    """Return where stages begin that begin with one of the `convolutions`."""
    modules = list(sequence)
    return [i for i, m in enumerate(modules) if m in convolutions and _is_stage(modules[i : i + 3])]


@contextmanager
def computed_as_one(stages: Sequence[tuple[nn.Sequential, Sequence[int]]], compute: ComputeStage) -> Iterator[None]:
    """Let `compute` replace the stages of these sequences (`stages_of`), if no user's hook takes part in them.

    The other modules run as usual, also those of a stage for inputs that are not `[B, C, H, W]` on a CPU.
    """
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for sequence, begins in stages:
        modules = list(sequence)
        starts = {i for i in begins if not any(map(_is_changed, modules[i : i + 3]))}
        if starts:
            forwards[sequence] = functools.partial(_forward, modules, starts, compute)
    with replaced_forwards(forwards):
        yield


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward passes of these modules, but for those that a user has replaced already."""
    ours = [module for module in forwards if "forward" not in vars(module)]
    for module in ours:  # of this instance, which torch prefers to that of its class
        vars(module)["forward"] = forwards[module]  # `setattr` of a module is slow
    try:
        yield
    finally:
        for module in ours:
            del vars(module)["forward"]


def _forward(modules: Sequence[nn.Module], starts: Collection[int], compute: ComputeStage, x: Tensor) -> Tensor:
    """Do what `nn.Sequential.forward` does."""
    i = 0
    while i < len(modules):
        module = modules[i]
        if i in starts and isinstance(module, nn.Conv2d) and x.dim() == 4 and x.device.type == "cpu":
            x, i = compute(module, x), i + 3
        else:
            x, i = module(x), i + 1
    return x


def _is_stage(modules: Sequence[nn.Module]) -> bool:
    conv, *others = modules
    if {type(m) for m in others} != {nn.ReLU, nn.MaxPool2d} or not has_special_backward(conv):
        return False
    pool = next(m for m in others if isinstance(m, nn.MaxPool2d))
    form = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    halves = all(value in (n, (n, n)) for value, n in zip(form, (2, 2, 0, 1), strict=True))
    plain = conv.groups == 1 and conv.dilation == (1, 1)
    return plain and halves and not pool.ceil_mode and not pool.return_indices


def _is_changed(module: nn.Module) -> bool:
    """Return whether a user's hook or `forward` takes part when the module is called."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" in vars(module) or any(hooks)
