"""`dpfl plan --ledger FILE...`: verify ledgers, and compute every epsilon again from them alone."""

import argparse
import contextlib
import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_lightning.config.command_line import CommandParser
from dpfl_lightning.config.reading import read_text
from dpfl_lightning.config.yaml_text import parse_yaml
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.accounting.accountant import (
    PURE,
    Accountant,
    Rdp,
    finite_or_none,
    get_accountant,
    rounded_up,
)
from dpfl_lightning.privacy.accounting.events import Caveat, Event, NoisedEvent, composed
from dpfl_lightning.privacy.accounting.guarantee import Guarantee, guarantee
from dpfl_lightning.privacy.ledger import signatures
from dpfl_lightning.privacy.ledger.export import ABOUT, as_dp_event
from dpfl_lightning.privacy.ledger.file import Charge, Header, Verified, head_file, verify
from dpfl_lightning.privacy.ledger.results import (
    RESULTS,
    Account,
    Evidence,
    check_finished,
    check_results,
    heads_of,
    results_of,
)
from dpfl_lightning.privacy.sampling import SAMPLINGS
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.runtime.text import at_most, columns, shown

_TOGETHER = (
    "Together: client 3 of one run is assumed to be client 3 of the others, with the same records. Its releases in all "
    "runs are composed, at its largest delta."
)


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow `plan`."""
    options = _parse(argv)
    try:
        paths = [ledger_of(folder) for folder in options.ledger]
        report = read(paths, options.accountant, options.delta, options.public_keys)
        if options.export is not None:
            report.export(Path(options.export))
    except (UserError, OSError) as problem:
        error = problem
        if isinstance(problem, OSError):
            name, must = problem.filename or options.ledger[0], "be a file that can be read, or written for --export"
            error = UserError(f"`{name}` must {must}, got {problem.strerror}. Check its name and its rights.")
        if options.json:
            print(json.dumps({"ledgers": options.ledger, "verified": False, "error": str(error)}))
        raise error from None
    print(json.dumps(report.as_dict()) if options.json else shown(report.text()))
    return 0


def ledger_of(folder: str | Path) -> Path:
    """Return the ledger in a run's folder, or the file itself. Raises UserError if there is no such file."""
    path = Path(folder)
    path = path / "ledger.jsonl" if path.is_dir() else path
    require(path.is_file(), "--ledger", "be a ledger, or the folder of a run", str(path), "For example runs/digits.")
    return path


