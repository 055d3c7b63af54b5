"""Operators of torch that end the process, or read other memory, for arguments that they do not check."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_CTC = frozenset({F.ctc_loss, torch.ctc_loss})


class CheckedOperators(TorchFunctionMode):
    """Within it such operators raise ValueError instead; under `vmap`, which cannot read numbers, they always raise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CTC:
            if any(isinstance(one, Tensor) and is_functorch_wrapped_tensor(one) for one in (*args, *kwargs.values())):
                raise ValueError("ctc_loss needs numbers, which `vmap` does not show")
            _check_ctc(*args, **kwargs)
        return func(*args, **kwargs)


def _check_ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | tuple[int, ...],
    target_lengths: Tensor | tuple[int, ...],
    blank: int = 0,
    *_: Any,
    **__: Any,
) -> None:
    """Raise ValueError for labels or lengths by which the kernel would write beyond its memory."""
    steps, classes = log_probs.shape[0], log_probs.shape[-1]
    lengths, given = torch.as_tensor(target_lengths).reshape(-1), torch.as_tensor(input_lengths).reshape(-1)
    most = int(targets.shape[1]) if targets.dim() == 2 else targets.numel()
    fits = 0 <= blank < classes and bool(((targets >= 0) & (targets < classes)).all())
    fits = fits and bool(((given >= 0) & (given <= steps)).all() and ((lengths >= 0) & (lengths <= most)).all())
    if not fits or (targets.dim() == 1 and int(lengths.sum()) > targets.numel()):
        raise ValueError(f"ctc_loss takes labels from 0 to {classes - 1}, and lengths within its tensors")
