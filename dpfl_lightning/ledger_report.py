"""`python -m dpfl_lightning.plan --ledger FILE`: verify a ledger, and compose every epsilon again from it alone."""

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
from dpfl_lightning.privacy.accountant import PURE, Accountant, Rdp, finite_or_none, get_accountant, rounded_up
from dpfl_lightning.privacy.accountant import epsilon_text as epsilon
from dpfl_lightning.privacy.composition import composed
from dpfl_lightning.privacy.events import Caveat, Event, NoisedEvent
from dpfl_lightning.privacy.guarantee import Guarantee, guarantee
from dpfl_lightning.privacy.ledger_file import Charge, Header, Verified, head_file, verify
from dpfl_lightning.privacy.sampling import SAMPLINGS
from dpfl_lightning.tables import columns


def main(words: Sequence[str]) -> int:
    """The command, of the words that follow `plan`."""
    options = _parse(words)
    path = Path(options.ledger)
    path = path / "ledger.jsonl" if path.is_dir() else path
    require(path.is_file(), "--ledger", "be a ledger, or the folder of a run", str(path), "For example runs/digits.")
    try:
        report = read(path, options.accountant, options.delta)
    except UserError as error:
        if options.json:
            print(json.dumps({"ledger": str(path), "verified": False, "error": str(error)}))
        raise
    print(report.text())
    if options.json:
        print(json.dumps(report.as_dict()))
    return 0


@dataclasses.dataclass(frozen=True)
class Account:
    """What one client has released.

    Args:
        releases: purpose -> how many.
        steps: noised steps of all of them.
        epsilon: of all of them, composed again; inf is no guarantee.
        budget: what it was to stay within; inf is none.
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
    """A verified ledger, composed.

    Args:
        accountant: that composed it.
        overrides: what was asked for in place of the header's.
        accounts: of each client.
        weakest: the guarantee with the largest epsilon.
    """

    path: Path
    verified: Verified
    accountant: str
    overrides: dict[str, Any]
    accounts: tuple[Account, ...]
    weakest: Guarantee

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        header, head = self.verified.header, self.verified.head
        rows = [{"client": client, **own.as_dict()} for client, own in enumerate(self.accounts)]
        return {
            "ledger": str(self.path),
            "verified": True,
            **self.verified.end.as_dict(),
            "head_lines": None if head is None else head.lines,
            "torn_bytes": self.verified.torn,
            "accountant": self.accountant,
            "adjacency": header.adjacency,
            "sampling": header.sampling,
            "caveats": list(header.caveats),
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
                *_what_was_verified(self.path, self.verified),
                *(f"In place of the ledger's own {name}: {value}." for name, value in self.overrides.items()),
                columns([head, *rows]),
                *([f"Above its budget: client {', '.join(over)}."] if over else []),
                f"Largest epsilon: {self.weakest.words()}",
            ]
        )


def read(path: Path, accountant: str | None = None, delta: float | None = None) -> LedgerReport:
    """Verify the ledger at `path` and compose its events again; reads only, so a run may be writing it.

    Args:
        accountant: instead of the header's.
        delta: of every client instead of the header's, in (0, 1).

    **Privacy** Arithmetic on public facts.

    Raises:
        UserError: the ledger was changed, or the accountant cannot compose its events.
    """
    require(delta is None or 0 < delta < 1, "--delta", "be in (0, 1)", delta, "Usual is below 1 / records.")
    kinds: dict[Event, int] = {}
    events: defaultdict[int, list[int]] = defaultdict(list)  # client -> numbers of its events: most clients' are equal
    releases: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def take(charge: Charge) -> None:
        events[charge.client].append(kinds.setdefault(charge.event, len(kinds)))
        releases[charge.client][charge.purpose] += 1

    verified = verify(path, take)
    header, known = verified.header, list(kinds)
    judge = get_accountant(accountant or header.accountant, header.adjacency)
    deltas = header.delta if delta is None else (delta,) * len(header.delta)
    keys = [(tuple(events[client]), own) for client, own in enumerate(deltas)]
    queries = {key: ([known[number] for number in key[0]], key[1]) for key in dict.fromkeys(keys)}
    found = dict(zip(queries, _epsilons(list(queries.values()), judge), strict=True))
    steps = {key: sum(_steps(event) for event in queries[key][0]) for key in queries}
    weakest = max(found, key=lambda key: found[key])
    return LedgerReport(
        path,
        verified,
        judge.name,
        {name: value for name, value in (("accountant", accountant), ("delta", delta)) if value is not None},
        tuple(
            Account(dict(releases[client]), steps[key], found[key], key[1], header.epsilon[client])
            for client, key in enumerate(keys)
        ),
        _promise(*queries[weakest], found[weakest], judge, header),
    )


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
        description="Verify a ledger, and compose every client's epsilon again from its events alone. Reads only.",
        allow_abbrev=False,
    )
    parser.add_argument("--ledger", metavar="FILE", required=True, help="ledger.jsonl of a run, or the run's folder")
    parser.add_argument("--accountant", help="compose by this one instead of the run's own (prv is tighter, slower)")
    parser.add_argument("--delta", type=float, help="of every client, in (0, 1), instead of the run's own")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line, too")
    options, rest = parser.parse_known_args(words)
    if rest:
        key = rest[0].removeprefix("--").partition("=")[0]
        raise UserError(f"`{key}` must be a key of --ledger, got another one. There are accountant, delta and json.")
    return options
