"""A model without random draws, and generators that stay as they are, for checks that compare passes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpfl_lightning.runtime.dispatch import DispatchMode

_NUMBER = 0.5  # instead of each random number; whole numbers are 0


class ConstantDraws(DispatchMode):
    """Within it operators that draw random numbers give a constant, at any level: in functions, layers and `vmap`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # no call of a user
            results = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return results
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(results[1])
        return tree_map(lambda one: _constant(one) if isinstance(one, Tensor) else one, results)


def _constant(result: Tensor) -> Tensor:
    return result.fill_(_NUMBER if result.is_floating_point() else 0)


def generators_kept(net: nn.Module) -> AbstractContextManager[Any]:
    """Restore the generators of random numbers at the end."""
    device = next(net.parameters()).device
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
