"""What epsilon protects: a record, or a unit of several records such as a person, which is drawn, clipped and counted.

Only this file, the options, and the files that read ids from data say which units there are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dpfl_lightning.config.options import MOST_ROWS, PrivacyOptions
from dpfl_lightning.errors import UserError, require, require_one_of
from dpfl_lightning.privacy.accounting.accountant import ADJACENCIES, Accountant
from dpfl_lightning.privacy.accounting.events import Event, NoisedEvent, Release, SelectionEvent
from dpfl_lightning.runtime.text import at_most, counted

VACUOUS = 30.0  # an epsilon above it promises nothing
ROWS_KEY = "rows_per_person"  # of the section privacy
ID_KEY = "person"  # argument of data, and key of a schema, with the column of the units' ids


def of_group(event: Event, records: int) -> Event:
    """Return an event that costs one record at least as much as this one costs a group of so many records.

    A step without any record of the group, of probability `(1 - q)^k`, is the same for both neighbours; the others
    move a sum by at most k bounds. By joint convexity no mixture of such steps costs more than the largest move in all
    of them: the Gaussian event with rate `1 - (1 - q)^k` and noise / k. A selection has k times its range.
    """
    if isinstance(event, SelectionEvent):
        return dataclasses.replace(event, epsilon=records * event.epsilon)
    if isinstance(event, NoisedEvent) and event.noise_multiplier is not None:
        rate = -math.expm1(records * math.log1p(-event.sample_rate)) if event.sample_rate < 1 else 1.0
        return type(event).of(min(math.nextafter(rate, 2), 1.0), event.noise_multiplier / records, event.steps)
    return event


@dataclass(frozen=True)
class Unit:
    """What neighbouring data sets differ in, and what training draws, clips and counts.

    Args:
        rows: the most rows of one `group` that releases use, if that is known.
    """

    rows: int | None = None

    name: ClassVar[str]
    group: ClassVar[str]  # what has several rows, and what ids in data name
    is_group: ClassVar[bool] = False  # whether training takes blocks of rows

    def __str__(self) -> str:
        return self.name

    @property
    def one_group(self) -> str:
        return f"{'an' if self.group[0] in 'aeio' else 'a'} {self.group}"

    @property
    def at_each_place(self) -> str:
        """Whom a bound is about that adds up those of several places."""
        return f"{self.one_group} with {'rows' if self.is_group else 'one record'}"

    @property
    def public_numbers(self) -> str:
        """The numbers that no guarantee protects."""
        return f"numbers of training records or {self.group}s"

    @property
    def clipped(self) -> str:
        """Whose gradient is clipped."""
        return f"each {self}'s gradient"

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What no epsilon of this unit covers, beside what none covers."""
        return ()

    def drawn(self, words: str) -> str:
        """Return how batches of this unit are drawn, given how batches are drawn."""
        return words

    def definition(self, place: str, elsewhere: str) -> str:
        """Return what one of this unit is among the rows of a `place`, and who is protected less.

        `elsewhere` says what holds for one with rows at several places.
        """
        whole = self.one_group.capitalize()
        return (
            f"A {self} is one row of one {place}'s data, for example one stay in a hospital. {whole} with several rows "
            f"is protected less. So is {self.one_group} with rows at several {place}s: {elsewhere}. How many rows "
            f"{self.one_group} has is known to the data holder alone."
        )

    def check(self, has_ids: bool) -> None:
        """Raise UserError if a run cannot protect this unit on data that have ids, or have none."""

    def caveats(self, has_ids: bool) -> tuple[str, ...]:
        """Return what every guarantee of a run says on data that have ids, or have none."""
        return ()

    def group_words(
        self, events: Sequence[Event], delta: float, accountant: Accountant, chosen: bool
    ) -> tuple[str, ...]:
        """Return what these events cost one `group` of up to `rows` records, if results have not `chosen` them."""
        return ()

    def most_of(self, other: Unit) -> int | None:
        """Return how many of another unit one of this holds at most; None if nobody says."""
        return 1

    def lacks(self, other: Unit) -> tuple[str, str]:
        """Return in words that `most_of` is not known, and the way out."""
        have, stated = "rows", f", or privacy.{ROWS_KEY} to the most rows of {self.one_group}"
        if other.is_group:
            have, stated = f"{other}s", ""
        elif other.group != self.group:
            stated = f", or give the limit the most rows of {self.one_group} (--{ROWS_KEY})"
        words = f"{other}s of {self}s of whom nobody says how many {have} they have"
        return words, f"Set privacy.unit to {self}{stated}."

    @classmethod
    def key(cls, adjacency: str) -> str:
        """Return the name of the relation between neighbouring data sets, as ledgers and accounts have it."""
        return f"{adjacency}_of_{cls.name}s" if cls.is_group else adjacency

    def relation(self, adjacency: str) -> str:
        """Return in words what neighbouring data sets differ in."""
        return ADJACENCIES[adjacency]

    def options(self) -> dict[str, Any]:
        """Return the options of the section privacy that name this unit."""
        return {"unit": self.name, ROWS_KEY: self.rows}


