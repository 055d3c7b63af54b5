"""Verify ledgers, and compute every epsilon again from them alone."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning.config.names import folded
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.accounting.events import Caveat, Release
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.privacy.compose import Keys, Line, Total, compose
from dpfl_lightning.privacy.ledger.file import Charge, Verified, head_file, verify


@dataclasses.dataclass(frozen=True)
class VerifiedLedger:
    """A verified ledger with the events and the releases by purpose of each client."""

    path: Path
    verified: Verified
    events: tuple[tuple[Release, ...], ...]
    releases: tuple[Counter[str], ...]


@dataclasses.dataclass(frozen=True)
class Composed:
    """Ledgers, and what all releases of each client in them cost together.

    `paid` is what was charged. `guaranteed` is above it if the end or the noise of a run follows from its results: then
    it is the cost of all that was planned, or of the whole budget. `matched` says how clients were recognised: by
    "name", or by "nothing".
    """

    ledgers: tuple[VerifiedLedger, ...]
    matched: str
    paid: tuple[Total, ...]
    guaranteed: tuple[Total, ...]

    @property
    def weakest(self) -> Guarantee:
        """The guarantee with the largest epsilon."""
        return max(self.guaranteed, key=lambda total: total.epsilon).guarantee

    def releases(self, total: Total) -> Counter[str]:
        """Return the number of releases by purpose."""
        of_run = {one.verified.header.run: one.releases for one in self.ledgers}
        return sum((of_run[line.run][line.client] for line in total.lines), Counter[str]())


def ledger_of(folder: str | Path) -> Path:
    """Return the ledger in a run's folder, or the file itself. Raises UserError if there is no such file."""
    path = Path(folder) / "ledger.jsonl" if Path(folder).is_dir() else Path(folder)
    if not path.is_file():
        runs = sorted(str(one.parent) for one in Path(folder).rglob("ledger.jsonl"))
        advice = f"Name the folders of its runs: {', '.join(runs)}." if runs else "For example runs/digits."
        require(False, "RUN", "be a ledger, or the folder of a run", str(folder), advice)
    return path


def read(
    paths: Sequence[Path], accountant: str | None = None, delta: float | None = None, one_population: bool = False
) -> Composed:
    """Verify ledgers and compose the releases of each client. It only reads: a run may be writing one of them.

    Clients of several ledgers are the same if they have the same name. Those without names may be anybody under any
    number, unless the caller knows that all runs divided `one_population` in the same way. `accountant` and `delta` (of
    every client, in (0, 1)) replace those of the ledgers, see `compose`. Raises UserError if a ledger and its head
    disagree.
    """
    require(delta is None or 0 < delta < 1, "--delta", "be in (0, 1)", delta, "It is usually below 1 / records.")
    ledgers = tuple(map(_verified, paths))
    headers = [ledger.verified.header for ledger in ledgers]
    require(len({header.run for header in headers}) == len(headers), "RUN", "name each run once", headers[0].run)
    every = {tuple(map(header.name_of, range(len(header.delta)))) for header in headers}
    numbers = len(ledgers) == 1 or (one_population and len(every) == 1)
    written = dict[str, str]()  # name as it is compared -> as it is written first
    try:
        lines = [line for ledger in ledgers for line in _lines(ledger, numbers, written)]
        guaranteed = compose(lines, delta, accountant)
        paid = guaranteed
        if any(line.planned or line.filter for line in lines):
            paid = compose([dataclasses.replace(line, planned=None, filter=None) for line in lines], delta, accountant)
    except UserError as error:
        if accountant is not None or delta is not None or len(paths) > 1:
            raise
        raise UserError(f"`{paths[0]}` must hold events that can be composed, got an error: {error}") from None
    matched = "name" if all(line.keys for line in lines) else "nothing"
    return Composed(ledgers, matched, tuple(paid.values()), tuple(guaranteed.values()))


def _verified(path: Path) -> VerifiedLedger:
    kinds: dict[Release, Release] = {}  # one object for equal events: most are equal
    events: defaultdict[int, list[Release]] = defaultdict(list)
    releases: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def take(charge: Charge) -> None:
        events[charge.client].append(kinds.setdefault(charge.event, charge.event))
        releases[charge.client][charge.purpose] += 1

    for file in (path, head_file(path)):
        must, advice = "be a file in the run's folder", "Name the folder that holds the files of the run."
        require(not file.is_symlink(), str(file), must, f"a link to {file.resolve()}", advice)
        require(file.is_file() or not file.exists(), str(file), must, "a folder or a device", advice)
    verified = verify(path, take)
    clients = range(len(verified.header.delta))
    paid, counts = tuple(tuple(events[one]) for one in clients), tuple(releases[one] for one in clients)
    return VerifiedLedger(path, verified, paid, counts)


def _lines(ledger: VerifiedLedger, numbers: bool, written: dict[str, str]) -> list[Line]:
    """Return what each client of a ledger has released. Its name is its key, or its number, if these are known.

    Names are compared as in an account; `written` has those of earlier ledgers.
    """
    header = ledger.verified.header
    known, plans = numbers or bool(header.identity.get("names")), header.planned or (None,) * len(ledger.events)
    filters, names = header.filters, map(header.name_of, range(len(header.delta)))
    caveats = tuple(map(Caveat, header.caveats))
    adjacency, unit = header.relation
    return [
        Line(
            run=header.run,
            client=client,
            keys=Keys([written.setdefault(folded(name), name)] if known else []),
            released=(*events, *caveats),
            delta=header.delta[client],
            adjacency=adjacency,
            sampling=header.sampling,
            accountant=header.accountant,
            budget=header.epsilon[client],
            planned=plans[client],
            filter=(bound,) if events and (bound := filters[client]) else None,
            unit=unit,
        )
        for client, (events, name) in enumerate(zip(ledger.events, names, strict=True))
    ]
