"""`dpfl ledger`: verify ledgers of runs, and compute epsilons from the charges."""

import argparse
import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpfl_lightning.config.command_line import CommandParser
from dpfl_lightning.errors import UserError, command, require
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.events import noised_steps
from dpfl_lightning.privacy.accounting.guarantee import ENDS_BY_RESULTS, NOISE_BY_RESULTS
from dpfl_lightning.privacy.ledger.account_file import users_file
from dpfl_lightning.privacy.ledger.export import ABOUT, as_dp_event
from dpfl_lightning.privacy.ledger.operator import OperatedAccount
from dpfl_lightning.privacy.ledger.verify import Composed, VerifiedLedger, ledger_of, read
from dpfl_lightning.privacy.sampling import SAMPLERS, weakest
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.runtime.text import at_most, columns, counted, shown
from dpfl_lightning.sites.receipt import FILE, read_receipts

_MATCHED = {
    "name": "Together: releases of clients with the same name are composed, at the smallest delta.",
    "nothing": (
        "Together: not all runs name their clients, so clients without names may be anybody. The worst combination of "
        "clients is stated, at the smallest delta."
    ),
}


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `ledger` with command-line arguments, and return its exit status."""
    parser = CommandParser(
        "ledger",
        "Verify the ledgers of runs, and compute every client's epsilon again from the charges alone. Several runs are "
        "composed by the names of their clients. The exit status is 2 if a ledger was changed. Nothing is written, "
        "except for --export.",
        "RUN [RUN ...] [FLAGS]",
        ("runs/digits", "runs/digits --accountant rdp --json"),
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or its ledger.jsonl")
    _flags(parser)
    options = parser.parse_args(argv)
    try:
        report = read([ledger_of(run) for run in options.runs], options.accountant, options.delta)
        for ledger in report.ledgers:
            _check_receipts(ledger)
        if options.export is not None:
            _export(report, Path(options.export))
    except (UserError, OSError) as error:
        if isinstance(error, OSError):
            name, must = error.filename or options.runs[0], "be a file that can be read, or written for --export"
            error = UserError(f"`{name}` must {must}, got {error.strerror}. Check its name and its rights.")
        if options.json:
            print(json.dumps({"ledgers": options.runs, "verified": False, "error": str(error)}))
        raise error from None
    overrides = {name: getattr(options, name) for name in ("accountant", "delta") if getattr(options, name) is not None}
    print(json.dumps({**_as_dict(report), "overrides": overrides}) if options.json else shown(_text(report, overrides)))
    return 0


def _check_receipts(ledger: VerifiedLedger) -> None:
    """Raise UserError unless a ledger has all releases that nodes have signed in receipts beside it, if any."""
    for client, receipt in read_receipts(ledger.path.parent).items():
        paid = sum(dict(enumerate(ledger.releases)).get(client, Counter()).values())
        must = f"have the {receipt.releases} releases that the node of client {client} has signed"
        advice = "If the run was interrupted, resume it: nodes tell again what they have paid for."
        require(paid >= receipt.releases, str(ledger.path), must, paid, advice)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--accountant", help="use this accountant instead of the run's (pld is tight)")
    parser.add_argument("--delta", type=float, help="delta of every client, in (0, 1), instead of the run's")
    export_help = "also write every client's events for the library dp_accounting, which composes them independently"
    parser.add_argument("--export", metavar="FILE", help=export_help)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")


def _as_dict(report: Composed) -> dict[str, Any]:
    """Return a dictionary for JSON; an infinite epsilon or budget is None."""
    rows = [
        {
            "client": paid.name,
            "releases": report.releases(paid),
            "steps": noised_steps(paid.released),
            "epsilon": finite_or_none(paid.epsilon),
            "guaranteed": finite_or_none(guaranteed.epsilon),
            "epsilon_budget": finite_or_none(paid.budget),
            "delta": paid.delta,
        }
        for paid, guaranteed in zip(report.paid, report.guaranteed, strict=True)
    ]
    return {
        "verified": True,
        "ledgers": _ledgers(report),
        "matched": report.matched,
        "accountant": _means(report)["accountant"],
        "guarantee": report.weakest.as_dict(),
        "clients": rows,
    }


def _ledgers(report: Composed) -> list[dict[str, Any]]:
    return [
        {
            "ledger": str(one.path),
            **one.verified.end.as_dict(),
            "head_lines": one.verified.head.lines,
            "torn_bytes": one.verified.torn,
            "adjacency": one.verified.header.adjacency,
            "sampling": one.verified.header.sampling,
            "caveats": list(one.verified.header.caveats),
        }
        for one in report.ledgers
    ]


def _means(report: Composed) -> dict[str, str]:
    """Return the adjacencies and accountants of all accounts, usually one of each."""
    each = {
        "adjacency": [total.relation.key for total in report.paid],
        "accountant": [total.accountant for total in report.paid],
    }
    return {name: ", ".join(dict.fromkeys(values)) for name, values in each.items()}


def _export(report: Composed, path: Path) -> None:
    """Write every client's events for dp_accounting to a new file."""
    free = not path.exists() and not path.is_symlink() and path.parent.is_dir()
    require(free, "--export", "be a new file in an existing folder", str(path), "Choose another name.")
    rows = []
    for total in report.paid:
        relation, event = as_dp_event(total.released, total.delta, total.adjacency)
        numbers = {"epsilon": finite_or_none(total.epsilon), "delta": total.delta}
        rows.append({"client": total.name, **numbers, "neighboring_relation": relation, "event": event})
    facts = {**_means(report), "ledgers": _ledgers(report)}
    write_text(path, json.dumps({"about": ABOUT, **facts, "clients": rows}, indent=1) + "\n")


