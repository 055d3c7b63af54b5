"""What a ledger looks like on disk, and its verification: header, charges, chain, head."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.events import Event, GaussianEvent, LaplaceEvent, NonPrivateEvent, SelectionEvent

VERSION = 2
_EVENTS = {
    "gaussian": GaussianEvent,
    "laplace": LaplaceEvent,
    "selection": SelectionEvent,
    "unprotected": NonPrivateEvent,
}
_KINDS = {kind: name for name, kind in _EVENTS.items()}
_NO_CHAIN = b"0" * 32  # before the first line
_TAIL = len(b', "chain": "%s"}\n' % _NO_CHAIN)
_CHANGED = "What a changed ledger says proves nothing: take an unchanged copy (MLflow keeps one), or start a new run."


@dataclass(frozen=True)
class Charge:
    """One release of one client, before it happens.

    Args:
        purpose: which line of the client's schedule pays ("train", ...).
        event: what it costs.
        number: of this charge among those of the client in this round, from 0: each has noise of its own.
    """

    client: int
    round: int
    purpose: str
    event: Event
    number: int = 0


@dataclass(frozen=True)
class Header:
    """What the charges mean, for a reader who has nothing but the file. Equal are those that mean the same.

    Args:
        accountant: its name.
        adjacency: key of the relation, "add_remove" or "replace_one".
        sampling: key of the sampling, "poisson" or "shuffle".
        delta: of each client.
        epsilon: each client's budget; inf is none.
        caveats: what every guarantee of the run says besides, in words.
        identity: what decides the run's releases, ready for JSON, see `federated.identity`: a run goes on with the same
            or not at all.
        run: random name of the run, hexadecimal: tells two ledgers of one configuration apart.
    """

    accountant: str
    adjacency: str
    sampling: str
    delta: tuple[float, ...]
    epsilon: tuple[float, ...]
    caveats: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    run: str = field(default_factory=lambda: secrets.token_hex(16), compare=False)


@dataclass(frozen=True)
class Head:
    """How far a ledger goes. Kept outside of it, this shows what the chain cannot: an end cut off, a whole rewritten.

    Args:
        run: of the header.
        lines: whole lines, the header's included.
        chain: of the last of them, hexadecimal.
    """

    run: str
    lines: int
    chain: str

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Verified:
    """What `verify` found.

    Args:
        end: where the file ends.
        head: where the file beside it says that it ends, at most one charge earlier; None: there is no such file.
        size: bytes of all whole lines.
        torn: bytes after them: a line that is being written, or that a crash tore. Its charge was never returned from.
    """

    header: Header
    end: Head
    head: Head | None
    size: int
    torn: int


def verify(path: Path, take: Callable[[Charge], None], checkpoint: Head | None = None) -> Verified:
    """Read a ledger, `take` each charge, and check that it is what was written. Neither locks nor changes the file.

    Every line's `chain` is a digest of the line before's `chain` and of its own content (blake2b, 16 bytes), and
    `ledger.head` beside the file repeats the last one.

    **Guarantees** Found are: lines changed, removed, moved, repeated or put in; with the head, lines cut off the end;
    with a checkpoint, both cut, or another run's. Not found is a forger who writes the whole file and its head anew,
    for the chain has no key (anybody may verify a copy): compare `end` with the head in `result.json`, or in MLflow.

    Args:
        checkpoint: a head that the ledger had earlier: it must still hold these lines.

    Raises:
        UserError: it is not; the message says which line, and what was found.
    """
    head = read_head(path)  # first: a run may be writing, and the ledger is never behind its head
    heads = [(f"`{head_file(path).name}`", head), ("the checkpoint", checkpoint)]
    must = [(source, one) for source, one in heads if one is not None]
    header, lines, size, torn, chain = None, 0, 0, 0, _NO_CHAIN
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n") or b"\0" in line:  # zeros: a crash after the file had grown
                torn = len(line) + sum(map(len, file))
                break
            lines += 1
            if not _follows(line, chain):
                raise _changed(path, lines, _found(path, lines, head))
            size, chain = size + len(line), _stated(line)
            if header is None:
                header = _first(path, line)
                _check_run(path, header, must)
            else:
                take(_charge(path, lines, line, len(header.delta)))
            for source, one in must:
                if lines == one.lines and chain.decode() != one.chain:
                    found = f"another chain than {source} has for it: it, or the whole up to it, was rewritten"
                    raise _changed(path, lines, found)
    for source, one in must:
        if lines < one.lines:
            raise UserError(
                f"`{path}` must hold the {one.lines} lines that {source} counts, got {lines}: "
                f"{one.lines - lines} were cut off its end, after line {lines}. {_CHANGED}"
            )
    if header is None:
        raise UserError(f"`{path}` must begin with a ledger's header, got no whole line. Is it the right file?")
    return Verified(header, Head(header.run, lines, chain.decode()), head, size, torn)


# ---- writing


def header_line(header: Header) -> bytes:
    """The first line."""
    fields = {
        "ledger": VERSION,
        "run": header.run,
        "accountant": header.accountant,
        "adjacency": header.adjacency,
        "sampling": header.sampling,
        "clients": len(header.delta),
        "delta": _one_or_all(header.delta),
        "epsilon": _one_or_all([finite_or_none(own) for own in header.epsilon]),
        "caveats": header.caveats,
        "identity": header.identity,
    }
    return _sealed(json.dumps(fields).encode()[:-1], _NO_CHAIN)


def charge_lines(charges: Sequence[Charge], chain: str) -> Iterator[bytes]:
    """The lines of these charges, after one with this chain."""
    before = chain.encode()
    for charge in charges:
        place = f'"client": {charge.client}, "round": {charge.round}, "number": {charge.number}'
        body = f'{{{place}, "purpose": {json.dumps(charge.purpose)}, "event": {_event_json(charge.event)}'
        line = _sealed(body.encode(), before)
        before = _stated(line)
        yield line


def chain_of(line: bytes) -> str:
    """The chain that a line states."""
    return _stated(line).decode()


def head_file(path: Path) -> Path:
    """Where the head of a ledger lies: `ledger.head` beside `ledger.jsonl`."""
    return path.with_suffix(".head")


def head_bytes(head: Head) -> bytes:
    """Of one length, so that one write over the old ones replaces them."""
    return json.dumps(head.as_dict()).ljust(127).encode() + b"\n"


def read_head(path: Path) -> Head | None:
    """The head beside a ledger; None without one, or with one that was never written.

    Raises:
        UserError: the file is damaged.
    """
    beside = head_file(path)
    try:
        content = beside.read_bytes()
    except FileNotFoundError:
        return None
    if not content.strip(b"\0"):
        return None
    try:
        head = Head(**json.loads(content))
    except (ValueError, TypeError):
        raise UserError(
            f"`{beside}` must hold the run, lines and chain of `{path.name}`, got {content[:80]!r}. {_CHANGED}"
        ) from None
    return head


def read_header(path: Path) -> Header | None:
    """The header of a ledger; None where its first line was not written yet.

    Raises:
        UserError: it was changed.
    """
    with open(path, "rb") as file:
        line = file.readline()
    if not line.endswith(b"\n"):
        return None
    if not _follows(line, _NO_CHAIN):
        raise _changed(path, 1, _found(path, 1, None))
    return _first(path, line)


def is_begun(path: Path) -> bool:
    """Whether a header was written, or the head says that it was."""
    with open(path, "rb") as file:
        return b"\n" in file.readline() or read_head(path) is not None


def _sealed(body: bytes, before: bytes) -> bytes:
    """A whole line: its content without the closing brace, and its chain."""
    chain = hashlib.blake2b(before + body, digest_size=16).hexdigest().encode()
    return b'%s, "chain": "%s"}\n' % (body, chain)


def _stated(line: bytes) -> bytes:
    return line[-35:-3]


def _follows(line: bytes, before: bytes) -> bool:
    return line == _sealed(line[:-_TAIL], before)


@functools.lru_cache(maxsize=4096)
def _event_json(event: Event) -> str:
    return json.dumps({"kind": _KINDS[type(event)], **vars(event)})


def _one_or_all(values: Sequence[float | None]) -> object:
    return values[0] if len(set(values)) == 1 else values


# ---- reading


def _first(path: Path, line: bytes) -> Header:
    try:
        fields = json.loads(line)
        version = fields["ledger"]
        if version == VERSION:
            return _header(fields)
    except (KeyError, TypeError, ValueError):
        raise _changed(path, 1, f"no header: {line[:80]!r}") from None
    raise UserError(
        f"`{path}` must have format {VERSION}, got {version!r} in line 1. "
        "Read it with the version of this program that wrote it."
    )


def _header(fields: dict[str, Any]) -> Header:
    count = fields["clients"]

    def each(value: Any) -> tuple[float, ...]:
        values = value if isinstance(value, list) else [value] * count
        return tuple(math.inf if own is None else float(own) for own in values)

    words = {name: str(fields[name]) for name in ("accountant", "adjacency", "sampling", "run")}
    header = Header(
        **words,
        delta=each(fields["delta"]),
        epsilon=each(fields["epsilon"]),
        caveats=(*fields["caveats"],),
        identity=dict(fields["identity"]),
    )
    if not len(header.delta) == len(header.epsilon) == count:
        raise ValueError(count)
    return header


def _charge(path: Path, number: int, line: bytes, clients: int) -> Charge:
    try:
        charge = _charge_of(json.loads(line))
        if charge.client not in range(clients):
            raise ValueError(charge.client)
        return charge
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _changed(path, number, f"no charge of this program: {line[:80]!r}") from None


def _charge_of(fields: dict[str, Any]) -> Charge:
    fields.pop("chain", None)
    event = fields.pop("event")
    return Charge(**fields, event=_EVENTS[event.pop("kind")](**event))


def _check_run(path: Path, header: Header, must: Sequence[tuple[str, Head]]) -> None:
    for source, one in must:
        if one.run != header.run:
            raise UserError(
                f"`{path}` must be the ledger of run {one.run}, which {source} is of, got that of run {header.run} in "
                "line 1. Put back the ledger and the head that this run wrote, or start a new run."
            )


# ---- what is wrong with a line


def _changed(path: Path, number: int, found: str) -> UserError:
    return UserError(f"`{path}` must be as it was written, got in line {number} {found}. {_CHANGED}")


def _found(path: Path, number: int, head: Head | None) -> str:
    """What became of the first line whose chain does not fit."""
    with open(path, "rb") as file:
        lines = list(file)
    line, kind = lines[number - 1], _kind(lines[number - 1])
    if kind == "old charge" and number == 1:
        return "a charge without a chain: the ledger is from an older version of this program"
    if kind not in ("header", "charge"):
        return f"no line of this program: {line[:80]!r}"
    if line in lines[: number - 1]:
        first = lines.index(line) + 1
        return f"line {first} again" + (": the file was appended to itself" if first == 1 else "")
    if kind == "header":
        return "a header that was edited" if number == 1 else "the header of another ledger, appended to this one"
    if number == 1:
        return "a charge: the header was removed"
    for other, before in enumerate(lines, start=1):
        if _follows(line, _stated(before)):
            return f"what belongs after the present line {other}: lines changed places"
    if head is not None and len(lines) < head.lines:
        return f"what does not follow line {number - 1}: of {head.lines} lines {head.lines - len(lines)} were removed"
    way = "that was put in or rewritten" if head is not None else "that was put in or rewritten, or lines were removed"
    return f"a line that was edited, or that follows one {way}: its content and line {number - 1} do not give its chain"


def _kind(line: bytes) -> str | None:
    try:
        fields = json.loads(line)
        if fields.get("ledger"):
            return "header"
        sealed = "chain" in fields
        _charge_of(fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return "charge" if sealed else "old charge"