@dataclasses.dataclass(frozen=True)
class VerifiedLedger:
    """A verified ledger with its clients' events, and what was found beside it.

    `results` are the files of a finished run, `signed` the head that clients signed, and `proven` those of
    them whose signatures a public key proved.
    """

    path: Path
    verified: Verified
    events: Mapping[int, Sequence[Event]]
    releases: Mapping[int, Counter[str]]
    last_round: int
    results: Mapping[str, dict[str, Any]]
    signed: signatures.Signed | None
    proven: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LedgerReport:
    """Verified and composed ledgers: account and events of each client, and the guarantee with the largest epsilon."""

    ledgers: tuple[VerifiedLedger, ...]
    accountant: str
    overrides: dict[str, Any]  # options that replace those of the headers
    accounts: tuple[Account, ...]
    events: tuple[Sequence[Event], ...]
    weakest: Guarantee

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON; an infinite epsilon or budget is None."""
        rows = [{"client": client, **vars(account)} for client, account in enumerate(self.accounts)]
        for row in rows:
            row |= {key: finite_or_none(row[key]) for key in ("epsilon", "epsilon_budget")}
        return {
            "verified": True,
            "ledgers": [
                {
                    "ledger": str(one.path),
                    **one.verified.end.as_dict(),
                    "head_lines": one.verified.head.lines,
                    "torn_bytes": one.verified.torn,
                    "adjacency": one.verified.header.adjacency,
                    "sampling": one.verified.header.sampling,
                    "caveats": list(one.verified.header.caveats),
                    "compared_with": list(one.results),
                    "signed_by": [] if one.signed is None else list(one.signed.signatures),
                    "signed_lines": 0 if one.signed is None else one.signed.head.lines,
                    "signatures_verified": list(one.proven),
                }
                for one in self.ledgers
            ],
            "accountant": self.accountant,
            "overrides": self.overrides,
            "guarantee": self.weakest.as_dict(),
            "clients": rows,
        }

    def guarantees(self) -> list[Guarantee]:
        """Return the guarantee of each client of one ledger, without overrides."""
        header = self.ledgers[0].verified.header
        accountant, known = get_accountant(header.accountant, header.adjacency), {}
        for events, account in zip(self.events, self.accounts, strict=True):
            if (id(events), account.delta) not in known:  # clients with equal events share them
                known[id(events), account.delta] = _promise(events, account.delta, account.epsilon, accountant, header)
        return [known[id(events), account.delta] for events, account in zip(self.events, self.accounts, strict=True)]

    def export(self, path: Path) -> None:
        """Write every client's events for dp_accounting to a new file."""
        free = not path.exists() and not path.is_symlink() and path.parent.is_dir()
        require(free, "--export", "be a new file in an existing folder", str(path), "Choose another name.")
        adjacency, rows = self.ledgers[0].verified.header.adjacency, []
        for client, (account, events) in enumerate(zip(self.accounts, self.events, strict=True)):
            relation, event = as_dp_event(events, account.delta, adjacency)
            numbers = {"epsilon": finite_or_none(account.epsilon), "delta": account.delta}
            rows.append({"client": client, **numbers, "neighboring_relation": relation, "event": event})
        facts = {"adjacency": adjacency, "accountant": self.accountant, "ledgers": self.as_dict()["ledgers"]}
        content = {"about": ABOUT, **facts, "clients": rows}
        write_text(path, json.dumps(content, indent=1) + "\n")

    def text(self) -> str:
        """Return what was verified, a row for each client, and the weakest guarantee."""
        head = ["client", "releases", "steps", "epsilon", "budget", "delta"]
        name_of = self.ledgers[0].verified.header.name_of
        rows = [
            [
                name_of(client),
                ", ".join(f"{count} {purpose}" for purpose, count in account.releases.items()) or "none",
                account.steps,
                at_most(account.epsilon),
                "none" if math.isinf(account.epsilon_budget) else at_most(account.epsilon_budget),
                at_most(account.delta),
            ]
            for client, account in enumerate(self.accounts)
        ]
        over = [
            name_of(client) for client, account in enumerate(self.accounts) if account.epsilon > account.epsilon_budget
        ]
        lines = [line for ledger in self.ledgers for line in _what_was_verified(ledger)]
        lines += [_TOGETHER] if len(self.ledgers) > 1 else []
        lines += [f"Instead of the ledger's {name}: {value}." for name, value in self.overrides.items()]
        lines.append(columns([head, *rows]))
        lines += [f"Above its budget: client {', '.join(over)}."] if over else []
        return "\n".join([*lines, f"Largest epsilon: {self.weakest.words()}"])


def read(
    paths: Sequence[Path],
    accountant: str | None = None,
    delta: float | None = None,
    public_keys: str | Path | None = None,
) -> LedgerReport:
    """Verify ledgers and compose their events together. It only reads, so a run may be writing one of them.

    The runs are those of the same clients, with the same records, which a ledger cannot show. `accountant` and `delta`
    (of every client, in (0, 1)) replace those of the headers; otherwise the largest delta of a client counts. The
    clients with a key in the folder `public_keys` must have signed every ledger. Raises UserError if a ledger, its
    head, its signatures or the results beside it disagree.
    """
    require(delta is None or 0 < delta < 1, "--delta", "be in (0, 1)", delta, "It is usually below 1 / records.")
    ledgers = [_verified(path, public_keys) for path in paths]
    try:
        report = _composed(ledgers, accountant, delta)
    except UserError as error:
        if accountant is not None or delta is not None or len(paths) > 1:
            raise
        raise UserError(f"`{paths[0]}` must hold events that can be composed, got an error: {error}") from None
    for ledger in ledgers:
        if ledger.results:
            alone = report if len(ledgers) == 1 and not report.overrides else _composed([ledger])
            facts = (ledger.verified.header, ledger.last_round, alone.accounts, alone.events, alone.guarantees())
            check_results(ledger.path, ledger.results, Evidence(*facts))
    return report


