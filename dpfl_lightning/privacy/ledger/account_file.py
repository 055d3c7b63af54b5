"""The file of an account: its lines, its lock and its chain."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

from dpfl_lightning.config.names import folded
from dpfl_lightning.config.reading import check_format, expecting
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.accounting.events import Release
from dpfl_lightning.privacy.accounting.planned import numbered
from dpfl_lightning.privacy.accounting.units import ROWS_KEY, Relation
from dpfl_lightning.privacy.compose import Limit
from dpfl_lightning.privacy.ledger.evidence import Evidence, named
from dpfl_lightning.privacy.ledger.file import NO_CHAIN, chain_of, charges_of, follows, release_of, sealed
from dpfl_lightning.runtime.files import write_all, write_text
from dpfl_lightning.runtime.strict_json import parsed

VERSION = 3
PLACE = "DPFL_ACCOUNT"  # variable of the environment with the path of the user's file
_PLAIN = ("run", "ledger", "adjacency", "sampling", "accountant", "whole")  # fields of a record
_NEWER = "Use the version of this package that wrote it, or another account (DPFL_ACCOUNT)."
_WAY_OUT = (
    "Restore the newest copy; or go on with what it holds: `dpfl account accept`, then `dpfl account add RUN ...`."
)


def users_file() -> Path:
    """Return the path of the user's account."""
    import platformdirs

    named = os.environ.get(PLACE)
    return Path(named).expanduser() if named else platformdirs.user_data_path("dpfl_lightning") / "account.jsonl"


@dataclass(frozen=True)
class RunRecord:
    """A run in the account.

    Args:
        run: name of the run's ledger, whose file `ledger` is locked as long as the run goes on.
        holders: client -> its name, or `NAMELESS`; clients without records are left out.
        delta, planned: of each of these clients, in the same order; `planned` are different releases and their numbers.
        evidence: keyed digests of records of each, which show later that two clients have records in common.
        filters: of each, what bounds all its releases if their noise follows from results, else None.
        whole: whether all that is planned counts, because its end follows from its releases.
        adjacency: key of the relation between neighbouring data sets, as a text.
        rows: of each, the most rows of one unit (of records: of one group) that are used, if that is known.
    """

    run: str
    ledger: str
    adjacency: str
    sampling: str
    accountant: str
    holders: Mapping[int, str]
    delta: tuple[float, ...]
    planned: tuple[tuple[tuple[Release, int], ...], ...]
    evidence: tuple[Evidence, ...]
    rows: tuple[int | None, ...]
    filters: tuple[Release | None, ...]
    whole: bool = False


