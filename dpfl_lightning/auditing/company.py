"""Attacks on a sum by its company: a record's clipped gradient must be the same bits whatever is computed with it.

A server that chooses the weights makes the last bits large: in a pair of hidden units whose large outputs cancel,
rounding decides the sign of the loss's gradient.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dpfl_lightning.privacy.clipping.inputs import Inputs, joined, take
from dpfl_lightning.privacy.clipping.reference import ClippedSum, ClipRequest, Params

LARGE = 1e10  # products of the weights of cancelling pairs
STRANGE = (math.nan, math.inf, 1e-41, -1e30, 0.0)  # values of neighbours


def hostile(params: Params, seed: int, large: float = LARGE) -> dict[str, Tensor]:
    """Return normal weights with cancelling pairs in two consecutive matrices; of one that fits, chosen by the seed.

    The pairs are units of the first matrix `[units, ...]` with weights `w` and `m w`, which the second matrix
    `[n, units * k]` multiplies by `m a` and `-a`, where `a w` is about `large` and m is 3, or 1 for every fourth seed
    and in two bytes, where multiples by 3 would round. These products of weights are exact, so that the sum is what
    sums of products round. Without matrices that fit all weights are just normal.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {name: (64 * torch.randn(p.shape, generator=generator)).round().to(p) / 64 for name, p in params.items()}
    matrices = [name for name, p in weights.items() if p.dim() >= 2]
    fitting = [
        (first, second)
        for first, second in itertools.pairwise(matrices)
        if len(weights[first]) >= 2 and weights[second].shape[1] % len(weights[first]) == 0
    ]
    if fitting:
        first, second = fitting[-1 if seed % 2 else int(torch.randint(len(fitting), (), generator=generator))]
        units, each = len(weights[first]) // 2 * 2, 2.0 ** round(math.log2(large) / 2)
        weights[first] *= each
        multiple = 1 if seed % 4 == 3 or weights[first].element_size() == 2 else 3
        weights[first][1:units:2] = multiple * weights[first][0:units:2]
        read = weights[second].view(len(weights[second]), len(weights[first]), -1)  # [n, units, what a unit gives]
        read *= each
        read[:, 0:units:2] = -multiple * read[:, 1:units:2]
        for name, value in weights.items():
            if "bias" in name:
                value.zero_()
    return weights


@dataclass(frozen=True)
class Company:
    """Records `x` and `y`, which hold at `places` the records numbered `watched`."""

    kind: str  # of what distinguishes it: count, place, view, neighbours
    x: Inputs
    y: Tensor
    watched: Tensor
    places: Tensor


def companies(x: Inputs, y: Tensor, others: tuple[Inputs, Tensor], generator: torch.Generator) -> Iterator[Company]:
    """Yield the records `[B]` in other companies, which the generator draws: none may change a watched record's bits.

    `others` are at least one more record. The first company has one record more.
    """

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    everyone, more_y = torch.arange(len(y)), others[1]
    for more in (1, drawn(2, 40)):
        rows = torch.arange(more) % len(more_y)
        yield Company("count", joined([x, take(others[0], rows)]), torch.cat([y, more_y[rows]]), everyone, everyone)
    first = drawn(0, len(y) - 1)
    for some in (everyone[first : first + 1], everyone[first:]):
        yield Company("count", take(x, some), y[some], some, torch.arange(len(some)))
    order = torch.randperm(len(y), generator=generator)
    yield Company("place", take(x, order), y[order], order, everyone)
    skipped, numbers = drawn(1, 7), drawn(1, 15)
    yield Company("view", tree_map(lambda part: _behind(part, skipped * part[:1].numel()), x), y, everyone, everyone)
    yield Company("view", tree_map(lambda part: _behind(part, numbers), x), _behind(y, numbers), everyone, everyone)
    yield Company("view", tree_map(_strided, x), y, everyone, everyone)
    for value in STRANGE:
        count = drawn(1, 9)
        strange = tree_map(lambda part: _filled(part, count, value), others[0])  # noqa: B023 used in this turn
        all_x, all_y = joined([x, strange]), torch.cat([y, more_y[torch.arange(count) % len(more_y)]])
        order = torch.randperm(len(all_y), generator=generator)
        yield Company("neighbours", take(all_x, order), all_y[order], everyone, order.argsort()[: len(y)])


@dataclass(frozen=True)
class Difference:
    """How many of the watched records have other bits in a company, and by how much: all distances in clip norms."""

    kind: str
    records: int
    largest: float  # of one record
    moved: float  # of the sum of the watched records


def differences(
    clipped_sum: ClippedSum,
    params: Params,
    records: tuple[Inputs, Tensor],
    others: tuple[Inputs, Tensor],
    request: ClipRequest,
    seed: int,
    most: int | None = None,
) -> list[Difference]:
    """Compare the clipped gradients of the last `most` records (None: all) in all companies with those of them alone.

    `request` gives clip norm and order.
    """
    generator, found, count = torch.Generator().manual_seed(seed), [], len(records[1])
    first = count - min(count, most or count)
    usual = _contributions(clipped_sum, params, *records, request, torch.arange(first, count))
    for company in companies(*records, others, generator):
        watched = company.watched >= first
        if not watched.any():
            continue
        there = _contributions(clipped_sum, params, company.x, company.y, request, company.places[watched])
        apart = there - usual[(company.watched[watched] - first).to(there.device)]
        changed = ~(apart == 0).all(dim=1)
        lengths = [torch.linalg.vector_norm(part, ord=request.order, dim=-1) for part in (apart, apart.sum(dim=0))]
        largest, moved = (float(length.max()) / request.clip_norm for length in lengths)
        found.append(Difference(company.kind, int(changed.sum()), largest, moved))
    return found


def _contributions(
    clipped_sum: ClippedSum, params: Params, x: Inputs, y: Tensor, request: ClipRequest, places: Tensor
) -> Tensor:
    """Return the clipped gradients of the W records at these places, `[W, P]`."""
    count = len(places)
    groups = torch.full((len(y),), count, device=y.device)  # the last one is that of the other records
    groups[places.to(y.device)] = torch.arange(count, device=y.device)
    request = replace(request, group=groups, num_groups=count + 1)
    return clipped_sum(params, x, y, request)[0][:count].clone()


def _behind(part: Tensor, numbers: int) -> Tensor:
    """Return the same values in memory that begins so many numbers later."""
    memory = part.new_zeros(part.numel() + numbers)
    memory[numbers:] = part.flatten()
    return memory[numbers:].view(part.shape)


def _strided(part: Tensor) -> Tensor:
    """Return the same values, with the records in the last place of memory."""
    return part.movedim(0, -1).contiguous().movedim(-1, 0)


def _filled(part: Tensor, count: int, value: float) -> Tensor:
    """Return `count` records that hold this value, or for whole numbers the first record."""
    first = part[:1].expand(count, *part.shape[1:]).clone()
    return first.copy_(torch.tensor(value, dtype=torch.float64)) if part.is_floating_point() else first
