"""What private trials, a distilled set and a final run cost their clients, alone and together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from dpfl_lightning.build import FederatedLoop
from dpfl_lightning.errors import require
from dpfl_lightning.privacy.accounting.accountant import (
    Accountant,
    exact_sum,
    finite_or_none,
    get_accountant,
)
from dpfl_lightning.privacy.accounting.events import (
    Caveat,
    Event,
    NonPrivateEvent,
)
from dpfl_lightning.privacy.accounting.guarantee import Guarantee, guarantee
from dpfl_lightning.privacy.accounting.planned import numbered, once_each
from dpfl_lightning.privacy.sampling import SAMPLINGS
from dpfl_lightning.runtime.text import at_most, columns, counted

_MOST_CLIENTS = 30
_EVENTS = {kind.__name__: kind for kind in get_args(Event)}


@dataclass(frozen=True)
class Cost:
    """The most that a run can cost each of N clients, known before it begins.

    Args:
        epsilon: budget of each client, or the epsilon of its plan if that is larger, `[N]`; None means no bound.
        delta: `[N]`, in [0, 1).
        events: what each client releases at most, and the caveats of its guarantee, `[N]`.
        accountant, adjacency, sampling: those of the run, by name.
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
    names: tuple[str, ...] = ()
    chosen: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the cost as JSON, in which equal clients share their events."""
        different, places = numbered(self.events)
        kinds = [[{"kind": type(event).__name__, **asdict(event)} for event in events] for events in different]
        return {**vars(self), "events": kinds, "events_of": places}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Cost:
        """Return the cost that `as_dict` stored."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
        }
        kinds = [tuple(map(_event, events)) for events in fields.pop("events")]
        events = tuple(kinds[place] for place in fields.pop("events_of"))
        return cls(**fields, events=events)


def _event(stored: Mapping[str, Any]) -> Event:
    fields = dict(stored)
    return _EVENTS[fields.pop("kind")](**fields)


def planned_cost(loop: FederatedLoop) -> Cost:
    """Return the cost of the run that `loop` is about to make. Its noise is solved; nothing is charged."""
    clients, accountant = loop.plan_schedule().clients, loop.accountant
    besides: list[Event] = [*map(Caveat, loop.caveats), *map(NonPrivateEvent, loop.clients.unprotected)]
    events = once_each(lambda schedule: (*schedule.events(), *besides), clients)
    epsilons = _bounds(events, [schedule.delta for schedule in clients], accountant)
    most = [max(own[0], schedule.target_epsilon) for own, schedule in zip(epsilons, clients, strict=True)]
    return Cost(
        tuple(map(finite_or_none, most)),
        tuple(schedule.delta for schedule in clients),
        tuple(events),
        accountant.name,
        accountant.adjacency,
        loop.clients.sampling,
        loop.facts.names,
        loop.replans,
    )


def together(costs: Sequence[Cost]) -> tuple[Guarantee, ...]:
    """Return each client's guarantee for all runs, `[N]`; client k is the same, with the same records, in each run.

    The events of the runs are composed by their accountant, at the largest delta of the client. The budgets and deltas
    of runs whose events were `chosen` from results, and of runs with another accountant than the first, are added, and
    the guarantee says so. Raises UserError if adjacencies differ.

    Reference: Rogers et al. (2016), https://arxiv.org/abs/1605.08294, on what may be chosen.
    """
    first, must = costs[0], "be the same for runs whose costs are stated together"
    adjacencies = dict.fromkeys(cost.adjacency for cost in costs)
    require(len(adjacencies) == 1, "privacy.adjacency", must, ", ".join(adjacencies))
    accountant = get_accountant(first.accountant, first.adjacency)
    sampling = SAMPLINGS[next((cost.sampling for cost in costs if cost.sampling != "poisson"), first.sampling)]
    apart = [cost for cost in costs if _why_apart(cost, first)]
    joined = [cost for cost in costs if not _why_apart(cost, first)]
    clients = range(len(first.delta))
    if joined:
        released = [tuple(event for cost in joined for event in cost.events[client]) for client in clients]
        deltas = [max(cost.delta[client] for cost in joined) for client in clients]
        bounds = _bounds(released, deltas, accountant)

    def promise(client: int) -> Guarantee:
        (epsilon, method), delta = (bounds[client], deltas[client]) if joined else ((0.0, ""), 0.0)
        if apart:
            epsilon = exact_sum([epsilon, *(_bound(cost.epsilon[client]) for cost in apart)])
            delta = exact_sum([delta, *(cost.delta[client] for cost in apart)])
            reasons = "; ".join(dict.fromkeys(_why_apart(cost, first) for cost in apart))
            added = f"addition of the budgets of {counted(len(apart), 'run')} ({reasons})"
            method = f"{method}, and {added}" if method else added
        events = [event for cost in costs for event in cost.events[client]]
        return guarantee(events, delta, accountant, sampling, bound=(epsilon, method))

    return tuple(map(promise, clients))


