"""Counts of clipped and non-finite gradients that are shown without noise, if `privacy.diagnostics` asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

#: what `privacy.diagnostics` shows, in the words of its `NonPrivateEvent`
SHOWN = "diagnostics: clip fractions and counts of broken gradients were shown without noise"


@dataclass(frozen=True)
class Diagnostics:
    """Statistics of each client's gradients in one round. A run that shows them has no privacy guarantee.

    `clip_fraction` is the clipped part of the gradients, in [0, 1], or None without gradients; `not_finite` counts
    those that were not finite.
    """

    clip_fraction: tuple[float | None, ...]
    not_finite: tuple[int, ...]

    @classmethod
    def of(cls, counts: Tensor) -> Diagnostics:
        """The statistics of one round, from its counts `[N, 3]`.

        >>> import torch
        >>> Diagnostics.of(torch.tensor([[4, 1, 2], [0, 0, 0]]))
        Diagnostics(clip_fraction=(0.25, None), not_finite=(2, 0))
        """
        gradients, clipped, not_finite = counts.T.tolist()
        pairs = zip(clipped, gradients, strict=True)
        return cls(tuple(part / total if total else None for part, total in pairs), tuple(not_finite))
