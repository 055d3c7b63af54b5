"""What the results beside a finished run's ledger state, compared with what the ledger says."""

import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.events import Event, NoisedEvent
from dpfl_lightning.privacy.accounting.guarantee import (
    FRESH_NOISE,
    GPU_NOISE,
    SIMULATED,
    SIMULATED_NOISE,
    Guarantee,
    in_words,
)
from dpfl_lightning.privacy.ledger.file import Head, Header, Verified, parsed, read_small
from dpfl_lightning.privacy.sampling import SAMPLINGS

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
    header: Header,
    accounts: Sequence[Account],
    events: Sequence[Sequence[Event]],
    promises: Sequence[Guarantee],
) -> None:
    """Raise UserError unless the results state what the ledger says: account, events and guarantee of each client."""
    whole, result = results.get("guarantees.json"), results.get("result.json")
    if result is not None:
        _check_clients(path, "result.json", result.get("clients"), dict, len(accounts))
    if whole is not None:
        _check_clients(path, "guarantees.json", whole.get("clients"), int, len(accounts))
        statements = _statements(path, whole)
        texts = [f"{row.get('sampling')}, {row.get('accountant')}" for row in statements]
        epsilons = [row.get("epsilon") for row in statements]
    elif result is not None:
        texts = [str(result.get("guarantee"))] * len(accounts)
        epsilons = [row.get("epsilon_spent") for row in result["clients"]]
    else:
        return
    drawn = SAMPLINGS.get(header.sampling, header.sampling)
    promises = [_as_stated(*one, drawn) for one in zip(promises, accounts, epsilons, texts, strict=True)]
    if result is not None:
        simulated = SIMULATED in header.caveats
        _check(path, "result.json", "", result, {"simulated": (simulated,)})
        for client, account in enumerate(accounts):
            values = _row(header, client, account, promises[client])
            if result.get("rounds") == header.identity.get("rounds") and FILTER not in promises[client].accountant:
                values |= _of_noise(events[client], values.get("num_records", (None,))[0])
            _check(path, "result.json", f" of client {client}", result["clients"][client], values)
        noise = (SIMULATED_NOISE,) if simulated else (FRESH_NOISE, GPU_NOISE)
        _check(path, "result.json", "", result, {"noise": noise, "guarantee": (in_words(promises),)})
    if whole is not None:
        for client, (row, promise) in enumerate(zip(statements, promises, strict=True)):
            values = {key: (value,) for key, value in promise.as_dict().items()}
            _check(path, "guarantees.json", f" of client {client}", row, values)
            _check_keys(path, "guarantees.json", row, values)
        _check_keys(path, "guarantees.json", whole, ("ledger", "guarantees", "clients"))


def guarantee_of_each(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each client's guarantee in the content of `guarantees.json`, where equal guarantees are written once."""
    return [content["guarantees"][place] for place in content["clients"]]


def _statements(path: Path, whole: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return `guarantee_of_each`. Raises UserError if a guarantee is no client's: it would not be compared."""
    stated = whole.get("guarantees")
    if not isinstance(stated, list) or any(type(row) is not dict for row in stated):
        raise _differs(path, "guarantees.json", "hold a list of guarantees", stated)
    if set(whole["clients"]) != set(range(len(stated))):
        places = sorted(set(whole["clients"]))
        raise _differs(path, "guarantees.json", f"hold the guarantees of its clients only, {len(stated)}", places)
    return guarantee_of_each(whole)


def _check_clients(path: Path, name: str, rows: Any, kind: type, count: int) -> None:
    if not isinstance(rows, list) or [type(row) for row in rows] != [kind] * count:
        raise _differs(path, name, f"hold {count} clients, as the ledger does", rows)


def _row(header: Header, client: int, account: Account, promise: Guarantee) -> dict[str, Sequence[Any]]:
    """Return the values that the ledger allows for a client, by the keys of `result.json`."""
    sizes = header.identity.get("clients.num_records")  # one for all clients, or one for each
    size = dict(enumerate(sizes)).get(client) if isinstance(sizes, list) else sizes
    values: dict[str, Sequence[Any]] = {
        "client": (client,),
        "releases": (sum(account.releases.values()),),
        "steps": (account.steps,),
        "epsilon_budget": (finite_or_none(account.epsilon_budget),),
        "delta": (account.delta,),
        "epsilon_spent": (finite_or_none(promise.epsilon),),
    }
    if sizes is not None:
        values["num_records"] = (size,)
    return values


def _of_noise(events: Sequence[Event], size: object) -> dict[str, Sequence[Any]]:
    """Return the allowed noise and batch sizes of a client that has done all rounds: those of its releases.

    They are those of the most frequent planned release, which a single release need not be.
    """
    noised = [event for event in events if isinstance(event, NoisedEvent)]
    if len(noised) < 2:
        return {}
    sizes = [round(event.sample_rate * size) for event in noised] if isinstance(size, int) else []
    values: dict[str, list[Any]] = {
        "noise_multiplier": [event.noise_multiplier or 0.0 for event in noised],
        "batch_size": sizes,
    }
    return {key: [*dict.fromkeys(allowed)] for key, allowed in values.items() if allowed}


def _as_stated(promise: Guarantee, account: Account, epsilon: object, text: str, drawn: str) -> Guarantee:
    """Return the ledger's guarantee of a client with what the writer knew more exactly, or knew of the plan.

    These are the last digits of epsilon, the budget of a privacy filter, and how batches are drawn that were planned
    and never released. `text` is what the file states.
    """
    stated = _number(epsilon)
    samplings = (promise.sampling, drawn, *(() if account.steps else ("full batches",)))
    promise = replace(promise, sampling=next((one for one in samplings if one in text), promise.sampling))
    same = math.isclose(stated, promise.epsilon, rel_tol=1e-6, abs_tol=2e-6)
    if same or (FILTER in text and promise.epsilon <= stated <= account.epsilon_budget):
        promise = replace(promise, epsilon=stated)
    return replace(promise, accountant=f"{promise.accountant}, {FILTER}") if FILTER in text else promise


def _check(path: Path, name: str, whose: str, stated: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]]) -> None:
    for key, values in allowed.items():
        if (got := stated.get(key)) not in values:
            if isinstance(got, str) and len(values) == 1 and isinstance(values[0], str):
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(got, values[0], strict=False))
                start = max(0, len([*same]) - 20)  # a few letters before the difference
                got, values = got[start:], [values[0][start:]]
            must = " or ".join(map(repr, values[:5]))
            raise _differs(path, name, f"state {key} {must}{whose}, as the ledger does", got)


def _check_keys(path: Path, name: str, stated: Iterable[str], known: Iterable[str]) -> None:
    if more := [key for key in stated if key not in known]:
        raise _differs(path, name, "hold what a run writes only", more)


def _number(value: Any) -> float:
    """Return the number in a JSON file, where null is infinite; nan for anything else."""
    return math.inf if value is None else float(value) if type(value) in (int, float) else math.nan


def _object(file: Path) -> dict[str, Any]:
    raw, content = read_small(file) or b"", None
    with contextlib.suppress(ValueError):
        content = parsed(raw)
    if not isinstance(content, dict):
        raise _differs(file, file.name, "be a JSON object with each key once", raw[:80])
    return content


def _differs(path: Path, name: str, must: str, got: object) -> UserError:
    text = repr(got)
    return UserError(
        f"`{path.with_name(name)}` must {must}, got {text if len(text) < 300 else text[:297] + '...'}. {_DIFFERS}"
    )
