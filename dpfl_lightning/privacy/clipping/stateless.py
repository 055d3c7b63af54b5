"""Calls of a model with other tensors in the places of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def further_names(net: nn.Module) -> dict[str, str]:
    """Return the further names of tensors that several modules hold, and their first names.

    A module with several names has one: torch's `tie_weights` would swap its tensors twice, and leave them swapped.

    >>> net = nn.ModuleDict({"first": nn.Linear(2, 2, bias=False), "second": nn.Linear(2, 2, bias=False)})
    >>> net["second"].weight, net["again"] = net["first"].weight, net["first"]
    >>> further_names(net)
    {'second.weight': 'first.weight'}
    """
    first: dict[Tensor, str] = {}
    further = {}
    for prefix, part in net.named_modules():
        for local, tensor in (*part._parameters.items(), *part._buffers.items()):
            name = f"{prefix}.{local}" if prefix else local
            if tensor is not None and first.setdefault(tensor, name) != name:
                further[name] = first[tensor]
    return further


def call(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    further: Mapping[str, str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Return what `net` returns with `tensors`, by first names, in the places of its own; see `further_names`."""
    tied = {name: tensors[first] for name, first in further.items() if first in tensors}
    return functional_call(net, {**tensors, **tied}, args, kwargs, tie_weights=False)
