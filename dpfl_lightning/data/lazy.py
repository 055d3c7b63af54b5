"""Inputs that are read from their source when a batch is drawn, for data that do not fit the memory."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_lightning.data.given import Source
from dpfl_lightning.data.raw_rows import cells_of_tensors
from dpfl_lightning.errors import require
from dpfl_lightning.privacy.clipping.inputs import Inputs, joined, record_shape, take

_AT_ONCE = 256  # records that are read together when all are


class LazyInputs:
    """The inputs of all records of a population: `inputs[rows]` reads these records, and nothing is kept.

    Several threads read at the same time, each for a client. A source has to return the same record every time.

    Args:
        sources: of all clients and of the test set, whose rows follow each other.
        empty: inputs [0, *X].
        digests: [n, 16] bytes of each record.
    """

    def __init__(self, sources: Sequence[Source], empty: Inputs, digests: Tensor) -> None:
        self._sources, self._empty, self.digests = tuple(sources), empty, digests
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, rows: Tensor) -> Inputs:
        """Return inputs [b, *X] of the rows [b] (int64), on the device of the population."""
        places, device = rows.cpu().numpy(), tree_leaves(self._empty)[0].device
        source_of = np.searchsorted(self._ends, places, side="right")
        batches, order = [], []
        for number in np.unique(source_of).tolist():
            source, at = self._sources[number], np.flatnonzero(source_of == number)
            batch = source.inputs(places[at] - (self._ends[number] - len(source)))
            must = f"return records of shape {record_shape(self._empty)}, as before"
            require(record_shape(batch) == record_shape(self._empty), source.where, must, record_shape(batch))
            batches.append(batch)
            order.append(at)
        if not batches:
            return self._empty
        batch = batches[0] if len(batches) == 1 else take(joined(batches), np.argsort(np.concatenate(order)))
        return tree_map(lambda part: part.to(device), batch)

    def to(self, device: torch.device | str) -> LazyInputs:
        moved = copy.copy(self)
        moved._empty = tree_map(lambda part: part.to(device), self._empty)
        return moved


def scanned(source: Source, seed: int) -> tuple[Inputs, Tensor, np.ndarray, np.ndarray, np.ndarray]:
    """Read all records of a source once.

    Returns inputs [0, *X], all labels [n], and of the records `coins`, digests [n, 16] and cells [n, C].
    """
    labels, coins_of, digests_of, cells_of, empty = [], [], [], [], None
    for rows in np.split(np.arange(len(source)), range(_AT_ONCE, len(source), _AT_ONCE)):
        x, y = source.read(rows)
        empty = take(x, slice(0)) if empty is None else empty
        must, advice = f"yield records of one shape, {record_shape(empty)}", "Resize images to one size."
        require(record_shape(x) == record_shape(empty), source.where, must, record_shape(x), advice)
        labels.append(y)
        coins_of.append(coins(x, y, seed))
        digests_of.append(record_digests(x, y, b"", size=16))
        cells_of.append(cells_of_tensors(x))
    return empty, torch.cat(labels), np.concatenate(coins_of), np.concatenate(digests_of), np.concatenate(cells_of)


def coins(x: Inputs, y: Tensor, seed: int) -> np.ndarray:
    """Return one number in [0, 2^64) for each record `[n]`: a digest of the record and `seed`, and of nothing else."""
    key = hashlib.blake2b(str(seed).encode()).digest()
    return record_digests(x, y, key, size=8).view(">u8")[:, 0].astype(np.uint64)


def record_digests(x: Inputs, y: Tensor, key: bytes, size: int) -> np.ndarray:
    """Return a digest of each record and its label, `[n, size]` bytes."""
    parts = [part + 0.0 if part.is_floating_point() else part for part in tree_leaves(x)]  # -0.0 is 0.0
    columns = [part.contiguous().numpy() for part in (*parts, y)]
    content = (b"".join(part.tobytes() for part in record) for record in zip(*columns, strict=True))
    digests = b"".join(hashlib.blake2b(one, digest_size=size, key=key).digest() for one in content)
    return np.frombuffer(digests, np.uint8).reshape(len(y), size)
