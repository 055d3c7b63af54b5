"""What the results beside a finished run's ledger state, compared with what the ledger says."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.guarantee import SIMULATED, Guarantee
from dpfl_lightning.privacy.ledger.file import Head, Verified

#: ends the description of an epsilon that is the whole budget, because later noise followed from earlier releases
FILTER = "as a privacy filter: the whole budget is what holds"

RESULTS = ("result.json", "guarantees.json")
_EPSILONS = ("epsilon", "epsilon_spent")
_DIFFERS = "A changed file proves nothing: use an unchanged copy (MLflow keeps one), or the version that wrote the run."


@dataclass(frozen=True)
class Account:
    """Releases of one client by purpose, and their noised steps; inf means no guarantee, or no budget."""

    releases: dict[str, int]
    steps: int
    epsilon: float
    epsilon_budget: float
    delta: float


def results_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return `result.json` and `guarantees.json` beside a run's `ledger.jsonl`, by name, if they exist.

    Only finished runs have them. A ledger of another name is a copy without the run's folder.
    """
    files = [path.with_name(name) for name in RESULTS] if path.name == "ledger.jsonl" else []
    return {file.name: _object(file) for file in files if file.exists()}


def heads_of(path: Path, results: Mapping[str, dict[str, Any]]) -> dict[str, Head]:
    """Return the heads that the results state, as `verify` takes them. Raises UserError if one states none."""
    heads = {}
    for name, result in results.items():
        try:
            heads[f"`{name}`"] = Head.of(result["ledger"])
        except (KeyError, TypeError, ValueError):
            raise _differs(path, name, "hold the run, lines and chain of the ledger", result.get("ledger")) from None
    return heads


def check_finished(path: Path, heads: Mapping[str, Head], verified: Verified) -> None:
    """Raise UserError unless a finished run's ledger ends where all of these heads, by name, say."""
    for name, head in heads.items():
        must = f"end after the {head.lines} lines that {name} counts, because the run has finished"
        if head.lines != verified.end.lines:
            raise UserError(f"`{path}` must {must}, got {verified.end.lines} lines. {_DIFFERS}")
    if verified.torn:
        must = "end with a complete line, because the run has finished"
        raise UserError(f"`{path}` must {must}, got {verified.torn} more bytes. {_DIFFERS}")


def check_results(
    path: Path,
    results: Mapping[str, dict[str, Any]],
    verified: Verified,
    accounts: Sequence[Account],
    weakest: Guarantee,
    guarantee_of: Callable[[int, float, str], Guarantee],
) -> None:
    """Raise UserError unless the results state what the ledger says.

    `guarantee_of(client, epsilon, method)` returns the guarantee of a client with a known epsilon.
    """
    if (result := results.get("result.json")) is not None:
        _check_rows(path, "result.json", result, [_row(verified, client, one) for client, one in enumerate(accounts)])
        simulated = SIMULATED in verified.header.caveats
        if result.get("simulated") is not simulated:
            must = f"state simulated {simulated}, as the ledger does"
            raise _differs(path, "result.json", must, result.get("simulated"))
        words = _words(result, accounts, weakest)
        if any(one.releases for one in accounts) and not str(result.get("guarantee")).startswith(words):
            must = f"state the guarantee that the ledger gives, {words!r}"
            raise _differs(path, "result.json", must, result.get("guarantee"))
    if (result := results.get("guarantees.json")) is not None:
        meaning = {"adjacency": weakest.adjacency, "caveats": list(weakest.caveats)}
        rows = [{**meaning, "delta": one.delta, "epsilon": finite_or_none(one.epsilon)} for one in accounts]
        _check_rows(path, "guarantees.json", result, rows)
        whole = [
            guarantee_of(i, _number(row["epsilon"]), row.get("accountant")) for i, row in enumerate(result["clients"])
        ]
        rows = [promise.as_dict() if one.steps else {} for promise, one in zip(whole, accounts, strict=True)]
        _check_rows(path, "guarantees.json", result, rows)


def _row(verified: Verified, client: int, account: Account) -> dict[str, Any]:
    """Return what the ledger says about a client, by the keys of `result.json`."""
    sizes = verified.header.identity.get("clients.num_records")  # one for all clients, or one for each
    size = dict(enumerate(sizes)).get(client) if isinstance(sizes, list) else sizes
    return {
        "client": client,
        **({} if sizes is None else {"num_records": size}),
        "releases": sum(account.releases.values()),
        "steps": account.steps,
        "epsilon_budget": finite_or_none(account.epsilon_budget),
        "delta": account.delta,
        "epsilon_spent": finite_or_none(account.epsilon),
    }


def _check_rows(path: Path, name: str, result: dict[str, Any], expected: Sequence[Mapping[str, Any]]) -> None:
    rows = result.get("clients")
    if not isinstance(rows, list) or [type(row) for row in rows] != [dict] * len(expected):
        raise _differs(path, name, f"hold {len(expected)} clients, as the ledger does", rows)
    for client, (row, values) in enumerate(zip(rows, expected, strict=True)):
        filtered = FILTER in str(result.get("guarantee", row.get("accountant")))
        for key, value in values.items():
            stated = row.get(key)
            if not (_same_epsilon(stated, value, filtered) if key in _EPSILONS else stated == value):
                raise _differs(path, name, f"state {key} {value!r} of client {client}, as the ledger does", stated)


def _same_epsilon(stated: object, value: float | None, filtered: bool) -> bool:
    """Whether an epsilon is that of the ledger, except for last digits, or at least that of a privacy filter."""
    value, stated = _number(value), _number(stated)
    return math.isclose(stated, value, rel_tol=1e-4, abs_tol=1e-6) or (filtered and stated >= value)


def _words(result: Mapping[str, Any], accounts: Sequence[Account], weakest: Guarantee) -> str:
    """Return the guarantee of the weakest client in words; that of a privacy filter states its whole budget."""
    if FILTER in str(result.get("guarantee")):
        spent = [_number(row.get("epsilon_spent")) for row in result["clients"]]
        delta = accounts[spent.index(max(spent))].delta
        weakest = replace(weakest, epsilon=max(spent), delta=delta, accountant=f"{weakest.accountant}, {FILTER}")
    return weakest.words()


def _number(value: object) -> float:
    """Return the number in a JSON file, where null is infinite; nan for anything else."""
    return math.inf if value is None else float(value) if isinstance(value, int | float) else math.nan


def _object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise _differs(file, file.name, "be a JSON object", "no such content")
    return content


def _differs(path: Path, name: str, must: str, got: object) -> UserError:
    text = repr(got)
    return UserError(
        f"`{path.with_name(name)}` must {must}, got {text if len(text) < 300 else text[:297] + '...'}. {_DIFFERS}"
    )
