"""What the operator of an account asks and decides: holders, limits, names, and runs that were made elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

from dpfl_lightning.config.names import folded, is_name
from dpfl_lightning.config.reading import expecting
from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.privacy.accounting.guarantee import CumulativeGuarantee
from dpfl_lightning.privacy.compose import Limit, compose
from dpfl_lightning.privacy.ledger.account import NAMELESS, PrivacyAccount, listed
from dpfl_lightning.privacy.ledger.account_file import RunRecord, ledger_line, limit_line, line_of
from dpfl_lightning.privacy.ledger.evidence import Evidence
from dpfl_lightning.privacy.ledger.file import Head
from dpfl_lightning.privacy.ledger.verify import read
from dpfl_lightning.runtime.text import counted


@dataclass(frozen=True)
class Holder:
    """All that the account says about a data holder, who may have several names."""

    names: tuple[str, ...]
    together: CumulativeGuarantee

    def is_called(self, name: str) -> bool:
        """Return whether a name, in any spelling, is one of the holder's."""
        return folded(name) in map(folded, self.names)


class OperatedAccount(PrivacyAccount):
    """An account in the hands of its operator; no run needs it."""

    def holders(self, run: str | None = None) -> list[Holder]:
        """Return every data holder, or those of one run."""
        with self._locked():
            entries = [entry for entry, _ in self._runs.values() if run in (None, entry.run)]
            names = [*(name for entry in entries for name in entry.holders.values()), *(() if run else self._limits)]
            groups = list(dict.fromkeys(map(self._group, names)))
            together = self._cumulative(groups, run)
        return [Holder(tuple(sorted(group)), one) for group, one in zip(groups, together, strict=True)]

    def ahead_of(self, ledger: Head) -> str:
        """Return in words which lines of a run the account has after the end of its ledger; empty for none."""
        with self._locked() as file:
            count = len(self._lines_after(file, ledger.run, ledger.chain)) if ledger.run in self._runs else 0
        more = f"The account counts {counted(count, 'line')} more of run {ledger.run[:12]} than its ledger has"
        why = "a charge in progress, or a crash. The run appends what is missing when it resumes."
        return f"{more}: {why}" if count else ""

    def limit(self, holder: str, limit: Limit) -> None:
        """Set the limit on all runs on the records of a holder."""
        _check_name(holder)
        with self._locked() as file:
            self._append(file, [limit_line(holder, limit)])
            known = self._names()
        if known and self._name(holder) not in known:
            warn_user(f"no run of {holder} is in the account yet; its data holders are {', '.join(sorted(known))}")

    def unlimit(self, holder: str) -> None:
        """Remove the limit on a holder. Raises UserError if there is none."""
        with self._locked() as file:
            name, known = self._name(holder), ", ".join(sorted(self._limits)) or "no holder"
            require(name in self._limits, "HOLDER", f"be one of {known}, on whom there is a limit", holder)
            self._append(file, [{"unlimited": name}])

    def join(self, one: str, other: str) -> None:
        """Say that two names are of one holder."""
        with self._locked() as file:
            known = self._known() | {name for name, _ in self._refused}
            must = f"be one of {', '.join(sorted(known)) or 'no holder'}"
            for name in (one, other):
                require(self._name(name) in known, "HOLDER", must, name)
            self._append(file, [{"joined": [one, other]}])

    def new(self, holder: str) -> None:
        """Say that a name is of a holder whom the account does not know. What records show of it stays."""
        _check_name(holder)
        with self._locked() as file:
            self._append(file, [{"new": holder}])
            name = self._name(holder)
            others = sorted(self._group(name) - self._declared.get(name, frozenset()) - {name})
        if others:
            warn_user(f"{name} has records of {listed(others)}, so their accounts stay one")

    def accept(self) -> int:
        """Go on with an account that is older than the one that was seen last; return its number of lines.

        Raises UserError if a line was changed: such a file is worth nothing.
        """
        with self._locked(accept=True):
            self._remember()
            return len(self._chains)

    def add(self, path: Path) -> int:
        """Add the run of a ledger that was made elsewhere; return how many releases were lacking. No limit refuses it.

        Raises UserError if the ledger was changed, or cannot be composed.
        """
        (ledger,) = read([path]).ledgers
        header, everyone = ledger.verified.header, range(len(ledger.events))
        clients = [client for client in everyone if header.planned or ledger.events[client]]
        filters = header.filters
        plans, named = header.planned or ((),) * len(header.delta), bool(header.identity.get("names"))
        entry = RunRecord(
            run=header.run,
            ledger=str(path.absolute()),
            adjacency=header.adjacency,
            sampling=header.sampling,
            accountant=header.accountant,
            holders={client: header.name_of(client) if named else NAMELESS for client in clients},
            delta=tuple(header.delta[client] for client in clients),
            planned=tuple(tuple((event, 1) for event in plans[client]) for client in clients),
            evidence=(Evidence(),) * len(clients),
            rows=(header.relation.unit.rows,) * len(clients),
            filters=tuple(filters[client] for client in clients),
            whole=bool(header.planned),
        )
        with self._locked() as file:
            self._add_record(file, self._spelt(entry))
        return self.reconcile(path, ledger.verified.size)[0]

    def merge(self, path: Path) -> int:
        """Add all runs of another account, as of another machine or of a copy that went on; return how many releases.

        What both have counts once. Names that are one holder there are one here. Limits stay those of this account.
        Records are recognised later only if both come from one file, because digests have a key; else it warns.
        Raises UserError if the file is no whole account, or has what cannot be composed.
        """
        other, lines = PrivacyAccount(path), dict[str, list[bytes]]()
        with path.open("rb", buffering=0) as theirs, expecting(path, "hold a whole account", "Add its runs instead."):
            other._read(theirs, accept=True)
            compose(other._lines())
            contents = list(other._contents(theirs))
        for content in contents:
            if "charged" in content:
                lines.setdefault(content["charged"], []).extend(map(ledger_line, content["lines"]))
        same_key = other._key == self.key
        if not same_key and any(any(entry.evidence) for entry, _ in other._runs.values()):
            warn_user(f"records of the runs in {path} are not recognised in later runs: its digests have another key")
        with self._locked() as file:
            count = 0
            for entry, _ in other._runs.values():
                entry = entry if same_key else replace(entry, evidence=(Evidence(),) * len(entry.holders))
                self._add_record(file, self._spelt(entry))
                count += self._add_lines(file, entry.run, lines.get(entry.run, ()))
            for content in contents:
                names = [self._name(name) for name in content.get("same", content.get("joined", ()))]
                known = self._declared if "joined" in content else self._same
                if names and names[1] not in known.get(names[0], {names[0]}):
                    self._append(file, [{name: value for name, value in content.items() if name != "chain"}])
        return count

    def _add_record(self, file: FileIO, entry: RunRecord) -> None:
        """Write a run down, or the clients and the evidence of it that the account lacks."""
        known = self._runs.get(entry.run)
        if known is not None:
            before, evidence = known[0], dict(zip(entry.holders, entry.evidence, strict=True))
            each = zip(before.holders, before.evidence, strict=True)
            whole = replace(before, evidence=tuple(own or evidence.get(client, own) for client, own in each))
            entry = _with_clients(whole, entry)
        if known is None or entry != known[0]:
            self._append(file, [*self._evidence_lines(entry), line_of(entry)])


def _check_name(holder: str) -> None:
    must = "be a name: at most 100 characters, no path, markup or control character"
    require(is_name(folded(holder)), "HOLDER", must, holder)


def _with_clients(entry: RunRecord, other: RunRecord) -> RunRecord:
    """Return an entry with the clients that only the other one has, too."""
    new = [place for place, client in enumerate(other.holders) if client not in entry.holders]
    joined: dict[str, Any] = {
        name: (*getattr(entry, name), *(getattr(other, name)[place] for place in new))
        for name in ("delta", "planned", "evidence", "rows", "filters")
    }
    named = list(other.holders.items())
    return replace(entry, holders={**entry.holders, **dict(named[place] for place in new)}, **joined)