class Record(Unit):
    """One row. `rows` is a public maximum up to which guarantees say what holds for persons with several rows."""

    name: ClassVar[str] = "record"
    group: ClassVar[str] = "person"

    def caveats(self, has_ids: bool) -> tuple[str, ...]:
        words = (
            f"epsilon is for one record, and {self.one_group} may have several: privacy.unit {self.group} protects "
            f"{self.group}s, and privacy.{ROWS_KEY} states what holds for them"
        )
        return (words,) if has_ids and self.rows in (None, 1) else ()

    def group_words(
        self, events: Sequence[Event], delta: float, accountant: Accountant, chosen: bool
    ) -> tuple[str, ...]:
        if self.rows is None or self.rows < 2:
            return ()
        if chosen:
            why = "because earlier releases chose later ones"
            return (f"nothing is stated for {self.group}s with several records, {why}",)
        released = [event for event in events if isinstance(event, Release)]
        sizes = [*(2**power for power in range(1, self.rows.bit_length()) if 2**power < self.rows), self.rows]
        parts = []
        for records in sizes:
            try:
                grouped = [of_group(event, records) for event in released]
                epsilon, _ = (accountant.faster or accountant).bound(grouped, delta)
            except UserError:
                epsilon = math.inf
            vacuous = epsilon > VACUOUS
            parts.append(f"{'vacuous' if vacuous else f'epsilon {at_most(epsilon)}'} for {records}")
            if vacuous:
                break
        more = " and more" if parts[-1].startswith("vacuous") and records < self.rows else ""
        known = f"{', '.join(parts)}{more} records"
        return (f"for all records of {self.one_group} with several, at the same delta, holds: {known}",)


