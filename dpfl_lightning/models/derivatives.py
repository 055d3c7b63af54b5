"""Code of users that differentiates, such as a gradient penalty, where it is only scored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Differentiating:
    """Runs such code with gradients on, once it has asked for a derivative where they were off."""

    def __init__(self) -> None:
        self._asks = False

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return what `compute` returns, without a graph where gradients are off."""
        if torch.is_grad_enabled():
            return compute()
        if not self._asks:
            try:
                return compute()
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                self._asks = True
        with torch.enable_grad():
            return compute().detach()
