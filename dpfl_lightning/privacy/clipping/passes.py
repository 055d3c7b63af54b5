"""Passes over records in which the bits of what is computed for a record depend on that record and the model alone.

Matrix products choose their code by shape and alignment, and elementwise functions compute the last numbers of a
tensor, or of a thread's share of it, by other code than the rest. A pass is therefore a copy in an aligned buffer of
one of a few sizes, filled up with a public record, and an operator of the CPU uses one thread. `vector_loops.py` says
at which sizes no record has those last numbers, and `sizes_in_company` tests on this machine which of them give a
record the same bits, wherever it is and whatever the others are. What no size passes goes one record at a time.
`docs/privacy.md` has the argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_lightning.privacy.clipping.inputs import Inputs, take
from dpfl_lightning.privacy.clipping.vector_loops import TRACED, multiple_of
from dpfl_lightning.runtime.threads import one_thread_an_operator

Batch = tuple[Inputs, Tensor]
#: (x `[size, *X]`, y `[size, ...]`, count) -> tensors with a row for each of the first `count` records
Rows = Callable[[Inputs, Tensor, int], Sequence[Tensor]]

#: records of a pass
SIZES: tuple[int, ...] = (8, 16, 24, 32, 40, 48, 64, 80, 96)
FEW_SIZES: tuple[int, ...] = (16, 32, 48, 64)  # of nets whose check takes seconds
PASS_COST = 20  # fixed cost of a pass, in records of padding


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

    >>> cheapest(75, (32, 64)), cheapest(20, (32, 64))
    ((64, 32), (32,))
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
    few = max(1, min(sizes) - 1)
    bits = {size: _bits_of(rows_of, examples, few, torch.arange(size).clamp(max=few) % few) for size in sizes}
    groups = ([other for other in sizes if _equal(bits[size], bits[other])] for size in sizes)
    group = max(groups, key=lambda group: (len(group), max(group)))
    expected = _bits_of(rows_of, examples, max(group), torch.arange(max(group)))
    if not _equal([one[:few] for one in expected], bits[max(group)]):
        return ()
    return tuple(size for size in group if _holds_in_company(rows_of, examples, size, expected))


def _holds_in_company(rows_of: Rows, examples: Batch, size: int, expected: Sequence[Tensor]) -> bool:
    """Return whether records have the `expected` bits at all places, and among copies, hostile records and padding."""
    copies = torch.ones(size, dtype=torch.long)  # of one record
    if not _equal(_bits_of(rows_of, examples, size, copies), [one[copies] for one in expected]):
        return False
    for shift, share, fills in _COMPANIES:
        count = min(size, round(share * size) | 1)  # odd, except for a full pass
        source = torch.arange(size).roll(shift)
        kept = torch.arange(0, count, 2 if fills else 1)
        source[count:] = 0
        x, y = take(examples[0], source), examples[1][source]
        company = tree_map(lambda part: _filled(part, fills), x) if fills else x, y  # noqa: B023 used in this turn
        try:
            actual = _bits_of(rows_of, company, count, torch.arange(size))
        except (RuntimeError, ValueError, IndexError):  # a user's code may refuse such records
            if fills:
                continue
            raise
        if not _equal([one[kept] for one in actual], [one[source[kept]] for one in expected]):
            return False
    return True


#: shift of the places, share of the size that is no padding, and what every second record is filled with
_COMPANIES: Sequence[tuple[int, float, tuple[float, ...]]] = (
    (1, 1.0, ()),
    (-3, 0.7, (float("nan"), float("inf"), 1e30, 1e-40, 0.0)),
)


def _bits_of(rows_of: Rows, examples: Batch, count: int, source: Tensor) -> list[Tensor]:
    """Return the bytes of the rows of the first `count` records of a pass, `[count, bytes]`.

    The pass has the examples in the places `source`, as copies, because it may change them.
    """
    x, y = examples
    return [one.contiguous().view(count, -1).view(torch.uint8) for one in rows_of(take(x, source), y[source], count)]


def _filled(part: Tensor, fills: Sequence[float]) -> Tensor:
    part = part.clone()
    for number, row in enumerate(part[1::2]):
        if part.is_floating_point():
            row.copy_(torch.tensor(fills[number % len(fills)], dtype=torch.float64))  # infinite in a short dtype
        elif row.dim():
            row.copy_(row.roll(number, 0))
    return part


def _equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


def checksums(rows: Tensor) -> Tensor:
    """Return a whole number `[n]` that tells whether bits of a row differ: the sum of its numbers as integers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return rows.contiguous().view(len(rows), -1).view(kinds[rows.element_size()]).sum(dim=1, dtype=torch.int64)


class FixedPasses:
    """The sizes of passes that computations may use on this machine, found on first use.

    `examples` are public records x `[n, *X]`, y `[n, ...]`, the first of which is the padding, n >= the largest size.
    `most` records of a pass fit the caches, `enter` gives records the memory format that suits the model, and `draws`
    tells whether the model draws random numbers.
    """

    def __init__(self, examples: Batch, sizes: Sequence[int] = SIZES) -> None:
        self.examples, self.most = examples, max(sizes)
        self.enter: Callable[[Inputs], Inputs] = lambda x: x
        self.draws = False
        self.padding = take(examples[0], slice(1)), examples[1][:1]
        self._sizes = sizes
        self._found: dict[str, tuple[int, ...]] = {}

    def sizes(self, what: str, rows_of: Rows) -> tuple[int, ...]:
        """Return the sizes for the computation `what`; none: one record at a time.

        The first call decides, so what `rows_of` computes may depend on `what` alone.
        """
        if what not in self._found:
            x, y = take(self.examples[0], slice(TRACED)), self.examples[1][:TRACED]
            with one_thread_an_operator():
                multiple = multiple_of(lambda: rows_of(x, y, len(y)))
                whole = [size for size in self._sizes if size % multiple == 0]
                sizes = [size for size in whole if size <= self.most] or whole[:1]
                self._found[what] = sizes_in_company(rows_of, self.examples, sizes) if sizes else ()
        return self._found[what]

    def rows(
        self,
        what: str,
        rows_of: Callable[[Inputs, Tensor], Tensor],
        x: Inputs,
        y: Tensor,
        evidence: Rows | None = None,
        alone: Callable[[Inputs, Tensor], Tensor] | None = None,
    ) -> Iterator[Tensor]:
        """Yield `rows_of` of the records in passes, `[count, ...]`, in order.

        `evidence` is what is compared in the check (None: the rows), and `alone` computes the row of one record, if no
        size passes or `rows_of` cannot be computed (None: `rows_of`).
        """
        try:
            sizes = self.sizes(what, evidence or (lambda x, y, count: [rows_of(self.enter(x), y)[:count]]))
        except Exception:  # a user's code may raise anything under `vmap`
            if alone is None:
                raise
            sizes = self._found[what] = ()
        compute = rows_of if sizes else alone or rows_of
        with one_thread_an_operator():
            for rows, some_x, some_y in passes(x, y, sizes or (1,), self.padding, self.enter):
                yield compute(some_x, some_y)[: rows.stop - rows.start]
