"""The person, or another unit of several rows, of each record: ids stay with the client, and codes hold no id."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dpfl_lightning.data.frames import Table, require_columns
from dpfl_lightning.data.ids import alike, ids_of
from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.privacy.accounting.units import ID_KEY

NOBODY = -1  # the code of records that are of no client, such as a test set


def ids_in(table: Table, column: str) -> list[str]:
    """Return the ids in a column of a table, as `ids_of`."""
    require_columns(table.frame, [column], f"{table.key}: {ID_KEY}")
    return ids_of(table.frame[column], len(table.frame), f"{table.key}: {column}")


def ids_of_clients(
    persons: Any, clients: Sequence[Any] | Mapping[str, Any], counts: Sequence[int], names: Sequence[str]
) -> list[list[str]]:
    """Return each client's ids: of a list or mapping of them, or of an attribute of each client's records."""
    whose = [f"client {name}: persons" for name in names or range(len(clients))]
    if isinstance(persons, str):
        given = [attribute(one, persons) for one in (clients.values() if isinstance(clients, Mapping) else clients)]
        for where, one in zip(whose, given, strict=True):
            require(one is not None, where, "be an attribute of the records", persons)
    elif isinstance(persons, Mapping):
        by_name = {str(name): one for name, one in persons.items()}
        fits = sorted(by_name) == sorted(names)
        require(fits, "persons", f"name the clients of the data ({', '.join(names)})", list(by_name))
        given = [by_name[name] for name in names]
    else:
        fits = isinstance(persons, Sequence) and len(persons) == len(clients)
        require(fits, "persons", f"be {len(clients)} lists, one for each client", type(persons).__name__)
        given = list(persons)
    return [ids_of(*one) for one in zip(given, counts, whose, strict=True)]


def attribute(records: Any, name: str) -> Any:
    """Return an attribute of a data set, or of that of a loader; None if it has none."""
    return getattr(records.dataset if isinstance(records, DataLoader) else records, name, None)


def codes(ids: Sequence[str]) -> Tensor:
    """Return the code of each record's id [n], int64 >= 0: a digest, equal at sites and in simulation."""
    return torch.from_numpy((_digests(ID_KEY, ids) >> np.uint64(1)).astype(np.int64))


def with_nobody(ids: Tensor, count: int) -> Tensor:
    """Return codes [count]: the given ones, followed by those of rows of no client."""
    return torch.cat([ids, ids.new_full((count - len(ids),), NOBODY)])


def coins(ids: Sequence[str], seed: int) -> np.ndarray:
    """Return one number in [0, 2^64) for each record `[n]`: a digest of its id and `seed`, and of nothing else.

    A unit at several clients is held out at all of them or at none.
    """
    return _digests(str(seed), ids)


def _digests(key: str, ids: Sequence[str]) -> np.ndarray:
    known, place = np.unique(np.array(ids, dtype=str), return_inverse=True)
    hashed = hashlib.blake2b(key.encode()).digest()
    each = b"".join(hashlib.blake2b(one.encode(), digest_size=8, key=hashed).digest() for one in known.tolist())
    return np.frombuffer(each, ">u8").astype(np.uint64)[place]


def check_test_ids(test_ids: Sequence[str] | None, ids: Sequence[Sequence[str]], is_held_out: np.ndarray) -> None:
    """Raise UserError if a person of the test set has a training record; warn if its persons are not given."""
    if test_ids is None:
        warn_user("the test set does not name persons: that none of them has training records is not checked")
        return
    every = np.array([one for part in ids for one in part], dtype=str)
    both = len({*map(alike, every[~is_held_out].tolist())} & {*map(alike, test_ids)})
    advice = "Leave their records out of one of the two. If equal ids mean other people, give the test set no ids."
    require(both == 0, "test", "have other persons than the training records", f"{both} of both", advice)


def in_groups(count: int, rows_of: Sequence[np.ndarray], each: int) -> Tensor:
    """Return codes [count] of made units: `each` successive rows of a client are one; other rows are nobody."""
    ids = with_nobody(torch.empty(0, dtype=torch.long), count)
    for rows in rows_of:
        ids[torch.from_numpy(rows)] = codes([str(place // each) for place in range(len(rows))])
    return ids


def cut(rows: np.ndarray, held_out: int, rng: np.random.Generator, each: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Split rows at random into training rows and at least `held_out` others; `each` successive rows stay together."""
    group = np.arange(len(rows)) // each
    place = np.argsort(rng.permutation(group[-1] + 1))[group]
    order = np.argsort(place, kind="stable")
    end = int(np.searchsorted(place[order], math.ceil(held_out / each)))
    return rows[order[end:]], rows[order[:end]]


def check_ids(
    ids: Tensor, count: int, train_of: Sequence[Tensor], held_out_of: Sequence[Tensor], test: Tensor | None
) -> None:
    """Raise UserError unless ids are whole numbers [count] and none has training and other records."""
    fits = ids.dtype == torch.long and ids.shape == (count,)
    require(fits, "Population.unit_ids", f"have one code for each of the {count} rows", tuple(ids.shape))
    on_test = ids[test] if test is not None else ids[:0]
    for train, held_out in zip(train_of, held_out_of, strict=True):
        others = torch.cat([ids[held_out], on_test])
        apart = not bool(torch.isin(ids[train], others).any()) and bool((ids[train] >= 0).all())
        must = "have each id on one side of a split, and one for each training record"
        require(apart, "Population.unit_ids", must, "ids of both, or none")
