"""Accountants that turn composed releases into an epsilon: `rdp` (Renyi), `prv`, `gdp` (full batches) and `paper_ma`.

Calibration uses the vectorised formulas in `rdp.py`; Opacus computes the reported number of RDP and PRV. It is imported
inside functions because it imports torch, which would slow down `dpfl_lightning.plan --help`.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from scipy.special import log_ndtr

from dpfl_lightning.errors import require, require_one_of
from dpfl_lightning.privacy.accounting.events import Composed, Event, composed
from dpfl_lightning.privacy.accounting.prv import EPS_ERROR, NoPrv, prv_epsilon
from dpfl_lightning.privacy.accounting.rdp import (
    ORDERS,
    classically_converted,
    converted,
    laplace_rdp,
    sampled_gaussian_rdp,
)

#: description of an epsilon that needs no delta
PURE = "addition of pure epsilons"

Query = tuple[Sequence[Event], float]  # the events of one client, and its delta

#: relation between neighbouring data sets -> description
ADJACENCIES = {"add_remove": "add or remove one record", "replace_one": "replace one record"}


class Accountant(ABC):
    """Composes events into upper bounds of epsilon, rounded up to 1e-6: inf without noise, 0.0 without releases.

    Under replace_one a record's contribution moves by up to twice its bound. Without sampling, a release therefore
    costs as much as a release with half of its noise under add_remove.
    """

    name: str
    description: str  # text for reports
    together = 1  # preferred number of clients in one call of `search`

    def __init__(self, adjacency: str = "add_remove") -> None:
        require_one_of(ADJACENCIES, "adjacency", adjacency)
        self.adjacency = adjacency
        self.sensitivity = 2 if adjacency == "replace_one" else 1

    @abstractmethod
    def bound(self, events: Sequence[Event], delta: float) -> tuple[float, str]:
        """Return epsilon and how it was computed."""

    @abstractmethod
    def curve(self, event: Event, counts: Sequence[int], delta: float, before: Sequence[Event] = ()) -> np.ndarray:
        """Return epsilon after `before` and counts[i] repeats of `event`, [len(counts)]: fast, for live display."""

    def epsilon(self, events: Sequence[Event], delta: float) -> float:
        return self.bound(events, delta)[0]

    def bounds(self, queries: Sequence[Query]) -> list[tuple[float, str]]:
        """Return `bound` of many clients, vectorised where the arithmetic allows it."""
        return [self.bound(events, delta) for events, delta in queries]

    def search(self, queries: Sequence[Query]) -> np.ndarray:
        """Return epsilon of many clients, [clients]. This is fast; `bound` certifies the value that is kept."""
        return np.array([self.epsilon(events, delta) for events, delta in queries])


def rounded_up(value: float, decimals: int) -> float:
    """Round up to this number of decimals, as every epsilon is."""
    return max(math.ceil(value * 10**decimals) / 10**decimals, value) if math.isfinite(value) else value


def epsilon_text(value: float, decimals: int = 4) -> str:
    """Format an epsilon, rounded up: with this number of decimals, or with three digits if it is below 0.001.

    >>> epsilon_text(1.00001), epsilon_text(1e-6), epsilon_text(math.inf)
    ('1.0001', '0.000001', 'inf')
    """
    if not 0 < value < 0.001:
        return f"{rounded_up(value, decimals):.{decimals}f}"
    decimals = 2 - math.floor(math.log10(value))
    return f"{rounded_up(value, decimals):.{decimals}f}".rstrip("0")


def delta_text(value: float) -> str:
    """Format a delta with three digits, rounded up.

    >>> delta_text(2.4644e-05), delta_text(1e-05), delta_text(0.0)
    ('2.47e-05', '1e-05', '0')
    """
    if not value > 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit - 1e-9) * unit:.3g}"


def finite_or_none(value: float) -> float | None:
    """Return None for an infinite value, because JSON has no infinity."""
    return value if math.isfinite(value) else None


class Rdp(Accountant):
    """Renyi accountant: epsilon is the minimum over orders of the converted sum of RDP. It composes every event.

    The value is that of Opacus at the best order, rounded up, for all releases that Opacus supports (not replace_one
    with sampled batches, nor Laplace noise), a few per cent above the tight value. A target at or below the floor
    (0.0013 at delta 1e-4) cannot be certified, except for pure releases, whose epsilons add up at any delta.

    >>> from dpfl_lightning.privacy.accounting.events import GaussianEvent
    >>> [Rdp(relation).epsilon([GaussianEvent(0.04, 1.5, 2250)], 1e-5) for relation in ADJACENCIES]
    [7.329112, 14.435712]
    """

    name = "rdp"
    together = 128
    kind = "RDP"
    convert = staticmethod(converted)

    def __init__(self, adjacency: str = "add_remove", orders: tuple[float, ...] = ORDERS) -> None:
        super().__init__(adjacency)
        self.orders = orders
        self.description = f"{self.kind} ({'Opacus, ' * (self.sensitivity == 1)}orders {orders[0]:g} to {orders[-1]:g})"

    def bound(self, events: Sequence[Event], delta: float) -> tuple[float, str]:
        releases = composed(events, delta)
        if releases.free or releases.noiseless:
            return (0.0 if releases.free else math.inf), self.description
        ours = self.convert(self._rdp([releases])[0], self.orders, delta)
        best = int(np.argmin(ours))
        rdp = self._opacus_rdp(releases, self.orders[best])
        # The larger, because Opacus' rounding can fall below the true value if a step costs very little.
        certified = max(float(self.convert(np.array([rdp]), (self.orders[best],), delta)[0]), float(ours[best]))
        pure = releases.pure(self.sensitivity)
        return (rounded_up(pure, 6), PURE) if pure <= certified else (rounded_up(certified, 6), self.description)

    def search(self, queries: Sequence[Query]) -> np.ndarray:
        releases = [composed(events, delta) for events, delta in queries]
        deltas = np.array([delta for _, delta in queries])
        best = self.convert(self._rdp(releases), self.orders, deltas).min(axis=1)
        best = np.minimum(best, [composition.pure(self.sensitivity) for composition in releases])
        return np.array([0.0 if r.free else rounded_up(e, 6) for r, e in zip(releases, best, strict=True)])

    def curve(self, event: Event, counts: Sequence[int], delta: float, before: Sequence[Event] = ()) -> np.ndarray:
        earlier, single = composed(before, delta), composed([event], delta)
        paid, per_event = self._rdp([earlier, single])
        count = np.asarray(counts, dtype=float)[:, None]
        with np.errstate(invalid="ignore"):  # zero repeats of a noiseless release cost nothing: 0 * inf
            rdp = paid + np.where(count > 0, count * per_event, 0.0)
            per_event_pure = single.pure(self.sensitivity)
            pure = earlier.pure(self.sensitivity) + np.where(count > 0, count * per_event_pure, 0.0)[:, 0]
        best = np.minimum(self.convert(rdp, self.orders, delta).min(axis=1), pure)
        return np.array([rounded_up(e, 6) if r.any() else 0.0 for e, r in zip(best, rdp, strict=True)])

    def _rdp(self, clients: Sequence[Composed]) -> np.ndarray:
        """Return the RDP of each client, [clients, orders]; each distinct mechanism is computed once."""
        pairs = sorted({(rate, noise) for client in clients for rate, noise, _ in client.gaussian if noise > 0})
        rates, noises = np.array(pairs).reshape(-1, 2).T
        divergences = sampled_gaussian_rdp(rates, noises, self.orders, self.adjacency)
        table = dict(zip(pairs, divergences, strict=True))
        total = np.array([self._unsampled_rdp(client) for client in clients]).reshape(len(clients), len(self.orders))
        for row, client in zip(total, clients, strict=True):
            for rate, noise, steps in client.gaussian:
                row += steps * table[rate, noise] if noise > 0 else math.inf
        return total

    def _unsampled_rdp(self, composition: Composed) -> np.ndarray:
        """Return the RDP of selections and Laplace releases, [orders]; infinite if a release is unprotected."""
        order = np.array(self.orders)
        if composition.noiseless:
            return np.full(len(order), math.inf)
        ranges = [(epsilon * self.sensitivity, count) for epsilon, count in composition.selection]
        zcdp = sum(count * eps * eps / 8 for eps, count in ranges)  # `**` would raise on overflow
        laplace = [steps * laplace_rdp(noise / self.sensitivity, self.orders) for noise, steps in composition.laplace]
        return sum(laplace, order * zcdp)

    def _opacus_rdp(self, composition: Composed, order: float) -> float:
        """Return the RDP at one order. Opacus computes the sampled Gaussians if it supports the adjacency."""
        from opacus.accountants.analysis.rdp import compute_rdp

        total = self._unsampled_rdp(composition)[self.orders.index(order)]
        for rate, noise, steps in composition.gaussian:
            if self.sensitivity == 1 or rate == 1:
                total += compute_rdp(q=rate, noise_multiplier=noise / self.sensitivity, steps=steps, orders=[order])[0]
            else:
                total += steps * sampled_gaussian_rdp([rate], [noise], (order,), self.adjacency)[0, 0]
        return float(total)


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


class Prv(Accountant):
    """Numerical composition of privacy loss distributions (Opacus' PRV): 3 to 10 % below RDP, and slower.

    Returns the smaller of two valid upper bounds, PRV and RDP, and says which one it is, or why PRV has no value: below
    delta 1e-9, if the grid would not fit into memory, the numerics fail, or one epsilon takes over `time_limit_s`.

    >>> from dpfl_lightning.privacy.accounting.events import GaussianEvent
    >>> Prv().bound([GaussianEvent(0.01, 1.0, 1000)], 1e-5)
    (1.838372, 'PRV (Opacus, upper bound within 0.01)')
    """

    name = "prv"

    def __init__(self, adjacency: str = "add_remove", time_limit_s: float = 20.0) -> None:
        super().__init__(adjacency)
        self.time_limit_s = time_limit_s
        self.description = f"PRV (Opacus, upper bound within {EPS_ERROR:g})"
        self._rdp = Rdp(adjacency)

    def bound(self, events: Sequence[Event], delta: float) -> tuple[float, str]:
        rdp_bound, rdp_text = self._rdp.bound(events, delta)
        releases = composed(events, delta)
        if releases.free or releases.noiseless:
            return rdp_bound, self.description
        try:
            prv_bound, error = prv_epsilon(releases, delta, self.adjacency, self.time_limit_s)
        except NoPrv as reason:
            return rdp_bound, f"{rdp_text}, because {reason}"
        if prv_bound < rdp_bound:
            return rounded_up(prv_bound, 6), f"PRV (Opacus, upper bound within {error:g})"
        return rdp_bound, f"{rdp_text}, the smaller bound here: PRV gives {prv_bound:g}"

    def curve(self, event: Event, counts: Sequence[int], delta: float, before: Sequence[Event] = ()) -> np.ndarray:
        """Return the values of RDP, because live values must be fast."""
        return self._rdp.curve(event, counts, delta, before)


class Gdp(Accountant):
    """Exact Gaussian differential privacy for full batches with noise that may differ: mu^2 = sum steps / z^2.

    Under replace_one mu is twice that. Epsilon is tight (Balle and Wang, 2018, theorem 8; Dong, Roth, Su, 2022). For
    sampled batches, Opacus' accountant of the same name gives values below the truth.

    >>> from dpfl_lightning.privacy.accounting.events import GaussianEvent
    >>> Gdp().epsilon([GaussianEvent(1.0, 1.0)], 1e-5)
    4.377179
    """

    name = "gdp"
    description = "Gaussian differential privacy (exact)"
    together = 4096

    def bound(self, events: Sequence[Event], delta: float) -> tuple[float, str]:
        return float(self.search([(events, delta)])[0]), self.description

    def bounds(self, queries: Sequence[Query]) -> list[tuple[float, str]]:
        return [(epsilon, self.description) for epsilon in self.search(queries).tolist()]

    def search(self, queries: Sequence[Query]) -> np.ndarray:
        mu = [self._mu(events, delta) for events, delta in queries]
        return gaussian_epsilon(np.array(mu), np.array([delta for _, delta in queries]))

    def curve(self, event: Event, counts: Sequence[int], delta: float, before: Sequence[Event] = ()) -> np.ndarray:
        paid, per_event, count = self._mu(before, delta), self._mu([event], delta), np.asarray(counts, dtype=float)
        with np.errstate(invalid="ignore"):  # as in Rdp
            mu = np.hypot(paid, np.where(count > 0, np.sqrt(count) * per_event, 0.0))
        return gaussian_epsilon(mu, np.full(len(count), delta))

    def _mu(self, events: Sequence[Event], delta: float) -> float:
        releases = composed(events, delta)
        sampled = [rate for rate, _, _ in releases.gaussian if rate < 1]
        way_out = "Exact Gaussian privacy is for full batches; its usual value for sampled ones is below the truth."
        only_full = not (sampled or releases.selection or releases.laplace)
        unsupported = f"a sample rate of {sampled[0]:g}" if sampled else "selections and Laplace noise"
        require(only_full, "accountant", f"be rdp or prv for {unsupported}", self.name, way_out)
        if releases.noiseless:
            return math.inf
        return self.sensitivity * math.sqrt(sum(steps / noise**2 for _, noise, steps in releases.gaussian))


def gaussian_epsilon(mu: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return the smallest epsilon with gaussian_delta(epsilon, mu) <= delta, rounded up, [n].

    `mu` [n] >= 0 is sensitivity / noise std of each Gaussian mechanism, inf without noise; `delta` [n] is in (0, 1).
    """
    finite = np.isfinite(mu) & (mu > 0)
    safe, delta = np.where(finite, mu, 1.0), np.where(finite, delta, 0.5)  # the others are set below
    low, high = (np.zeros_like(safe), safe**2 / 2 + safe * np.sqrt(-2 * np.log(delta)))  # Phi(-x) <= exp(-x^2 / 2)
    for _ in range(60):
        middle = (low + high) / 2
        fits = gaussian_delta(middle, safe) <= delta
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    high = np.where(gaussian_delta(np.zeros_like(safe), safe) <= delta, 0.0, high)
    value = np.where(finite, high, np.where(mu > 0, np.inf, 0.0))
    return np.array([rounded_up(e, 6) for e in value])


def gaussian_delta(epsilon: np.ndarray, mu: np.ndarray) -> np.ndarray:
    """delta(epsilon; mu) = Phi(-eps/mu + mu/2) - exp(eps) Phi(-eps/mu - mu/2), [n]; epsilon >= 0, 0 < mu < inf."""
    minus = np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))  # this form does not overflow
    return np.exp(log_ndtr(mu / 2 - epsilon / mu)) - minus


