"""`python -m dpfl_lightning.plan --ledger FILE...`: verify ledgers, and compose every epsilon again from them alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.accounting.accountant import (
    PURE,
    Accountant,
    Rdp,
    finite_or_none,
    get_accountant,
    rounded_up,
)
from dpfl_lightning.privacy.accounting.accountant import epsilon_text as epsilon
from dpfl_lightning.privacy.accounting.composition import composed
from dpfl_lightning.privacy.accounting.events import Caveat, Event, NoisedEvent
from dpfl_lightning.privacy.accounting.guarantee import Guarantee, guarantee
from dpfl_lightning.privacy.ledger.file import Charge, Header, Verified, head_file, verify
from dpfl_lightning.privacy.sampling import SAMPLINGS
from dpfl_lightning.runtime.text import columns

_TOGETHER = (
    "Together: client 3 of one run is taken for client 3 of the others, with the same records, and what it released in "
    "all of them is composed. At a client's largest delta."
)


def main(words: Sequence[str]) -> int:
    """The command, of the words that follow `plan`."""
    options = _parse(words)
    try:
        report = read([ledger_of(one) for one in options.ledger], options.accountant, options.delta)
    except UserError as error:
        if options.json:
            print(json.dumps({"ledgers": options.ledger, "verified": False, "error": str(error)}))
        raise
    print(report.text())
    if options.json:
        print(json.dumps(report.as_dict()))
    return 0


def ledger_of(folder: str | Path) -> Path:
    """The ledger of a run's folder, or the file itself.

    Raises:
        UserError: there is none.
    """
    path = Path(folder)
    path = path / "ledger.jsonl" if path.is_dir() else path
    require(path.is_file(), "--ledger", "be a ledger, or the folder of a run", str(path), "For example runs/digits.")
    return path


@dataclasses.dataclass(frozen=True)
class Account:
    """What one client has released.

    Args:
        releases: purpose -> how many.
        steps: noised steps of all of them.
        epsilon: of all of them, composed again; inf is no guarantee.
        budget: what it was to stay within; inf is none. Several runs together have none.
    """

    releases: dict[str, int]
    steps: int
    epsilon: float
    delta: float
    budget: float

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON: None where epsilon is infinite, or there is no budget."""
        return {
            "releases": self.releases,
            "steps": self.steps,
            "epsilon": finite_or_none(self.epsilon),
            "epsilon_budget": finite_or_none(self.budget),
            "delta": self.delta,
        }


@dataclasses.dataclass(frozen=True)
class LedgerReport:
    """Verified ledgers, composed.

    Args:
        ledgers: the files, and what was found in each.
        accountant: that composed them.
        overrides: what was asked for in place of the headers'.
        accounts: of each client.
        weakest: the guarantee with the largest epsilon.
    """

    ledgers: tuple[tuple[Path, Verified], ...]
    accountant: str
    overrides: dict[str, Any]
    accounts: tuple[Account, ...]
    weakest: Guarantee

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        rows = [{"client": client, **own.as_dict()} for client, own in enumerate(self.accounts)]
        return {
            "verified": True,
            "ledgers": [_as_dict(path, verified) for path, verified in self.ledgers],
            "accountant": self.accountant,
            "overrides": self.overrides,
            "guarantee": self.weakest.as_dict(),
            "clients": rows,
        }

    def text(self) -> str:
        """For a person: what was verified, a row for each client, the weakest guarantee."""
        head = ["client", "releases", "steps", "epsilon", "budget", "delta"]
        rows = [
            [
                client,
                ", ".join(f"{count} {purpose}" for purpose, count in own.releases.items()) or "none",
                own.steps,
                epsilon(own.epsilon),
                "none" if math.isinf(own.budget) else f"{own.budget:g}",
                f"{own.delta:g}",
            ]
            for client, own in enumerate(self.accounts)
        ]
        over = [str(client) for client, own in enumerate(self.accounts) if own.epsilon > own.budget]
        return "\n".join(
            [
                *(line for one in self.ledgers for line in _what_was_verified(*one)),
                *([_TOGETHER] if len(self.ledgers) > 1 else []),
                *(f"In place of the ledger's own {name}: {value}." for name, value in self.overrides.items()),
                columns([head, *rows]),
                *([f"Above its budget: client {', '.join(over)}."] if over else []),
                f"Largest epsilon: {self.weakest.words()}",
            ]
        )


def read(paths: Sequence[Path], accountant: str | None = None, delta: float | None = None) -> LedgerReport:
    """Verify ledgers and compose their events again, all in one; reads only, so a run may be writing one of them.

    Args:
        paths: of different runs of the same clients: client 3 of one must be client 3 of the others, with the same
            records, which no ledger can show.
        accountant: instead of the headers'.
        delta: of every client instead of the headers' (the largest of a client's), in (0, 1).

    **Privacy** Arithmetic on public facts.

    Raises:
        UserError: a ledger was changed, the accountant cannot compose the events, or runs that do not go together.
    """
    require(delta is None or 0 < delta < 1, "--delta", "be in (0, 1)", delta, "Usual is below 1 / records.")
    kinds: dict[Event, int] = {}
    events: defaultdict[int, list[int]] = defaultdict(list)  # client -> numbers of its events: most clients' are equal
    releases: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def take(charge: Charge) -> None:
        events[charge.client].append(kinds.setdefault(charge.event, len(kinds)))
        releases[charge.client][charge.purpose] += 1

    ledgers = tuple((path, verify(path, take)) for path in paths)
    header, known = _together([verified.header for _, verified in ledgers], accountant), list(kinds)
    judge = get_accountant(header.accountant, header.adjacency)
    deltas = header.delta if delta is None else (delta,) * len(header.delta)
    keys = [(tuple(events[client]), own) for client, own in enumerate(deltas)]
    queries = {key: ([known[number] for number in key[0]], key[1]) for key in dict.fromkeys(keys)}
    found = dict(zip(queries, _epsilons(list(queries.values()), judge), strict=True))
    steps = {key: sum(_steps(event) for event in queries[key][0]) for key in queries}
    weakest = max(found, key=lambda key: found[key])
    return LedgerReport(
        ledgers,
        judge.name,
        {name: value for name, value in (("accountant", accountant), ("delta", delta)) if value is not None},
        tuple(
            Account(dict(releases[client]), steps[key], found[key], key[1], header.epsilon[client])
            for client, key in enumerate(keys)
        ),
        _promise(*queries[weakest], found[weakest], judge, header),
    )


