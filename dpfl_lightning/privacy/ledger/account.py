"""The account of data holders: what all runs on their records have released, in one file outside of every run."""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import FileIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from dpfl_lightning.config.names import folded
from dpfl_lightning.errors import UserError, require, warn_user
from dpfl_lightning.privacy.accounting.events import Event, Release
from dpfl_lightning.privacy.accounting.guarantee import CumulativeGuarantee
from dpfl_lightning.privacy.accounting.planned import numbered
from dpfl_lightning.privacy.accounting.units import Relation
from dpfl_lightning.privacy.compose import (
    ANYBODY,
    History,
    Keys,
    Limit,
    Line,
    Total,
    compose,
    histories,
    pointwise_maximum,
    relation_of_all,
)
from dpfl_lightning.privacy.ledger.account_file import (
    AccountFile,
    RunRecord,
    charged_lines,
    ledger_line,
    line_of,
    unite,
)
from dpfl_lightning.privacy.ledger.evidence import Evidence, Match, matches
from dpfl_lightning.privacy.ledger.file import Charge, chain_of, charges_of, follows, read_header
from dpfl_lightning.runtime.files import is_locked
from dpfl_lightning.runtime.strict_json import parsed
from dpfl_lightning.runtime.text import at_most

Runs = Mapping[str, tuple[RunRecord, Mapping[int, Counter[Release]]]]
Join = tuple[str, str, Match]  # two names whose records match

AUTO = "auto"  # privacy.account: the user's file for own data, none for public data
#: as the holder of clients without names, of whom any may be any
NAMELESS = "clients without names"
_MOST_NAMES = 6  # in a sentence


