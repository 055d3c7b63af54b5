"""Functions of autograd whose rule for `vmap` folds the records of a pass into a dimension of their sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class OfRecords(torch.autograd.Function):
    """A function that computes each sequence alone, so that those of all records can be computed at once.

    Sequences are in dimension 1, after the steps, and in 0 of `states`, which have no steps. `weights` are those of the
    model, which are no record's, or options; one sequence of `shared` without records stands for those of all.
    """

    states: tuple[int, ...] = ()  # places of arguments
    weights: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    results_of_states: tuple[int, ...] = ()

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:  # type: ignore[override]
        as_it_is = {*cls.weights, *(place for place in cls.shared if in_dims[place] is None)}
        folded = [
            one if place in as_it_is else _folded(one, dim, info.batch_size, int(place not in cls.states))
            for place, (one, dim) in enumerate(zip(args, in_dims, strict=True))
        ]
        results = cls.forward(*folded)
        dims = tuple(int(place not in cls.results_of_states) for place in range(len(results)))
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
