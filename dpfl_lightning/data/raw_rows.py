"""Digests of records as their owner gave them, before anything was selected, parsed or scaled."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from dpfl_lightning.config.names import folded
from dpfl_lightning.privacy.clipping.inputs import Inputs
from dpfl_lightning.privacy.ledger.evidence import Evidence, density

_MARKS_OF_MISSING = frozenset(("", "?", "-", ".", "na", "n/a", "nan", "nat", "<na>", "null", "none"))
_NUMBER = re.compile(r"[-+]?\d+([.,]\d+)?([eE][-+]?\d+)?")
_MOST_PARTS, _MOST_NUMBERS = 8, 256  # of a record of tensors: parts that have a digest each, and numbers that count


@dataclass(frozen=True, eq=False)
class RawRows:
    """What tells stored records apart, whatever a configuration makes of them. Their order is that of the storage.

    Args:
        cells: plain digests [n, C] of the cells of each record, uint64, 0 for an empty one. Their sum is that of the
            record, in whatever order its columns are. None if records have no other form than their tensors.
        person_numbers: [n] digits of the ids of their persons, as numbers, or None.

    **Privacy** A plain digest confirms a guess of a record. It stays beside the records.
    """

    cells: np.ndarray | None = None
    person_numbers: np.ndarray | None = None

    def evidence(self, rows: np.ndarray, x: Any, persons: np.ndarray | None, key: bytes, clients: int) -> Evidence:
        """Return keyed evidence of some records; `x` makes their inputs, if these are all that there is."""
        cells = cells_of_tensors(x()) if self.cells is None else self.cells[rows]
        if persons is None or self.person_numbers is None:
            return Evidence.of(cells, None, 1.0, key, clients)
        return Evidence.of(cells, persons[rows], density(self.person_numbers[rows]), key, clients)


def joined_cells(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the cells [n, C] of tables with other numbers of columns, below each other."""
    most = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, most - part.shape[1]))) for part in parts])


def numbers_of_ids(ids: Iterable[str]) -> np.ndarray:
    """Return the digits of ids as numbers: running ones are dense, those of a register are not."""
    return np.array([float("0" + "".join(filter(str.isdecimal, one))[:300]) for one in ids])


def cell_digest(value: str) -> int:
    """Return a digest of the text of a cell; 0 if it is missing. 7, 7.0 and " 7" are one, and so are 1.5 and 1,5.

    >>> cell_digest("7.0") == cell_digest(" 7"), cell_digest("n/a")
    (True, 0)
    """
    text = folded(value)
    if text in _MARKS_OF_MISSING:
        return 0
    if _NUMBER.fullmatch(text):
        number = float(text.replace(",", "."))
        whole = text.isdecimal() and len(text) > 15  # a floating number does not hold it
        text = str(int(text)) if whole else f"{number + 0.0:.12g}"
    return _plain(text.encode())


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
