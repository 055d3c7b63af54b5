"""Digests of records as their owner gave them, before anything was selected, parsed or scaled."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from dpfl_lightning.config.names import folded
from dpfl_lightning.privacy.clipping.inputs import Inputs
from dpfl_lightning.privacy.ledger.evidence import Evidence, density

_MARKS_OF_MISSING = frozenset(("", "?", "-", ".", "na", "n/a", "nan", "nat", "<na>", "null", "none"))
_NUMBER = re.compile(r"[-+]?\d+([.,]\d+)?([eE][-+]?\d+)?")
_DAY = re.compile(r"(?P<year>\d{4})[-/](?P<month>\d\d?)[-/](?P<day>\d\d?)([ t]00:00(:00(\.0+)?)?)?")
_DAY_FIRST = re.compile(r"(?P<day>\d\d?)\.(?P<month>\d\d?)\.(?P<year>\d{4})")
_AT_ONCE = 4096  # records whose inputs are read together
_MOST_PARTS, _MOST_NUMBERS = 8, 256  # of a record of tensors: parts that have a digest each, and numbers that count


@dataclass(frozen=True, eq=False)
class RawRows:
    """What tells stored records apart, whatever a configuration makes of them. Their order is that of the storage.

    Args:
        cells: plain digests [n, C] of the cells of each record, uint64, 0 for an empty one. Their sum is that of the
            record, in whatever order its columns are. None if records have no other form than their tensors.
        id_numbers: [n] digits of the ids of their units, as numbers, or None.

    **Privacy** A plain digest confirms a guess of a record. It stays beside the records.
    """

    cells: np.ndarray | None = None
    id_numbers: np.ndarray | None = None

    def evidence(self, rows_of: Sequence[np.ndarray], inputs: Any, ids: Any, key: bytes) -> tuple[Evidence, ...]:
        """Return keyed evidence of clients.

        Args:
            rows_of: rows of each client.
            inputs: function that returns the inputs of rows, which count if there is nothing else.
            ids: [n] codes of the units of all rows, uint64, or None.
            key: secret of the account.
        """
        if self.cells is not None:
            cells_of = [self.cells[rows] for rows in rows_of]
        else:
            order = np.concatenate(rows_of)
            parts = [cells_of_tensors(inputs(some)) for some in np.split(order, range(_AT_ONCE, len(order), _AT_ONCE))]
            cells_of = np.split(np.concatenate(parts), np.cumsum(list(map(len, rows_of)))[:-1])
        count = len(rows_of)
        if ids is None or self.id_numbers is None:
            return tuple(Evidence.of(cells, None, 1.0, key, count) for cells in cells_of)
        densities = [density(self.id_numbers[rows]) for rows in rows_of]
        ids_of = [ids[rows] for rows in rows_of]
        return tuple(map(Evidence.of, cells_of, ids_of, densities, repeat(key), repeat(count)))


def joined_cells(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the cells [n, C] of tables with other numbers of columns, below each other."""
    most = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, most - part.shape[1]))) for part in parts])


def numbers_of_ids(ids: Iterable[str]) -> np.ndarray:
    """Return the digits of ids as numbers: running ones are dense, those of a register are not."""
    return np.array([float("0" + "".join(filter(str.isdecimal, one))[:300]) for one in ids])


def cell_digest(column: str, value: str) -> int:
    """Return a digest of the text of a cell; 0 if it is missing. 7, 7.0 and " 7" are one, and so are 1.5 and 1,5.

    >>> cell_digest("age", "7.0") == cell_digest("Age", " 7"), cell_digest("age", "n/a")
    (True, 0)
    """
    text = folded(value)
    if text in _MARKS_OF_MISSING:
        return 0
    if (day := _DAY.fullmatch(text)) or (day := _DAY_FIRST.fullmatch(text)):
        text = "{year}-{month:0>2}-{day:0>2}".format(**day.groupdict())
    elif _NUMBER.fullmatch(text):
        number = float(text.replace(",", "."))
        whole = text.isdecimal() and len(text) > 15  # a floating number does not hold it
        text = str(int(text)) if whole else f"{number + 0.0:.12g}"
    return _plain(f"{folded(column)}\n{text}".encode())


def cells_of_tensors(x: Inputs) -> np.ndarray:
    """Return cells [n, C] of inputs [n, *X]: digests of a few parts of each record, of its first, ninth ... number."""
    leaves = [part.reshape(len(part), -1).cpu() for part in tree_leaves(x)]
    step = sum(part.shape[1] for part in leaves) // _MOST_NUMBERS + 1
    numbers = torch.cat([part[:, ::step].to(torch.float64) for part in leaves], dim=1).numpy() + 0.0  # -0.0 is 0.0
    parts = min(_MOST_PARTS, numbers.shape[1])
    cells = np.empty((len(numbers), parts), dtype=np.uint64)
    for part in range(parts):
        chosen = np.ascontiguousarray(numbers[:, part::parts])
        cells[:, part] = [_plain(b"%d;" % part + row.tobytes()) for row in chosen]
    return cells


def _plain(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
