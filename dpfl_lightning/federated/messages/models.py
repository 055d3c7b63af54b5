"""The models that a run evaluates and exports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class ClientModels:
    """What the run hands over: models `[K, P]` and the row of each of the N clients."""

    models: Tensor
    model_of: tuple[int, ...]