class PrivacyAccount(AccountFile):
    """One file (mode 0600) to which every run on own records appends its charges, synced before anything is computed.

    It has the lines of their ledgers, which are extracts of it. A charge is counted each time that it is made, so that
    copies of a run, runs at the same time and runs whose folder is gone are all counted.

    Names are compared without regard to case, spaces around them and invisible characters, and shown as first written.

    **Privacy** For the data holders alone: it holds names, and keyed digests of records beside the key.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._entry: RunRecord | None = None

    # -- a run

    def enter(self, entry: RunRecord, ended: bool = False) -> None:
        """Begin or resume a run. Raises UserError if its plan, with all other runs, would exceed a limit, or if it has
        an unknown name while there is a limit.

        Runs that go on at the same time count with all that they plan. One that has `ended` releases nothing more.
        """
        with self._locked() as file:
            entry, known = self._spelt(entry), self._runs.get(entry.run)
            if known is not None and self._chains_of[entry.run]:
                _require_same_holders(known[0], entry)
            joins = [] if known and known[0].evidence == entry.evidence else self._joins(entry)
            if not ended:
                self._admit(file, entry, joins)
            new = known is None or known[0] != entry
            self._join(file, joins, [*self._evidence_lines(entry), line_of(entry)] if new else [])
            self._within = len(self._chains)
        self._entry = entry

    def reconcile(self, path: Path, size: int) -> tuple[int, list[bytes]]:
        """Add the lines of a run's ledger, whose first `size` bytes were verified, that the account lacks.

        Returns:
            How many releases were lacking; and the lines of the account that go on where the ledger ends, because a
            crash came between the two, or a copy of the ledger went on.
        """
        with path.open("rb") as ledger:
            lines = ledger.read(size).splitlines(keepends=True)
        header, end = read_header(path), chain_of(lines[-1])
        assert header is not None  # its run has entered
        with self._locked() as file:
            return self._add_lines(file, header.run, lines[1:]), self._lines_after(file, header.run, end)

    def _add_lines(self, file: FileIO, run: str, lines: Iterable[bytes]) -> int:
        """Add the lines of a run's ledger that the account lacks; return how many releases they are."""
        known, (entry, _) = self._chains_of[run], self._runs[run]
        new = [line for line in lines if chain_of(line) not in known]
        self._append(file, charged_lines(run, new))
        return sum(charge.client in entry.holders for line in new for charge in charges_of(parsed(line)))

    def _lines_after(self, file: FileIO, run: str, chain: str) -> list[bytes]:
        """Return the lines of a ledger, in the account, that go on from this chain; of several copies, the first."""
        found: list[bytes] = []
        if next(reversed(self._chains_of[run]), chain) != chain:
            contents = (content for content in self._contents(file) if content.get("charged") == run)
            for line in (ledger_line(fields) for content in contents for fields in content["lines"]):
                if follows(line, chain):
                    found.append(line)
                    chain = chain_of(line)
        return found

    def charge(self, charges: Sequence[Charge], lines: Sequence[bytes]) -> None:
        """Write down what clients of the run are about to release, and the lines of its ledger that say so.

        Raises UserError, and writes nothing, if that would exceed a limit.
        """
        entry = self._current
        counts = Counter((charge.client, charge.event) for charge in charges if charge.client in entry.holders)
        with self._locked() as file:
            new = [] if entry.run in self._runs else [*self._evidence_lines(entry), line_of(entry)]
            within = not new and self._within == len(self._chains) and self._plans(entry, counts)
            if not within:
                self._check(entry, counts)
            self._append(file, [*new, *charged_lines(entry.run, lines)])
            self._within = len(self._chains) if within else -1

    def together(self, planned: bool = False) -> dict[int, CumulativeGuarantee]:
        """Return what each client of the run has released in all runs, or will have if it releases what is planned."""
        with self._locked():
            return self._of_clients(self._current, {self._current.run} if planned else (), self._runs)

    def projected_cost(self, entry: RunRecord) -> dict[int, CumulativeGuarantee]:
        """Return what each client of a run will have released in all runs. The run is not written down.

        Raises UserError as `enter` does, and then keeps what the run says of who is who, as `enter` does.
        """
        with self._locked() as file:
            entry = self._spelt(entry)
            joins = self._joins(entry)
            self._admit(file, entry, joins)
            nothing = {client: Counter[Release]() for client in entry.holders}
            with self._united(joins):
                return self._of_clients(entry, {entry.run}, {**self._runs, entry.run: (entry, nothing)})

    def _of_clients(self, entry: RunRecord, planned: Collection[str], runs: Runs) -> dict[int, CumulativeGuarantee]:
        groups, place_of = numbered([self._group(name) for name in entry.holders.values()])
        found = self._cumulative(groups, entry.run, planned, runs)
        return {client: found[place] for client, place in zip(entry.holders, place_of, strict=True)}

    def has_limits(self) -> bool:
        with self._locked():
            return bool(self._limits)

    def limits_on(self, record: RunRecord) -> list[str]:
        """Return the data holders of a run, by their names or records, who have a limit. Nothing is written down.

        Raises UserError for an unknown name if there is a limit.
        """
        with self._locked(), self._united(self._joins(record)):
            self._require_known(record)
            nameless = NAMELESS in record.holders.values()
            groups = [self._group(name) for name in (self._limits if nameless else record.holders.values())]
            return sorted({min(group) for group in groups if self._limits_of(group)})

    # -- what is composed

    @property
    def _current(self) -> RunRecord:
        if self._entry is None:
            raise RuntimeError("no run has entered the account")
        return self._entry

    def _names(self) -> set[str]:
        return {name for entry, _ in self._runs.values() for name in entry.holders.values()}

    def _known(self) -> set[str]:
        """Return all names that a run, a limit or the operator has made known."""
        return self._names() | self._limits.keys() | self._declared.keys() | self._new

    def _name(self, written: str) -> str:
        """Return a name as it was first written."""
        return self._written.get(folded(written), written)

    def _spelt(self, entry: RunRecord) -> RunRecord:
        """Return an entry with the names as they were first written, in the account or in the entry."""
        written = dict[str, str]()
        names = [self._written.get(one) or written.setdefault(one, name) for one, name in _foldings(entry)]
        return replace(entry, holders=dict(zip(entry.holders, names, strict=True)))

    def _group(self, name: str) -> frozenset[str]:
        return self._same.get(name, frozenset([name]))

    def _lines(self, planned: Collection[str] = (), runs: Runs | None = None) -> list[Line]:
        """Return what the clients of all runs, or of these `runs`, have released.

        Of `planned` runs it is what they plan, where that is more. Clients of a run that share records, or that the
        operator has joined, are one line. Clients without names have no keys.
        """
        lines: list[Line] = []
        for entry, paid in (self._runs if runs is None else runs).values():
            clients, names = list(entry.holders), list(entry.holders.values())
            adjacency, unit = Relation.of_key(entry.adjacency)
            places_of: dict[Keys, list[int]] = {}
            for place, name in enumerate(names):
                places_of.setdefault(self._group(name), []).append(place)
            for group, places in places_of.items():
                for of_one in self._sharing(entry, names, places):
                    released, plan, instead = list[Event](), list[Event](), list[Event]()
                    for place in of_one:
                        own = [event.repeated(n) for event, n in paid[clients[place]].items()]
                        planned_own = [event.repeated(n) for event, n in entry.planned[place]]
                        bound = entry.filters[place] if own or entry.run in planned else None
                        released, plan = [*released, *own], [*plan, *planned_own]
                        instead += own if bound is None else [bound]
                    if entry.run in planned:
                        released = pointwise_maximum(released, plan)
                    line = Line(
                        run=entry.run,
                        client=clients[of_one[0]],
                        keys=_keys(group) if any(names[place] != NAMELESS for place in of_one) else ANYBODY,
                        released=tuple(released),
                        delta=min((d for place in of_one if (d := entry.delta[place])), default=0.0),
                        adjacency=adjacency,
                        sampling=entry.sampling,
                        accountant=entry.accountant,
                        planned=tuple(plan) if entry.whole else None,
                        filter=tuple(instead) if any(entry.filters[place] for place in of_one) else None,
                        unit=replace(unit, rows=_most([entry.rows[place] for place in of_one])),
                    )
                    lines.append(line)
        most = Counter[tuple[Keys, str]]()  # rows of one group, as any run of the holder shows or says
        for line in lines:
            most[line.keys, line.unit.group] = max(most[line.keys, line.unit.group], line.unit.rows or 0)
        return [
            line
            if line.unit.rows is None
            else replace(line, unit=replace(line.unit, rows=most[line.keys, line.unit.group]))
            for line in lines
        ]

    def _limits_of(self, group: Collection[str]) -> list[Limit]:
        return [self._limits[name] for name in group if name in self._limits]

    def _cumulative(
        self, groups: Sequence[Keys], own: str | None, planned: Collection[str] = (), runs: Runs | None = None
    ) -> list[CumulativeGuarantee]:
        """Return what holds for each group of names beside the run `own`: at the delta of its limit, if it has one."""
        lines = self._lines(planned, runs)
        limits = [self._tightest(group, lines) for group in groups]
        totals: dict[tuple[Keys, Limit | None], Total] = {}
        for limit in dict.fromkeys(limit for limit, _ in limits):
            asked = [_keys(group) for group, (at, _) in zip(groups, limits, strict=True) if at == limit]
            own_lines = lines if limit is None else [limit.in_its_unit(line) for line in lines]
            delta = None if limit is None else limit.delta
            relation = None if limit is None else limit.relation
            found = compose(own_lines, delta, of=asked, relation=relation)
            totals |= {(keys, limit): total for keys, total in found.items()}
        each = zip(groups, limits, strict=True)
        return [totals[_keys(group), limit].beside(own, limit, used) for group, (limit, used) in each]

    def _tightest(self, group: Keys, lines: Sequence[Line]) -> tuple[Limit | None, float | None]:
        """Return the limit of which most is used, and the share that is used; None without one."""
        limits, keys = self._limits_of(group), _keys(group)
        each = [(limit, limit.used(_history(keys, lines, limit))) for limit in limits]
        return max(each, key=itemgetter(1), default=(None, None))

    def _admit(self, file: FileIO, entry: RunRecord, joins: Sequence[Join]) -> None:
        """Raise UserError unless the plan of a run keeps all limits and they know its names.

        What a refused run says of who is who is kept: otherwise two names in turn would each time be new.
        """
        try:
            with self._united(joins):
                self._require_known(entry)
                self._check(entry, {})
        except UserError:
            known = {*self._evidence(self._runs.values()), *self._refused}
            new = [(name, one.name) for name, one in self._evidence([(entry, {})]) if (name, one) not in known]
            self._join(file, joins, [*self._evidence_lines(entry), {"refused": new}] if new else [])
            raise

    def _join(self, file: FileIO, joins: Sequence[Join], lines: Sequence[Mapping[str, Any]]) -> None:
        """Write down which names are one holder and how likely that is by chance, and further lines."""
        self._append(file, [*({"same": [one, other], "chance": match.chance} for one, other, match in joins), *lines])
        for other, ones in groupby(joins, key=itemgetter(1)):
            pairs = [(name, match) for name, _, match in ones]
            warn_user(_joined_words([name for name, _ in pairs], other, [match for _, match in pairs]))

    def _require_known(self, entry: RunRecord) -> None:
        """Raise UserError for a name that nobody has made known and whose records are not known, if there is a limit.

        Records that are not recognised do not show that it is another holder: every row may have been changed.
        """
        if not self._limits or entry.run in self._runs:
            return
        known = self._known()
        unknown = sorted({name for name in entry.holders.values() if known.isdisjoint(self._group(name))})
        limited = listed(sorted(self._limits))
        name, one = (shlex.quote(min(names, default="")) for names in (unknown, self._limits))
        file = self._in_commands()
        advice = (
            f"Say who it is: `dpfl account new {name}{file}` if the account has none of its records, else, with the "
            f"name of their holder, `dpfl account join {name} {one}{file}`."
        )
        must = f"know all data holders of a run, because there is a limit on {limited}"
        require(not unknown, "privacy.account", must, listed(unknown), advice)

    def _check(self, entry: RunRecord, charges: Mapping[tuple[int, Release], int]) -> None:
        """Raise UserError if the charges, or without them the plan of a run, would exceed a limit."""
        names = self._limits if NAMELESS in entry.holders.values() else entry.holders.values()
        limited = [group for group in {*map(self._group, names)} if self._limits_of(group)]
        if not limited:
            return
        paid = {client: Counter[Release]() for client in entry.holders}
        paid |= {client: Counter(events) for client, events in self._runs.get(entry.run, (entry, {}))[1].items()}
        for (client, event), count in charges.items():
            paid[client][event] += count
        others = {one.run for one, _ in self._runs.values() if one.run != entry.run and is_locked(Path(one.ledger))}
        planned = set() if charges else {entry.run, *others}
        lines = self._lines(planned, {**self._runs, entry.run: (entry, paid)})
        for group in limited:
            limit, used = self._tightest(group, lines)
            if limit is None or used is None or used <= 1:
                continue
            rest = _history(_keys(group), [line for line in lines if line.run != entry.run], limit)
            known = [line.relation for history in rest for run in history for line in run if line.costs]
            at = f"epsilon {at_most(limit.epsilon)} at delta {at_most(limit.delta)} ({limit.words})"
            must = f"keep the limit of {_named(group)}, {at}"
            got = f"{used:.1%} of it (Renyi filter), {limit.used(rest):.1%} without this run"
            advice = f"Plan a smaller privacy.epsilon or fewer rounds. See `dpfl account{self._in_commands()}`."
            own = [line for line in lines if line.run == entry.run]
            if lacking := [line.unit for line in own if limit.unit.most_of(line.unit) is None]:
                got, advice = limit.unit.lacks(lacking[0])
            elif known and relation_of_all([*known, own[0].relation]).key != relation_of_all(known).key:
                same = known[-1].key.replace("_", " ")
                advice = f"Its unit or adjacency is another one, so all runs count as replacement: keep {same}."
            require(False, "privacy.account", must, got, advice)

    def _plans(self, entry: RunRecord, charges: Mapping[tuple[int, Release], int]) -> bool:
        """Return whether a run plans these charges beside those that it has paid for."""
        planned, paid = dict(zip(entry.holders, map(dict, entry.planned), strict=True)), self._runs[entry.run][1]
        return all(paid[client][event] + n <= planned[client].get(event, 0) for (client, event), n in charges.items())

    def _joins(self, entry: RunRecord) -> list[Join]:
        """Return the names that have records in common with a client of the run, in earlier runs or in this one."""
        earlier = dict.fromkeys([*self._evidence(self._runs.values()), *self._refused])
        names, evidence = zip(*earlier, *self._evidence([(entry, {})]), strict=True)
        joins, same = list[Join](), dict(self._same)
        for name, like in zip(entry.holders.values(), matches(evidence, len(earlier)), strict=True):
            for other, match in ((names[one], match) for one, match in like.items()):
                if NAMELESS in (name, other):
                    continue  # it may be anybody in any case, and each such client somebody else
                if name != other and other not in same.get(name, ()):
                    joins.append((name, other, match))
                    unite(same, name, other)
        return joins

    def _evidence(self, runs: Iterable[tuple[RunRecord, object]]) -> list[tuple[str, Evidence]]:
        """Return the name and the evidence of each client of some runs."""
        return [pair for entry, _ in runs for pair in zip(entry.holders.values(), entry.evidence, strict=True)]

    def _sharing(self, entry: RunRecord, names: Sequence[str], places: Sequence[int]) -> list[list[int]]:
        """Return which of some clients of a run, whose clients have these names, share records."""
        if len(places) == 1:
            return [[*places]]
        owners = tuple(map(self._owner, (names[place] for place in places)))
        classes = _classes(owners, tuple(entry.evidence[place] for place in places))
        return [[places[one] for one in of_one] for of_one in classes]

    def _owner(self, name: str) -> str:
        """Return one name for all that the operator has joined; clients without names stay so."""
        return name if name == NAMELESS else min(self._declared.get(name, {name}) - {NAMELESS})

    @contextlib.contextmanager
    def _united(self, joins: Sequence[Join]) -> Iterator[None]:
        """Answer questions as if these names were joined, of which nothing is written down."""
        same = dict(self._same)
        for one, other, _ in joins:
            unite(self._same, one, other)
        try:
            yield
        finally:
            self._same.clear()
            self._same.update(same)


