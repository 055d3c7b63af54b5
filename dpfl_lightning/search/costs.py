"""What private trials, a distilled set and a final run cost their clients, alone and together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpfl_lightning.loop import FederatedLoop
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.events import Caveat, Event, NonPrivateEvent, event_of
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.privacy.accounting.planned import numbered, once_each
from dpfl_lightning.privacy.compose import Keys, Line, compose
from dpfl_lightning.runtime.text import at_most, columns, counted

_MOST_CLIENTS = 30


@dataclass(frozen=True)
class Cost:
    """The most that a run can cost each of N clients, known before it begins.

    Args:
        epsilon: budget of each client, or the epsilon of its plan if that is larger, `[N]`; None means no bound.
        delta: `[N]`, in [0, 1).
        events: what each client releases at most, and the caveats of its guarantee, `[N]`.
        accountant, adjacency, sampling: those of the run, by name.
        rows_per_person: of the run, see `guarantee`.
        names: the clients'.
        chosen: whether results of earlier runs on the same records may change the events. Then only the budgets are
            known in advance.
    """

    epsilon: tuple[float | None, ...]
    delta: tuple[float, ...]
    events: tuple[tuple[Event, ...], ...]
    accountant: str = "pld"
    adjacency: str = "add_remove"
    sampling: str = "poisson"
    rows_per_person: int | None = None
    names: tuple[str, ...] = ()
    chosen: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the cost as JSON, in which equal clients share their events."""
        different, places = numbered(self.events)
        kinds = [[event.as_dict() for event in events] for events in different]
        return {**vars(self), "events": kinds, "events_of": places}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Cost:
        """Return the cost that `as_dict` stored."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
        }
        kinds = [tuple(map(event_of, events)) for events in fields.pop("events")]
        events = tuple(kinds[place] for place in fields.pop("events_of"))
        return cls(**fields, events=events)


def planned_cost(loop: FederatedLoop) -> Cost:
    """Return the cost of the run that `loop` is about to make. Its noise is solved; nothing is charged."""
    clients, accountant = loop.plan_schedule().clients, loop.config.accountant
    besides: list[Event] = [*map(Caveat, loop.config.caveats), *map(NonPrivateEvent, loop.clients.unprotected)]
    events = once_each(lambda schedule: (*schedule.events(), *besides), clients)
    queries, places = numbered([(one, schedule.delta) for one, schedule in zip(events, clients, strict=True)])
    bounds = accountant.bounds(queries)
    most = [max(bounds[place][0], schedule.target_epsilon) for place, schedule in zip(places, clients, strict=True)]
    return Cost(
        tuple(map(finite_or_none, most)),
        tuple(schedule.delta for schedule in clients),
        tuple(events),
        accountant.name,
        accountant.adjacency,
        loop.clients.sampling,
        loop.clients.most_records,
        loop.config.facts.names,
        loop.config.replans,
    )


def composed_costs(costs: Sequence[Cost]) -> dict[str, Guarantee]:
    """Return each client's guarantee for all runs, see `compose`, by its name or number.

    Without names, client k is the same in runs of as many clients; otherwise it may be anybody. Of runs whose events
    were `chosen` from results, the budgets are added, and the guarantee says so.
    """
    most = max((cost.rows_per_person for cost in costs if cost.rows_per_person), default=None)
    alike = len({len(cost.delta) for cost in costs}) == 1 and not any(cost.names for cost in costs)
    totals = compose(line for number, cost in enumerate(costs) for line in _lines(cost, number, alike))
    return {min(keys, default="any client"): total.guarantee(most) for keys, total in totals.items()}


def _lines(cost: Cost, run: int, alike: bool) -> list[Line]:
    """Return what each client of a run costs; numbers tell clients apart if those of all runs are `alike`."""
    names = cost.names or (tuple(map(str, range(len(cost.delta)))) if alike else ())
    means = cost.adjacency, cost.sampling, cost.accountant, None
    return [
        Line(
            str(run),
            client,
            Keys(names[client : client + 1]),
            cost.events[client],
            cost.delta[client],
            *means,
            (_bound(cost.epsilon[client]), cost.delta[client]) if cost.chosen else None,
        )
        for client in range(len(cost.delta))
    ]


def _bound(spent: float | None) -> float:
    return math.inf if spent is None else spent


# ---- reports


def costs_of(begun: Sequence[Mapping[str, Any]]) -> list[Cost]:
    """Return the costs of the runs of all trials that began, from their notes.

    A trial counts with everything it planned even if it was pruned, failed or died, because its length depends on the
    trials' results.
    """
    return [Cost.of(stored) for noted in begun for stored in noted.get("costs", ())]


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
        "composed": not any(cost.chosen for cost in costs),
        "not_covered": list(worst.not_covered),
    }


def headline(cost: Mapping[str, Any]) -> str:
    """State what all private trials cost a record or person together, for the first line of a report."""
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
