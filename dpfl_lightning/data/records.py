"""The records of one client, as a view of the storage of a population."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfl_lightning.privacy.clipping.inputs import Inputs

if TYPE_CHECKING:
    from dpfl_lightning.data.population import Population


class Records:
    """What one data holder has: records that it trains on, and held-out ones. Its length is what sampling counts.

    **Privacy** Private. Nothing is copied until a batch is drawn.
    """

    def __init__(self, population: Population, place: int) -> None:
        self._population, self._place = population, place

    def __len__(self) -> int:
        return self._population.num_records[self._place]

    @property
    def device(self) -> torch.device:
        return self._population.y.device

    def batch(self, rows: Tensor) -> tuple[Inputs, Tensor]:
        """Return x [b, *X] and y [b, ...] of the training records, or other units, at `rows` [b]."""
        return self._population.records(self._place, rows)

    def held_out(self) -> tuple[Inputs, Tensor]:
        """Return x [h, *X] and y [h, ...] of the held-out records, or other units; h may be 0."""
        return self._population.held_out(self._place)

    @property
    def num_held_out(self) -> int:
        return self._population.num_held_out[self._place]

    @property
    def labels(self) -> Tensor:
        """The labels of all training records, [n, ...]."""
        return self._population.y[self._population.train_of[self._place]]
