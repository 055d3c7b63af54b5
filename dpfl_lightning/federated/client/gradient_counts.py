"""Exact counts of each client's clipped and non-finite gradients. No mechanism protects them; clients keep them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: what is counted: gradients of single records (one a record and step), and of these
COUNTED = ("gradients", "clipped", "not_finite")
PADDING = -1.0  # stands where a record's norm would, and counts as none

_ABOUT = (
    "Exact counts over the run of the gradients of each client's records: all (one a record and step), those that were "
    "clipped, and those that were not finite and so contributed nothing. No noise and no guarantee covers them: they "
    "are for each client alone. Do not share this file."
)


def count_outcomes(norms: Tensor, clip_norm: float | Tensor) -> Tensor:
    """For each gradient by its norm `[...]` the numbers 0 or 1 to add up for `COUNTED`, `[..., 3]` int64.

    Nothing waits for the device.

    **Privacy** Private, as the norms are.

    >>> count_outcomes(torch.tensor([0.5, 2.0, float("nan"), PADDING]), clip_norm=1.0).sum(dim=0)
    tensor([3, 1, 1])
    """
    finite = torch.isfinite(norms)
    return torch.stack([norms != PADDING, finite & (norms > clip_norm), ~finite], dim=-1).long()


def notes(counts: Tensor) -> dict[str, Any]:
    """The content of `private.json` from all clients' counts `[N, 3]`."""
    rows = [dict(zip(COUNTED, row, strict=True)) for row in counts.tolist()]
    return {"about": _ABOUT, "clients": [{"client": client, **row} for client, row in enumerate(rows)]}
