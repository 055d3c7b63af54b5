"""The append-only record of what each client has released: the only source of spent epsilons."""

from __future__ import annotations

import fcntl
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfl_lightning.errors import UserError, require, shortened, warn_user
from dpfl_lightning.privacy.accounting.events import Release
from dpfl_lightning.privacy.accounting.guarantee import EXACT_TIMES
from dpfl_lightning.privacy.ledger import file as ledger_file
from dpfl_lightning.privacy.ledger.file import Charge, Head, Header
from dpfl_lightning.runtime.files import sync_folder, write_all
from dpfl_lightning.runtime.strict_json import parsed
from dpfl_lightning.runtime.text import counted

if TYPE_CHECKING:
    from dpfl_lightning.privacy.ledger.account import PrivacyAccount

_sync = getattr(os, "fdatasync", os.fsync)  # it also syncs a file's new length; not every system has it


class Ledger:
    """Append-only lines, synced to disk before a client trains; one writer at a time.

    The lines of an interrupted run enter the head by `accept` only, because somebody may have appended some of them.
    A completed charge is on disk: a crash afterwards never under-reports. Nothing was released for an incomplete last
    line, which is cut off; a complete line that the head does not count yet counts as paid. `ledger_file.verify`
    describes further guarantees. With an `account`, which the run has entered, every line is first written there: the
    file is then an extract of the account, and what a crash or a copy left out of it is appended when it is opened.
    The file holds public facts, and keyed digests of private records: it may be shown to others. Raises UserError if
    another process writes it, it was changed, or it belongs to another run.
    """

    def __init__(
        self, path: Path, header: Header, checkpoint: Head | None = None, account: PrivacyAccount | None = None
    ) -> None:
        self.path, self._account = path, account
        self._files = ExitStack()
        self._file = self._files.enter_context(_locked(path))
        self._paid: defaultdict[int, dict[str, list[Release]]] = defaultdict(dict)
        self._events: defaultdict[int, list[Release]] = defaultdict(list)
        self._charges: defaultdict[tuple[int, int], list[Charge]] = defaultdict(list)
        self._is_accepted = True
        try:
            if checkpoint is None and not ledger_file.is_begun(path):
                self._begin(header)
            else:
                self._resume(header, checkpoint)
        except BaseException:
            self.close()
            raise

    def charge(self, charges: Sequence[Charge]) -> None:
        """Write the charges and sync. A failed write closes the ledger, whose state on disk is then unknown.

        Raises UserError, and writes nothing, if they exceed a limit of the account.
        """
        if not charges:
            return
        lines = list(ledger_file.charge_lines(charges, self.head.chain))
        if self._account is not None:
            self._account.charge(charges, lines)
        try:
            self._append(lines)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                error.filename = str(self.path)  # a full disk does not say which file it was
            raise
        for charge in charges:
            self._remember(charge)

    def accept(self) -> None:
        """Write the head of an interrupted run, after its lines were compared with the plan."""
        if self._is_accepted:
            return
        for (client, round), charges in self._charges.items():
            numbers = [charge.number for charge in charges]
            must = f"number the charges of client {client} in round {round} from 0"
            require(numbers == [*range(len(numbers))], str(self.path), must, numbers, ledger_file.CHANGED)
        self._write_head()
        self._is_accepted = True

    def charges(self, client: int, round: int) -> Sequence[Charge]:
        """Return the charges of the client in that round, by number."""
        return self._charges.get((client, round), ())

    def rounds(self, client: int) -> list[int]:
        """Return the rounds in which the client has paid for anything, in order."""
        return sorted(round for payer, round in self._charges if payer == client)

    def used(self, client: int, purpose: str) -> int:
        """Return how many releases of `purpose` the client has paid for; compare it with the schedule."""
        return len(self._paid.get(client, {}).get(purpose, ()))

    def paid(self, client: int) -> Mapping[str, Sequence[Release]]:
        """Return what the client has paid for, by purpose, in order."""
        return {purpose: tuple(events) for purpose, events in self._paid.get(client, {}).items()}

    def events(self, client: int) -> list[Release]:
        """Return everything the client has paid for, in order."""
        return list(self._events.get(client, ()))

    def payers(self) -> set[int]:
        """Return the clients that have paid for anything."""
        return set(self._events)

    def close(self) -> None:
        self._files.close()

    def _begin(self, header: Header) -> None:
        """Write a head of 0 lines and the header, also over an incomplete first line that a crash left."""
        self._file.truncate(0)
        self.head = Head(header.run, 0, "")
        self._open_head()
        self._write_head()
        sync_folder(self.path.parent)
        self._append([ledger_file.header_line(header)])

    def _resume(self, header: Header, checkpoint: Head | None) -> None:
        known = {} if checkpoint is None else {"the checkpoint": checkpoint}
        verified = ledger_file.verify(self.path, self._remember, known)
        check_resumed(self.path, verified.header, header)
        self.head = verified.end
        self._open_head()
        self._file.truncate(verified.size)
        self._is_accepted = verified.head == verified.end
        if self._account is not None:
            self._follow(self._account)

    def _follow(self, account: PrivacyAccount) -> None:
        """Bring the file and the account together: each gets the lines of this run that only the other has."""
        added, behind = account.reconcile(self.path, os.fstat(self._file.fileno()).st_size)
        if added:
            words = f"the account lacked {counted(added, 'release')} of this run, which it counts from now on"
            warn_user(f"{words}: {account.path} was changed, or an older copy")
        for line in behind:
            for charge in ledger_file.charges_of(parsed(line)):
                self._remember(charge)
        if behind:
            self._append(behind)
            self._is_accepted = False  # nobody has compared them with the plan

    def _append(self, lines: Sequence[bytes]) -> None:
        """Write the lines to disk, and then the head."""
        write_all(self._file, lines)
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
        self._charges[charge.client, charge.round].append(charge)


