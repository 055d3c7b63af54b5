"""Clients whose records are at the sites: the server knows their numbers, shapes and types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from dpfl_lightning.data import Population
from dpfl_lightning.errors import require
from dpfl_lightning.privacy.clipping.inputs import Inputs, record_shape


@dataclass(frozen=True, eq=False, repr=False)
class AbsentRecords(Population):
    """Clients whose records are elsewhere: only their numbers `sizes` `[N]` are known. It may have a test set."""

    sizes: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        names: Sequence[str],
        shape: tuple[Inputs, Tensor],
        num_classes: int,
        features: Mapping[str, Any] | None,
        public: Population,
    ) -> AbsentRecords:
        """Return the population of clients with so many records of the shape of `x [0, *X]`, `y [0, ...]`.

        Its test set is that of `public`, whose clients are left out. Raises UserError if it has other records.
        """
        test = public.test_records()
        if test is not None:
            must = (
                f"have inputs of shape {record_shape(shape[0])} and labels of {shape[1].dtype}, as the sites' records"
            )
            require(alike(test, shape), "test set", must, (record_shape(test[0]), test[1].dtype))
        x, y = shape if test is None else test
        none = torch.zeros(0, dtype=torch.long)
        return cls(
            *(x, y, [none for _ in sizes], [none for _ in sizes]),
            test=None if test is None else torch.arange(len(y)),
            num_classes=num_classes,
            names=tuple(names),
            features=features,
            sizes=tuple(sizes),
        )

    @property
    def num_records(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.sizes


def alike(one: tuple[Inputs, Tensor], other: tuple[Inputs, Tensor]) -> bool:
    """Return whether two batches x [n, *X], y [n, ...] have records of equal structure, shape and type."""

    def kind(batch: tuple[Inputs, Tensor]) -> tuple[Any, ...]:
        leaves, structure = tree_flatten(batch)
        return structure, [(leaf.dtype, tuple(leaf.shape[1:])) for leaf in leaves]

    return kind(one) == kind(other)
