"""Passes over records in which the bits of what is computed for a record depend on that record and the model alone.

Matrix products choose their code by shape and alignment, so that a record's numbers may depend on how many records a
pass has, on its place and on its memory. A pass is therefore a copy in an aligned buffer of one of a few sizes, filled
up with a public record. `sizes_in_company` tests on this machine which sizes give a record the same bits, wherever it
is and whatever the others are. What no size passes goes one record at a time. `docs/privacy.md` has the argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_lightning.privacy.clipping.inputs import Inputs, take

Batch = tuple[Inputs, Tensor]
#: (x `[size, *X]`, y `[size, ...]`, count) -> tensors with a row for each of the first `count` records
Rows = Callable[[Inputs, Tensor, int], Sequence[Tensor]]

SIZES = (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96)  # records of a pass
FEW_SIZES = (16, 32, 40, 64)  # of nets whose check takes seconds
_STRANGE = (float("nan"), float("inf"), 1e30, 1e-40, 0.0)  # numbers of hostile records
PASS_COST = 10  # fixed cost of a pass, in records of padding


def passes(
    x: Inputs,
    y: Tensor,
    sizes: tuple[int, ...],
    padding: Batch | None = None,
    enter: Callable[[Inputs], Inputs] = lambda x: x,
) -> Iterator[tuple[slice, Inputs, Tensor]]:
    """Yield slices of the records, and copies of these filled up to one of `sizes` with the `padding` `[1, ...]`.

    Without a padding it is the first record. `enter` gives the buffer its memory format. The next pass overwrites it.
    """
    padding, plan = padding or (take(x, slice(1)), y[:1]), cheapest(len(y), sizes)
    largest, first = max(plan, default=0), 0
    x_buffer = enter(tree_map(lambda part: part.new_empty(largest, *part.shape[1:]), x))
    y_buffer = y.new_empty(largest, *y.shape[1:])
    for size in plan:
        rows = slice(first, min(first + size, len(y)))
        count, first = rows.stop - rows.start, rows.stop
        some_x, some_y = take(x_buffer, slice(size)), y_buffer[:size]
        for buffer, part, fill in zip(
            (*tree_leaves(some_x), some_y),
            (*tree_leaves(take(x, rows)), y[rows]),
            (*tree_leaves(padding[0]), padding[1]),
            strict=True,
        ):
            buffer[:count] = part
            buffer[count:] = fill
        yield rows, some_x, some_y


@functools.lru_cache(maxsize=4096)
def cheapest(records: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of passes for so many records: few passes, and little padding.

    >>> cheapest(75, (8, 32, 64)), cheapest(20, (8, 32, 64))
    ((64, 8, 8), (32,))
    """
    largest = max(sizes)
    if records > 2 * largest:
        passes_before = -(-records // largest) - 2
        return (largest,) * passes_before + cheapest(records - passes_before * largest, sizes)
    if records <= 0:
        return ()
    plans = ((size, *cheapest(records - size, sizes)) for size in sorted(sizes, reverse=True))
    return min(plans, key=lambda plan: PASS_COST * len(plan) + sum(plan))


def sizes_in_company(rows_of: Rows, examples: Batch, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the largest group of sizes that give a record the same bits, with any other records of a pass.

    `examples` are public records, at least as many as the largest size; the first one is the padding.
    """
    x, y = examples
    few = max(1, min(sizes) - 1)
    source = torch.zeros(max(sizes), dtype=torch.long, device=y.device)
    source[:few] = torch.arange(few)
    bits = {size: _bits(rows_of(take(x, source[:size]), y[source[:size]], few)) for size in sizes}
    groups = ([other for other in sizes if _equal(bits[size], bits[other])] for size in sizes)
    group = max(groups, key=lambda group: (len(group), max(group)))
    expected = _bits(rows_of(take(x, slice(max(group))), y[: max(group)], max(group)))
    if not _equal([one[:few] for one in expected], bits[max(group)]):
        return ()
    return tuple(size for size in group if _holds_in_company(rows_of, x, y, size, expected))


def _holds_in_company(rows_of: Rows, x: Inputs, y: Tensor, size: int, expected: Sequence[Tensor]) -> bool:
    """Return whether records have the `expected` bits at other places, and among hostile records and padding."""
    every, last = torch.arange(size, device=y.device), len(expected[0]) - size
    # all records in the last places in turn: for these, functions of numbers may have another code
    companies = [((every + first).roll(1), size, False) for first in range(0, last + 1, size)]
    companies.append((every.roll(-3), min(size, round(0.7 * size) | 1), True))  # an odd number
    for source, count, hostile in companies:
        kept = every[:count]
        source[count:] = 0
        some_x = take(x, source)
        if hostile:
            some_x, kept = tree_map(_strange, some_x), kept[::2]
        try:
            actual = _bits(rows_of(some_x, y[source], count))
        except (RuntimeError, ValueError, IndexError):  # a user's code may refuse such records
            if hostile:
                continue
            raise
        if not _equal([one[kept] for one in actual], [one[source[kept]] for one in expected]):
            return False
    return True


def _strange(part: Tensor) -> Tensor:
    """Return the records, of which every second is hostile."""
    part = part.clone()
    for number, row in enumerate(part[1::2]):
        if part.is_floating_point():
            row.fill_(_STRANGE[number % len(_STRANGE)])
        elif row.dim():
            row.copy_(row.roll(number, 0))
    return part


def _bits(rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the bytes of each row, `[n, bytes]`."""
    return [one.contiguous().view(len(one), -1).view(torch.uint8) for one in rows]


def _equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


def checksums(rows: Tensor) -> Tensor:
    """Return a whole number `[n]` that tells whether bits of a row differ: the sum of its numbers as integers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return rows.contiguous().view(len(rows), -1).view(kinds[rows.element_size()]).sum(dim=1, dtype=torch.int64)


class FixedPasses:
    """The sizes of passes that computations may use on this machine, found on first use.

    `examples` are public records x `[n, *X]`, y `[n, ...]`, the first of which is the padding, n >= the largest size.
    `most` records of a pass fit the caches, `enter` gives records the memory format that suits the
    model, and `draws` tells whether the model draws random numbers outside of layers for dropout.
    """

    def __init__(self, examples: Batch, sizes: Sequence[int] = SIZES) -> None:
        self.examples, self.most = examples, max(sizes)
        self.draws = False
        self.enter: Callable[[Inputs], Inputs] = lambda x: x
        self.padding = take(examples[0], slice(1)), examples[1][:1]
        self._sizes = sizes
        self._found: dict[tuple[str, int], tuple[int, ...]] = {}

    def sizes(self, what: str, rows_of: Rows) -> tuple[int, ...]:
        """Return the sizes for the computation `what`, with the present number of threads; none: one at a time."""
        key = what, torch.get_num_threads()
        if key not in self._found:
            sizes = [size for size in self._sizes if size <= self.most] or [min(self._sizes)]
            self._found[key] = sizes_in_company(rows_of, self.examples, sizes)
        return self._found[key]

    def rows(self, what: str, rows_of: Callable[[Inputs, Tensor], Tensor], x: Inputs, y: Tensor) -> Iterator[Tensor]:
        """Yield `rows_of` of the records in passes, `[count, ...]`, in order."""
        sizes = self.sizes(what, lambda x, y, count: [rows_of(self.enter(x), y)[:count]]) or (1,)
        for rows, some_x, some_y in passes(x, y, sizes, self.padding, self.enter):
            yield rows_of(some_x, some_y)[: rows.stop - rows.start]
