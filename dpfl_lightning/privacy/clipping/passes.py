"""Passes over records in which the bits of what is computed for a record depend on that record and the model alone.

Operators choose their code by shapes and alignment, and elementwise functions compute the last numbers of a tensor, or
of a thread's share of it, by other code than the rest. A pass is therefore a copy in an aligned buffer, filled up with
a public record; all passes of a computation have one size, which public facts determine; and an operator of the CPU
uses one thread. `vector_loops.py` says at which sizes no record has those last numbers, and `is_private` tests on this
machine that a pass gives a record the same bits, wherever it is and whatever the others are. What no size passes goes
one record at a time. `docs/proof.md` has the argument.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from statistics import NormalDist

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_lightning.privacy.clipping.inputs import Inputs, take
from dpfl_lightning.privacy.clipping.vector_loops import computes_whole, multiple_of
from dpfl_lightning.runtime.threads import one_thread_an_operator

Batch = tuple[Inputs, Tensor]
#: (x `[size, *X]`, y `[size, ...]`, count) -> tensors with a row for each of the first `count` records
Rows = Callable[[Inputs, Tensor, int], Sequence[Tensor]]

SIZES = (4, *range(8, 97, 8))  # records of a pass
PASS_COST = 20.0  # fixed cost of a pass of a small model, in records of padding
PASS_FLOPS = 8e8  # of products, which take as long as the fixed cost of a pass: 4 and 6 records of two ResNets
FAILURES = (RuntimeError, ValueError, IndexError, AssertionError)  # with which a user's code may refuse records
OF_ANY_WIDTH = 32  # records whose numbers fill whole registers, however many each of them has
_COMPARED = 64  # records of the check of a size, of models that are not large
_QUANTILES = [NormalDist().inv_cdf((2 * number + 1) / 32) for number in range(16)]
_COMPANY = (float("nan"), float("inf"), 1e30, 1e-40, 0.0)  # what hostile records are filled with


def passes(
    x: Inputs,
    y: Tensor,
    size: int,
    padding: Batch | None = None,
    enter: Callable[[Inputs], Inputs] = lambda x: x,
    into: Batch | None = None,
) -> Iterator[tuple[slice, Inputs, Tensor]]:
    """Yield slices of the records, and copies of these filled up to `size` with the `padding` `[1, ...]`.

    Without a padding it is the first record. `enter` gives the buffer its memory format, or `into` is the buffer. The
    next pass overwrites it.
    """
    padding = padding or (take(x, slice(1)), y[:1])
    some_x, some_y = into or (
        enter(tree_map(lambda part: part.new_empty(size, *part.shape[1:]), x)),
        y.new_empty(size, *y.shape[1:]),
    )
    batches = (some_x, some_y), (x, y), padding
    parts = [*zip(*((*tree_leaves(inputs), labels) for inputs, labels in batches), strict=True)]
    for first in range(0, len(y), size):
        rows = slice(first, min(first + size, len(y)))
        count = rows.stop - rows.start
        for buffer, part, fill in parts:
            buffer[:count] = part[rows]
            if count < size:
                buffer[count:] = fill
        yield rows, some_x, some_y


def cost(size: int, expected: float, of_a_pass: float = PASS_COST) -> float:
    """Return what passes of this size cost for a Poisson number of records, in records.

    >>> min((16, 32, 64), key=lambda size: cost(size, expected=20.0))
    32
    """
    numbers = [max(0.0, expected + quantile * math.sqrt(expected)) for quantile in _QUANTILES]
    return (size + of_a_pass) * sum(math.ceil(number / size) for number in numbers)


def is_private(rows_of: Rows, examples: Batch, size: int) -> bool:
    """Return whether passes of this size give a record the same bits at all places, and in all of these companies.

    Its company are other records, copies of it, and hostile records and padding. `examples` are at least `size` public
    records, the first of which is the padding.
    """
    places, copies = torch.arange(size), torch.ones(size, dtype=torch.long)
    expected = _bits_of(rows_of, examples, size, places)
    for source in (places.roll(1), copies) if size > 4 else (copies,):  # of few, two have other places below
        if not _equal(_bits_of(rows_of, examples, size, source), [one[source] for one in expected]):
            return False
    count = min(size, round(0.7 * size) | 1)  # odd
    source = places.roll(-3)
    source[count:] = 0
    x, y = take(examples[0], source), examples[1][source]
    try:
        actual = _bits_of(rows_of, (tree_map(_with_hostile_records, x), y), count, places)
    except FAILURES:
        actual = _bits_of(rows_of, (x, y), count, places)
    kept = places[:count:2]
    return _equal([one[kept] for one in actual], [one[source[kept]] for one in expected])


def _bits_of(rows_of: Rows, examples: Batch, count: int, source: Tensor) -> list[Tensor]:
    """Return the bytes of the rows of the first `count` records of a pass, `[count, bytes]`.

    The pass has the examples in the places `source`, as copies, because it may change them.
    """
    x, y = examples
    return [one.contiguous().view(count, -1).view(torch.uint8) for one in rows_of(take(x, source), y[source], count)]


def _with_hostile_records(part: Tensor) -> Tensor:
    """Return a copy of records in which every second one is hostile."""
    part = part.clone()
    for number, row in enumerate(part[1::2]):
        if part.is_floating_point():
            row.copy_(torch.tensor(_COMPANY[number % len(_COMPANY)], dtype=torch.float64))  # infinite in a short dtype
        elif row.dim():
            row.copy_(row.roll(number + 1, 0))
    return part


def _equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


def checksums(rows: Tensor) -> Tensor:
    """Return a whole number `[n]` that tells whether bits of a row differ: a sum of its bytes, eight at a time."""
    octets = rows.contiguous().view(len(rows), -1).view(torch.uint8)
    whole = octets.shape[1] // 8 * 8
    found = octets[:, whole:].sum(dim=1, dtype=torch.int64)
    if whole:
        aligned = whole == octets.shape[1] and octets.storage_offset() % 8 == 0
        eights = octets if aligned else octets[:, :whole].clone(memory_format=torch.contiguous_format)
        found += eights.view(torch.int64).sum(dim=1)
    return found


def checksum(tensor: Tensor) -> int:
    """Return a whole number that tells whether bits of a tensor differ."""
    return int(checksums(tensor.detach().reshape(1, -1))) if tensor.numel() else 0


class Checksums:
    """Tells whether bits of tensors have changed since it was made: by their versions, and by what lies in memory.

    Tensors that fill most of one vector, as parameters do, are read as one.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        parts = defaultdict[int, list[Tensor]](list)
        for one in tensors.values():
            parts[one.untyped_storage()._cdata].append(one)
        self._read = [one for some in parts.values() for one in _as_few(some)]
        self._before = self._now()

    def _now(self) -> tuple[list[int], list[int]]:
        return [one._version for one in self.tensors.values()], [*map(checksum, self._read)]

    def again(self, tensors: Mapping[str, Tensor]) -> Checksums:
        """Return those of these tensors: its own, if they are the same by their versions."""
        same = self.are_of(tensors) and [one._version for one in tensors.values()] == self._before[0]
        return self if same else Checksums(tensors)

    def are_of(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether these are its tensors, whatever their numbers are."""
        return [*map(id, tensors.values())] == [*map(id, self.tensors.values())]

    def changed(self) -> list[str]:
        """Return the names of tensors that may have changed: all if their vector has."""
        versions, _ = after = self._now()
        if after == self._before:
            return []
        found = [name for name, one, other in zip(self.tensors, versions, self._before[0], strict=True) if one != other]
        return found or [*self.tensors]


def _as_few(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors in one storage, or the bytes of this storage if they are at least half of them."""
    storage = tensors[0].untyped_storage()
    if 2 * sum(one.numel() * one.element_size() for one in tensors) < storage.nbytes():
        return tensors
    return [torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage)]


