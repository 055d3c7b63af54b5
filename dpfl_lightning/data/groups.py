"""Simulated differences between clients: groups with rotated images or renamed classes, and wrong labels."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.config.registry import call
from dpfl_lightning.config.typed import Interval
from dpfl_lightning.errors import require

Share = Annotated[float, Interval(ge=0, le=1)]
Shift = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Groups:
    """The group of each client `[N]`, and how records are shifted: (x, y, group) -> (x, y); group 0 is unchanged."""

    of: tuple[int, ...]
    shift: Shift


def grouped(name: str, num_clients: int, input_shape: tuple[int, ...], num_classes: int, /, **options: Any) -> Groups:
    """Return the groups called `name`, a key of `GROUPS`; UserError if the options do not fit.

    `options` are `sizes`, the number of clients of each group, or `count`, the number of groups, whose sizes are then
    as equal as possible, the smaller ones first.

    Reference: Malekmohammadi, Taik and Farnadi (2024), "Mitigating Disparate Impact of Differential Privacy in
    Federated Learning through Robust Clustering": both kinds, with sizes [3, 6, 6, 6].

    >>> grouped("rotation", 5, (1, 8, 8), 10, sizes=[1, 2, 2]).of
    (0, 1, 1, 2, 2)
    >>> grouped("label_shift", 5, (1, 8, 8), 10, count=2).of
    (0, 0, 1, 1, 1)
    """
    return call("data.groups", GROUPS, name, num_clients, input_shape, num_classes, **options)


def rotation(
    num_clients: int,
    input_shape: tuple[int, ...],
    num_classes: int,
    sizes: Sequence[int] | None = None,
    count: int | None = None,
) -> Groups:
    """Covariate shift: images of group k are rotated by 90 k degrees, counter-clockwise; at most four groups."""
    square = len(input_shape) >= 2 and input_shape[-1] == input_shape[-2]
    must = f"be label_shift if records are not square images but have shape {input_shape}"
    require(square, "data.groups.name", must, "rotation")
    return Groups(_in_order(num_clients, sizes, count, most=4, why="there are 4 quarter turns"), turned)


def label_shift(
    num_clients: int,
    input_shape: tuple[int, ...],
    num_classes: int,
    sizes: Sequence[int] | None = None,
    count: int | None = None,
) -> Groups:
    """Concept shift: in group k class y is called (y + k) mod `num_classes`; at most `num_classes` groups."""
    require(num_classes > 1, "data.groups.name", "be rotation if there are no classes to rename", "label_shift")
    of = _in_order(num_clients, sizes, count, most=num_classes, why=f"there are {num_classes} classes")
    return Groups(of, lambda x, y, group: (x, renamed(y, group, num_classes)))


GROUPS: dict[str, Callable[..., Groups]] = {"rotation": rotation, "label_shift": label_shift}


def turned(x: Tensor, y: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Rotate images [..., S, S] by 90 * `group` degrees counter-clockwise; labels are unchanged."""
    return torch.rot90(x, group, dims=(-2, -1)), y


def renamed(y: Tensor, group: int, num_classes: int) -> Tensor:
    """Return labels (y + `group`) mod `num_classes`; y is [n]."""
    require(y.ndim == 1, "data", "have one class for each record, so that it can be renamed", tuple(y.shape))
    return (y + group) % num_classes


def stored(
    x: Tensor, y: Tensor, rows_of: Sequence[Tensor], group_of: Sequence[int], shift: Shift
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Build one storage of shifted records: a copy of each record for each group that uses it.

    `rows_of` are lists of rows of x [n, *X] and y [n], `group_of` the group of each list; returned are the shifted
    x [m, *X] and y [m], and the lists as rows of these.
    """
    total, last = len(y), max(group_of)
    pairs = torch.cat([group * total + rows for rows, group in zip(rows_of, group_of, strict=True)])
    copies, places = pairs.unique(return_inverse=True)  # sorted: one group after the other
    ends = torch.searchsorted(copies, total * torch.arange(last + 2)).tolist()
    new_x, new_y = x.new_empty(len(copies), *x.shape[1:]), y.new_empty(len(copies))
    for group, (first, end) in enumerate(pairwise(ends)):
        rows = copies[first:end] - group * total
        new_x[first:end], new_y[first:end] = shift(x[rows], y[rows], group)
    return new_x, new_y, list(places.split([len(rows) for rows in rows_of]))


def _in_order(num_clients: int, sizes: Sequence[int] | None, count: int | None, most: int, why: str) -> tuple[int, ...]:
    key, advice = "data.groups.sizes", "Give sizes: [3, 6, 6, 6], or count: 4 for sizes as equal as possible."
    require((sizes is None) != (count is None), key, "be given, or else data.groups.count, not both", sizes, advice)
    if sizes is None:
        assert count is not None  # for mypy
        limit = min(most, num_clients)
        require(1 <= count <= limit, "data.groups.count", f"be from 1 to {limit}: {why}, {num_clients} clients", count)
        sizes = sorted(map(len, np.array_split(range(num_clients), count)))
    require(1 <= len(sizes) <= most, key, f"have from 1 to {most} sizes, one a group: {why}", list(sizes))
    require(min(sizes) >= 1, key, "be at least 1 each", list(sizes))
    total = f"It is {sum(sizes)}."
    require(sum(sizes) == num_clients, key, f"have the sum {num_clients}, clients.count", list(sizes), total)
    return tuple(np.repeat(range(len(sizes)), sizes).tolist())


# ---- wrong labels


def with_wrong_labels(
    name: str, y: Tensor, rows_of: Sequence[Tensor], num_classes: int, rng: np.random.Generator, /, **options: Any
) -> Tensor:
    """Return labels [n], of which a `share` in [0, 1] of those in `rows_of` are wrong, in units of `name` (`UNITS`).

    Reference: Wang and Wang (2024), who do not state whether a portion is one of records or of clients.

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


def of_records(rows_of: Sequence[Tensor], rng: np.random.Generator, share: Share) -> Tensor:
    """Return rows of this share of each client's records."""
    return torch.cat([rows[_some(len(rows), rng, share)] for rows in rows_of])


def of_clients(rows_of: Sequence[Tensor], rng: np.random.Generator, share: Share) -> Tensor:
    """Return all rows of this share of the clients."""
    chosen = _some(len(rows_of), rng, share)
    return torch.cat([rows_of[client] for client in chosen.tolist()] or [rows_of[0][:0]])


UNITS: dict[str, Callable[..., Tensor]] = {"records": of_records, "clients": of_clients}


def _some(total: int, rng: np.random.Generator, share: float) -> Tensor:
    """Draw a share of `total` at random; a half is rounded up."""
    return torch.from_numpy(rng.permutation(total)[: math.floor(share * total + 0.5)])
