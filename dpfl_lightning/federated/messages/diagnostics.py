"""Counts of clipped and non-finite gradients that are shown without noise, if `privacy.diagnostics` asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

#: what `privacy.diagnostics` shows, as its `NonPrivateEvent` event says it
SHOWN = "diagnostics: clip fractions and counts of broken gradients were shown without noise"


@dataclass(frozen=True)
class Diagnostics:
    """What became of the gradients of one round, for everybody to see: then no guarantee holds.

    Args:
        clip_fraction: length N, of each client's gradients, in [0, 1]; None for a client that had none.
        not_finite: length N.
    """

    clip_fraction: tuple[float | None, ...]
    not_finite: tuple[int, ...]

    @classmethod
    def of(cls, counts: Tensor) -> Diagnostics:
        """From the counts of one round `[N, 3]`.

        >>> Diagnostics.of(torch.tensor([[4, 1, 2], [0, 0, 0]]))
        Diagnostics(clip_fraction=(0.25, None), not_finite=(2, 0))
        """
        rows = counts.tolist()
        fractions = tuple(clipped / gradients if gradients else None for gradients, clipped, _ in rows)
        return cls(fractions, tuple(not_finite for _, _, not_finite in rows))
