"""Norms and sums `[G, P]` of the per-record gradients of a chunk of records."""

import functools

import torch
from torch import Tensor

from dpfl_lightning.privacy.clipping.float64_sums import Products
from dpfl_lightning.privacy.clipping.layer_rules import ByName, Grads, arranged
from dpfl_lightning.privacy.clipping.reference import Params

Form = tuple[tuple[int, ...], tuple[int, ...]]  # shape and order of `Grads`


class ChunkGradients:
    """The gradients of a chunk's records with respect to at least one parameter, and their norms of `order` 2 or 1.

    Gradients that are products in float32 on a CPU are measured and summed together, which saves many small operations.
    """

    def __init__(self, grads: ByName, order: int) -> None:
        self.order = order
        self.by_name = {name: form.measurable(order) for name, form in grads.items()}
        pairs = {name: pair for name, form in self.by_name.items() if (pair := _float32_pair(form)) is not None}
        self.together = list(pairs)
        self.products = Products(list(pairs.values())) if pairs else None
        self.alone = {name: form for name, form in self.by_name.items() if name not in pairs}

    @property
    def terms(self) -> int:
        """Largest number of terms of one gradient that are summed with those of other records."""
        return max(grads.terms for grads in self.by_name.values())

    def norms(self) -> Tensor:
        """Return `|g_j|` over all parameters, `[B]` in float64; infinite or NaN if it is not finite."""
        squares_or_sums = [grads.norms(self.order).pow(self.order) for grads in self.alone.values()]
        if self.products is not None:
            squares_or_sums.append(self.products.powers(self.order))
        total = functools.reduce(torch.add, squares_or_sums)
        return total.sqrt() if self.order == 2 else total


class Totals:
    """Accumulates the sums `[G, P]` in float64, parameter by parameter."""

    def __init__(self, params: Params, zeros: Tensor) -> None:
        self._sums = zeros  # [G, P]
        self._parts = dict(zip(params, zeros.split([p.numel() for p in params.values()], dim=1), strict=True))
        self._elsewhere: dict[tuple[str, Form], Tensor] = {}  # sums in other orders

    def add(self, chunk: ChunkGradients, factors: Tensor, group: Tensor | None) -> None:
        """Add a chunk's gradients with their factors `[B]` to their groups `[B]`."""
        if len(self._sums) == 1:
            group = None
        elif group is None:
            group = torch.zeros_like(factors, dtype=torch.long)
        for name, grads in chunk.alone.items():
            grads.add(self._place(name, grads, strided=False), factors, group)
        if chunk.products is not None:
            places = [self._place(name, chunk.by_name[name], strided=True) for name in chunk.together]
            chunk.products.add(places, factors, group)

    def _place(self, name: str, grads: Grads, strided: bool) -> Tensor:
        """Return the tensor `[G, n]` that accumulates a parameter's sum; its rows may be apart if it is `strided`."""
        part, form = self._parts[name], (grads.shape, grads.order)
        if not grads.order and (strided or part.is_contiguous()):
            return part
        if (name, form) not in self._elsewhere:
            self._elsewhere[name, form] = torch.zeros_like(part, memory_format=torch.contiguous_format)
        return self._elsewhere[name, form]

    def result(self) -> Tensor:
        """Return `[G, P]` in the order of the parameters; zeros for those without gradients."""
        for (name, form), total in self._elsewhere.items():
            ordered_total = arranged(total, *form)
            self._parts[name].unflatten(1, ordered_total.shape[1:]).add_(ordered_total)
        return self._sums


def _float32_pair(grads: Grads) -> tuple[Tensor, Tensor] | None:
    """Return the input of `Products`, or None if the gradients do not have that form."""
    pair = grads.pair()
    fits = pair is not None and pair[1].device.type == "cpu" and pair[0].dtype == pair[1].dtype == torch.float32
    return pair if fits else None