def read_ledger(path: Path) -> list[Charge]:
    """Return the verified charges of a ledger file. Raises UserError if the file was changed."""
    charges: list[Charge] = []
    ledger_file.verify(path, charges.append)
    return charges


def _locked(path: Path) -> FileIO:
    file = open(path, "a+b", buffering=0)  # noqa: SIM115 (open, and locked, as long as the ledger)
    for _ in range(5):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            time.sleep(0.1)  # a process that only tests the lock (`is_locked`) is soon done
    file.close()
    raise UserError(f"`{path}` is being written by another run. Wait for it, or choose another --output_dir.")


def check_same(folder: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError, which names the setting, unless the run in `folder` is resumed with its settings `begun`."""
    if (difference := first_difference(begun, now)) is not None:
        key, before, after = difference
        raise UserError(
            f"`{key}` must stay {shortened(repr(before), 80)}, with which the run in {folder} began, got "
            f"{shortened(repr(after), 80)}. Only fewer `rounds` are possible, to stop earlier; start a new run for "
            "anything else."
        )


def check_resumed(path: Path, begun: Header, now: Header) -> None:
    """Raise UserError, which names the setting, unless the run of a ledger goes on with what its header says."""
    check_same(path.parent, _compared(begun), _compared(now))


def first_difference(begun: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> tuple[str, Any, Any] | None:
    """Return the first (dotted) key at which two nested mappings differ, and both values; None if they are equal."""
    for key in dict.fromkeys([*begun, *now]):
        before, after = begun.get(key), now.get(key)
        if before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            return first_difference(before, after, f"{prefix}{key}.")
        if isinstance(before, list | tuple) and isinstance(after, list | tuple) and len(before) == len(after):
            client = next(i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
            return f"{prefix}{key} of client {client}", before[client], after[client]
        return f"{prefix}{key}", before, after
    return None


def _compared(header: Header) -> dict[str, Any]:
    """Return what must stay when a run is resumed, by the names of its options."""
    caveats = [caveat for caveat in header.caveats if caveat != EXACT_TIMES]
    changed = {"evaluation.exact_times": EXACT_TIMES in header.caveats, "caveats": caveats}
    return {**header.identity, **vars(header), **changed, "run": None, "identity": None}
