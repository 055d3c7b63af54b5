"""What the results beside a finished run's ledger state, compared with what the ledger says."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.guarantee import SIMULATED, Guarantee
from dpfl_lightning.privacy.ledger.file import Head, Verified

#: ends the description of an epsilon that is the whole budget, because later noise followed from earlier releases
FILTER = "as a privacy filter: the whole budget is what holds"

RESULTS = ("result.json", "guarantees.json")
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


def check_results(
    path: Path,
    results: Mapping[str, dict[str, Any]],
    verified: Verified,
    accounts: Sequence[Account],
    weakest: Guarantee,
) -> None:
    """Raise UserError unless the results state what the ledger says, and the ledger ends where they say."""
    for name, head in {**heads_of(path, results), **({"`ledger.head`": verified.head} if results else {})}.items():
        must = f"end after the {head.lines} lines that {name} counts, because the run has finished"
        if head.lines != verified.end.lines:
            raise UserError(f"`{path}` must {must}, got {verified.end.lines} lines. {_DIFFERS}")
    if results and verified.torn:
        must = "end with a complete line, because the run has finished"
        raise UserError(f"`{path}` must {must}, got {verified.torn} more bytes. {_DIFFERS}")
    if (result := results.get("result.json")) is not None:
        _check_rows(path, "result.json", result, [_row(verified, client, one) for client, one in enumerate(accounts)])
        simulated = SIMULATED in verified.header.caveats
        if result.get("simulated") is not simulated:
            must = f"state simulated {simulated}, as the ledger does"
            raise _differs(path, "result.json", must, result.get("simulated"))
        stated = str(result.get("guarantee"))
        if any(one.releases for one in accounts) and FILTER not in stated and not stated.startswith(weakest.words()):
            must = f"state the guarantee that the ledger gives, {weakest.words()!r}"
            raise _differs(path, "result.json", must, result.get("guarantee"))
    if (result := results.get("guarantees.json")) is not None:
        meaning = {"adjacency": weakest.adjacency, "caveats": list(weakest.caveats)}
        rows = [{**meaning, "delta": one.delta, "epsilon": one.epsilon} for one in accounts]
        _check_rows(path, "guarantees.json", result, rows)


def _row(verified: Verified, client: int, account: Account) -> dict[str, Any]:
    """Return what the ledger says about a client, by the keys of `result.json`."""
    sizes = verified.header.identity.get("clients.num_records")
    return {
        **({} if sizes is None else {"num_records": sizes[client] if isinstance(sizes, list) else sizes}),
        "releases": sum(account.releases.values()),
        "steps": account.steps,
        "epsilon_budget": account.epsilon_budget,
        "delta": account.delta,
        "epsilon_spent": account.epsilon,
    }


def _check_rows(path: Path, name: str, result: dict[str, Any], expected: Sequence[Mapping[str, Any]]) -> None:
    rows = result.get("clients")
    if not isinstance(rows, list) or [type(row) for row in rows] != [dict] * len(expected):
        raise _differs(path, name, f"hold {len(expected)} clients, as the ledger does", rows)
    filtered = FILTER in json.dumps(result)
    for client, (row, values) in enumerate(zip(rows, expected, strict=True)):
        for key, value in values.items():
            stated = row.get(key)
            spent = key in ("epsilon", "epsilon_spent")
            whole_budget = filtered and spent and _number(stated) >= _number(value)
            if not (_equal(stated, value) or whole_budget):
                raise _differs(path, name, f"state {key} {value!r} of client {client}, as the ledger does", stated)


def _equal(stated: object, value: object) -> bool:
    """Whether two values are equal; an accountant's last digits may differ between machines."""
    if isinstance(value, float):
        return math.isclose(_number(stated), value, rel_tol=1e-4, abs_tol=1e-6)
    return stated == value


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