def gaussian_mu(epsilon: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return the largest mu with gaussian_delta(epsilon, mu) <= delta, by bisection, never rounded up, [n].

    `epsilon` [n] is >= 0 and allows any mu if it is infinite; `delta` [n] is in (0, 1).
    """
    bounded = np.isfinite(epsilon)
    epsilon, low = np.where(bounded, epsilon, 1.0), np.full(np.shape(epsilon), 1e-6)
    high = np.ones_like(low)
    while (more := gaussian_delta(epsilon, high) <= delta).any():
        high = np.where(more, 2 * high, high)
    while (less := gaussian_delta(epsilon, low) > delta).any():
        low = np.where(less, low / 2, low)
    for _ in range(100):
        middle = (low + high) / 2
        fits = gaussian_delta(epsilon, middle) <= delta
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return np.where(bounded, low, np.inf)


ACCOUNTANTS: dict[str, type[Rdp | Prv | Gdp]] = {"rdp": Rdp, "prv": Prv, "gdp": Gdp, "paper_ma": PaperMa}


@functools.cache
def get_accountant(name: str, adjacency: str = "add_remove") -> Accountant:
    """Return "rdp" (default), "prv" (tighter, slower), "gdp" (exact, full batches) or "paper_ma".

    `adjacency` is the relation between neighbouring data sets, "add_remove" or "replace_one"; the same for a whole run.
    """
    require_one_of(ACCOUNTANTS, "accountant", name)
    return ACCOUNTANTS[name](adjacency)
