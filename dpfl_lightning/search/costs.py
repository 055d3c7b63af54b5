"""What private trials, a distilled set and a final run cost their clients, alone and together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dpfl_lightning.loop import FederatedLoop
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.events import Caveat, Event, NonPrivateEvent, event_of
from dpfl_lightning.privacy.accounting.filters import counted_events, whole_budgets
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.privacy.accounting.planned import numbered, once_each
from dpfl_lightning.privacy.accounting.units import unit_of
from dpfl_lightning.privacy.compose import Keys, Line, compose
from dpfl_lightning.runtime.text import at_most, columns, counted

_MOST_CLIENTS = 30


#: the most that a run can cost each of N clients, known before it begins `[N]`; without a name they have no keys
Cost = Sequence[Line]


def planned_cost(loop: FederatedLoop) -> Cost:
    """Return the cost of the run that `loop` is about to make. Its noise is solved; nothing is charged.

    The budget of a client is the epsilon of its plan if that is larger. If results choose the noise of the run, it
    costs its `whole_budgets`.
    """
    clients, accountant, names = loop.plan_schedule().clients, loop.config.accountant, loop.config.facts.names
    besides: list[Event] = [*map(Caveat, loop.config.caveats), *map(NonPrivateEvent, loop.clients.unprotected)]
    bounds = whole_budgets(clients, accountant) if loop.config.replans else [None] * len(clients)
    pairs = [*zip(clients, bounds, strict=True)]
    events = once_each(lambda pair: (*counted_events(pair[0].events(), pair[1]), *besides), pairs)
    lines = [
        Line(
            run="planned",
            client=client,
            keys=Keys([str(client)]),
            released=events[client],
            delta=schedule.delta,
            adjacency=accountant.adjacency,
            sampling=loop.clients.sampling,
            accountant=accountant.name,
            budget=schedule.target_epsilon,
            unit=loop.clients.unit,
        )
        for client, schedule in enumerate(clients)
    ]
    most = [max(line.budget, total.epsilon) for line, total in zip(lines, compose(lines).values(), strict=True)]
    return [replace(line, keys=Keys(names[i : i + 1]), budget=most[i]) for i, line in enumerate(lines)]


def composed_costs(costs: Sequence[Cost]) -> dict[str, Guarantee]:
    """Return each client's guarantee for all runs, see `compose`, by its name or number.

    Without names, client k is the same in runs of as many clients; otherwise it may be anybody.
    """
    alike = len(set(map(len, costs))) == 1 and not any(line.keys for cost in costs for line in cost)
    totals = compose(
        replace(line, run=str(run), keys=Keys([str(line.client)]) if alike else line.keys)
        for run, cost in enumerate(costs)
        for line in cost
    )
    return {total.name: total.guarantee for total in totals.values()}


def chosen_if(chosen: bool, cost: Cost) -> Cost:
    """Return a cost whose releases results have `chosen`, if they have, or as it was."""
    return [replace(line, chosen=line.chosen or chosen) for line in cost]


def stored(cost: Cost) -> dict[str, Any]:
    """Return a cost as JSON, in which equal clients share their events."""
    different, places = numbered([line.released for line in cost])
    return {
        **{name: getattr(cost[0], name) for name in ("adjacency", "sampling", "accountant", "chosen")},
        **cost[0].unit.options(),
        "names": [min(line.keys, default=None) for line in cost],
        "budget": [finite_or_none(line.budget) for line in cost],
        "delta": [line.delta for line in cost],
        "events": [[event.as_dict() for event in events] for events in different],
        "events_of": places,
    }


def cost_of(content: Mapping[str, Any]) -> Cost:
    """Return the cost that `stored` describes."""
    of_run: dict[str, Any] = {name: content[name] for name in ("adjacency", "sampling", "accountant", "chosen")}
    of_run["unit"] = unit_of(content)
    kinds = [tuple(map(event_of, events)) for events in content["events"]]
    rows = zip(*(content[name] for name in ("names", "budget", "delta", "events_of")), strict=True)
    return [
        Line("planned", i, Keys([] if name is None else [name]), kinds[place], delta, budget=_bound(budget), **of_run)
        for i, (name, budget, delta, place) in enumerate(rows)
    ]


def _bound(spent: float | None) -> float:
    return math.inf if spent is None else spent


# ---- reports


def costs_of(begun: Sequence[Mapping[str, Any]]) -> list[Cost]:
    """Return the costs of the runs of all trials that began, from their notes.

    A trial counts with everything it planned even if it was pruned, failed or died, because its length depends on the
    trials' results.
    """
    return [cost_of(content) for noted in begun for content in noted.get("costs", ())]


def summary(costs: Sequence[Cost]) -> dict[str, Any] | None:
    """Return each client's epsilon (None: no bound) and delta for all runs, and the guarantee of the weakest client.

    None without a run.
    """
    if not costs:
        return None
    by_name = composed_costs(costs)
    promises = by_name.values()
    worst = max(promises, key=lambda promise: promise.epsilon)
    return {
        "runs": len(costs),
        "epsilon": [finite_or_none(promise.epsilon) for promise in promises],
        "delta": [promise.delta for promise in promises],
        "names": list(by_name),
        "unit": worst.unit,
        "guarantee": worst.words(),
        "composed": not any(line.chosen for cost in costs for line in cost),
        "not_covered": list(worst.not_covered),
    }


def headline(cost: Mapping[str, Any]) -> str:
    """State what all private trials together cost a record, or another unit, for the first line of a report."""
    numbers = list(map(_bound, cost["epsilon"]))
    how = "composed" if cost["composed"] else "budgets are added"
    largest = cost["names"][numbers.index(max(numbers))]
    return (
        f"PRIVATE: all trials ({counted(cost['runs'], 'run')}) together cost a {cost['unit']} of a client at most "
        f"epsilon {at_most(max(numbers))} at delta {at_most(max(cost['delta']))} (client {largest} has the largest "
        f"epsilon; {how})."
    )


def details(cost: Mapping[str, Any], choice: str) -> str:
    """Describe the guarantee behind `headline`; `choice` states what it costs to choose the best trial."""
    return (
        f"Each run is a separate release. Guarantee of the client with the largest epsilon: {cost['guarantee']} "
        f"{choice} A later run on the same clients adds to this cost; `not_covered` in result.json lists what it does "
        "not cover."
    )


def table(cost: Mapping[str, Any]) -> list[str]:
    """Return a table of the clients' epsilons and deltas if the clients are few."""
    numbers = list(map(_bound, cost["epsilon"]))
    rows = zip(cost["names"], map(at_most, numbers), map(at_most, cost["delta"]), strict=True)
    return [] if len(numbers) > _MOST_CLIENTS else [columns([["client", "epsilon", "delta"], *rows])]


def set_text(card: Mapping[str, Any]) -> str:
    """Describe the cost of the distilled set, and what a final run adds to it."""
    spent, cost = card.get("epsilon_max"), "an epsilon without a bound"
    if spent is not None and "delta_max" in card:
        cost = f"at most epsilon {at_most(spent)} at delta {at_most(card['delta_max'])}"
    words = (
        f"The set cost its clients {cost}. Searching on it costs nothing more. A final run on the same clients adds "
        "its releases to this cost."
    )
    promise = card.get("guarantee")
    return f"{words} The set's guarantee: {promise['words']}" if promise else words
