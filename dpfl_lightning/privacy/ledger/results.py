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
    FILTER,
    FRESH_NOISE,
    GPU_NOISE,
    SIMULATED,
    SIMULATED_NOISE,
    Guarantee,
    in_words,
)
from dpfl_lightning.privacy.ledger.file import Head, Header, Verified, read_small
from dpfl_lightning.privacy.sampling import SAMPLINGS
from dpfl_lightning.runtime.strict_json import parsed

RESULTS = ("result.json", "guarantees.json")
#: fields of `result.json`, and of its clients, that are not compared with the ledger
_NOT_COMPARED = (
    *("output_dir", "wall_seconds", "training_seconds", "client_seconds", "records_per_second", "reason"),
    *(
        "task",
        "test_set",
        "at_sites",
        "test_accuracy",
        "test_loss",
        "accuracy_mean",
        "accuracy_std",
        "accuracy_worst",
        "accuracy_gap",
    ),
    *("accuracy_of_groups", "test_metrics", "metrics_mean", "metrics", "client_embedding"),
)
_NOT_COMPARED_OF_A_CLIENT = ("name", "noise_std", "accuracy", "loss", "metrics", "model", "true_group")
_DIFFERS = "A changed file proves nothing: use an unchanged copy (MLflow keeps one), or the version that wrote the run."


@dataclass(frozen=True)
class Account:
    """Releases of one client by purpose, and their noised steps; inf means no guarantee, or no budget."""

    releases: dict[str, int]
    steps: int
    epsilon: float
    epsilon_budget: float
    delta: float


@dataclass(frozen=True)
class Evidence:
    """What a ledger says, for each client; `last_round` is the last one that a client paid for."""

    header: Header
    last_round: int
    accounts: Sequence[Account]
    events: Sequence[Sequence[Event]]
    guarantees: Sequence[Guarantee]


def results_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return `result.json` and `guarantees.json` beside a run's `ledger.jsonl`, by name, if they exist.

    Only finished runs have them, and always both. A ledger of another name is a copy without the run's folder.
    """
    files = [path.with_name(name) for name in RESULTS] if path.name == "ledger.jsonl" else []
    there = [file for file in files if file.exists()]
    if len(there) == 1:
        (missing,) = {*files} - {*there}
        raise _differs(path, missing.name, f"lie beside {there[0].name}, because the run has finished", "no such file")
    return {file.name: _object(file) for file in there}


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


def check_results(path: Path, results: Mapping[str, dict[str, Any]], evidence: Evidence) -> None:
    """Raise UserError unless the two results state what the ledger says of the run and of each client."""
    header, accounts = evidence.header, evidence.accounts
    result, whole = (results[name] for name in RESULTS)
    for name, kind in zip(RESULTS, (dict, int), strict=True):
        rows = results[name].get("clients")
        if not isinstance(rows, list) or [type(row) for row in rows] != [kind] * len(accounts):
            raise _differs(path, name, f"hold {len(accounts)} clients, as the ledger does", rows)
    statements = _statements(path, whole)
    promises = [
        _as_stated(promise, account, row, header)
        for promise, account, row in zip(evidence.guarantees, accounts, statements, strict=True)
    ]
    simulated = SIMULATED in header.caveats
    noise = (SIMULATED_NOISE,) if simulated else (FRESH_NOISE, GPU_NOISE)
    whole_run = {"finished": (True,), "simulated": (simulated,), "noise": noise}
    _check(path, "result.json", "", result, whole_run)
    rounds, planned = result.get("rounds"), header.identity.get("rounds")
    fewest = max(evidence.last_round - 1, 0)  # in the last round, clients may only have answered a question
    if not (type(rounds) is type(planned) is int and fewest <= rounds <= planned):
        must = f"state rounds from {fewest} to {planned}, as the ledger does"
        raise _differs(path, "result.json", must, rounds)
    for client, account in enumerate(accounts):
        values, row = _row(header, client, account, promises[client]), result["clients"][client]
        if planned in (rounds, evidence.last_round):  # else, the planned noise may never have been added
            values |= _of_noise(evidence.events[client], values.get("num_records", (None,))[0])
        _check(path, "result.json", f" of client {client}", row, values)
        known = (*values, "num_records", "noise_multiplier", "batch_size", *_NOT_COMPARED_OF_A_CLIENT)
        _check_keys(path, "result.json", row, known)
    _check(path, "result.json", "", result, {"guarantee": (in_words(promises),)})
    _check_keys(path, "result.json", result, (*whole_run, "rounds", "guarantee", "ledger", "clients", *_NOT_COMPARED))
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


def _row(header: Header, client: int, account: Account, promise: Guarantee) -> dict[str, Sequence[Any]]:
    """Return the values that the ledger allows for a client, by the keys of `result.json`."""
    sizes = header.identity.get("clients.num_records")  # one for all clients, or one for each
    size = dict(enumerate(sizes)).get(client) if isinstance(sizes, list) else sizes
    values: dict[str, Sequence[Any]] = {
        "client": (client,),
        "name": (header.name_of(client),),
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


def _as_stated(promise: Guarantee, account: Account, row: Mapping[str, Any], header: Header) -> Guarantee:
    """Return the ledger's guarantee of a client with what the writer knew more exactly, or knew of the plan.

    These are the last digits of epsilon, the budget of a privacy filter where a strategy may change mechanisms, and how
    batches are drawn that were planned and never released. `row` is what `guarantees.json` states.
    """
    stated, changed = _number(row.get("epsilon")), f"{promise.accountant}, {FILTER}"
    is_filter = row.get("accountant") == changed and header.identity.get("changes_mechanisms") is True
    samplings = (SAMPLINGS[header.sampling], *(() if account.steps else ("full batches",)))
    promise = replace(
        promise, sampling=next((one for one in samplings if one == row.get("sampling")), promise.sampling)
    )
    same = stated >= 0 and math.isclose(stated, promise.epsilon, rel_tol=1e-6, abs_tol=2e-6)
    if same or (is_filter and promise.epsilon <= stated <= account.epsilon_budget):
        promise = replace(promise, epsilon=stated)
    return replace(promise, accountant=changed) if is_filter else promise


def _check(path: Path, name: str, whose: str, stated: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]]) -> None:
    for key, values in allowed.items():
        got = stated.get(key)
        if not any(type(got) is type(value) and got == value for value in values):
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
        must = "be a JSON object in UTF-8 with each key once, and finite numbers of 64 bits"
        raise _differs(file, file.name, must, raw[:80])
    return content


def _differs(path: Path, name: str, must: str, got: object) -> UserError:
    text = repr(got)
    return UserError(
        f"`{path.with_name(name)}` must {must}, got {text if len(text) < 300 else text[:297] + '...'}. {_DIFFERS}"
    )
