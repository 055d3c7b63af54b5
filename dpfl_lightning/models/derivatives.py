"""Code of users that differentiates, such as a gradient penalty, where it is only scored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from dpfl_lightning.privacy.clipping.reference import Params


class Differentiating:
    """Runs such code with gradients on, once it has asked for a derivative where they were off, or of no parameter."""

    def __init__(self) -> None:
        self._asks = False

    def run(self, compute: Callable[[Params], Tensor], params: Params) -> Tensor:
        """Return what `compute` returns for parameters, without a graph where gradients are off."""
        wanted = torch.is_grad_enabled()
        if not self._asks:
            try:
                return compute(params)
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                self._asks = True
        if peek_interpreter_stack() is None and not any(p.requires_grad for p in params.values()):
            params = {name: p.detach().requires_grad_() for name, p in params.items()}
        with torch.enable_grad():
            found = compute(params)
        return found if wanted else found.detach()
