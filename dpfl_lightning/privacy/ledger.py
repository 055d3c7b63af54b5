"""The append-only account of what each client has released: the only source of an epsilon that was spent."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy import ledger_file
from dpfl_lightning.privacy.events import Event
from dpfl_lightning.privacy.ledger_file import Charge, Head, Header

_sync = getattr(os, "fdatasync", os.fsync)  # the new length of a file included; not every system has it


class Ledger:
    """Append-only lines, synced to disk before a client trains; one writer at a time.

    Each line is chained to the one before, and `ledger.head` beside the file says how far it goes: see
    `ledger_file.verify` for what that shows and what it does not.

    Args:
        path: of a new ledger, or of one to go on with, which is verified.
        header: what its charges mean.
        checkpoint: a head that it had earlier: it must still hold these lines.

    **Guarantees** A charge that was returned from is on disk: a crash afterwards never under-reports. Charging the same
    (client, round, purpose, release) again changes nothing. A torn last line is one whose charge was never returned
    from, so nothing was released for it, and it is cut off; a whole line that the head does not count yet is kept, and
    is paid.

    **Privacy** Holds public facts, and digests that are keyed by whoever charges: it may be shown to others.

    Raises:
        UserError: another process writes the same ledger; it was changed; it is another run's.
    """

    def __init__(self, path: Path, header: Header, checkpoint: Head | None = None) -> None:
        self.path = path
        self._files = ExitStack()
        self._file = self._files.enter_context(_locked(path))
        self._paid: defaultdict[int, dict[str, list[Event]]] = defaultdict(dict)
        self._events: defaultdict[int, list[Event]] = defaultdict(list)
        self._attempts: defaultdict[tuple[int, int], list[tuple[str, str]]] = defaultdict(list)
        try:
            if checkpoint is None and not ledger_file.is_begun(path):
                self._begin(header)
            else:
                self._go_on(header, checkpoint)
        except BaseException:
            self.close()
            raise

    def charge(self, charges: Sequence[Charge]) -> list[int]:
        """Write the charges that are new and sync; returns each one's attempt number: how many other releases of its
        client and round were charged before it, for whatever purpose, so that no two of them have the same noise.

        A write that fails closes the ledger: what lies on disk is then known again only after it is verified.
        """
        new = [charge for charge in charges if not self.holds(charge)]
        if new:
            try:
                self._append(list(ledger_file.charge_lines(new, self.head.chain)))
            except BaseException:
                self.close()
                raise
            for charge in new:
                self._remember(charge)
        return [self._attempts[charge.key[:2]].index(charge.key[2:]) for charge in charges]

    def holds(self, charge: Charge) -> bool:
        """Whether this very release is already paid for (a replay)."""
        return charge.key[2:] in self._attempts.get(charge.key[:2], ())

    def used(self, client: int, purpose: str) -> int:
        """How many releases of `purpose` the client has paid for: an integer to compare with its schedule."""
        return len(self._paid[client].get(purpose, ()))

    def paid(self, client: int) -> Mapping[str, Sequence[Event]]:
        """What the client has paid for, by purpose, in order."""
        return {purpose: tuple(events) for purpose, events in self._paid[client].items()}

    def events(self, client: int) -> list[Event]:
        """Everything the client has paid for, in order."""
        return list(self._events[client])

    def close(self) -> None:
        self._files.close()

    def _begin(self, header: Header) -> None:
        """Also over what a crash left of a first line."""
        self._file.truncate(0)
        self.head = Head(header.run, 0, "")
        self._open_head()
        self._append([ledger_file.header_line(header)])
        _sync_folder(self.path.parent)

    def _go_on(self, header: Header, checkpoint: Head | None) -> None:
        verified = ledger_file.verify(self.path, self._remember, checkpoint)
        for own in dataclasses.fields(header):
            found, given = (getattr(one, own.name) for one in (verified.header, header))
            if own.compare and found != given:
                raise UserError(
                    f"`{self.path}` must be of a run with {own.name} {_short(given)}, got {_short(found)} in line 1. "
                    "Go on with what the run began with, or start a new run."
                )
        if verified.head is None and verified.end.lines > 1:
            raise UserError(
                f"`{ledger_file.head_file(self.path)}` must lie beside the ledger, got no such file: whether lines "
                "were cut off the ledger's end cannot be seen. Put it back, or start a new run."
            )
        self.head = verified.end
        self._open_head()
        self._file.truncate(verified.size)
        if verified.head != verified.end:
            self._write_head()

    def _append(self, lines: Sequence[bytes]) -> None:
        """On disk when it returns: first the lines, then that they are there."""
        rest = memoryview(b"".join(lines))
        while rest:
            rest = rest[self._file.write(rest) :]
        _sync(self._file.fileno())
        self.head = Head(self.head.run, self.head.lines + len(lines), ledger_file.chain_of(lines[-1]))
        self._write_head()

    def _open_head(self) -> None:
        self._head_file = os.open(ledger_file.head_file(self.path), os.O_WRONLY | os.O_CREAT, 0o666)
        self._files.callback(os.close, self._head_file)

    def _write_head(self) -> None:
        os.pwrite(self._head_file, ledger_file.head_bytes(self.head), 0)
        _sync(self._head_file)

    def _remember(self, charge: Charge) -> None:
        self._paid[charge.client].setdefault(charge.purpose, []).append(charge.event)
        self._events[charge.client].append(charge.event)
        self._attempts[charge.key[:2]].append(charge.key[2:])


def read_ledger(path: Path) -> list[Charge]:
    """The charges of a ledger file, verified.

    Raises:
        UserError: it was changed: see `ledger_file.verify`.
    """
    charges: list[Charge] = []
    ledger_file.verify(path, charges.append)
    return charges


def _locked(path: Path) -> FileIO:
    file = open(path, "a+b", buffering=0)  # noqa: SIM115 (held, and locked, as long as the ledger)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(
            f"`{path}` is being written by another run. Wait for it, or choose another --output_dir."
        ) from None
    return file


def _sync_folder(folder: Path) -> None:
    """The names of new files in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