def _together(headers: Sequence[Header], accountant: str | None) -> Header:
    """What the charges of all ledgers mean together, composed by `accountant` or by the one that all have."""
    first = headers[0]
    require(len({one.run for one in headers}) == len(headers), "--ledger", "name each run once", first.run)
    for name, of in (("clients", lambda one: len(one.delta)), ("adjacency", lambda one: one.adjacency)):
        values = {of(one): None for one in headers}
        require(len(values) == 1, "--ledger", f"be of runs with the same {name}", ", ".join(map(str, values)))
    judges = list(dict.fromkeys(one.accountant for one in headers))
    must = "be given for runs with several accountants"
    require(accountant is not None or len(judges) == 1, "--accountant", must, ", ".join(judges))
    if len(headers) == 1:
        return dataclasses.replace(first, accountant=accountant or first.accountant)
    return dataclasses.replace(
        first,
        accountant=accountant or first.accountant,
        # of Poisson draws and shuffled batches together no more is proven than of the latter
        sampling=next((one.sampling for one in headers if one.sampling != "poisson"), first.sampling),
        delta=tuple(map(max, *(one.delta for one in headers))),
        epsilon=(math.inf,) * len(first.epsilon),
        caveats=tuple(dict.fromkeys(words for one in headers for words in one.caveats)),
    )


def _as_dict(path: Path, verified: Verified) -> dict[str, Any]:
    header, head = verified.header, verified.head
    return {
        "ledger": str(path),
        **verified.end.as_dict(),
        "head_lines": None if head is None else head.lines,
        "torn_bytes": verified.torn,
        "adjacency": header.adjacency,
        "sampling": header.sampling,
        "caveats": list(header.caveats),
    }


def _epsilons(queries: Sequence[tuple[list[Event], float]], judge: Accountant) -> list[float]:
    """Of each client, or of all that are equal; an accountant answers many at once."""
    many = [judge.search(queries[start : start + judge.together]) for start in range(0, len(queries), judge.together)]
    return [float(one) for one in np.concatenate(many)]


def _promise(events: list[Event], delta: float, epsilon: float, judge: Accountant, header: Header) -> Guarantee:
    """The guarantee of these events, whose epsilon is known: RDP's `bound` would load Opacus, and torch, for it."""
    if type(judge) is Rdp:
        pure = rounded_up(composed(events, delta).pure(judge.sensitivity), 6)
        how = PURE if 0 < pure == epsilon < math.inf else judge.description
    else:
        how = judge.bound(events, delta)[1]
    sampling = SAMPLINGS.get(header.sampling, header.sampling)
    return guarantee([*events, *map(Caveat, header.caveats)], delta, judge, sampling, found=(epsilon, how))


def _steps(event: Event) -> int:
    return event.steps if isinstance(event, NoisedEvent) else 0


def _what_was_verified(path: Path, verified: Verified) -> list[str]:
    end, head, beside = verified.end, verified.head, head_file(path).name
    said = [f"{path}: {end.lines} lines, run {end.run}. Each follows from the one before: none was changed or removed."]
    if head is None:
        said.append(f"No {beside} lies beside it: whether lines were cut off its end cannot be seen.")
    elif head.lines < end.lines:
        more = end.lines - head.lines
        said.append(f"It agrees with {beside}, which counts {more} less: a charge in progress, or before a crash.")
    else:
        said.append(f"It ends where {beside} says: none was cut off.")
    if verified.torn:
        said.append(
            f"The last {verified.torn} bytes are no whole line: it is being written, or a crash tore it. Its charge "
            "was never returned from, so nothing was released for it."
        )
    said.append(
        "A ledger and a head that were both written anew would pass, too: compare this head's chain, "
        f"{end.chain}, with the one in `result.json`, or in MLflow (tag `ledger_head`)."
    )
    return said


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See --help.")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m dpfl_lightning.plan",
        description="Verify ledgers, and compose every client's epsilon again from their events alone. Reads only.",
        allow_abbrev=False,
    )
    several = "ledger.jsonl of a run, or the run's folder; several are composed: runs of the same clients"
    parser.add_argument("--ledger", metavar="FILE", nargs="+", required=True, help=several)
    parser.add_argument("--accountant", help="compose by this one instead of the run's own (prv is tighter, slower)")
    parser.add_argument("--delta", type=float, help="of every client, in (0, 1), instead of the run's own")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line, too")
    options, rest = parser.parse_known_args(words)
    if rest:
        key = rest[0].removeprefix("--").partition("=")[0]
        raise UserError(f"`{key}` must be a key of --ledger, got another one. There are accountant, delta and json.")
    return options
