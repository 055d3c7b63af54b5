"""The run of the best trial's configuration on the clients, and what it costs them together with what chose it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfl_lightning.config.options import Options
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.loop import build_loop, so_far
from dpfl_lightning.papers.sets.cards import data_of_card
from dpfl_lightning.privacy.ledger.verify import ledger_of, read
from dpfl_lightning.search.costs import chosen_if, composed_costs, costs_of, planned_cost


def final_so_far(options: Options) -> tuple[bool, RunResult | None]:
    """Return whether the final run has begun, and its result if it is finished. UserError if it is of another trial."""
    try:
        return so_far(options)
    except UserError as error:
        folder = Path(str(options.output_dir))
        advice = f"Move {folder} away (its ledger still counts), or run fit --config {folder.parent}/best.yaml instead"
        raise UserError(f"{error} {folder} contains the run of an earlier best trial. {advice}.") from None


def clients_of(options: Options) -> dict[str, Any]:
    """Return the options that determine which records each client has."""
    return {"data": dataclasses.asdict(options.data), "seed": options.seed, "clients": options.clients.count}


def with_the_set(source: str | None, card: Mapping[str, Any], final: Options, chosen: bool = False) -> str | None:
    """Describe the joint guarantee of a distilled set (`source`, `card`) and of a later run on the same clients.

    The two ledgers are composed if both are available, client k of one is client k of the other, and the search on the
    set has not `chosen` the releases of the run; otherwise the text states why not. None if there is no set or it was
    made of public records only.
    """
    if source is None or (card.get("data") or {}).get("use_public"):
        return None
    clients = clients_of(final)
    clients = json.loads(json.dumps({**clients, "data": data_of_card(clients["data"])}))  # as the card has them
    why = f"the ledger in {Path(source)} belongs to another run"
    if {key: card.get(key) for key in clients} != clients:
        why = "the records of its clients were distributed differently (data, seed or clients.count differ)"
    elif chosen:
        why = "the search on the set chose batch sizes, and with them the releases of the run"
    else:
        try:
            report = read([ledger_of(source), ledger_of(final.output_dir or "")], one_population=True)
            if report.ledgers[0].verified.end.run == (card.get("ledger") or {}).get("run"):
                return f"Together with the set, composed from both ledgers: {report.weakest.words()}"
        except UserError as error:
            why = str(error)
    advice = "Add the epsilon and delta of the set to those of the run."
    return f"The costs of the set and of the run are not composed: {why.rstrip('.')}. {advice}"


def with_the_trials(begun: Sequence[Mapping[str, Any]], trial: Options, final: Options, chosen: bool) -> str | None:
    """Describe what private trials (their notes) and the final run cost the same clients; None if trials cost nothing.

    `trial` are the options of a trial. `chosen` says that the search can change the releases of a run.
    """
    if not (costs := costs_of(begun)):
        return None
    if clients_of(trial) != clients_of(final):
        return "The trials had other clients (data, seed or clients.count differ): add the epsilons of both."
    own = chosen_if(chosen, planned_cost(build_loop(final)))
    try:
        promises = composed_costs([*costs, own]).values()
    except UserError as error:
        return f"The costs of the trials and of the run are not stated together: {error}"
    weakest = max(promises, key=lambda promise: promise.epsilon)
    return f"Together with the trials that chose it, for the weakest client: {weakest.words()}"
