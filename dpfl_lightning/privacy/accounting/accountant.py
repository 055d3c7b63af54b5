"""Accountants that turn composed releases into an epsilon: `pld` (tight), `rdp` (Renyi) and `paper_ma`.

Calibration of RDP uses the vectorised formulas in `rdp.py`; Opacus computes the number that is reported. It is imported
inside functions because it imports torch, which would slow down `dpfl plan --help`.
"""

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set
from decimal import Decimal
from operator import itemgetter
from typing import Any

import numpy as np

from dpfl_lightning.errors import require_one_of
from dpfl_lightning.privacy.accounting.events import SENSITIVITY, Composed, Event, composed
from dpfl_lightning.privacy.accounting.gaussian import gaussian_epsilon
from dpfl_lightning.privacy.accounting.losses import NoPld
from dpfl_lightning.privacy.accounting.pld import pld_epsilon
from dpfl_lightning.privacy.accounting.rdp import ORDERS, classically_converted, converted

#: description of an epsilon that needs no delta
PURE = "addition of pure epsilons"
#: description of the epsilon of full batches with Gaussian noise
EXACT = "exact Gaussian differential privacy"

_MOST_KNOWN = 4096  # mechanisms whose RDP is kept

Step = tuple[Any, ...]  # class and parameters of a release

Query = tuple[Sequence[Event], float]  # the events of one client, and its delta

#: relation between neighbouring data sets -> description, if they are about records; see `Unit.relation`
ADJACENCIES = {"add_remove": "add or remove one record", "replace_one": "replace one record"}


class Accountant(ABC):
    """Composes events into upper bounds of epsilon, rounded up to 1e-6: inf without noise, 0.0 without releases.

    Under replace_one a record's contribution moves by up to twice its bound. Without sampling, a release therefore
    costs as much as a release with half of its noise under add_remove.
    """

    name: str
    description: str  # text for reports
    chunk_size = 1  # preferred number of clients in one call of `search`
    faster: "Accountant | None" = None  # a faster accountant, whose noise is a first guess

    def __init__(self, adjacency: str = "add_remove") -> None:
        require_one_of(ADJACENCIES, "adjacency", adjacency)
        self.adjacency, self.sensitivity = adjacency, SENSITIVITY[adjacency]

    @abstractmethod
    def bounds(self, queries: Sequence[Query]) -> list[tuple[float, str]]:
        """Return the epsilon of each client and how it was computed, vectorised where the arithmetic allows it."""

    def bound(self, events: Sequence[Event], delta: float) -> tuple[float, str]:
        return self.bounds([(events, delta)])[0]

    def epsilon(self, events: Sequence[Event], delta: float) -> float:
        return self.bound(events, delta)[0]

    def estimates(self, queries: Sequence[Query]) -> list[tuple[float, str]]:
        """Like `bounds`, but fast; `bounds` certifies the values that are kept."""
        return self.bounds(queries)

    def search(self, queries: Sequence[Query]) -> np.ndarray:
        """Return the epsilons of `estimates`, [clients]."""
        return np.array([epsilon for epsilon, _ in self.estimates(queries)])