def _named(group: Collection[str]) -> str:
    return " or ".join(sorted(group))


def _most(rows: Sequence[int | None]) -> int | None:
    """Return the most rows of one group in clients that share records; None if one of them is not known."""
    known = [one for one in rows if one is not None]
    return max(known) if len(known) == len(rows) else None


def _keys(group: Keys) -> Keys:
    """Return what identifies a group of names; nothing does if its clients have none."""
    return group - {NAMELESS}


def _history(keys: Keys, lines: Iterable[Line], limit: Limit) -> list[History]:
    """Return what a holder may have released, as its limit counts it."""
    return histories(map(limit.in_its_unit, lines), [keys])[keys]


def _foldings(entry: RunRecord) -> list[tuple[str, str]]:
    return [(folded(name), name) for name in entry.holders.values()]


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"


def _require_same_holders(begun: RunRecord, now: RunRecord) -> None:
    """Raise UserError if a run that goes on would leave a data holder out, or give its charges to another."""
    for client, name in begun.holders.items():
        must = f"name {name} for client {client}, as when the run began"
        require(now.holders.get(client) == name, "privacy.account", must, now.holders.get(client, "nobody"))


def _joined_words(names: Sequence[str], other: str, found: Sequence[Match]) -> str:
    have = "has" if len(names) == 1 else "have"
    shared, compared = min((one.shared, one.compared) for one in found)
    agree = f"all {shared:,}" if shared == compared else f"{shared:,} of {compared:,}"
    chance = max(1e-99, *(one.chance for one in found))
    return (
        f"{listed(names)} {have} records of {other}: their accounts are one from now on; {agree} records agree that "
        f"were compared, by chance with a probability of at most {chance:.0e}"
    )


@functools.lru_cache(maxsize=4096)
def _classes(owners: tuple[str, ...], evidence: tuple[Evidence, ...]) -> tuple[tuple[int, ...], ...]:
    """Return which clients share records: those whose evidence matches, of one owner, or with a name but none."""
    first = list(range(len(owners)))  # an earlier place of the same class, the place itself for the first one

    def first_of(place: int) -> int:
        while first[place] != place:
            first[place] = place = first[first[place]]
        return place

    named = [place for place, owner in enumerate(owners) if owner != NAMELESS]
    unknown = not all(evidence[place] for place in named)  # whoever has no evidence may be each of the others
    same: dict[str, int] = {}
    for place, like in enumerate(matches(evidence)):
        by_name = () if owners[place] == NAMELESS else (same.setdefault("" if unknown else owners[place], place),)
        for other in (*like, *by_name):
            one, another = sorted((first_of(place), first_of(other)))
            first[another] = one
    classes: dict[int, list[int]] = {}
    for place in range(len(owners)):
        classes.setdefault(first_of(place), []).append(place)
    return tuple(map(tuple, classes.values()))
