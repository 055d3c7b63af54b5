"""The models that a run evaluates and exports."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ClientModels:
    """Models `[K, P]`, and for each of the N clients the row of its model."""

    models: Tensor
    model_of: tuple[int, ...]
