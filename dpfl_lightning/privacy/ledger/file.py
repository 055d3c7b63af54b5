"""File format of a ledger, and its verification: header, charges, chain, head."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from dpfl_lightning.config.names import is_name
from dpfl_lightning.config.reading import check_format, expecting, read_bytes
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.events import Release, event_of
from dpfl_lightning.privacy.accounting.units import ROWS_KEY, Relation
from dpfl_lightning.privacy.sampling import SAMPLERS
from dpfl_lightning.runtime.strict_json import parsed

T = TypeVar("T")

VERSION = 3
_DIGITS = re.compile("[0-9a-f]{32}")  # of a run's name, and of a chain
_SALT = re.compile("[0-9a-f]{16}")
_MOST_CLIENTS = 1_000_000
NO_CHAIN = "0" * 32  # chain before the first line
_TAIL = len(f', "chain": "{NO_CHAIN}"}}\n')
_UNLINKED = "a line that does not follow the one before: a line was edited, inserted, moved or removed"
CHANGED = "A changed ledger proves nothing: use an unchanged copy (MLflow keeps one), or start a new run."


@dataclass(frozen=True)
class Charge:
    """One release of one client, recorded before it happens.

    `number` counts the client's charges in this round from 0; each has separate noise.
    """

    client: int
    round: int
    purpose: str
    event: Release
    number: int = 0


@dataclass(frozen=True)
class Header:
    """The meaning of the charges, so that the file can be read alone. Headers are equal if they mean the same.

    `adjacency` is the key of a `Relation`. `delta` and `epsilon`, the budget (inf means none), are those of each
    client. `identity` is everything that determines the run's releases, ready for JSON: a run can be resumed only with
    the same one. The random name `run` tells apart two ledgers of one configuration.
    """

    accountant: str
    adjacency: str
    sampling: str
    delta: tuple[float, ...]
    epsilon: tuple[float, ...]
    caveats: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    run: str = field(default_factory=lambda: secrets.token_hex(16), compare=False)

    @property
    def relation(self) -> Relation:
        """What neighbouring data sets are, with the most rows of a unit that the run states. Raises UserError."""
        return Relation.of_key(self.adjacency, self.identity.get(f"privacy.{ROWS_KEY}"))

    @property
    def planned(self) -> tuple[tuple[Release, ...], ...]:
        """What is planned for each client; empty unless the end of the run may follow from its results."""
        given = self.identity.get("planned")
        if given is None:
            return ()
        return _by_place([tuple(map(release_of, events)) for events in given["events"]], given["of"])

    @property
    def filters(self) -> tuple[Release | None, ...]:
        """What bounds the releases of each client, if their noise follows from results; see `whole_budgets`."""
        given = self.identity.get("filter")
        if given is None:
            return (None,) * len(self.delta)
        different = [None if fields is None else release_of(fields) for fields in given["events"]]
        return _by_place(different, given["of"])

    def name_of(self, client: int) -> str:
        """Return the name of a client for reports; its number if the run gave it none."""
        names = self.identity.get("names")
        return str(names[client]) if names else str(client)  # type: ignore[index]


@dataclass(frozen=True)
class Head:
    """Position of a ledger's end: run, number of complete lines with the header, and chain of the last line.

    A copy kept elsewhere shows a cut end or a complete rewrite, which the chain cannot. A head of 0 lines is written
    before the header, so that every ledger with a header has a head.
    """

    run: str
    lines: int
    chain: str

    def __post_init__(self) -> None:
        texts, chain = {type(self.run), type(self.chain)} == {str}, _DIGITS if self.lines else re.compile("")
        fits = texts and type(self.lines) is int and 0 <= self.lines < 2**63
        if not (fits and _DIGITS.fullmatch(self.run) and chain.fullmatch(self.chain)):
            raise ValueError("no head of a ledger")

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Verified:
    """Result of `verify`: header, end of the file, and content of the head file, at most one charge earlier."""

    header: Header
    end: Head
    head: Head
    size: int  # bytes of all complete lines
    torn: int  # bytes after them, of a line that is being written or that a crash interrupted


def verify(path: Path, take: Callable[[Charge], None], known: Mapping[str, Head] | None = None) -> Verified:
    """Read a ledger, `take` each charge, and check that the file is unchanged. It neither locks nor changes the file.

    Every line's `chain` is a digest of the line before's `chain` and of its content (blake2b, 16 bytes), and
    `ledger.head` beside the file repeats the last one. `known` are further heads by the name of their source, for
    example a checkpoint: their lines must be there.

    It detects lines that were changed, removed, moved, repeated or inserted; with the head, lines cut off the end; with
    a known head, that both were cut, rewritten or belong to another run. The chain has no key (so that anybody can
    verify a copy): a forger who rewrites the ledger and all known heads is not detected. Raises
    UserError, which names the line and the problem, if the file was changed.
    """
    head = read_head(path)  # read first: a run may be writing, and the ledger is never behind its head
    if head is None:
        got = "an empty one" if head_file(path).exists() else "no such file"
        raise UserError(
            f"`{head_file(path)}` must lie beside `{path.name}`, got {got}: without it, lines could have been "
            "cut off the ledger's end. Copy it together with the ledger (MLflow keeps both), or start a new run."
        )
    heads = {f"`{head_file(path).name}`": head, **(known or {})}
    header, lines, size, chain = None, 0, 0, NO_CHAIN
    late: list[int] = []  # clients of the lines after the head
    with open(path, "rb") as file:
        total = os.fstat(file.fileno()).st_size  # lines that are written from now on are later than the heads
        for line in file:
            complete = line.endswith(b"\n") and b"\0" not in line  # a crash after the file had grown leaves zeros
            if not complete or size + len(line) > total:
                break
            lines += 1
            if not follows(line, chain):
                raise _changed(path, lines, _UNLINKED)
            size, chain = size + len(line), chain_of(line)
            if header is None:
                header = _first(path, line)
                for source, known_head in heads.items():
                    if known_head.run != header.run:
                        raise UserError(
                            f"`{path}` must be the ledger of run {known_head.run}, to which {source} belongs, got that "
                            f"of run {header.run} in line 1. Restore the ledger and the head of this run, or start a "
                            "new run."
                        )
            else:
                charges = _charges(path, lines, line, len(header.delta))
                late += [charge.client for charge in charges] if lines > head.lines else []
                for charge in charges:
                    take(charge)
            for source, known_head in heads.items():
                if lines == known_head.lines and chain != known_head.chain:
                    reason = f"a chain that differs from that in {source}: this line or an earlier one was rewritten"
                    raise _changed(path, lines, reason)
        file.seek(size)
        torn = file.read(total - size)
    for source, known_head in heads.items():
        if lines < known_head.lines:
            raise UserError(
                f"`{path}` must hold the {known_head.lines} lines that {source} counts, got {lines}: "
                f"{known_head.lines - lines} were cut off its end, after line {lines}. {CHANGED}"
            )
    if header is None:
        raise UserError(
            f"`{path}` must begin with a ledger's header, got no complete line. If the run has just begun, wait for "
            "its first round; otherwise, this is not the right file."
        )
    late_lines, clients = lines + torn.count(b"\n") - head.lines, len(header.delta)
    if late_lines > clients or len(set(late)) < len(late):
        raise UserError(
            f"`{path}` must have at most one charge of each of {clients} clients after the {head.lines} lines that "
            f"`{head_file(path).name}` counts, because a crash interrupts one charge, got {late_lines} lines: some "
            f"were appended, or the head is an older one. {CHANGED}"
        )
    return Verified(header, Head(header.run, lines, chain), head, size, len(torn))


def header_line(header: Header) -> bytes:
    fields = {
        "ledger": VERSION,
        "run": header.run,
        "accountant": header.accountant,
        "adjacency": header.adjacency,
        "sampling": header.sampling,
        "clients": len(header.delta),
        "delta": _one_or_all(header.delta),
        "epsilon": _one_or_all([finite_or_none(budget) for budget in header.epsilon]),
        "caveats": header.caveats,
        "identity": header.identity,
    }
    return sealed(json.dumps(fields).encode()[:-1], NO_CHAIN)


def charge_lines(charges: Sequence[Charge], chain: str) -> Iterator[bytes]:
    """Yield lines for these charges, after a line with this chain: one for all clients with equal charges.

    Each has a random salt: a copy of the ledger that goes on for itself has another chain, though it pays for the same.
    """
    clients: dict[tuple[int, int, str, Release], list[int]] = {}
    for one in sorted(charges, key=attrgetter("number")):
        clients.setdefault((one.round, one.number, one.purpose, one.event), []).append(one.client)
    for (round, number, purpose, event), who in clients.items():
        place = f'"round": {round}, "number": {number}, "clients": {json.dumps(spans(who))}'
        body = f'{{{place}, "purpose": {json.dumps(purpose)}, "event": {_event_json(event)}'
        body += f', "salt": "{secrets.token_hex(8)}"'
        line = sealed(body.encode(), chain)
        chain = chain_of(line)
        yield line


def spans(numbers: Iterable[int]) -> list[int | list[int]]:
    """Return different numbers, ascending, with [first, last] for three and more in a row.

    >>> spans([7, 1, 3, 2, 9])
    [[1, 3], 7, 9]
    """
    found: list[int | list[int]] = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        found += [[run[0], run[-1]]] if len(run) > 2 else run
    return found


def numbers_of(found: object, end: int) -> list[int]:
    """Return the numbers below `end` in the result of `spans`. Raises ValueError or TypeError if it is none."""
    if not isinstance(found, list):
        raise TypeError(found)
    ranges = [one if isinstance(one, list) and len(one) == 2 else [one, one] for one in found]
    edges = list(itertools.chain(*ranges))
    if not all(map(_is_count, edges)) or any(first > last for first, last in ranges) or not ranges:
        raise ValueError(found)
    if any(one[1] >= other[0] for one, other in itertools.pairwise(ranges)) or edges[-1] >= end:
        raise ValueError(found)
    return [number for first, last in ranges for number in range(first, last + 1)]


def chain_of(line: bytes) -> str:
    """Return the chain stored in a line."""
    return line[-35:-3].decode(errors="replace")


def head_file(path: Path) -> Path:
    """Return the path of a ledger's head: `ledger.head` beside `ledger.jsonl`."""
    return path.with_suffix(".head")


