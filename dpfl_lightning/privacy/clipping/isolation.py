"""Test batches that show whether one record of a batch influences another."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Answer = TypeVar("Answer")

CROWD = 200  # records in a large batch
SMALL_CROWD = 16
#: multiples of the watched records that the other records are: similar, far larger, or zero
LIVELY = (1.0, -1.0, 0.0, 1e-3, 10.0, 100.0, 1e4)
HOSTILE = (math.nan, math.inf, 1e30)


def in_companies(
    look: Callable[[Tensor, Tensor, Tensor], Answer], x: Tensor, y: Tensor, most: int = CROWD
) -> list[Answer]:
    """Return the results of `look` for watched records in a large ordinary batch and in a small batch with NaN and inf.

    `look` gets records `[N, *X]`, N <= `most`, labels `[N]` and the positions `[W]` of the watched records in them. If
    a net or a loss raises an error for the other records, copies of the watched records replace them.
    """
    answers = []
    for multiples, crowd in ((LIVELY, CROWD), (HOSTILE, SMALL_CROWD)):
        records = max(len(x), min(most, crowd))
        try:
            answers.append(look(*in_company(x, y, multiples, records)))
        except (RuntimeError, ValueError):
            answers.append(look(*in_company(x, y, (1.0,), records)))
    return answers


def in_company(x: Tensor, y: Tensor, multiples: tuple[float, ...], records: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return N `records`, their labels, and the positions of the W >= 1 watched `x`, evenly from the first to the last.

    The other records are `multiples` of the watched records, and constants. Integer records, which may be rows of a
    table, are rolled within the record. Labels are permuted.

    >>> x, y, places = in_company(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), (1.0, 10.0), records=6)
    >>> places.tolist(), x[:, 0].tolist(), y.tolist()
    ([0, 5], [1.0, 2.0, 10.0, 20.0, 1.0, 2.0], [0, 1, 1, 0, 0, 1])
    """
    index = torch.arange(records, device=x.device)
    source, repeat = index % len(x), index // len(x)
    batch = x[source]
    if x.is_floating_point():
        factors = torch.tensor(multiples, dtype=x.dtype, device=x.device)
        shape = (-1, *[1] * (x.dim() - 1))
        constant = (repeat % (len(multiples) + 1) == len(multiples)).view(shape)
        batch = torch.where(constant, 1.0, batch * factors[repeat % len(multiples)].view(shape))
    elif x.dim() > 1:
        batch = batch.roll(1, dims=1)
    labels = y[(source + repeat) % len(x)]
    places = torch.linspace(0, records - 1, len(x), device=x.device).long()
    batch[places], labels[places] = x, y
    return batch, labels, places
