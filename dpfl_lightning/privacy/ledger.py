"""The append-only account of what each client has released: the only source of an epsilon that was spent."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.events import Caveat, Event, GaussianEvent, SelectionEvent

_EVENTS = {"gaussian": GaussianEvent, "selection": SelectionEvent, "caveat": Caveat}
_KINDS = {kind: name for name, kind in _EVENTS.items()}


@dataclass(frozen=True)
class Charge:
    """One release of one client, before it happens.

    Args:
        purpose: which line of the client's schedule pays ("train", ...).
        release: digest of everything that decides what is released but the noise key. A replay with the same digest
            is the same release, bit for bit, and is not charged twice; any other is a new one.
    """

    client: int
    round: int
    purpose: str
    release: str
    event: Event

    @property
    def key(self) -> tuple[int, int, str, str]:
        return (self.client, self.round, self.purpose, self.release)


class Ledger:
    """Append-only JSON lines, synced to disk before a client trains; one writer at a time.

    **Guarantees** A charge that was returned from is on disk: a crash afterwards never under-reports. Charging the same
    (client, round, purpose, release) again changes nothing. A torn last line is one whose charge was never returned
    from, so nothing was released for it, and it is cut off.

    Raises:
        UserError: another process writes the same ledger, or a line is not one of ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "a+b")  # noqa: SIM115 (held, and locked, as long as the ledger)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(
                f"`{path}` is being written by another run. Wait for it, or choose another --output_dir."
            ) from None
        self._keys: set[tuple[int, int, str, str]] = set()
        self._used: Counter[tuple[int, str]] = Counter()
        self._events: defaultdict[int, list[Event]] = defaultdict(list)
        self._attempts: dict[tuple[int, int, str], list[str]] = defaultdict(list)
        self._cut_torn_line()
        for charge in read_ledger(path):
            self._remember(charge)

    def charge(self, charges: Sequence[Charge]) -> list[int]:
        """Write the charges that are new and sync; returns each one's attempt number (0 unless released before)."""
        new = [charge for charge in charges if charge.key not in self._keys]
        if new:
            self._file.write(b"".join(_line(charge) for charge in new))
            self._file.flush()
            os.fsync(self._file.fileno())
            for charge in new:
                self._remember(charge)
        return [self._attempts[charge.key[:3]].index(charge.release) for charge in charges]

    def holds(self, charge: Charge) -> bool:
        """Whether this very release is already paid for (a replay)."""
        return charge.key in self._keys

    def used(self, client: int, purpose: str) -> int:
        """How many releases of `purpose` the client has paid for: an integer to compare with its schedule."""
        return self._used[client, purpose]

    def events(self, client: int) -> list[Event]:
        """Everything the client has paid for, in order."""
        return list(self._events[client])

    def close(self) -> None:
        self._file.close()

    def _remember(self, charge: Charge) -> None:
        self._keys.add(charge.key)
        self._used[charge.client, charge.purpose] += 1
        self._events[charge.client].append(charge.event)
        self._attempts[charge.key[:3]].append(charge.release)

    def _cut_torn_line(self) -> None:
        content = self.path.read_bytes()
        if content and not content.endswith(b"\n"):
            self._file.truncate(content.rfind(b"\n") + 1)


def read_ledger(path: Path) -> list[Charge]:
    """The charges of a ledger file.

    Raises:
        UserError: a line that cannot be read, with its number.
    """
    charges = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            fields = json.loads(line)
            event = _EVENTS[fields["event"].pop("kind")](**fields.pop("event"))
            charges.append(Charge(**fields, event=event))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"Line {number} of `{path}` is not a charge of this program: {line[:80]!r}. "
                "A ledger that was edited proves nothing; start a new run in another --output_dir."
            ) from None
    return charges


def _line(charge: Charge) -> bytes:
    event = {"kind": _KINDS[type(charge.event)], **dataclasses.asdict(charge.event)}
    fields = {name: getattr(charge, name) for name in ("client", "round", "purpose", "release")}
    return json.dumps({**fields, "event": event}).encode() + b"\n"
