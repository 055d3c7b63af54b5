"""Simulated wrong labels of clients' training records: class y becomes (y + 1) mod num_classes at all clients.

Each unit is a function `(rows_of [N], rng, share) -> rows of wrong labels`, which `with_wrong_labels` calls by name.
Test, held-out and public records keep their labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.config.registry import call
from dpfl_lightning.data.groups import renamed
from dpfl_lightning.errors import require


def with_wrong_labels(
    name: str, y: Tensor, rows_of: Sequence[Tensor], num_classes: int, rng: np.random.Generator, /, **options: Any
) -> Tensor:
    """Return labels [n], of which some in `rows_of` are wrong.

    Args:
        name: one of `UNITS`.
        y: [n] labels.
        rows_of: [N] rows of each client's training records; clients must not share rows.
        num_classes: number of classes, >= 2.
        rng: generator of all randomness.
        options: share, in [0, 1].

    Raises:
        UserError: a name or option is unknown, a value is out of range, there are no classes, or clients share records.

    Reference: Wang and Wang (2024) give portions of wrong labels, but neither which labels are wrong nor whether a
    portion is one of records or of clients; both are here.

    >>> y, clients = torch.tensor([0, 1, 2, 0]), [torch.tensor([0, 1]), torch.tensor([2])]
    >>> with_wrong_labels("records", y, clients, 3, np.random.default_rng(0), share=1.0).tolist()
    [1, 2, 0, 0]
    """
    must, rows = "be null if there are no classes", torch.cat(list(rows_of))
    require(num_classes > 1 and not y.is_floating_point(), "data.label_noise", must, name)
    must = "be null if clients share records, because a record has one label"
    require(len(rows.unique()) == len(rows), "data.label_noise", must, name)
    wrong = call("data.label_noise", UNITS, name, rows_of, rng, **options)
    changed = y.clone()
    changed[wrong] = renamed(y[wrong], 1, num_classes)
    return changed


def of_records(rows_of: Sequence[Tensor], rng: np.random.Generator, share: float) -> Tensor:
    """Return rows of this share of each client's records."""
    return torch.cat([rows[_some(len(rows), rng, share)] for rows in rows_of])


def of_clients(rows_of: Sequence[Tensor], rng: np.random.Generator, share: float) -> Tensor:
    """Return all rows of this share of the clients."""
    chosen = _some(len(rows_of), rng, share)
    return torch.cat([rows_of[client] for client in chosen.tolist()] or [rows_of[0][:0]])


UNITS: dict[str, Callable[..., Tensor]] = {"records": of_records, "clients": of_clients}


def _some(total: int, rng: np.random.Generator, share: float) -> Tensor:
    """Draw a share of `total` at random; a half is rounded up."""
    require(0 <= share <= 1, "data.label_noise.share", "be in [0, 1]", share)
    return torch.from_numpy(rng.permutation(total)[: math.floor(share * total + 0.5)])
