"""Evidence of whose records a client holds: keyed digests, by which an account recognises them in other runs."""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpfl_lightning.privacy.accounting.units import ID_KEY

CONTAINMENT = 0.05  # of the records of the smaller of two clients: from here on they are of one holder
MOST_CHANCE = 1e-9  # that clients with other records agree as much
MIN_SHARED = 3  # records
_MOST_DIGESTS = 256, 1 << 18  # of whole records: of a client, and about that of all clients of a run
_MOST_WITHOUT = 256, 1 << 14, 1 << 18  # of records without one column: for each column, of a client, of all clients
_FEWEST = 8, 32  # digests, of whole records and of those without a column: fewer show nothing
_MOST_HASHED = 1 << 20  # digests of records without one column, of all columns: of more, the least plain ones count
_MOST_CANDIDATES = 64  # earlier clients that are compared because of one digest
_FEW_ROWS = 64
_FEWEST_IDS = 8  # in the middle half of all
_EVEN = 0.6, 1.6  # deviation of gaps between random ids, in units of their mean
_LEAST_AGREEMENT = 1e-30  # below it, probabilities are no floating numbers
_LAST = 2**64 - 1


@dataclass(frozen=True)
class View:
    """The least keyed digests of a set of records in one form, a MinHash sketch (Broder, 1997).

    Args:
        packed: the least digests of records that occur once, 8 bytes each, in ascending order.
        records: number of records, of which some may be equal.
        complete: whether `packed` has the digests of all of these.
        agreement: estimated probability that another record of the population is a given one of these.
        whole: keyed digest of all records together, in any order.
        repeat: bound of the probability that as many other records of the population are the same ones.
    """

    packed: bytes
    records: int
    complete: bool
    agreement: float
    whole: str
    repeat: float

    @functools.cached_property
    def digests(self) -> np.ndarray:
        return np.frombuffer(self.packed, ">u8")

    @property
    def last(self) -> int:
        """Up to which digest it has those of all records."""
        return _LAST if self.complete else int(self.digests[-1])

    @classmethod
    def of(cls, records: np.ndarray, agreement: float, key: bytes, kind: str, most: int) -> View:
        """Return the view of records, given by plain digests [n] uint64. Those of other kinds are never equal."""
        own = hashlib.blake2b(kind.encode(), key=key, digest_size=32).digest()
        different, counts = np.unique(records, return_counts=True)
        keyed = sorted(_keyed(own, one) for one in different[_copies(counts) == 1])
        whole = _keyed(own, records.sum(dtype=np.uint64)).hex()
        return cls(b"".join(keyed[:most]), len(records), len(keyed) <= most, agreement, whole, _repeat(counts))


@dataclass(frozen=True)
class Match:
    """Two clients have records in common: how many of those that were compared, and how likely that is by chance."""

    shared: int
    compared: int
    chance: float