class AccountFile:
    """Lines that several processes append to one file (mode 0600), each time under its lock and synced.

    Every line is linked to the one before. A small file in the user's state directory remembers the last one: a file
    that is older, or gone, is refused. Who deletes both is not noticed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    @contextlib.contextmanager
    def _locked(self, accept: bool = False) -> Iterator[FileIO]:
        """Hold the lock of the file, and know all of its lines; `accept` an older file than was seen last."""
        try:
            self.state_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            must, advice = "be a folder that can be written", "Set XDG_STATE_HOME, or privacy.account to null."
            raise UserError(f"`{self.state_file.parent}` must {must}, got {error.strerror}. {advice}") from None
        regular = self.path.is_file() or not self.path.exists()
        require(regular, str(self.path), "be a regular file", "another kind", f"Set {PLACE} to the path of a file.")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.fchmod(descriptor, 0o600)  # a copy may have come back with another mode
        except OSError as error:
            must = "be a file that can be written"
            advice = f"Set {PLACE}, or privacy.account to such a file, or to null to keep none."
            raise UserError(f"`{self.path}` must {must}, got {error.strerror}. {advice}") from None
        with open(descriptor, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._read(file, accept)
            yield file

    def _forget(self) -> None:
        self._chains: list[str] = []
        self._size = 0
        self._inode = -1
        self._within = -1  # number of lines with which all that the run plans is within the limits
        self._runs: dict[str, tuple[RunRecord, dict[int, Counter[Release]]]] = {}
        self._same: dict[str, frozenset[str]] = {}  # name -> all names of its holder
        self._declared: dict[str, frozenset[str]] = {}  # those of them that the operator has joined
        self._limits: dict[str, Limit] = {}
        self._new: set[str] = set()  # names that the operator has declared new
        self._written: dict[str, str] = {}  # name as it is compared -> as it was first written
        self._seen_evidence: dict[str, Evidence] = {"": Evidence()}
        self._refused: dict[tuple[str, Evidence], None] = {}  # names and evidence of runs that were refused
        self._chains_of: dict[str, dict[str, None]] = {}  # run -> chains of the lines of its ledger
        self._key = b""

    def _read(self, file: FileIO, accept: bool) -> None:
        """Read the lines that others have added, and check that the file goes on from what was seen last."""
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._size:
            self._forget()
            self._inode = status.st_ino
        file.seek(self._size)
        for line in (file.read() or b"").splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break  # a crash interrupted it, before anything was computed
            if not follows(line, self._chains[-1] if self._chains else NO_CHAIN):
                got = f"a line {len(self._chains) + 1} that does not follow the one before"
                begin = f"`dpfl account add RUN ...{self._in_commands()}`"
                advice = f"Restore a copy, or move it away and begin a new account with {begin}."
                raise UserError(f"`{self.path}` must be unchanged, got {got}. {advice}")
            with expecting(
                self.path, f"hold lines that this version knows, in line {len(self._chains) + 1}, too", _NEWER
            ):
                self._take(line)
        if accept or not self.state_file.is_file():
            return
        advice = f"Accept the account as it is: `dpfl account accept{self._in_commands()}`."
        with expecting(self.state_file, "hold the last line of the account", advice):
            seen = json.loads(self.state_file.read_bytes())
            lines, chain = int(seen["lines"]), str(seen["chain"])
        if lines and self._chains[lines - 1 : lines] != [chain]:
            must, got = f"hold the {lines} lines that were written to it", "an older copy, or another file"
            raise UserError(f"`{self.path}` must {must}, got {len(self._chains)}: {got}. {_WAY_OUT}")

    def _remember(self) -> None:
        last = {"lines": len(self._chains), "chain": self._chains[-1] if self._chains else ""}
        write_text(self.state_file, json.dumps(last), private=True)

    def _take(self, line: bytes) -> None:
        """Remember a line of the file."""
        content = parsed(line)
        self._size += len(line)
        self._chains.append(chain_of(line))
        if "account" in content:
            check_format(self.path, content["account"], VERSION)
            self._key = bytes.fromhex(content["key"])
        elif "run" in content:
            entry = self._entry_of(content)
            paid = self._runs[entry.run][1] if entry.run in self._runs else {}
            self._chains_of.setdefault(entry.run, {})
            self._runs[entry.run] = entry, {**{client: Counter() for client in entry.holders}, **paid}
        elif "charged" in content:
            paid, chains = self._runs[content["charged"]][1], self._chains_of[content["charged"]]
            for fields in content["lines"]:
                chains[fields["chain"]] = None
                for charge in charges_of(fields):
                    if charge.client in paid:
                        paid[charge.client][charge.event] += 1
        elif "limit" in content:
            adjacency, unit = Relation.of_key(content["adjacency"])
            limit = Limit(content["epsilon"], content["delta"], adjacency, replace(unit, rows=content[ROWS_KEY]))
            self._limits[self._as_first_written(content["limit"])] = limit
        elif "unlimited" in content:
            self._limits.pop(self._as_first_written(content["unlimited"]), None)
        elif "refused" in content:
            pairs = [(self._as_first_written(name), self._seen_evidence[one]) for name, one in content["refused"]]
            self._refused |= dict.fromkeys(pairs)
        elif "evidence" in content:
            self._seen_evidence |= {name: Evidence.of_json(one) for name, one in content["evidence"].items()}
        elif "new" in content:
            self._new.add(self._as_first_written(content["new"]))
        elif "joined" in content:
            names = [self._as_first_written(name) for name in content["joined"]]
            unite(self._declared, *names)
            unite(self._same, *names)
        else:
            unite(self._same, *map(self._as_first_written, content["same"]))

    def _as_first_written(self, name: str) -> str:
        """Remember how a name is written first, and return that."""
        return self._written.setdefault(folded(name), name)

    def _entry_of(self, content: Mapping[str, Any]) -> RunRecord:
        planned = [tuple((release_of(fields), count) for fields, count in plan) for plan in content["planned"]]
        return RunRecord(
            **{name: content[name] for name in _PLAIN},
            holders={client: self._as_first_written(name) for client, name in content["holders"]},
            delta=tuple(content["delta"]),
            rows=tuple(content["rows"]),
            filters=tuple(None if one is None else release_of(one) for one in content["filters"]),
            planned=tuple(planned[place] for place in content["plan_of"]),
            evidence=tuple(self._seen_evidence[name] for name in content["evidence"]),
        )

    def _append(self, file: FileIO, contents: Sequence[Mapping[str, Any]]) -> None:
        """Write lines and sync; a new file gets a header. Nothing that is not on disk is remembered."""
        if not self._chains:
            contents = [{"account": VERSION, "key": secrets.token_hex(32)}, *contents]
        lines, chain = [], self._chains[-1] if self._chains else NO_CHAIN
        for content in contents:
            lines.append(sealed(json.dumps(content).encode()[:-1], chain))
            chain = chain_of(lines[-1])
        if not lines:
            return
        try:
            file.truncate(self._size)
            write_all(file, lines)
            os.fsync(file.fileno())
        except OSError as error:
            self._forget()  # what is on disk is unknown
            error.filename = str(self.path)  # a full disk does not say which file it was
            raise
        for line in lines:
            self._take(line)
        self._remember()

    @staticmethod
    def _contents(file: FileIO) -> Iterator[dict[str, Any]]:
        """Yield the content of each complete line of the file."""
        file.seek(0)
        for line in (file.read() or b"").splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield parsed(line)

    def _evidence_lines(self, entry: RunRecord) -> list[dict[str, Any]]:
        """Return a line for the evidence of a run that is not in the account; a line of a run refers to it."""
        new = {name: one.as_json() for name, one in named(entry.evidence).items() if name not in self._seen_evidence}
        return [{"evidence": new}] if new else []

    def _in_commands(self) -> str:
        """Return what commands need to find this account: nothing if it is that of the user."""
        return "" if self.path == users_file() else f" --file {shlex.quote(str(self.path))}"

    def is_missed(self) -> bool:
        """Return whether an account was at this path before."""
        return self.state_file.is_file()

    @property
    def state_file(self) -> Path:
        """The file in the user's state folder that remembers the last line of the account."""
        import platformdirs

        digest = hashlib.blake2b(str(self.path.resolve()).encode(), digest_size=8).hexdigest()
        return platformdirs.user_state_path("dpfl_lightning") / f"account-{digest}.json"

    @property
    def key(self) -> bytes:
        """The key of the digests of records."""
        with self._locked() as file:
            self._append(file, [])
            return self._key