def head_bytes(head: Head) -> bytes:
    """Return bytes of constant length, so that one write replaces the old head."""
    return json.dumps(head.as_dict()).ljust(127).encode() + b"\n"


def read_head(path: Path) -> Head | None:
    """Return the head beside a ledger, None if it was never written. Raises UserError if it is damaged."""
    file = head_file(path)
    if not file.exists():
        return None
    require(file.is_file(), str(file), "be a regular file", "another kind", "Name the folder that holds the run.")
    content = read_bytes(file, advice="Use an unchanged copy.")
    if not content.strip(b"\0"):
        return None
    with expecting(file, f"hold the run, lines and chain of `{path.name}`", CHANGED):
        return Head(**parsed(content))


def read_header(path: Path) -> Header | None:
    """Return the header of a ledger; None if it is not written yet. Raises UserError if it was changed."""
    with open(path, "rb") as file:
        line = file.readline()
    if not line.endswith(b"\n"):
        return None
    if not follows(line, NO_CHAIN):
        raise _changed(path, 1, _UNLINKED)
    return _first(path, line)


def holds(path: Path, head: Head) -> bool:
    """Return whether a verified ledger is the one of this head, or goes on from it."""
    with open(path, "rb") as file:
        line = next(itertools.islice(file, max(head.lines - 1, 0), None), b"")
    return chain_of(line) == head.chain


