"""`dpfl account`: what all runs on the same records cost together, and the limit on them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpfl_lightning.config.command_line import CommandParser
from dpfl_lightning.config.registry import names_of
from dpfl_lightning.errors import command, require
from dpfl_lightning.runtime.text import at_most, columns, counted, shown

if TYPE_CHECKING:
    from dpfl_lightning.privacy.compose import Limit
    from dpfl_lightning.privacy.ledger.operator import Holder, OperatedAccount

_ABOUT = (
    "Show what all runs on the records of each data holder cost together: epsilon, composed as if one run had planned "
    "them, at the least delta of the runs or that of the limit. limit HOLDER EPSILON DELTA: no run may bring all "
    "runs above that, though later ones are chosen after earlier results; with a limit, a run with an unknown name is "
    "refused. --unit, --adjacency and --rows_per_person say what it protects. unlimit HOLDER: remove the limit. new "
    "HOLDER: a name is of a holder of whom the account has no records. join HOLDER HOLDER: two names are one holder, "
    "for ever. add RUN ...: count runs that were made elsewhere, or all runs of another account. accept: go on with an "
    "older file than was seen last."
)
_USAGE = "[VERB WORD ...] [FLAGS]"
_EXAMPLES = (
    "",
    "limit bergen 8 1e-5",
    "limit lund 8 1e-5 --unit person --rows_per_person 4",
    "new lund",
    "join bergen haukeland",
    "add runs/*",
    "--json",
)
_COUNTS = {"": 0, "limit": 3, "unlimit": 1, "new": 1, "join": 2, "accept": 0}  # words after the verb


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `account` with command-line arguments, and return its exit status."""
    parser = CommandParser("account", _ABOUT, _USAGE, _EXAMPLES)
    parser.add_argument("verb", metavar="VERB", nargs="?", default="", choices=(*_COUNTS, "add"))
    parser.add_argument("words", metavar="WORD", nargs="*", help="what VERB needs, see above")
    names = names_of("privacy.unit")
    parser.add_argument("--unit", choices=names, help="what a limit protects (default: a record)")
    relation_help = "relation of a limit (default: add_remove); runs of several relations count as replacement"
    parser.add_argument("--adjacency", choices=("add_remove", "replace_one"), help=relation_help)
    rows_help = "with --unit person: the most rows of a person, for runs whose unit is record and that do not say it"
    parser.add_argument("--rows_per_person", type=int, metavar="ROWS", help=rows_help)
    parser.add_argument("--file", metavar="FILE", help="the account (default: that of privacy.account auto)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    flags = parser.parse_args(argv)
    from dpfl_lightning.privacy.ledger.account_file import users_file
    from dpfl_lightning.privacy.ledger.operator import OperatedAccount

    count = _COUNTS.get(flags.verb, max(len(flags.words), 1))
    require(len(flags.words) == count, f"account {flags.verb}".strip(), _needs(count), flags.words, "See --help.")
    for name in () if flags.verb == "limit" else ("unit", "adjacency", "rows_per_person"):
        given = getattr(flags, name)
        require(given is None, f"--{name}", "come with `limit`", given, "See --help.")
    account = OperatedAccount(users_file() if flags.file is None else Path(flags.file))
    if flags.verb == "" and not account.path.exists() and not account.is_missed():
        print(json.dumps(_as_dict(account, [])) if flags.json else _text(account, []))
        return 0
    if flags.verb == "limit":
        account.limit(flags.words[0], _limit(flags))
    elif flags.verb == "unlimit":
        account.unlimit(*flags.words)
    elif flags.verb == "new":
        account.new(*flags.words)
    elif flags.verb == "join":
        account.join(*flags.words)
    elif flags.verb == "add":
        _add(account, flags.words)
    elif flags.verb == "accept":
        lines = counted(account.accept(), "line")
        print(f"The account goes on with {lines}. Set again what was set later: limits, joined names, new ones.")
    holders = account.holders()
    print(json.dumps(_as_dict(account, holders)) if flags.json else shown(_text(account, holders)))
    return 0


def _needs(count: int) -> str:
    return f"be followed by {counted(count, 'word')}"


def _limit(flags: argparse.Namespace) -> Limit:
    from dpfl_lightning.privacy.accounting.units import unit_of
    from dpfl_lightning.privacy.compose import Limit

    epsilon, delta = map(_number, flags.words[1:])
    unit = unit_of({"unit": flags.unit or "record", "rows_per_person": flags.rows_per_person})
    return Limit(epsilon, delta, flags.adjacency or "add_remove", unit)


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        require(False, "account limit", "be followed by a name, an epsilon and a delta", word, "Such as bergen 8 1e-5.")
        raise


def _add(account: OperatedAccount, runs: Sequence[str]) -> None:
    from dpfl_lightning.privacy.ledger.account_file import is_account
    from dpfl_lightning.privacy.ledger.verify import ledger_of

    for name in runs:
        other = is_account(Path(name))
        path = Path(name) if other else ledger_of(name)
        print(f"{path}: {counted(account.merge(path) if other else account.add(path), 'release')} added")


def _as_dict(account: OperatedAccount, holders: Sequence[Holder]) -> dict[str, object]:
    rows = [{"holder": list(one.names), **one.together.as_dict()} for one in holders]
    return {"account": str(account.path), "holders": rows}


def _text(account: OperatedAccount, holders: Sequence[Holder]) -> str:
    """Return a row for each data holder."""
    if not holders:
        return f"{account.path}: no run is in the account."
    rows = [
        [
            " = ".join(one.names),
            one.together.runs,
            at_most(one.together.epsilon),
            at_most(one.together.delta),
            "none" if one.together.limit is None else f"{at_most(one.together.limit)}, {one.together.limit_adjacency}",
            "" if one.together.used is None else f"{one.together.used:.1%}",
            one.together.adjacency,
            one.together.sampling,
            one.together.accountant,
        ]
        for one in holders
    ]
    costs, means = ["epsilon", "delta", "limit", "limit used"], ["neighbouring data sets", "sampling", "accountant"]
    lines = [f"Account {account.path}", columns([["data holder", "runs", *costs, *means], *rows])]
    if any(one.together.used is not None for one in holders):
        lines.append(
            "A limit is used up by Renyi differential privacy at one order, a bound that holds though later runs "
            "follow from earlier results; epsilon assumes that all runs were planned beforehand, and is smaller."
        )
    return "\n".join(lines)