def _verified(path: Path, public_keys: str | Path | None) -> VerifiedLedger:
    """Verify one ledger against everything that lies beside it, without composing its events."""
    kinds: dict[Event, Event] = {}  # one object for equal events: most are equal
    events: defaultdict[int, list[Event]] = defaultdict(list)
    releases: defaultdict[int, Counter[str]] = defaultdict(Counter)
    last_round = 0

    def take(charge: Charge) -> None:
        nonlocal last_round
        last_round = max(last_round, charge.round)
        events[charge.client].append(kinds.setdefault(charge.event, charge.event))
        releases[charge.client][charge.purpose] += 1

    for file in (path, head_file(path), signatures.signature_file(path), *(path.with_name(name) for name in RESULTS)):
        must, advice = "be a file in the run's folder", "Name the folder that holds the files of the run."
        require(not file.is_symlink(), str(file), must, f"a link to {file.resolve()}", advice)
        require(file.is_file() or not file.exists(), str(file), must, "a folder or a device", advice)
    results, signed = results_of(path), signatures.read_signatures(path)
    known = {**heads_of(path, results), **signatures.signed_head(path, signed)}
    verified = verify(path, take, known)
    clients = len(verified.header.delta)
    keys = {} if public_keys is None else signatures.public_keys(Path(public_keys), clients)
    signatures.check(path, signed, keys, verified)
    if results:
        check_finished(path, {**known, "`ledger.head`": verified.head}, verified)
    return VerifiedLedger(path, verified, events, releases, last_round, results, signed, tuple(keys))


def _composed(
    ledgers: Sequence[VerifiedLedger], accountant: str | None = None, delta: float | None = None
) -> LedgerReport:
    """Compose the events of verified ledgers."""
    kinds: dict[Event, int] = {}  # distinct events, numbered, because most clients' events are equal
    events: defaultdict[int, list[int]] = defaultdict(list)  # client -> numbers of its events
    releases: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for ledger in ledgers:
        for client, known in ledger.events.items():
            events[client] += [kinds.setdefault(event, len(kinds)) for event in known]
            releases[client].update(ledger.releases[client])
    header, known_events = _together([ledger.verified.header for ledger in ledgers], accountant), list(kinds)
    chosen = get_accountant(header.accountant, header.adjacency)
    deltas = header.delta if delta is None else (delta,) * len(header.delta)
    keys = [(tuple(events[client]), client_delta) for client, client_delta in enumerate(deltas)]
    queries = {key: ([known_events[number] for number in key[0]], key[1]) for key in dict.fromkeys(keys)}
    values, size = list(queries.values()), chosen.chunk_size
    chunks = [chosen.search(values[start : start + size]) for start in range(0, len(values), size)]
    epsilons = dict(zip(queries, np.concatenate(chunks).tolist(), strict=True))
    steps = {key: sum(event.steps for event in queries[key][0] if isinstance(event, NoisedEvent)) for key in queries}
    weakest = max(epsilons, key=lambda key: epsilons[key])
    return LedgerReport(
        tuple(ledgers),
        chosen.name,
        {name: value for name, value in (("accountant", accountant), ("delta", delta)) if value is not None},
        tuple(
            Account(dict(releases[client]), steps[key], epsilons[key], header.epsilon[client], key[1])
            for client, key in enumerate(keys)
        ),
        tuple(queries[key][0] for key in keys),
        _promise(*queries[weakest], epsilons[weakest], chosen, header),
    )


def _together(headers: Sequence[Header], accountant: str | None) -> Header:
    """Combine the headers of all ledgers; the accountant is `accountant` or the one that all have."""
    first = headers[0]
    require(len({header.run for header in headers}) == len(headers), "--ledger", "name each run once", first.run)
    for name, value_of in (("clients", lambda h: len(h.delta)), ("adjacency", lambda h: h.adjacency)):
        values = {value_of(header): None for header in headers}
        require(len(values) == 1, "--ledger", f"be of runs with the same {name}", ", ".join(map(str, values)))
    accountants = list(dict.fromkeys(header.accountant for header in headers))
    must = "be given for runs with several accountants"
    require(accountant is not None or len(accountants) == 1, "--accountant", must, ", ".join(accountants))
    first = dataclasses.replace(first, accountant=first.accountant if accountant is None else accountant)
    if len(headers) == 1:
        return first
    return dataclasses.replace(
        first,
        # Poisson samples and shuffled batches together are proven no better than shuffled batches
        sampling=next((header.sampling for header in headers if header.sampling != "poisson"), first.sampling),
        delta=tuple(map(max, *(header.delta for header in headers))),
        epsilon=(math.inf,) * len(first.epsilon),
        caveats=tuple(dict.fromkeys(words for header in headers for words in header.caveats)),
    )