def is_begun(path: Path) -> bool:
    """Return whether anything lies there that a crash of the first start does not leave.

    That is no file, an empty one, or an incomplete header beside a head of 0 lines, which is written before it.
    """
    head = read_head(path)
    if head is not None and head.lines > 0:
        return True
    if not path.exists():
        return False
    with open(path, "rb") as file:
        line = file.readline()
    return line.endswith(b"\n") or (head is None and line != b"")


def sealed(body: bytes, before: str) -> bytes:
    """Return a complete line from its JSON object without the closing brace, with its chain."""
    chain = hashlib.blake2b(before.encode() + body, digest_size=16).hexdigest()
    return body + f', "chain": "{chain}"}}\n'.encode()


def follows(line: bytes, before: str) -> bool:
    """Return whether a complete line goes on from the line with this chain."""
    return line == sealed(line[:-_TAIL], before)


def _by_place(values: Sequence[T], places: object) -> tuple[T, ...]:
    """Return the value at each place. Raises ValueError or TypeError unless these are places."""
    if not isinstance(places, list):
        raise TypeError(places)
    if not all(_is_count(place) and place < len(values) for place in places):
        raise ValueError(places)
    return tuple(values[place] for place in places)


@functools.lru_cache(maxsize=4096)
def _event_json(event: Release) -> str:
    return json.dumps(event.as_dict())