class Group(Unit):
    """All rows with one id, of which a secret chooses at most `rows` for all releases of a run.

    The loss of a unit is the mean of those of its rows, and its gradient is clipped.
    """

    is_group: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        cls.group = cls.name

    @property
    def clipped(self) -> str:
        return f"each {self}'s gradient, the mean over at most {self.rows} of the {self}'s rows,"

    @property
    def not_covered(self) -> tuple[str, ...]:
        place = f"{self.one_group} at two clients is two {self}s"
        return (f"what other clients release about the same {self}: {place}",)

    def definition(self, place: str, elsewhere: str) -> str:
        return (
            f"{self.one_group.capitalize()} is all rows of one {place} with one id, as many of them as the run used; "
            f"further rows had no influence. {self.one_group.capitalize()} with rows at several {place}s counts as "
            f"several {self}s: {elsewhere}."
        )

    def drawn(self, words: str) -> str:
        most = "" if self.rows is None else f", at most {counted(self.rows, 'row')} of each"
        return f"{words} of {self}s{most}"

    def check(self, has_ids: bool) -> None:
        advice = f"Name the most rows of {self.one_group} that are used, such as 4."
        require(self.rows is not None, f"privacy.{ROWS_KEY}", f"be a number with unit {self}", self.rows, advice)
        advice = f"Name the column or the ids of the {self}s ({ID_KEY}=...), or set privacy.unit to record."
        require(has_ids, "privacy.unit", f"be record for data without {self}s", self.name, advice)

    def most_of(self, other: Unit) -> int | None:
        if type(other) is type(self):
            return 1
        stated = [one.rows for one in (self, other) if one.rows is not None and one.group == self.group]
        return None if other.is_group else max(stated, default=None)

    def relation(self, adjacency: str) -> str:
        return f"{ADJACENCIES[adjacency].replace('record', self.name)} of one client"

    def blocks(self, rows: np.ndarray, ids: np.ndarray, key: bytes) -> np.ndarray:
        """Return the rows `[units, self.rows]` of a client that releases use, of its `rows` `[n]` with `ids` `[n]`.

        They are in the order of the ids, filled up with -1. Of a unit with more rows those are chosen whose places
        among its rows have the smallest digests with the secret `key`.

        **Guarantees** The rows of a unit depend on its id, its rows and the key alone.

        >>> Person(2).blocks(np.array([10, 11, 12, 13]), np.array([7, 5, 7, 7]), key=b"secret")
        array([[11, -1],
               [12, 13]])
        """
        assert self.rows is not None, "`check` was not called"
        different, unit = np.unique(ids, return_inverse=True)
        order = np.argsort(unit, kind="stable")
        counts = np.bincount(unit, minlength=len(different))
        found = np.full((len(different), self.rows), -1, dtype=np.int64)
        for number, own in enumerate(np.split(rows[order], counts.cumsum()[:-1]) if len(different) else ()):
            if len(own) > self.rows:
                digests = [_place_digest(int(different[number]), place, key) for place in range(len(own))]
                own = own[np.sort(np.argsort(digests)[: self.rows])]
            found[number, : len(own)] = own
        return found


class Person(Group):
    """All rows of a person."""

    name: ClassVar[str] = "person"


#: privacy.unit
UNITS: dict[str, type[Unit]] = {"record": Record, "person": Person}
RECORD = Record()


def unit_of(options: PrivacyOptions | Mapping[str, Any] | None) -> Unit:
    """Return the unit that options of the section privacy name; without privacy, a record."""
    if options is None:
        return RECORD
    given = options if isinstance(options, Mapping) else vars(options)
    require_one_of(UNITS, "privacy.unit", given["unit"])
    return UNITS[given["unit"]](given[ROWS_KEY])


def unit_named(name: str) -> Unit:
    """Return the unit of a name that a file has, without its rows; a record for an unknown one."""
    return UNITS.get(name, Record)()


class Relation(NamedTuple):
    """Between neighbouring data sets: how they differ, and in what."""

    adjacency: str = "add_remove"
    unit: Unit = RECORD

    @property
    def key(self) -> str:
        """Its name in ledgers and accounts, such as add_remove, which does not tell the rows of a unit."""
        return self.unit.key(self.adjacency)

    @property
    def words(self) -> str:
        return self.unit.relation(self.adjacency)

    @classmethod
    def of(cls, privacy: PrivacyOptions | None) -> Relation:
        return cls() if privacy is None else cls(privacy.adjacency, unit_of(privacy))

    @classmethod
    def of_key(cls, key: str, rows: object = None) -> Relation:
        """Return the relation of this name; `rows` of a file count if they are possible. Raises UserError."""
        known = {kind.key(adjacency): (adjacency, kind) for kind in UNITS.values() for adjacency in ADJACENCIES}
        require_one_of(known, "adjacency", key)
        adjacency, kind = known[key]
        return cls(adjacency, kind(rows if type(rows) is int and 1 <= rows <= MOST_ROWS else None))


def _place_digest(code: int, place: int, key: bytes) -> bytes:
    return hashlib.blake2b(f"{code},{place}".encode(), key=key, digest_size=16).digest()