class FixedPasses:
    """The size of passes that a computation may use on this machine, found on first use.

    `examples` are public records x `[n, *X]`, y `[n, ...]`, more than the largest size; the first is the padding.
    `most` records of a pass fit the caches, a pass costs as much as `cost` records, `enter` gives records the memory
    format that suits the model, and `draws` tells whether the model draws random numbers. The batch of a check may have
    `crowd` records. If weights may call `any_operator`, no loop over records of any width may end within one.
    """

    def __init__(self, examples: Batch, sizes: Sequence[int] = SIZES) -> None:
        self.examples, self.most, self.cost, self.crowd = examples, max(sizes), PASS_COST, SIZES[-1]
        self.enter: Callable[[Inputs], Inputs] = lambda x: x
        self.draws = self.any_operator = False
        self.padding = take(examples, [0])
        self._sizes = sizes
        self._whole: dict[Hashable, list[int]] = {}
        self._checked: dict[tuple[Hashable, int], bool] = {}

    def size(self, what: Hashable, rows_of: Rows, expected: float | None = None, wide: bool | None = None) -> int:
        """Return the size for the computation `what` of a public `expected` number of records (None: very many).

        1 means one record at a time. The first call for a size decides, so what `rows_of` computes may depend on `what`
        alone. In `wide` passes (None: if weights may call `any_operator`) no loop of any operator ends within a record.
        """
        what = what, self.any_operator if wide is None else wide
        if what not in self._whole:
            self._whole[what] = self._whole_sizes(rows_of, what[1])
        for size in _cheapest_first(expected, tuple(self._whole[what]), self.cost):
            if (what, size) not in self._checked:
                with one_thread_an_operator():
                    seen = size == max(self._sizes) <= 8  # by `multiple_of`, which watches no larger pass then
                    whole = seen or computes_whole(self._of_records(rows_of), size)
                    self._checked[what, size] = whole and all(
                        is_private(rows_of, take(self.examples, rows), size) for rows in self._windows(size)
                    )
            if self._checked[what, size]:
                return size
        return 1

    def _whole_sizes(self, rows_of: Rows, wide: bool) -> list[int]:
        """Return the sizes at which vectorised loops end with a record, the smallest one if none of them fits."""
        fitting = max((size for size in self._sizes if size <= self.most), default=self._sizes[0])
        for largest in (fitting, max(self._sizes)):
            with one_thread_an_operator():
                multiple = multiple_of(self._of_records(rows_of), largest)
            if multiple and wide and max(self._sizes) >= OF_ANY_WIDTH:
                multiple = math.lcm(multiple, OF_ANY_WIDTH)
            whole = [size for size in self._sizes if multiple and size % multiple == 0]
            if not whole or whole[0] <= largest:
                break
        return [size for size in whole if size <= fitting] or whole[:1]

    def _windows(self, size: int) -> list[list[int]]:
        """Return rows of examples, the padding first: few records may keep their bits by chance."""
        count = max(1, min(self.crowd, _COMPARED, len(self.examples[1])) // size)
        return [[0, *range(first, first + size - 1)] for first in range(1, 1 + count * (size - 1), max(size - 1, 1))]

    def _of_records(self, rows_of: Rows) -> Callable[[int], object]:
        x, y = self.examples
        return lambda count: rows_of(take(x, slice(count)), y[:count], count)

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
            size = self.size(what, evidence or (lambda x, y, count: [rows_of(self.enter(x), y)[:count]]))
        except Exception:  # a user's code may raise anything under `vmap`
            if alone is None:
                raise
            self._whole[what, self.any_operator], size = [], 1
        compute = rows_of if size > 1 else alone or rows_of
        with one_thread_an_operator():
            for rows, some_x, some_y in passes(x, y, size, self.padding, self.enter):
                yield compute(some_x, some_y)[: rows.stop - rows.start]


@functools.lru_cache(maxsize=4096)
def _cheapest_first(expected: float | None, sizes: tuple[int, ...], of_a_pass: float) -> list[int]:
    if expected is None:
        return sorted(sizes, reverse=True)
    return sorted(sizes, key=lambda size: cost(size, expected, of_a_pass))