def is_account(path: Path) -> bool:
    """Return whether a file begins as an account."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(11) == b'{"account":'


def unite(groups: dict[str, frozenset[str]], one: str, other: str) -> None:
    group = groups.get(one, frozenset([one])) | groups.get(other, frozenset([other]))
    groups |= dict.fromkeys(group, group)


def line_of(entry: RunRecord) -> dict[str, Any]:
    different, places = numbered(entry.planned)
    planned = [[[event.as_dict(), count] for event, count in plan] for plan in different]
    fields: dict[str, Any] = {name: getattr(entry, name) for name in (*_PLAIN, "delta", "rows")}
    fields["evidence"] = [one.name for one in entry.evidence]
    fields["filters"] = [None if one is None else one.as_dict() for one in entry.filters]
    return {**fields, "holders": [*entry.holders.items()], "planned": planned, "plan_of": places}


def limit_line(holder: str, limit: Limit) -> dict[str, Any]:
    relation = {"adjacency": limit.relation.key, ROWS_KEY: limit.unit.rows}
    return {"limit": holder, "epsilon": limit.epsilon, "delta": limit.delta, **relation}


def ledger_line(fields: Mapping[str, Any]) -> bytes:
    """Return the line of a ledger with these fields, as it was written."""
    return json.dumps(fields).encode() + b"\n"


def charged_lines(run: str, lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return one line for lines of the ledger of a run, as they are there."""
    return [{"charged": run, "lines": [parsed(line) for line in lines]}] if lines else []
