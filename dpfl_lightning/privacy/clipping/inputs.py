"""Inputs of records: one tensor, or a tuple or dictionary of tensors, with one row for each record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dpfl_lightning.errors import require

_LABELS = ("labels", "label", "targets", "target", "y")  # of records that are dictionaries
Inputs = Any  # a Tensor, tuple[Tensor, ...], dict[str, Tensor] or Block; mypy knows no tree of tensors of torch


def take(x: Inputs, rows: Any) -> Inputs:
    """Return the rows (an index of a tensor) of all tensors of `x`.

    >>> take({"ids": torch.tensor([[1, 2], [3, 4]]), "age": torch.tensor([30.0, 40.0])}, slice(1, 2))
    {'ids': tensor([[3, 4]]), 'age': tensor([40.])}
    """
    return x[rows] if isinstance(x, Tensor) else tree_map(lambda part: part[rows], x)


class Block(NamedTuple):
    """The rows of B units, `x` `[B, R, *X]`, and the weight of each in its unit's loss, `weights` `[B, R]`.

    Weights are 1 / number of the unit's rows, and 0 for those that fill up the block. Labels are `[B, R, ...]`.
    """

    x: Inputs
    weights: Tensor

    @classmethod
    def of(cls, x: Inputs, present: Tensor) -> "Block":
        """Return a block of `present` `[B, R]` rows (bool) `x` `[B R, *X]`, at least one for each unit."""
        weights = present / present.sum(dim=1, keepdim=True)
        return cls(tree_map(lambda part: part.unflatten(0, present.shape), x), weights)

    @property
    def rows(self) -> Inputs:
        """All rows, `[B R, *X]`."""
        return tree_map(lambda part: part.flatten(0, 1), self.x)

    def means(self, values: Tensor) -> Tensor:
        """Return the weighted sum of each unit's `values` `[B R, ...]`, such as the losses of its rows, `[B, ...]`."""
        parts = values.unflatten(0, self.weights.shape)
        return (parts * self.weights[(..., *[None] * (parts.dim() - 2))]).sum(dim=1)


def rows_each(x: Inputs) -> int:
    """Return how many rows the gradient of each record, or other unit, is a sum over."""
    return x.weights.shape[1] if isinstance(x, Block) else 1


def joined(batches: Sequence[Inputs]) -> Inputs:
    """Concatenate inputs of the same structure along the records."""
    return torch.cat(list(batches)) if isinstance(batches[0], Tensor) else tree_map(_concatenated, *batches)


def _concatenated(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


def arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a model for `x`: a tuple is several, a dictionary are keywords."""
    return ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})


def floating_to(x: Inputs, dtype: torch.dtype) -> Inputs:
    """Convert the floating tensors of `x` to `dtype`; whole numbers, such as rows of an embedding, stay."""
    return tree_map(lambda part: part.to(dtype) if part.is_floating_point() else part, x)


def record_shape(x: Inputs) -> Any:
    """Return the shape of a record: a tuple of sizes, or a tuple or dictionary of such.

    >>> record_shape({"ids": torch.zeros(5, 8), "age": torch.zeros(5)})
    {'ids': (8,), 'age': ()}
    """
    return tree_map(lambda part: tuple(part.shape[1:]), x)


@dataclass(frozen=True)
class BatchForm:
    """What a user's code gets as a batch: (x, y), the parts of a tuple x and then y, or a dictionary with y.

    `label` is the key of y in a dictionary.
    """

    layout: str = "pair"  # or parts, or dictionary
    label: str = ""

    def __post_init__(self) -> None:
        fits = self.layout in ("pair", "parts", "dictionary") and (self.layout == "dictionary") == bool(self.label)
        require(fits, "form", "be pair, parts, or dictionary with a label", self.layout)

    def __str__(self) -> str:
        return f"{self.layout} with {self.label}" if self.label else self.layout

    @classmethod
    def of(cls, record: Any, label: str | None, where: str) -> "BatchForm":
        """The form of a record, or of arrays of records, as a user gave them. Raises UserError."""
        if isinstance(record, Mapping):
            name = label or next((key for key in _LABELS if key in record), None)
            keys = ", ".join(map(str, record))
            must, advice = f"have a key {label or ' or '.join(_LABELS)} with the label", "Name it: label='...'."
            require(name in record and len(record) > 1, where, must, keys, advice)
            return cls("dictionary", str(name))
        several = isinstance(record, tuple | list) and len(record) >= 2
        advice = "Let a Dataset return the inputs as one tensor, tuple or dictionary, and the label beside them."
        must = "yield or be pairs (x, y), tuples that end with y, or dictionaries with the label"
        require(several, where, must, type(record).__name__, advice)
        return cls("pair" if len(record) == 2 else "parts")

    def separated(self, record: Any) -> tuple[Any, Any]:
        """Return inputs and label of a record of this form."""
        if self.layout == "dictionary":
            return {name: part for name, part in record.items() if name != self.label}, record[self.label]
        return record if self.layout == "pair" else (tuple(record[:-1]), record[-1])

    def batch(self, x: Inputs, y: Tensor) -> Any:
        """Return a batch of this form."""
        if self.layout == "dictionary":
            return {**x, self.label: y}
        return (x, y) if self.layout == "pair" else (*x, y)


PAIR = BatchForm()