def _one_or_all(values: Sequence[float | None]) -> object:
    return values[0] if len(set(values)) == 1 else values


def _first(path: Path, line: bytes) -> Header:
    try:
        fields = parsed(line)
        if type(fields["ledger"]) is int:
            check_format(path, fields["ledger"], VERSION)
        return _header(fields)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError):
        raise _changed(path, 1, f"an invalid header: {line[:80]!r}") from None


def _header(fields: dict[str, Any]) -> Header:
    """Return the header in a JSON object. Raises KeyError, TypeError or ValueError if a field is of another form."""
    texts = {name: fields[name] for name in ("accountant", "adjacency", "sampling", "run")}
    count, caveats, identity = fields["clients"], fields["caveats"], fields["identity"]
    if fields.keys() != {*texts, "ledger", "clients", "delta", "epsilon", "caveats", "identity", "chain"}:
        raise KeyError(fields)
    if [type(one) for one in (fields["ledger"], count, caveats, identity)] != [int, int, list, dict]:
        raise TypeError(fields)
    if not (0 < count <= _MOST_CLIENTS and texts["sampling"] in SAMPLERS and _DIGITS.fullmatch(texts["run"])):
        raise ValueError(fields)
    if not all(type(text) is str and text.isprintable() for text in (*texts.values(), *caveats)):
        raise ValueError(texts)  # a terminal would obey control characters
    names = identity.get("names", [])
    if not (isinstance(names, list) and len(names) in (0, count) and all(map(is_name, names))):
        raise ValueError(names)
    each = [given if isinstance(given, list) else [given] * count for given in (fields["delta"], fields["epsilon"])]
    delta, epsilon = tuple(map(_real, each[0])), tuple(math.inf if one is None else _real(one) for one in each[1])
    if not (len(delta) == len(epsilon) == count and max(delta) < 1 and min(*delta, *epsilon) >= 0):
        raise ValueError(count)
    header = Header(**texts, delta=delta, epsilon=epsilon, caveats=tuple(caveats), identity=identity)
    if len(header.planned) not in (0, count) or len(header.filters) != count:
        raise ValueError(count)
    return header


def _real(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(value)
    return float(value)


def _charges(path: Path, number: int, line: bytes, clients: int) -> list[Charge]:
    """Return the charges in a line, one for each client."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        return charges_of(parsed(line), clients)
    raise _changed(path, number, f"an invalid charge: {line[:80]!r}")


def charges_of(fields: Mapping[str, Any], clients: int = _MOST_CLIENTS) -> list[Charge]:
    """Return the charges in the fields of a line. Raises KeyError, TypeError or ValueError if they are none."""
    round, number, purpose, event = (fields[name] for name in ("round", "number", "purpose", "event"))
    if fields.keys() != {"round", "number", "clients", "purpose", "event", "salt", "chain"}:
        raise KeyError(fields)
    if not _SALT.fullmatch(fields["salt"]):
        raise ValueError(fields)
    if not (_is_count(round) and _is_count(number) and type(purpose) is str and purpose.isprintable()):
        raise ValueError(fields)
    release = release_of(event)
    return [Charge(client, round, purpose, release, number) for client in numbers_of(fields["clients"], clients)]


def release_of(fields: dict[str, Any]) -> Release:
    """Return the release that `as_dict` describes. Raises KeyError, TypeError or ValueError for others."""
    event = event_of(fields)
    if not isinstance(event, Release):
        raise TypeError(event)
    counts = [fields[key] for key in ("steps", "count") if key in fields]
    numbers = [fields[key] for key in ("sample_rate", "noise_multiplier", "epsilon") if key in fields]
    if not (all(map(_is_count, counts)) and all(type(value) in (int, float) for value in numbers)):
        raise ValueError(fields)
    return event


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _changed(path: Path, number: int, reason: str) -> UserError:
    return UserError(f"`{path}` must be unchanged, got in line {number} {reason}. {CHANGED}")
