"""Batches that show whether one record reaches another one: what a check of a net runs it on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Answer = TypeVar("Answer")

CROWD = 200  # records of a large batch
SMALL_CROWD = 16
#: what the others are, as multiples of the watched records: like them, far beyond them, or nothing
LIVELY = (1.0, -1.0, 0.0, 1e-3, 10.0, 100.0, 1e4)
HOSTILE = (math.nan, math.inf, 1e30)


def in_companies(
    look: Callable[[Tensor, Tensor, Tensor], Answer], x: Tensor, y: Tensor, most: int = CROWD
) -> list[Answer]:
    """What `look` says of watched records in a large lively batch and in a small hostile one.

    A net or a loss may refuse the others by an error: then copies of the watched records take their places.

    Args:
        look: called with records `[N, *X]`, labels `[N]` and the places of the watched records in them `[W]`.
        x: the watched records, `[W, *X]`.
        y: their labels, `[W]`.
        most: records of the large batch.
    """
    answers = []
    for multiples, records in ((LIVELY, CROWD), (HOSTILE, SMALL_CROWD)):
        records = max(len(x), min(most, records))
        try:
            answers.append(look(*in_company(x, y, multiples, records)))
        except (RuntimeError, ValueError):
            answers.append(look(*in_company(x, y, (1.0,), records)))
    return answers


def in_company(x: Tensor, y: Tensor, multiples: tuple[float, ...], records: int) -> tuple[Tensor, Tensor, Tensor]:
    """A batch in which the watched records `x` stand at the first, the last and places between.

    The others are multiples of the watched records, and constants; whole numbers, which may be rows of a table, are
    moved within their records. Labels change places.

    Args:
        x: `[W, *X]`, W >= 1.
        y: `[W]`.
        multiples: the others' multiples.
        records: N, at least W.

    Returns:
        All records `[N, *X]`, all labels `[N]`, the places of the watched records `[W]`.

    >>> x, y, places = in_company(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), (1.0, 10.0), records=6)
    >>> places.tolist(), x[:, 0].tolist(), y.tolist()
    ([0, 5], [1.0, 2.0, 10.0, 20.0, 1.0, 2.0], [0, 1, 1, 0, 0, 1])
    """
    number = torch.arange(records, device=x.device)
    source, turn = number % len(x), number // len(x)
    company = x[source]
    if x.is_floating_point():
        by = torch.tensor(multiples, dtype=x.dtype, device=x.device)
        shape = (-1, *[1] * (x.dim() - 1))
        constant = (turn % (len(multiples) + 1) == len(multiples)).view(shape)
        company = torch.where(constant, 1.0, company * by[turn % len(multiples)].view(shape))
    elif x.dim() > 1:
        company = company.roll(1, dims=1)
    labels = y[(source + turn) % len(x)]
    places = torch.linspace(0, records - 1, len(x), device=x.device).long()
    company[places], labels[places] = x, y
    return company, labels, places