def rounded_up(value: float, decimals: int) -> float:
    """Round up to this number of decimals, as every epsilon is."""
    return max(math.ceil(value * 10**decimals) / 10**decimals, value) if math.isfinite(value) else value


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum of epsilons or deltas, added as the decimal numbers that they are written as.

    >>> exact_sum([0.1, 0.1, 0.1]), math.fsum([0.1, 0.1, 0.1])
    (0.3, 0.30000000000000004)
    """
    return float(sum(Decimal(repr(float(value))) for value in values))


def finite_or_none(value: float) -> float | None:
    """Return None for an infinite value, because JSON has no infinity."""
    return value if math.isfinite(value) else None


class Rdp(Accountant):
    """Renyi accountant: epsilon is the minimum over orders of the converted sum of RDP. It composes every event.

    The value is that of Opacus at the best order, rounded up, for all releases that Opacus supports (not replace_one
    with sampled batches, nor noise for the L1 norm), a few per cent above the tight value. A target at or below the
    floor (0.0013 at delta 1e-4) cannot be certified, except for pure releases, whose epsilons add up at any delta.

    >>> from dpfl_lightning.privacy.accounting.events import GaussianEvent
    >>> [Rdp(relation).epsilon([GaussianEvent(0.04, 1.5, 2250)], 1e-5) for relation in ADJACENCIES]
    [7.329112, 14.435712]
    """

    name = "rdp"
    chunk_size = 128
    kind = "RDP"
    convert = staticmethod(converted)

    def __init__(self, adjacency: str = "add_remove", orders: tuple[float, ...] = ORDERS) -> None:
        super().__init__(adjacency)
        self.orders = orders
        self._known: dict[Step, np.ndarray] = {}
        self.description = f"{self.kind} ({'Opacus, ' * (self.sensitivity == 1)}orders {orders[0]:g} to {orders[-1]:g})"

    def bounds(self, queries: Sequence[Query]) -> list[tuple[float, str]]:
        return [self._certified(composed(*query), query[1]) for query in queries]

    def _certified(self, releases: Composed, delta: float) -> tuple[float, str]:
        if releases.free or releases.noiseless:
            return self._smaller(releases, math.inf)
        ours = self.convert(self._rdp([releases])[0], self.orders, delta)
        best = int(np.argmin(ours))
        rdp = sum(release.library_rdp(self.orders[best], self.adjacency) for release in releases.releases)
        # The larger, because Opacus' rounding can fall below the true value if a step costs very little.
        certified = max(float(self.convert(np.array([rdp]), (self.orders[best],), delta)[0]), float(ours[best]))
        return self._smaller(releases, certified)

    def estimates(self, queries: Sequence[Query]) -> list[tuple[float, str]]:
        releases, delta = [composed(*query) for query in queries], np.array([delta for _, delta in queries])
        best = self.convert(self._rdp(releases), self.orders, delta).min(axis=1)
        return list(map(self._smaller, releases, best.tolist()))

    def _smaller(self, releases: Composed, epsilon: float) -> tuple[float, str]:
        """Return the smaller of an epsilon by RDP and of pure epsilons."""
        if releases.free:
            return 0.0, self.description
        pure = releases.pure(self.sensitivity)
        epsilon, how = (pure, PURE) if pure <= epsilon and not releases.noiseless else (epsilon, self.description)
        return rounded_up(epsilon, 6), how

    def curves(self, queries: Sequence[Query]) -> np.ndarray:
        """Return the RDP of each client at each order, `[clients, orders]`."""
        return self._rdp([composed(*query) for query in queries])

    def _rdp(self, clients: Sequence[Composed]) -> np.ndarray:
        """Return the RDP of each client, [clients, orders]; each distinct mechanism is computed once."""
        total = np.zeros((len(clients), len(self.orders)))
        steps: list[tuple[int, Step, int]] = []
        for row, client in enumerate(clients):
            if client.noiseless:
                total[row] = math.inf
            else:
                steps += [(row, (type(one), *one.parameters()), one.total) for one in client.releases]
        table = self._of_steps({step for _, step, _ in steps})
        for row, step, count in steps:
            total[row] += count * table[step]
        return total

    def _of_steps(self, steps: Set[Step]) -> dict[Step, np.ndarray]:
        """Return the RDP of single steps, [orders] each."""
        table = {step: self._known[step] for step in steps if step in self._known}
        new = sorted(steps - table.keys(), key=lambda step: (step[0].kind, *step[1:]))
        for kind, group in itertools.groupby(new, key=itemgetter(0)):
            of_kind = list(group)
            parameters = np.array([one[1:] for one in of_kind])
            table |= zip(of_kind, kind.rdp(parameters, self.orders, self.adjacency), strict=True)
        self._known = table if len(self._known) > _MOST_KNOWN else self._known | table
        return table


class PaperMa(Rdp):
    """The "moments accountant" of the noise-aware paper's code: RDP with orders up to 64 and the older conversion.

    Valid, but larger than `rdp`, by an unbounded factor near its floor (0.1462 at delta 1e-4): only for comparison with
    the paper's tables.

    >>> from dpfl_lightning.privacy.accounting.events import GaussianEvent
    >>> PaperMa().epsilon([GaussianEvent(16 / 2400, 6.0, 30000)], 1e-4)
    0.852265
    """

    name = "paper_ma"
    kind = "the noise-aware paper's moments accountant: RDP with the older conversion"
    convert = staticmethod(classically_converted)

    def __init__(self, adjacency: str = "add_remove") -> None:
        super().__init__(adjacency, (*(1 + x / 10 for x in range(1, 100)), *range(12, 65)))


class Pld(Accountant):
    """Tight composition of privacy loss distributions: upper bounds, within 1 % and 0.01 of the least true epsilon.

    Full batches with Gaussian noise are composed exactly, everything else numerically, as tightly as said for sample
    rates from 1e-4, epsilons from 0.001 and deltas up to 0.1. Where the epsilon of RDP is above 100, where there is no
    tight bound, or where RDP is smaller, RDP stands in, and the guarantee says so.

    >>> from dpfl_lightning.privacy.accounting.events import GaussianEvent
    >>> Pld().bound([GaussianEvent(0.01, 1.0, 1000)], 1e-5)
    (1.828583, 'PLD (dp_accounting, upper bound)')
    >>> Pld().bound([GaussianEvent(1.0, 1.0)], 1e-5)
    (4.377179, 'exact Gaussian differential privacy')
    """

    name = "pld"
    description = "PLD (dp_accounting, upper bound)"
    chunk_size = 16
    faster: Rdp

    def __init__(self, adjacency: str = "add_remove") -> None:
        super().__init__(adjacency)
        self.faster = Rdp(adjacency)
        self._cached_bound = functools.lru_cache(maxsize=8192)(self._composed)

    def bounds(self, queries: Sequence[Query]) -> list[tuple[float, str]]:
        releases = [composed(events, delta) for events, delta in queries]
        full = [i for i, release in enumerate(releases) if release.full_batches]
        mu, deltas = [releases[i].mu(self.sensitivity) for i in full], [queries[i][1] for i in full]
        exact = dict(zip(full, gaussian_epsilon(np.array(mu), np.array(deltas)).tolist(), strict=True))
        return [
            (rounded_up(exact[i], 6), EXACT) if i in exact else self._cached_bound(release, queries[i][1])
            for i, release in enumerate(releases)
        ]

    def _composed(self, releases: Composed, delta: float) -> tuple[float, str]:
        if releases.free or releases.noiseless:
            return (0.0 if releases.free else math.inf), self.description
        if (pure := rounded_up(releases.pure(self.sensitivity), 6)) and delta == 0:
            return pure, PURE
        rdp = float(self.faster.search([(releases.releases, delta)])[0])
        try:
            epsilon = pld_epsilon(releases, delta, self.adjacency, rdp)
        except NoPld as reason:
            return rdp, f"{self.faster.description}, because {reason}"
        except (ValueError, ArithmeticError, MemoryError) as error:  # of dp_accounting
            return rdp, f"{self.faster.description}, because the numerics failed ({error})"
        by_rdp = f"{self.faster.description}, the smaller bound here"
        bounds = ((pure, PURE), (rounded_up(epsilon, 6), self.description), (rdp, by_rdp))
        return min(bounds, key=lambda bound: bound[0])


ACCOUNTANTS: dict[str, type[Pld | Rdp]] = {"pld": Pld, "rdp": Rdp, "paper_ma": PaperMa}


@functools.cache
def get_accountant(name: str, adjacency: str = "add_remove") -> Accountant:
    """Return "pld" (default, tight), "rdp" or "paper_ma".

    `adjacency` is the relation between neighbouring data sets, "add_remove" or "replace_one"; the same for a whole run.
    """
    require_one_of(ACCOUNTANTS, "accountant", name)
    return ACCOUNTANTS[name](adjacency)
