"""Functions of autograd whose rule for `vmap` folds the records of a pass into a dimension of their sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class OfRecords(torch.autograd.Function):
    """A function that computes each sequence alone, so that those of all records can be computed at once.

    Sequences are in dimension 1 of tensors, after the steps, or in 0 of those `without_steps`. Arguments `as_given` are
    weights of the model, which are no record's, or options. One sequence that is `shared` by all records stays one.
    """

    without_steps: frozenset[int] = frozenset()  # places of arguments
    as_given: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()
    results_without_steps: frozenset[int] = frozenset()

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:  # type: ignore[override]
        def folded(place: int) -> Any:
            one, dim = args[place], in_dims[place]
            if place in cls.as_given or (place in cls.shared and dim is None and (one is None or len(one) == 1)):
                return one
            return _folded(one, dim, info.batch_size, int(place not in cls.without_steps))

        results = cls.forward(*map(folded, range(len(args))))
        dims = tuple(int(place not in cls.results_without_steps) for place in range(len(results)))
        records = (info.batch_size, -1)
        return tuple(one.unflatten(dim, records) for one, dim in zip(results, dims, strict=True)), dims

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep nothing: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("steps of recurrent layers, and attention, have one derivative")


def _folded(tensor: Tensor, dim: int | None, records: int, at: int) -> Tensor:
    """Return a tensor whose records, in this dimension or in none, are sequences in the dimension `at`."""
    own = tensor.unsqueeze(at) if dim is None else tensor.movedim(dim, at)
    return own.expand(*own.shape[:at], records, *own.shape[at + 1 :]).flatten(at, at + 1)
