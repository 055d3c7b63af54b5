"""What a run evaluates and shows: models, their accuracy and loss, and statistics of gradients without noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from torch import Tensor

from dpfl_lightning.models.tasks import Measure


@dataclass(frozen=True)
class ClientModels:
    """Models `[K, P]`, and for each of the N clients the row of its model."""

    models: Tensor
    model_of: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """Accuracy in [0, 1] (None for a regression, and without records) and mean loss of a model on some records.

    Accuracy is the share of right predictions: of records, labels (multilabel), pixels or tokens. `metrics` have None
    where the records do not define a value, and `undefined` says why: "the records ..." is completed by its words.
    `tables` are of a test set alone, see `Tables.values`.
    """

    accuracy: float | None
    loss: float
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    undefined: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """`test`: mean over clients of their models' scores on the test set. `clients`: scores on held-out records.

    Without a test set, `test` is the mean of `clients`. `baseline` has the accuracy and the metrics of the best
    constant prediction on the records of `test`. `measures` say which values of a score are better. `fairness` is of
    simulations alone.
    """

    test: Score
    clients: tuple[Score, ...]
    baseline: Mapping[str, float | None] = field(default_factory=dict)
    measures: Mapping[str, Measure] = field(default_factory=dict)
    fairness: Mapping[str, float] = field(default_factory=dict)


def known_values(rows: Sequence[Mapping[str, float | None]]) -> dict[str, list[float]]:
    """Return the known values of each score."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [value for row in rows if (value := row.get(name)) is not None] for name in names}


def mean_metrics(metrics: Iterable[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Return the mean of each metric over the mappings that have a value of it, None if none has.

    >>> mean_metrics([{"f1": 0.5, "auroc": None}, {"f1": 1.0, "auroc": None}])
    {'f1': 0.75, 'auroc': None}
    """
    return {name: fmean(values) if values else None for name, values in known_values(list(metrics)).items()}


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