def _promise(
    events: Sequence[Event], delta: float, epsilon: float, accountant: Accountant, header: Header
) -> Guarantee:
    """Return the guarantee of events with known epsilon. For RDP, `bound` is avoided because it would import torch."""
    if type(accountant) is Rdp:
        pure = rounded_up(composed(events, delta).pure(accountant.sensitivity), 6)
        method = PURE if 0 < pure == epsilon < math.inf else accountant.description
    else:
        method = accountant.bound(events, delta)[1]
    return _guarantee(events, delta, accountant, header, (epsilon, method))


def _guarantee(
    events: Sequence[Event], delta: float, accountant: Accountant, header: Header, bound: tuple[float, str]
) -> Guarantee:
    caveats = map(Caveat, header.caveats)
    return guarantee([*events, *caveats], delta, accountant, SAMPLINGS[header.sampling], bound=bound)


def _what_was_verified(ledger: VerifiedLedger) -> list[str]:
    verified, head_name = ledger.verified, head_file(ledger.path).name
    end = verified.end
    if missing := end.lines - verified.head.lines:
        end_message = f"It agrees with {head_name}, which counts {missing} less: a charge in progress, or a crash."
    else:
        end_message = f"Its end agrees with {head_name}: no line was cut off."
    torn_message = (
        f"The last {verified.torn} bytes are an incomplete line: it is being written, or a crash interrupted it. "
        "Its charge never completed, so nothing was released for it."
    )
    results = "There is no result.json in its folder: the run has not finished, or this is a copy of its ledger."
    if ledger.results:
        results = (
            f"{' and '.join(ledger.results)} in its folder state its end, and the "
            "budgets, deltas, epsilons, numbers of releases and guarantees that follow from it."
        )
    if ledger.signed and ledger.proven:
        unsigned = end.lines - ledger.signed.head.lines
        which = f"first {ledger.signed.head.lines} lines were" if unsigned else "end was"
        signed = f"Its {which} signed by the holders of the keys of client {', '.join(map(str, ledger.proven))}."
        if unsigned:
            signed += (
                f" The last {unsigned} are unsigned: a charge in progress, a crash, or lines that somebody appended."
            )
    else:
        whether = "No client signed it" if not ledger.signed else "Its signatures were not verified (--public_keys)"
        signed = (
            f"{whether}: nobody would notice if the ledger and all files in its folder were rewritten together. "
            f"{_kept_elsewhere(ledger.path, end.chain)}"
        )
    return [
        f"{ledger.path}: {end.lines} lines, run {end.run}. The chain is intact: no line was changed or removed.",
        end_message,
        *([torn_message] if verified.torn else []),
        results,
        signed,
    ]


def _kept_elsewhere(path: Path, chain: str) -> str:
    """Return where the head of a ledger is, or should be, kept outside of the run's folder."""
    file = path.with_name("options.yaml")
    with contextlib.suppress(UserError):  # nothing follows from a file that cannot be read
        options = parse_yaml(read_text(file), str(file))
        if isinstance(options, dict) and options.get("tracking") is not None:
            return f"Compare this head's chain, {chain}, with the one in MLflow (tag `ledger_head`)."
    return f"Keep a copy of this head elsewhere. Its chain is {chain}."


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        "plan",
        "Verify ledgers and what lies beside them, and compute every client's epsilon again from the "
        "events alone. The exit status is 2 if anything disagrees. Nothing is written, except for --export.",
        "--ledger FILE [FILE ...] [FLAGS]",
        ("--ledger runs/digits", "--ledger runs/digits --accountant rdp --json"),
    )
    ledger_help = "ledger.jsonl of a run, or the run's folder; several runs of the same clients are composed"
    parser.add_argument("--ledger", metavar="FILE", nargs="+", required=True, help=ledger_help)
    parser.add_argument("--accountant", help="use this accountant instead of the run's (pld is tight)")
    parser.add_argument("--delta", type=float, help="delta of every client, in (0, 1), instead of the run's")
    keys_help = "folder with public keys client-<number>.pem (Ed25519): these clients must have signed the ledger"
    parser.add_argument("--public_keys", metavar="FOLDER", help=keys_help)
    export_help = "also write every client's events for the library dp_accounting, which composes them independently"
    parser.add_argument("--export", metavar="FILE", help=export_help)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    options, rest = parser.parse_known_args(argv)
    if rest:
        key = rest[0].removeprefix("--").partition("=")[0]
        known = "accountant, delta, public_keys, export or json"
        raise UserError(f"`{key}` must be an option of --ledger ({known}), got an unknown one.")
    return options