@dataclass(frozen=True)
class Evidence:
    """What an account keeps of a client's records: of whole rows, of rows without one column, and of ids of units.

    Rows without one column are equal where labels were swapped or a column is lacking. A table that was changed in
    every row, in more than one column, is not recognised.

    **Privacy** Keyed by the secret of the account. It stays there: no run, message or ledger has any of it.
    """

    views: tuple[View, ...] = ()

    @classmethod
    def of(cls, cells: np.ndarray, ids: np.ndarray | None, id_density: float, key: bytes, clients: int = 1) -> Evidence:
        """Return the evidence of one of several `clients` of a run.

        Args:
            cells: digests [n, C] of the cells of its records, uint64; 0 for an empty cell.
            ids: digests [n] of the ids of their units, or None.
            id_density: share of the possible ids that are there, see `density`.
            key: secret of the account.
            clients: number of clients of the run, who share the space.
        """
        rows, columns = cells.sum(axis=1, dtype=np.uint64), cells.shape[1]
        most = max(min(_MOST_DIGESTS[0], _MOST_DIGESTS[1] // clients), _FEWEST[0])
        without = min(_MOST_WITHOUT[0], min(_MOST_WITHOUT[1], _MOST_WITHOUT[2] // clients) // columns)
        equal = _equal_pairs(cells)
        views = [View.of(rows, _agreement(rows, equal), key, "row", most)]
        if columns > 1 and without >= _FEWEST[1]:
            for number in np.flatnonzero(cells.any(axis=0)):
                rest = rows - cells[:, number]
                agreement = _agreement(rest, np.delete(equal, number))
                some = np.sort(rest)[: _MOST_HASHED // columns]
                views.append(replace(View.of(some, agreement, key, "row", without), records=len(rest)))
        if ids is not None and len(ids):
            different = np.unique(ids)
            agreement = 1 - (1 - id_density) ** (1 / len(different))  # so that one of as many is hit with this density
            views.append(replace(View.of(different, agreement, key, ID_KEY, most), repeat=1.0))
        return cls(tuple(views))

    def as_json(self) -> list[list[Any]]:
        return [
            [base64.b64encode(one.packed).decode(), one.records, one.complete, one.agreement, one.whole, one.repeat]
            for one in self.views
        ]

    @classmethod
    def of_json(cls, content: Sequence[Sequence[Any]]) -> Evidence:
        return cls(tuple(View(base64.b64decode(packed), *rest) for packed, *rest in content))

    def __bool__(self) -> bool:
        return bool(self.views)

    @functools.cached_property
    def name(self) -> str:
        """A short digest of it, by which lines of an account refer to it; empty for none."""
        return hashlib.blake2b(repr(self.as_json()).encode(), digest_size=8).hexdigest() if self.views else ""


def density(numbers: np.ndarray) -> float:
    """Return which share of the whole numbers around them ids have, in their middle half: 1 for running numbers.

    It is 1 as well for ids that are numbered in blocks or steps, as by year or ward, which other holders have, too:
    gaps between random ids of a register deviate about as much as they are large.
    """
    every = np.sort(np.unique(numbers))
    middle = every[len(every) // 4 : len(every) - len(every) // 4]
    if len(middle) < _FEWEST_IDS:
        return 1.0
    gaps = np.diff(every)
    even = gaps.std() / gaps.mean()
    return min(1.0, len(middle) / float(middle[-1] - middle[0] + 1)) if _EVEN[0] < even < _EVEN[1] else 1.0


def matches(evidence: Sequence[Evidence], since: int = 0) -> list[dict[int, Match]]:
    """Return for each client from `since` on the earlier ones that have records in common with it."""
    having: dict[bytes, dict[int, list[int]]] = {}  # digest -> clients -> their views that have it
    of_whole: dict[str, dict[int, list[int]]] = {}  # the same of digests of all records together
    first = dict[Evidence, int]()  # clients with equal evidence are compared once
    equal: dict[int, list[int]] = {}
    found: list[dict[int, Match]] = []
    for place, one in enumerate(evidence):
        known = first.setdefault(one, place)
        if place >= since:
            shared = Counter[tuple[int, int, int]]()
            for number, view in enumerate(one.views):
                for digest in _digests(view):
                    for other, views in having.get(digest, {}).items():
                        shared.update((number, other, view_of) for view_of in views)
                for other, views in of_whole.get(view.whole, {}).items():  # though nothing in it occurs once
                    shared.update({(number, other, view_of): 0 for view_of in views})
            best: dict[int, Match] = {}
            for (number, other, view_of), count in shared.items():
                match = _match(one.views[number], evidence[other].views[view_of], count, one, evidence[other])
                if match is not None and (other not in best or match.chance < best[other].chance):
                    best[other] = match
            found.append({every: match for other, match in best.items() for every in equal[other]})
        equal.setdefault(known, []).append(place)
        if known == place:
            for number, view in enumerate(one.views):
                for owners in (
                    *(having.setdefault(one, {}) for one in _digests(view)),
                    of_whole.setdefault(view.whole, {}),
                ):
                    if place in owners or len(owners) < _MOST_CANDIDATES:
                        owners.setdefault(place, []).append(number)
    return found


def _match(one: View, other: View, shared: int, of_one: Evidence, of_other: Evidence) -> Match | None:
    """Return how two views match; None if they have too few records in common, or may have them by chance."""
    comparisons = len(of_one.views) * len(of_other.views)
    if one.whole == other.whole and one.repeat * comparisons < MOST_CHANCE:
        return Match(one.records, one.records, one.repeat * comparisons)
    last = min(one.last, other.last)
    counts = [int(np.searchsorted(view.digests, last, side="right")) for view in (one, other)]
    if shared < max(MIN_SHARED, CONTAINMENT * min(counts)):
        return None
    agreement = max(one, other, key=lambda view: view.records).agreement  # the larger table shows more
    tails = (_tail(shared, counts[0], agreement, other.records), _tail(shared, counts[1], agreement, one.records))
    chance = min(1.0, max(tails) * comparisons)
    return Match(shared, min(counts), chance) if chance < MOST_CHANCE else None


def _tail(shared: int, compared: int, agreement: float, records: int) -> float:
    """Bound the probability that so many of the compared records are among others by chance (Chernoff, 1952)."""
    if agreement >= 1:
        return 1.0
    rate = -math.expm1(records * math.log1p(-agreement))  # of one record to agree with any of the others
    share = min(1.0, shared / compared)
    if share <= rate:
        return 1.0
    rest = 0.0 if share == 1 else (1 - share) * math.log((1 - share) / (1 - rate))
    return math.exp(-compared * (share * math.log(share / rate) + rest))


def _agreement(rows: np.ndarray, equal_cells: np.ndarray) -> float:
    """Estimate how often another record of the population is a given row that occurs once, to the safe side.

    It is what rows that occur twice show, at most; where there are few, the product of what columns show, of which each
    is taken for as informative as half of an independent one. Rows that were filled in alike, or a table that was
    copied, do not count as chance.

    Reference: Good (1953), on the probability of what was seen once.
    """
    pairs = len(rows) * (len(rows) - 1) / 2
    times = _copies(np.unique(rows, return_counts=True)[1])
    once, twice = int((times == 1).sum()), int((times == 2).sum())
    if not pairs or not once:
        return 1.0
    found, most = (2 * count / (int(times.sum()) * once) for count in (twice, twice + 3 * math.sqrt(twice) + 3))
    by_columns = math.exp(float(np.log((equal_cells + 1) / (pairs + 1)).sum()) / 2)
    return max(min(found, 1.0), min(most, by_columns, 1.0), _LEAST_AGREEMENT)


def _copies(counts: np.ndarray) -> np.ndarray:
    """Return how often each record occurs, in a table of which there may be several copies in one."""
    return counts // np.gcd.reduce(counts) if len(counts) else counts


def _repeat(counts: np.ndarray) -> float:
    """Bound the probability of these counts of equal records, whatever the population is: the largest multinomial one.

    >>> round(_repeat(np.array([1, 1, 1])), 3)  # 3! / 3^3
    0.222
    """
    total = int(counts.sum())
    ways = math.lgamma(total + 1) - sum(map(math.lgamma, (counts + 1).tolist()))
    return math.exp(ways + float((counts * np.log(counts / total)).sum()))


def _equal_pairs(values: np.ndarray) -> np.ndarray:
    """Return how many pairs of rows are equal in each column [C] of values [n, C]."""
    if len(values) <= _FEW_ROWS:  # of many small clients
        return ((values[:, None] == values).sum(axis=(0, 1)) - len(values)) / 2
    counts = [np.unique(column, return_counts=True)[1].astype(np.float64) for column in values.T]
    return np.array([(one * (one - 1)).sum() / 2 for one in counts])


def _keyed(key: bytes, value: np.uint64) -> bytes:
    return hashlib.blake2b(int(value).to_bytes(8, "big"), key=key, digest_size=8).digest()


def _digests(view: View) -> Iterator[bytes]:
    return (view.packed[place : place + 8] for place in range(0, len(view.packed), 8))


def named(evidence: Sequence[Evidence]) -> Mapping[str, Evidence]:
    """Return different evidence by its name."""
    return {one.name: one for one in dict.fromkeys(evidence) if one}