def _text(report: Composed, overrides: dict[str, Any]) -> str:
    """Return what was verified, a row for each client, and the weakest guarantee."""
    totals = list(zip(report.paid, report.guaranteed, strict=True))
    by_results = any(guaranteed.epsilon > paid.epsilon for paid, guaranteed in totals)
    rows = [
        [
            paid.name,
            ", ".join(f"{count} {purpose}" for purpose, count in report.releases(paid).items()) or "none",
            noised_steps(paid.released),
            at_most(paid.epsilon),
            *([at_most(guaranteed.epsilon)] if by_results else []),
            "none" if math.isinf(paid.budget) else at_most(paid.budget),
            at_most(paid.delta),
        ]
        for paid, guaranteed in totals
    ]
    over = [total.name for total in report.paid if total.epsilon > total.budget]
    lines = [line for ledger in report.ledgers for line in _what_was_verified(ledger)]
    if len(report.ledgers) > 1:
        alone = report.matched == "name" and sum(len(one.events) for one in report.ledgers) == len(report.paid)
        lines.append("No client is in several runs." if alone else _MATCHED[report.matched])
    lines += [f"Instead of the ledger's {name}: {value}." for name, value in overrides.items()]
    means, sampling = _means(report), weakest(total.sampling for total in report.paid)
    lines.append(
        f"Accountant {means['accountant']}, adjacency {means['adjacency']}, sampling: {SAMPLERS[sampling].words}."
    )
    epsilons = ["paid", "guaranteed"] if by_results else ["epsilon"]
    lines.append(columns([["client", "releases", "steps", *epsilons, "budget", "delta"], *rows]))
    lines += [f"Above its budget: client {', '.join(over)}."] if over else []
    if by_results:
        paid = at_most(max(total.epsilon for total in report.paid))
        filtered = any(filter(None, itertools.chain(*(one.verified.header.filters for one in report.ledgers))))
        why = NOISE_BY_RESULTS if filtered else ENDS_BY_RESULTS
        lines.append(f"Paid so far: epsilon at most {paid}, which is not the guarantee, as {why}.")
    return "\n".join([*lines, f"Largest epsilon: {report.weakest.words()}", *_in_account(report)])


def _in_account(report: Composed) -> list[str]:
    """Return what the user's account says about the clients of the runs, if it knows them."""
    if not users_file().is_file():
        return []
    account, ends = OperatedAccount(users_file()), [ledger.verified.end for ledger in report.ledgers]
    holders = [one for ledger in report.ledgers for one in account.holders(ledger.verified.header.run)]
    worst = max(holders, key=lambda one: one.together.urgency, default=None)
    ahead = list(filter(None, map(account.ahead_of, ends)))
    total = [] if worst is None else [f"Account {account.path}, {' = '.join(worst.names)}: {worst.together.words()}"]
    return [*ahead, *total]


def _what_was_verified(ledger: VerifiedLedger) -> list[str]:
    verified = ledger.verified
    end, late = verified.end, verified.end.lines - verified.head.lines
    agrees = f"counts {late} lines less: a charge in progress, or a crash" if late else "agrees: no line was cut off"
    lines = [
        f"{ledger.path}: {end.lines} lines, run {end.run}. The chain is intact: no line was changed or removed.",
        f"Its ledger.head {agrees}.",
    ]
    if verified.torn:
        lines.append(
            f"The last {verified.torn} bytes are an incomplete line: it is being written, or a crash interrupted it. "
            "Nothing was released for it."
        )
    if count := len(read_receipts(ledger.path.parent)):
        whole = "no release that they count is missing here. Compare its public keys with those of the plan"
        lines.append(f"{FILE} beside it holds the heads of ledgers that {counted(count, 'node')} signed: {whole}.")
    return [
        *lines,
        f"Whoever rewrites ledger and head together is not noticed: compare the chain {end.chain} with a copy that is "
        "kept elsewhere (MLflow's tag `ledger_head`).",
    ]
