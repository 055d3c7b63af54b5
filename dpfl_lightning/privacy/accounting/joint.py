"""Several runs on the records of one data holder: their common epsilon, and the filter that keeps a limit on it."""

import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from dpfl_lightning.errors import require
from dpfl_lightning.privacy.accounting.accountant import (
    ADJACENCIES_OF_PERSONS,
    Query,
    Rdp,
    exact_sum,
    get_accountant,
    rounded_up,
)
from dpfl_lightning.privacy.accounting.events import Release, composed
from dpfl_lightning.privacy.accounting.rdp import ORDERS, converted

#: what one client has released in a run
Released = tuple[Release, ...]
#: for each run, what each client released that may be the holder's: one of them, unless clients have no names
History = Sequence[Sequence[Released]]

_MOST_TIGHT = 200  # different mechanisms that are composed tightly: about three seconds
_WORST = "with the worst client of each run"


def relation_of_all(adjacencies: Sequence[str]) -> str:
    """Return the relation between neighbouring data sets under which the runs compose.

    Different relations compose under replacement: it costs at least as much as adding or removing. A replaced record
    moves what its person contributes by at most twice the clip norm, so a mixture of records and persons holds for
    a record that its person replaces.
    """
    different = set(adjacencies)
    if len(different) == 1:
        return adjacencies[0]
    return "replace_one_of_persons" if different <= ADJACENCIES_OF_PERSONS.keys() else "replace_one"


def larger(one: Sequence[Release], other: Sequence[Release]) -> list[Release]:
    """Return for each mechanism the releases of the side that has more of them."""
    most: dict[Hashable, Release] = {}
    for release in (*composed(one, 0.5).releases, *composed(other, 0.5).releases):  # costs come later, with a delta
        key = type(release), *release.parameters()
        if key not in most or most[key].total < release.total:
            most[key] = release
    return [*most.values(), *dict.fromkeys(event for event in (*one, *other) if not event.private)]


def joint_bounds(holders: Sequence[tuple[History, float, str]]) -> list[tuple[float, str]]:
    """Return epsilon and how it was computed for the (history, delta, adjacency) of each holder.

    Releases of all runs are composed as if one run had planned them; of several clients of a run the worst counts. PLD
    composes the holders with the largest epsilons as long as they have few different mechanisms, RDP the others.
    """
    bounds, left = [_by_rdp(*holder) for holder in holders], _MOST_TIGHT
    done: dict[Hashable, tuple[float, str]] = {}
    for place in sorted(range(len(holders)), key=lambda place: -bounds[place][0]):
        history, delta, adjacency = holders[place]
        different = [sorted(set(run), key=repr) for run in history]
        count = math.prod(map(len, different))
        if (key := (repr(different), delta, adjacency)) not in done:
            of_first = [event for run in different for event in run[0]]
            if count * len(composed(of_first, delta).releases) > left:
                continue
            everything = [[event for released in one for event in released] for one in itertools.product(*different)]
            left -= sum(len(composed(events, delta).releases) for events in everything)
            tight = get_accountant("pld", adjacency).bounds([(events, delta) for events in everything])
            done[key] = max(tight, key=lambda bound: bound[0])
        bounds[place] = done[key]
    return bounds


def _by_rdp(history: History, delta: float, adjacency: str) -> tuple[float, str]:
    rdp = _rdp(adjacency)
    pure = exact_sum(max(composed(one, delta).pure(rdp.sensitivity) for one in run) for run in history)
    epsilon = min(float(converted(worst_curve(history, rdp), rdp.orders, delta).min()), pure)
    several = any(len(set(run)) > 1 for run in history)
    return rounded_up(epsilon, 6), f"{rdp.description}, {_WORST}" if several else rdp.description


def worst_curve(history: History, rdp: Rdp) -> np.ndarray:
    """Return an upper bound of the RDP of a holder at each order, `[orders]`: of each run, the client with most."""
    total = np.zeros(len(rdp.orders))
    for run in history:
        queries: list[Query] = [(released, 0.5) for released in set(run)]  # RDP has no delta
        total += rdp.curves(queries).max(axis=0)
    return total


@functools.cache
def _rdp(adjacency: str, orders: tuple[float, ...] = ORDERS) -> Rdp:
    return Rdp(adjacency, orders)


@dataclass(frozen=True)
class RenyiFilter:
    """Keeps runs within (epsilon, delta), though later runs are chosen after the results of earlier ones.

    The RDP of all of them at one order, which is fixed by the limit, stays within a budget. The order is the one at
    which Gaussian noise on full batches may have the least variance. Composing what was released by PLD gives a
    smaller epsilon; it assumes that all runs were planned beforehand. Raises UserError if no order can keep the limit.

    Reference: Feldman and Zrnic (2021), theorem 4.3.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        require(0 < self.delta < 1, "delta", "be in (0, 1)", self.delta, "It is usually below 1 / records.")
        floor = float(self._floors.min())
        must = f"be above {rounded_up(floor, 4)} at this delta, and finite"
        require(floor < self.epsilon < np.inf, "epsilon", must, self.epsilon)

    @property
    def _floors(self) -> np.ndarray:
        """The epsilon of nothing at each order."""
        return converted(np.zeros(len(ORDERS)), ORDERS, self.delta)

    @functools.cached_property
    def order(self) -> float:
        return ORDERS[int(np.argmax((self.epsilon - self._floors) / np.array(ORDERS)))]

    @property
    def budget(self) -> float:
        """The RDP at `order` that may be spent."""
        return self.epsilon - float(self._floors[ORDERS.index(self.order)])

    def used(self, history: History, adjacency: str) -> float:
        """Return the share of the budget that a holder has used: at most 1 is within the limit."""
        return float(worst_curve(history, _rdp(adjacency, (self.order,)))[0]) / self.budget
