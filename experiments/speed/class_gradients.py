"""Gradients of each class without privacy, a client's part of distillation, beside a plain loop over classes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dpfl_lightning.algorithms.gradient_matching import matched_names
from dpfl_lightning.federated.client.engines.unclipped import quicker_without_clipping
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.runtime.memory import keep_freed_memory
from experiments.speed.cases import NUM_CLASSES
from experiments.speed.matching import SHAPE, Step, build, in_turns, num_parameters


def class_gradient_times(
    repeats: int, device: torch.device, say: Callable[[str], None], width: int = 128, records_per_class: int = 64
) -> dict[str, Any]:
    """One client's gradients of all classes, by its engine and by a plain loop: as `in_turns`."""
    x, y = records(records_per_class, device)
    return {
        **in_turns("class_gradients", ours(width, x, y), loop(width, x, y), repeats, 1, say),
        "parameters": num_parameters(width),
        "records": len(x),
    }


def records(per_class: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(NUM_CLASSES * per_class, *SHAPE, generator=torch.Generator().manual_seed(0))
    return x.to(device), torch.arange(len(x), device=device) % NUM_CLASSES


def ours(width: int, x: Tensor, y: Tensor) -> Step:
    """`[num_classes, p]`, as the default engine computes it without privacy."""
    module = ClientModule(build(width)).to(x.device)
    clipped_sum = clipped_sum_for(module.net, module.sample_loss, x[:0], y[:0])[0]
    summed = quicker_without_clipping(clipped_sum, module)
    names = matched_names({name: p.shape for name, p in module.named_trainable.items()}, "layerwise_cosine")
    keep_freed_memory()

    def step() -> Tensor:
        request = ClipRequest(math.inf, group=y, num_groups=NUM_CLASSES, only=names)
        return summed(module.named_trainable, x, y, request)[0]

    return step


def loop(width: int, x: Tensor, y: Tensor) -> Step:
    """The same as users write it: one backward pass a class."""
    net = build(width).to(x.device)
    weights = [parameter for parameter in net.parameters() if parameter.dim() >= 2]

    def gradient(label: int) -> Tensor:
        rows = y == label
        parts = torch.autograd.grad(cross_entropy(net(x[rows]), y[rows], reduction="sum"), weights)
        return torch.cat([part.flatten() for part in parts])

    def step() -> Tensor:
        return torch.stack([gradient(label) for label in range(NUM_CLASSES)])

    return step
