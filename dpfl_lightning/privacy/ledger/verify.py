"""Verify ledgers, and compute every epsilon again from them alone."""

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning.config.options import MOST_ROWS
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.accounting.accountant import Accountant, get_accountant
from dpfl_lightning.privacy.accounting.events import Caveat, Release, noised_steps
from dpfl_lightning.privacy.accounting.guarantee import FILTER, Guarantee, guarantee
from dpfl_lightning.privacy.ledger.file import Charge, Header, Verified, head_file, verify
from dpfl_lightning.privacy.sampling import SAMPLERS, weakest

ANYBODY = "any client"


@dataclasses.dataclass(frozen=True)
class Account:
    """Releases of one client by purpose, and their noised steps; inf means no guarantee, or no budget.

    `guaranteed` is above `epsilon`, which was paid, if the end of the run follows from its results: the epsilon of all
    that was planned.
    """

    client: str
    releases: dict[str, int]
    steps: int
    epsilon: float
    guaranteed: float
    epsilon_budget: float
    delta: float


@dataclasses.dataclass(frozen=True)
class VerifiedLedger:
    """A verified ledger with the events and the releases by purpose of each client."""

    path: Path
    verified: Verified
    events: tuple[tuple[Release, ...], ...]
    releases: tuple[Counter[str], ...]


@dataclasses.dataclass(frozen=True)
class Composed:
    """Ledgers, their combined header, and each client's account, events, and guaranteed epsilon with its method.

    `matched` says how clients of several ledgers were recognised: "name" or "nothing", see `read`.
    """

    ledgers: tuple[VerifiedLedger, ...]
    header: Header
    matched: str
    accounts: tuple[Account, ...]
    events: tuple[tuple[Release, ...], ...]
    bounds: tuple[tuple[float, str], ...]

    @property
    def weakest(self) -> Guarantee:
        """The guarantee with the largest epsilon."""
        return self._promise(max(range(len(self.accounts)), key=lambda row: self.accounts[row].guaranteed))

    def guarantees(self) -> list[Guarantee]:
        """Return the guarantee of each account."""
        return [self._promise(row) for row in range(len(self.accounts))]

    def _promise(self, row: int) -> Guarantee:
        accountant = get_accountant(self.header.accountant, self.header.adjacency)
        events, account = self.events[row], self.accounts[row]
        caveats, sampling = map(Caveat, self.header.caveats), SAMPLERS[self.header.sampling].words
        stated = [one.verified.header.identity.get("privacy.rows_per_person") for one in self.ledgers]
        most = max((one for one in stated if type(one) is int and 1 <= one <= MOST_ROWS), default=None)
        return guarantee([*events, *caveats], account.delta, accountant, sampling, (), self.bounds[row], most)


@dataclasses.dataclass(frozen=True)
class _Row:
    """A client before its epsilon is known; its budget is that of its only ledger. `guaranteed` are events, too."""

    client: str
    events: tuple[Release, ...]
    guaranteed: tuple[Release, ...]
    releases: Counter[str]
    delta: float
    budget: float

    @property
    def steps(self) -> int:
        return noised_steps(self.events)

    def __add__(self, other: "_Row") -> "_Row":
        releases, delta = self.releases + other.releases, max(self.delta, other.delta)
        events, guaranteed = self.events + other.events, self.guaranteed + other.guaranteed
        return _Row(self.client, events, guaranteed, releases, delta, math.inf)


def ledger_of(folder: str | Path) -> Path:
    """Return the ledger in a run's folder, or the file itself. Raises UserError if there is no such file."""
    path = Path(folder) / "ledger.jsonl" if Path(folder).is_dir() else Path(folder)
    if not path.is_file():
        runs = sorted(str(one.parent) for one in Path(folder).rglob("ledger.jsonl"))
        advice = f"Name the folders of its runs: {', '.join(runs)}." if runs else "For example runs/digits."
        require(False, "RUN", "be a ledger, or the folder of a run", str(folder), advice)
    return path