def _bounds(
    events: Sequence[tuple[Event, ...]], deltas: Sequence[float], accountant: Accountant
) -> list[tuple[float, str]]:
    """Return the accountant's bound for each client, computed once for equal clients."""
    different, places = numbered(list(zip(events, deltas, strict=True)))
    bounds = accountant.bounds(different)
    return [bounds[place] for place in places]


def _why_apart(cost: Cost, first: Cost) -> str:
    """Return why the releases of a run cannot be composed with those of the first run; empty if they can."""
    if cost.accountant != first.accountant:
        return f"accountant {cost.accountant} is not that of the other runs"
    return "results of earlier runs chose its releases" if cost.chosen else ""


def _bound(spent: float | None) -> float:
    return math.inf if spent is None else spent


# ---- reports


def total_cost(begun: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return what all trials that began cost each client together; None if no trial has a cost.

    `begun` are the notes of the trials. A trial counts with everything it planned even if it was pruned, failed or
    died, because its length depends on the trials' results.
    """
    costs = [Cost.of(noted["cost"]) for noted in begun if "cost" in noted]
    return summary(costs) if costs else None


def summary(costs: Sequence[Cost]) -> dict[str, Any]:
    """Return each client's epsilon (None: no bound) and delta for all runs, and the guarantee of the weakest client."""
    promises = together(costs)
    worst = max(promises, key=lambda promise: promise.epsilon)
    return {
        "runs": len(costs),
        "epsilon": [finite_or_none(promise.epsilon) for promise in promises],
        "delta": [promise.delta for promise in promises],
        "names": list(costs[0].names),
        "guarantee": worst.words(),
        "composed": not any(_why_apart(cost, costs[0]) for cost in costs),
        "not_covered": list(worst.not_covered),
    }


def cost_words(cost: Mapping[str, Any]) -> str:
    """Describe the cost of private trials for their clients."""
    numbers = list(map(_bound, cost["epsilon"]))
    most, names = numbers.index(max(numbers)), cost["names"] or range(len(numbers))
    how = "composed" if cost["composed"] else "budgets are added"
    return (
        f"PRIVATE: {cost['runs']} trials on the clients' records, each of them a separate release. Together with the "
        f"choice made from them, they cost a record of a client at most epsilon {at_most(numbers[most])} at delta "
        f"{at_most(max(cost['delta']))} (client {names[most]} has the largest epsilon; {how}). For this client: "
        f"{cost['guarantee']} Scores on public records choose, at no cost. A later run on the same clients adds to "
        "this cost; `not_covered` in result.json lists what it does not cover."
    )


def cost_text(cost: Mapping[str, Any]) -> str:
    """Return `cost_words`, and a table if the clients are few."""
    words, numbers = cost_words(cost), list(map(_bound, cost["epsilon"]))
    if len(numbers) > _MOST_CLIENTS:
        return words
    names = cost["names"] or range(len(numbers))
    rows = zip(names, map(at_most, numbers), map(at_most, cost["delta"]), strict=True)
    return f"{words}\n{columns([['client', 'epsilon', 'delta'], *rows])}"


def set_text(card: Mapping[str, Any]) -> str:
    """Describe the cost of the distilled set, and what a final run adds to it."""
    spent, cost = card.get("epsilon_max"), "an epsilon without a bound"
    if spent is not None and "delta_max" in card:
        cost = f"at most epsilon {at_most(spent)} at delta {at_most(card['delta_max'])}"
    words = (
        f"The set cost its clients {cost}. Searching on it costs nothing more. A final run on the same clients adds "
        "its releases to this cost."
    )
    promise = card.get("guarantee")  # with its caveats
    return f"{words} The set's guarantee: {promise}" if promise else words
