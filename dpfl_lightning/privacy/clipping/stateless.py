"""Calls of a model with other tensors in the places of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call

T = TypeVar("T")


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


class Held(nn.Module):
    """Runs work with other tensors in the places of a model's parameters, until a backward pass is over, too.

    `call` takes its tensors out again after the forward pass, but a checkpoint computes again in the backward pass.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self._further = net, further_names(net)

    def run(self, tensors: Mapping[str, Tensor], work: Callable[[], T]) -> T:
        """Return what `work()` returns while `tensors`, by first names, are in their places."""
        tied = {name: tensors[first] for name, first in self._further.items() if first in tensors}
        named = {f"net.{name}": tensor for name, tensor in {**tensors, **tied}.items()}
        return functional_call(self, named, (work,), tie_weights=False)

    def forward(self, work: Callable[[], T]) -> T:
        return work()
