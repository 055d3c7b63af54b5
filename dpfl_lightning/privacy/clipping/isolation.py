"""Test batches that show whether one record of a batch influences another."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dpfl_lightning.privacy.clipping.inputs import Inputs
from dpfl_lightning.privacy.clipping.passes import SIZES

Answer = TypeVar("Answer")

CROWD = SIZES[-1]  # records in a large batch: no pass has more
SMALL_CROWD = 16
#: multiples of the watched records that the other records are: similar, far larger, or zero
LIVELY = (1.0, -1.0, 0.0, 1e-3, 10.0, 100.0, 1e4)
HOSTILE = (math.nan, math.inf, 1e30)
FAILURES = (RuntimeError, ValueError, IndexError)


def in_companies(
    look: Callable[[Inputs, Tensor, Tensor], Answer], x: Inputs, y: Tensor, most: int = CROWD
) -> list[Answer]:
    """Return the results of `look` for watched records in a large ordinary batch and in a small batch with NaN and inf.

    `look` gets records `[N, *X]`, N <= `most`, labels `[N]` and the positions `[W]` of the watched records in them. If
    a model or a loss raises an error for the other records, first their labels are those of the watched records, and
    then they are copies of these.
    """
    answers = []
    for multiples, crowd in ((LIVELY, CROWD), (HOSTILE, SMALL_CROWD)):
        records = max(len(y), min(most, crowd))
        try:
            answers.append(look(*in_company(x, y, multiples, records)))
        except FAILURES:
            try:
                answers.append(look(*in_company(x, y, multiples, records, (1.0,))))
            except FAILURES:
                answers.append(look(*in_company(x, y, (1.0,), records)))
    return answers


def in_company(
    x: Inputs, y: Tensor, multiples: Sequence[float], records: int, of_labels: Sequence[float] | None = None
) -> tuple[Inputs, Tensor, Tensor]:
    """Return N `records`, their labels, and the positions of the W >= 1 watched `x`, evenly from the first to the last.

    The other records are `multiples` of the watched records, and constants. Integer records, which may be rows of a
    table, are rolled within the record. Labels are permuted, and multiplied by `of_labels` (None is `multiples`) if
    they are floating.

    >>> x, y, places = in_company(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), (1.0, 10.0), records=6)
    >>> places.tolist(), x[:, 0].tolist(), y.tolist()
    ([0, 5], [1.0, 2.0, 10.0, 20.0, 1.0, 2.0], [0, 1, 1, 0, 0, 1])
    """
    index = torch.arange(records, device=y.device)
    source, repeat = index % len(y), index // len(y)
    places = torch.linspace(0, records - 1, len(y), device=y.device).long()

    def crowded(x: Tensor, source: Tensor, multiples: Sequence[float]) -> Tensor:
        batch = x[source]
        if x.is_floating_point():
            factors = torch.tensor(multiples, dtype=x.dtype, device=x.device)
            shape = (-1, *[1] * (x.dim() - 1))
            constant = (repeat % (len(multiples) + 1) == len(multiples)).view(shape)
            batch = torch.where(constant, 1.0, batch * factors[repeat % len(multiples)].view(shape))
        elif x.dim() > 1:
            batch = batch.roll(1, dims=1)
        batch[places] = x
        return batch

    labels = crowded(y, (source + repeat) % len(y), multiples if of_labels is None else of_labels)
    return tree_map(lambda part: crowded(part, source, multiples), x), labels, places
