"""What a run evaluates and shows: models, their accuracy and loss, and statistics of gradients without noise."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ClientModels:
    """Models `[K, P]`, and for each of the N clients the row of its model."""

    models: Tensor
    model_of: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """Accuracy in [0, 1] (None for a regression, and without records) and mean loss of a model on some records."""

    accuracy: float | None
    loss: float


@dataclass(frozen=True)
class Evaluation:
    """`test`: mean over clients of their models' scores on the test set. `clients`: scores on held-out records."""

    test: Score
    clients: tuple[Score, ...]


#: what `privacy.diagnostics` shows, in the words of its `NonPrivateEvent`
SHOWN = "diagnostics: clip fractions and counts of broken gradients were shown without noise"


@dataclass(frozen=True)
class Diagnostics:
    """Each client's clipped part of the gradients of one round (None without gradients), and how many are not finite.

    A run that shows them has no privacy guarantee.
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
