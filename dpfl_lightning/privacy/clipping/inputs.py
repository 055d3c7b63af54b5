"""Inputs of records: one tensor, or a tuple or dictionary of tensors, with one row for each record."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Inputs = Any  # a Tensor, tuple[Tensor, ...] or dict[str, Tensor]; mypy knows no tree of tensors that torch accepts


def take(x: Inputs, rows: Any) -> Inputs:
    """Return the rows (an index of a tensor) of all tensors of `x`.

    >>> take({"ids": torch.tensor([[1, 2], [3, 4]]), "age": torch.tensor([30.0, 40.0])}, slice(1, 2))
    {'ids': tensor([[3, 4]]), 'age': tensor([40.])}
    """
    return x[rows] if isinstance(x, Tensor) else tree_map(lambda part: part[rows], x)


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