def read(
    paths: Sequence[Path],
    accountant: str | None = None,
    delta: float | None = None,
    one_population: bool = False,
    most_combinations: int = 10_000,
) -> Composed:
    """Verify ledgers and compose the events of each client in them. It only reads: a run may be writing one of them.

    Clients of several ledgers are the same if they have the same name. If not all ledgers name their clients, anybody
    may be in all of them under any number: one account then holds the worst combination, unless the caller knows that
    all runs divided `one_population` in the same way; there may be `most_combinations`. `accountant` and `delta` (of
    every client, in (0, 1)) replace those of the headers; otherwise a client's largest delta counts.
    Raises UserError if a ledger and its head disagree.
    """
    require(delta is None or 0 < delta < 1, "--delta", "be in (0, 1)", delta, "It is usually below 1 / records.")
    ledgers = tuple(map(_verified, paths))
    header = _together([ledger.verified.header for ledger in ledgers], accountant)
    matched, rows = _rows(ledgers, one_population, most_combinations)
    if delta is not None:
        rows = [dataclasses.replace(row, delta=delta) for row in rows]
    try:
        bounds = _bounds(
            [*((row.events, row.delta) for row in rows), *((row.guaranteed, row.delta) for row in rows)],
            get_accountant(header.accountant, header.adjacency),
        )
    except UserError as error:
        if accountant is not None or delta is not None or len(paths) > 1:
            raise
        raise UserError(f"`{paths[0]}` must hold events that can be composed, got an error: {error}") from None
    paid, planned = bounds[: len(rows)], bounds[len(rows) :]
    known = [
        (row, spent[0], (whole[0], f"{whole[1]}, {FILTER}") if whole[0] > spent[0] else spent)
        for row, spent, whole in zip(rows, paid, planned, strict=True)
    ]
    if matched == "nothing":
        known = [max(known, key=lambda one: one[2][0])]
    accounts = tuple(
        Account(row.client, dict(row.releases), row.steps, epsilon, bound[0], row.budget, row.delta)
        for row, epsilon, bound in known
    )
    events, stated = tuple(row.events for row, _, _ in known), tuple(bound for _, _, bound in known)
    return Composed(ledgers, header, matched, accounts, events, stated)


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


def _rows(ledgers: Sequence[VerifiedLedger], one_population: bool, most: int) -> tuple[str, list[_Row]]:
    """Return how clients were recognised, and a row for each; of unknown ones, a row for each combination."""
    each = [_rows_of(ledger) for ledger in ledgers]
    if len(ledgers) == 1:
        return "name", each[0]
    identities = [ledger.verified.header.identity for ledger in ledgers]
    same = one_population and len({tuple(row.client for row in rows) for rows in each}) == 1
    if same or all(identity.get("names") for identity in identities):
        return "name", _joined(each)
    different = [list({(row.events, row.guaranteed, row.delta): row for row in rows}.values()) for rows in each]
    count, advice = math.prod(map(len, different)), "Give the clients names in their data."
    require(count <= most, "RUN", "be runs whose clients have names", f"{count} combinations", advice)
    rows = [sum(rest, start=first) for first, *rest in itertools.product(*different)]
    return "nothing", [dataclasses.replace(row, client=ANYBODY) for row in rows]


def _rows_of(ledger: VerifiedLedger) -> list[_Row]:
    header = ledger.verified.header
    columns = (ledger.events, header.planned or ledger.events, ledger.releases, header.delta, header.epsilon)
    return [_Row(header.name_of(client), *values) for client, values in enumerate(zip(*columns, strict=True))]


def _joined(each: Sequence[Sequence[_Row]]) -> list[_Row]:
    """Add up the rows of the same client."""
    known: dict[str, _Row] = {}
    for row in itertools.chain(*each):
        known[row.client] = known[row.client] + row if row.client in known else row
    return list(known.values())


def _bounds(keys: Sequence[tuple[tuple[Release, ...], float]], accountant: Accountant) -> list[tuple[float, str]]:
    """Return epsilon and method of each (events, delta)."""
    different, size = list(dict.fromkeys(keys)), accountant.chunk_size
    queries = [(list(events), delta) for events, delta in different]
    chunks = [accountant.estimates(queries[start : start + size]) for start in range(0, len(queries), size)]
    known = dict(zip(different, itertools.chain(*chunks), strict=True))
    return [known[key] for key in keys]


def _together(headers: Sequence[Header], accountant: str | None) -> Header:
    """Combine the headers of all ledgers; the accountant is `accountant` or the one that all have."""
    first = headers[0]
    require(len({header.run for header in headers}) == len(headers), "RUN", "name each run once", first.run)
    relations = ", ".join(dict.fromkeys(header.adjacency for header in headers))
    require(relations == first.adjacency, "RUN", "be runs with the same adjacency", relations)
    accountants = list(dict.fromkeys(header.accountant for header in headers))
    must = "be given for runs with several accountants"
    require(accountant is not None or len(accountants) == 1, "--accountant", must, ", ".join(accountants))
    return dataclasses.replace(
        first,
        accountant=first.accountant if accountant is None else accountant,
        sampling=weakest(header.sampling for header in headers),
        caveats=tuple(dict.fromkeys(words for header in headers for words in header.caveats)),
    )
