"""Epsilon of composed releases: `rdp` (Renyi), `prv` (numerical composition), `gdp` (exact, full batches).

Every accountant takes the same events and adjacency (add or remove one record), composes different events together, and
errs on one side only: an epsilon is rounded up to 1e-6. Opacus is the authority for RDP and PRV; what calibration needs
thousands of times comes from `rdp.py`, and the number reported is then Opacus' own.

Opacus imports torch, so it is imported where it is called: `dpfl_lightning.plan --help` stays quick.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy.integrate import IntegrationWarning
from scipy.special import log_ndtr

from dpfl_lightning.errors import UserError, nearest, require
from dpfl_lightning.privacy.events import Caveat, Event, GaussianEvent, SelectionEvent, repeated
from dpfl_lightning.privacy.rdp import ORDERS, converted, sampled_gaussian_rdp

Query = tuple[Sequence[Event], float]  # the events of one client, and its delta


class Accountant(Protocol):
    """What composes events into an epsilon. All values are upper bounds."""

    name: str
    description: str  # what a report says of it
    together: int  # how many clients `search` likes to be asked about at once

    def bound(self, events: Sequence[Event], delta: float) -> tuple[float, str]:
        """Epsilon, rounded up to 1e-6 (inf without noise, 0.0 without releases), and how it was found."""
        ...

    def epsilon(self, events: Sequence[Event], delta: float) -> float:
        """The first half of `bound`."""
        ...

    def search(self, queries: Sequence[Query]) -> np.ndarray:
        """Epsilon of many clients at once, [clients], quick; `bound` certifies the one that is kept."""
        ...

    def curve(self, event: Event, counts: Sequence[int], delta: float, before: Sequence[Event] = ()) -> np.ndarray:
        """Epsilon after `before` and counts[i] repeats of `event`, [len(counts)]: live values, cheap."""
        ...


def rounded_up(value: float, decimals: int) -> float:
    """The smallest number of so many decimals that is not below `value`: how every epsilon is rounded.

    >>> rounded_up(1.00000001, 6), rounded_up(2.0, 6), rounded_up(math.inf, 6)
    (1.000001, 2.0, inf)
    """
    if not math.isfinite(value):
        return value
    return max(math.ceil(value * 10**decimals) / 10**decimals, value)


@dataclass(frozen=True)
class Composed:
    """Events after merging equal ones: what an accountant composes.

    Args:
        gaussian: (sample_rate, noise_multiplier, steps) of each distinct Gaussian event that costs anything.
        selection: sum of count * epsilon^2 / 8 over the selections; their RDP at order alpha is alpha
            times this.
    """

    gaussian: tuple[tuple[float, float, int], ...]
    selection: float

    @property
    def noiseless(self) -> bool:
        """Epsilon is infinite."""
        return any(noise == 0 for _, noise, _ in self.gaussian) or math.isinf(self.selection)

    @property
    def free(self) -> bool:
        """Epsilon is 0."""
        return not self.gaussian and self.selection == 0


def composed(events: Sequence[Event], delta: float) -> Composed:
    """Check events and delta, and merge equal events (a ledger has one line a round).

    Raises:
        UserError: a sampling rate outside (0, 1], negative or unsolved noise, negative counts, delta outside
            (0, 1).

    >>> composed([GaussianEvent(0.1, 1.0, 3), GaussianEvent(0.1, 1.0, 4)], 1e-5).gaussian
    ((0.1, 1.0, 7),)
    """
    steps_of: Counter[tuple[float, float]] = Counter()
    selection = 0.0
    for event in events:
        if isinstance(event, GaussianEvent):
            steps_of[_checked(event)] += event.steps
        elif isinstance(event, SelectionEvent):
            require(event.epsilon >= 0, "selection epsilon", "be at least 0", event.epsilon)
            require(event.count >= 0, "count", "be at least 0", event.count)
            selection += event.count * event.epsilon**2 / 8 if event.count else 0.0
        elif not isinstance(event, Caveat):
            raise TypeError(f"not an event: {event!r}")
    costly = [(*key, steps) for key, steps in steps_of.items() if steps > 0 and math.isfinite(key[1])]
    releases = Composed(tuple(costly), selection)
    if not (releases.free or releases.noiseless):  # nothing spent, and nothing protected, are so at any delta
        require(0 < delta < 1, "delta", "be in (0, 1)", delta, "Usual is at most 1 / number of records.")
    return releases


def _checked(event: GaussianEvent) -> tuple[float, float]:
    """(sample_rate, noise_multiplier) of a valid event; a UserError else."""
    rate, noise = event.sample_rate, event.noise_multiplier
    require(0 < rate <= 1, "sample_rate", "be in (0, 1]", rate, "A batch size? Divide by the number of records.")
    require(event.steps >= 0, "steps", "be at least 0", event.steps)
    if noise is None:
        raise UserError("`noise_multiplier` must be a number, got None. Solve it first with `calibrate`.")
    require(noise >= 0, "noise_multiplier", "be at least 0", noise, "0 is no privacy.")
    if 1e100 < noise < math.inf:  # its square leaves a double's range: the safe bound of less noise, or none
        noise = 1e100
    return float(rate), float(noise) if noise > 1e-100 else 0.0


class Rdp:
    """Renyi accountant: epsilon = min over orders of the converted sum of RDP; composes every kind of event.

    The value is Opacus' own at the best order (`RDPAccountant.get_epsilon` with these orders), rounded up. It
    is a few per cent above the tight value; a target at or below its floor (0.0013 at delta 1e-4) cannot be
    certified.

    >>> Rdp().epsilon([GaussianEvent(0.04, 1.5, 2250)], 1e-5)
    7.329112
    """

    name = "rdp"
    together = 128

    def __init__(self, orders: tuple[float, ...] = ORDERS) -> None:
        self.orders = orders
        self.description = f"RDP (Opacus, orders {min(orders):g} to {max(orders):g})"

    def epsilon(self, events: Sequence[Event], delta: float) -> float:
        return self.bound(events, delta)[0]

    def bound(self, events: Sequence[Event], delta: float) -> tuple[float, str]:
        releases = composed(events, delta)
        if releases.free or releases.noiseless:
            return (0.0 if releases.free else math.inf), self.description
        from opacus.accountants.analysis.rdp import compute_rdp

        ours = converted(self._rdp([releases])[0], self.orders, delta)
        order = self.orders[int(np.argmin(ours))]
        rdp = releases.selection * order
        for rate, noise, steps in releases.gaussian:
            rdp += compute_rdp(q=rate, noise_multiplier=noise, steps=steps, orders=[order])[0]
        # The larger, because Opacus' rounding can fall below the truth where a step costs next to nothing.
        certified = max(float(converted(np.array([rdp]), (order,), delta)[0]), float(ours.min()))
        return rounded_up(certified, 6), self.description

    def search(self, queries: Sequence[Query]) -> np.ndarray:
        releases = [composed(events, delta) for events, delta in queries]
        deltas = np.array([delta for _, delta in queries])
        best = converted(self._rdp(releases), self.orders, deltas).min(axis=1)
        return np.array([0.0 if r.free else rounded_up(e, 6) for r, e in zip(releases, best, strict=True)])

    def curve(self, event: Event, counts: Sequence[int], delta: float, before: Sequence[Event] = ()) -> np.ndarray:
        paid, each = self._rdp([composed(before, delta), composed([event], delta)])
        count = np.asarray(counts, dtype=float)[:, None]
        with np.errstate(invalid="ignore"):  # no repeat of a noiseless release costs nothing: 0 * inf
            rdp = paid + np.where(count > 0, count * each, 0.0)
        best = converted(rdp, self.orders, delta).min(axis=1)
        return np.array([rounded_up(e, 6) if r.any() else 0.0 for e, r in zip(best, rdp, strict=True)])

    def _rdp(self, many: Sequence[Composed]) -> np.ndarray:
        """RDP of each composition, [len(many), orders]; each distinct mechanism is computed once."""
        pairs = sorted({(rate, noise) for one in many for rate, noise, _ in one.gaussian if noise > 0})
        rates, noises = np.array(pairs).reshape(-1, 2).T
        table = dict(zip(pairs, sampled_gaussian_rdp(rates, noises, self.orders), strict=True))
        total = np.outer([one.selection for one in many], self.orders)
        for row, one in zip(total, many, strict=True):
            for rate, noise, steps in one.gaussian:
                row += steps * table[rate, noise] if noise > 0 else math.inf
        return total


_EPS_ERROR, _MAX_EPS_ERROR = 0.01, 0.1
# Points of the discretised privacy loss: a second or two, and some 300 MB, for each distinct event.
_MAX_GRID = 2**21


class Prv:
    """Numerical composition of privacy loss distributions (Opacus' PRV): 3 to 10 % below RDP, and slower.

    The smaller of two valid upper bounds, PRV and RDP, is given, and the words say which. RDP alone is used,
    and the words say why, for selections, below delta 1e-9, where the grid would not fit, its numerics fail,
    or time is over.

    Args:
        time_limit_s: for one epsilon. Looked at between distinct events, each of which the grid's size bounds
            to a second or two; given up as soon as the first ones show that the rest cannot be done in time.

    >>> Prv().bound([GaussianEvent(0.01, 1.0, 1000)], 1e-5)
    (1.838372, 'PRV (Opacus, upper bound within 0.01)')
    """

    name = "prv"
    description = f"PRV (Opacus, upper bound within {_EPS_ERROR:g})"
    together = 1

    def __init__(self, time_limit_s: float = 20.0) -> None:
        self.time_limit_s = time_limit_s
        self._rdp = Rdp()

    def epsilon(self, events: Sequence[Event], delta: float) -> float:
        return self.bound(events, delta)[0]

    def bound(self, events: Sequence[Event], delta: float) -> tuple[float, str]:
        loose, loose_words = self._rdp.bound(events, delta)
        releases = composed(events, delta)
        if releases.free or releases.noiseless:
            return loose, self.description
        if releases.selection > 0:
            return loose, f"{loose_words}, because PRV does not compose selections here"
        try:
            tight, error = _prv_epsilon(releases.gaussian, delta, self.time_limit_s)
        except _NoPrv as reason:
            return loose, f"{loose_words}, because {reason}"
        if tight < loose:
            return tight, f"PRV (Opacus, upper bound within {error:g})"
        return loose, f"{loose_words}, the smaller bound here: PRV gives {tight:g}"

    def search(self, queries: Sequence[Query]) -> np.ndarray:
        return np.array([self.epsilon(events, delta) for events, delta in queries])

    def curve(self, event: Event, counts: Sequence[int], delta: float, before: Sequence[Event] = ()) -> np.ndarray:
        """As RDP's, but nowhere above PRV's value at the largest count, which is also the last value."""
        if not len(counts):
            return np.empty(0)
        last = self.epsilon([*before, repeated(event, int(max(counts)))], delta)
        return np.minimum(self._rdp.curve(event, counts, delta, before), last)


class _NoPrv(Exception):
    """Why PRV has no value, in words."""


@functools.lru_cache(maxsize=4096)
def _prv_epsilon(
    gaussian: tuple[tuple[float, float, int], ...], delta: float, time_limit_s: float
) -> tuple[float, float]:
    """Opacus' PRV upper bound of different events, and the error it includes, in bounded time and memory.

    Raises:
        _NoPrv: there is none; the message says why.
    """
    from opacus.accountants.analysis import prv

    # The tail of the composed loss is a sum of rounding errors of 1e-16: measured against exact values,
    # Opacus' result is below the truth (by 0.1) at delta 1e-10 after 60,000 steps. Keep two orders of
    # magnitude away.
    if delta < max(1e-9, 1e-12 * sum(steps for _, _, steps in gaussian)):
        raise _NoPrv(f"PRV's rounding errors matter at delta {delta:g}")
    delta_error = delta / 1000  # Opacus' default
    eps_error, reach, mesh = _prv_grid(gaussian, delta_error)
    total: Any = None
    start = time.monotonic()
    try:
        grid = prv.Domain.create_aligned(-reach, reach, mesh)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("error", IntegrationWarning)  # a mean that cannot be trusted
            for done, (rate, noise, steps) in enumerate(gaussian):
                elapsed = time.monotonic() - start
                if elapsed > time_limit_s or (done and elapsed / done * len(gaussian) > time_limit_s):
                    raise _NoPrv(f"PRV would need more than its {time_limit_s:g} s")
                loss = prv.PoissonSubsampledGaussianPRV(rate, noise)
                one = prv.discretize(prv.TruncatedPrivacyRandomVariable(loss, grid.t_min, grid.t_max), grid)
                one = prv.compose_heterogeneous([one], [steps])
                total = one if total is None else prv.compose_heterogeneous([total, one], [1, 1])
            epsilon = float(total.compute_epsilon(delta, delta_error, eps_error)[2])
    except (RuntimeError, ValueError, IntegrationWarning, MemoryError) as error:  # Opacus' refusals
        why = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise _NoPrv(f"PRV failed ({why})") from error
    if not math.isfinite(epsilon):
        raise _NoPrv("PRV gave no finite value")
    return rounded_up(max(epsilon, 0.0), 6), eps_error


def _prv_grid(gaussian: tuple[tuple[float, float, int], ...], delta_error: float) -> tuple[float, float, float]:
    """(error of epsilon, reach, mesh) of Opacus' grid; the error grows where the grid would not fit."""
    steps = np.array([steps for _, _, steps in gaussian])
    each = sampled_gaussian_rdp([rate for rate, _, _ in gaussian], [noise for _, noise, _ in gaussian])
    whole_run = converted(steps @ each, ORDERS, delta_error / 4).min()
    one_step = converted(each, ORDERS, delta_error / (8 * steps.sum())).min(axis=1).max()
    reach = max(whole_run, one_step, _EPS_ERROR) + 3  # Gopi et al. (2021), remark 5.6, as Opacus
    relative_mesh = 1 / math.sqrt(steps.sum() * math.log(12 / delta_error) / 2)
    eps_error = max(_EPS_ERROR, math.ceil(100 * 2 * reach / relative_mesh / _MAX_GRID) / 100)
    if eps_error > _MAX_EPS_ERROR:
        raise _NoPrv("PRV's grid would not fit its memory")
    return eps_error, reach, eps_error * relative_mesh


class Gdp:
    """Exact Gaussian differential privacy, for full batches only, of unequal noise: mu^2 = sum steps / z^2.

    Epsilon solves delta = Phi(-eps/mu + mu/2) - exp(eps) Phi(-eps/mu - mu/2), which is tight. Opacus'
    accountant of this name is a central-limit value for sampled batches, below the truth, hence not offered.

    Reference: Balle and Wang (2018), theorem 8; Dong, Roth, Su (2022).

    >>> Gdp().epsilon([GaussianEvent(1.0, 1.0)], 1e-5)
    4.377179
    """

    name = "gdp"
    description = "Gaussian differential privacy (exact)"
    together = 128

    def epsilon(self, events: Sequence[Event], delta: float) -> float:
        return self.bound(events, delta)[0]

    def bound(self, events: Sequence[Event], delta: float) -> tuple[float, str]:
        return float(self.search([(events, delta)])[0]), self.description

    def search(self, queries: Sequence[Query]) -> np.ndarray:
        mu = [self._mu(events, delta) for events, delta in queries]
        return gaussian_epsilon(np.array(mu), np.array([delta for _, delta in queries]))

    def curve(self, event: Event, counts: Sequence[int], delta: float, before: Sequence[Event] = ()) -> np.ndarray:
        paid, each, count = self._mu(before, delta), self._mu([event], delta), np.asarray(counts, dtype=float)
        with np.errstate(invalid="ignore"):  # as in Rdp
            mu = np.hypot(paid, np.where(count > 0, np.sqrt(count) * each, 0.0))
        return gaussian_epsilon(mu, np.full(len(count), delta))

    def _mu(self, events: Sequence[Event], delta: float) -> float:
        releases = composed(events, delta)
        sampled = [rate for rate, _, _ in releases.gaussian if rate < 1]
        way_out = "Exact Gaussian privacy is for full batches; its usual value for sampled ones is below the truth."
        only_full = not sampled and releases.selection == 0
        found = f"a sample rate of {sampled[0]:g}" if sampled else "a selection"
        require(only_full, "accountant", f"be rdp or prv for {found}", self.name, way_out)
        square = sum(steps / noise**2 if noise else math.inf for _, noise, steps in releases.gaussian)
        return math.sqrt(square)


def gaussian_epsilon(mu: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Smallest epsilon with delta(epsilon; mu) <= delta, by bisection from above, rounded up, [n].

    Args:
        mu: sensitivity / noise std of each Gaussian mechanism, [n], >= 0; inf has no noise.
        delta: in (0, 1), [n].

    >>> gaussian_epsilon(np.array([1.0]), np.array([1e-5]))
    array([4.377179])
    """

    def delta_of(epsilon: np.ndarray) -> np.ndarray:
        minus = np.exp(epsilon + log_ndtr(-safe / 2 - epsilon / safe))  # this form holds at any epsilon
        return np.exp(log_ndtr(safe / 2 - epsilon / safe)) - minus

    finite = np.isfinite(mu) & (mu > 0)
    safe, delta = np.where(finite, mu, 1.0), np.where(finite, delta, 0.5)  # the others are set below
    low, high = (
        np.zeros_like(safe),
        safe**2 / 2 + safe * np.sqrt(-2 * np.log(delta)),
    )  # Phi(-x) <= exp(-x^2 / 2)
    for _ in range(60):
        middle = (low + high) / 2
        fits = delta_of(middle) <= delta
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    high = np.where(delta_of(np.zeros_like(safe)) <= delta, 0.0, high)
    value = np.where(finite, high, np.where(mu > 0, np.inf, 0.0))
    return np.array([rounded_up(e, 6) for e in value])


_ACCOUNTANTS: dict[str, Accountant] = {one.name: one for one in (Rdp(), Prv(), Gdp())}


def get_accountant(name: str, adjacency: str = "add_remove") -> Accountant:
    """The accountant of that name: "rdp" (default), "prv" (tighter, slower) or "gdp" (exact, full batches).

    Raises:
        UserError: another name; the message has the nearest one.

    >>> get_accountant("rdp").description
    'RDP (Opacus, orders 1.1 to 1024)'
    """
    names = ", ".join(_ACCOUNTANTS)
    require(name in _ACCOUNTANTS, "accountant", f"be one of {names}", name, nearest(name, _ACCOUNTANTS))
    return _ACCOUNTANTS[name]
