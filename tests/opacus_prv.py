"""Opacus' numerical composition (Gopi, Lee, Wutschitz, 2021) of all events: an interval around the tight epsilon."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from opacus.accountants.analysis import prv
from scipy.fft import next_fast_len
from scipy.optimize import brentq
from scipy.special import ndtr

from dpfl_lightning.privacy.accounting.accountant import Rdp
from dpfl_lightning.privacy.accounting.events import Event, GaussianEvent, LaplaceEvent, SelectionEvent, composed

Cdf = Callable[[np.ndarray], np.ndarray]


class Loss:
    """The distribution function of a privacy loss, with its mean if the loss is bounded (Opacus integrates others)."""

    def __init__(self, cdf: Cdf, mean: float | None = None) -> None:
        self.cdf = cdf
        if mean is not None:
            self.mean = lambda: mean


def interval(
    events: Sequence[Event], delta: float, adjacency: str = "add_remove", error: float = 1e-3
) -> tuple[float, float, float]:
    """Return (lower bound, estimate, upper bound) of the tight epsilon; the bounds are `error` from the estimate."""
    releases, sensitivity = composed(events, delta), 2 if adjacency == "replace_one" else 1
    gaussian, laplace, choices = (
        [one for one in releases.releases if isinstance(one, kind)]
        for kind in (GaussianEvent, LaplaceEvent, SelectionEvent)
    )
    sides = []
    for added in (False, True):
        losses = [(_gaussian(one.sample_rate, one.noise_multiplier, sensitivity, added), one.steps) for one in gaussian]
        sides.append(losses + [(_laplace(sensitivity / one.noise_multiplier), one.steps) for one in laplace])
    steps = sum(n for _, n in sides[0])
    rdp = Rdp(adjacency).epsilon(events, delta / 4000)
    mesh = error / math.sqrt(steps * math.log(12e3 / delta) / 2)
    half = next_fast_len(math.ceil((rdp + 3) / mesh) + 1, real=True) - 1
    grid = prv.Domain.create_aligned((0.5 - half) * mesh, (half - 0.5) * mesh, mesh)
    with np.errstate(all="ignore"):
        totals = [_composed(losses, grid) for losses in sides]
        if choices:
            (choice,) = choices
            width = sensitivity * choice.epsilon
            tight = max(_with_selections(total, width, choice.count, delta, rdp) for total in totals)
            return tight - error, tight, tight + error
        return max((total.compute_epsilon(delta, delta / 1000, error) for total in totals), key=lambda one: one[1])


def _with_selections(total: prv.DiscretePRV, width: float, count: int, delta: float, most: float) -> float:
    """The epsilon of `total` and then adaptive choices: each has a loss of t or t - width, for the worst t on a grid.

    worth[i] is the largest delta that the remaining choices reach where the loss is epsilon - y[i].
    """
    cells = 64
    t = np.arange(cells + 1) * width / cells
    high = (math.exp(width) - np.exp(t)) / math.expm1(width)
    y = np.arange(-count * cells, count * cells + 1) * width / cells
    worth = np.maximum(-np.expm1(y), 0)
    places = np.arange(len(y))[:, None] - np.arange(cells + 1)
    for _ in range(count):
        outside = -np.expm1(y[0] - np.arange(cells, 0, -1) * width / cells)
        wide = np.concatenate([outside, worth, np.zeros(cells)])
        worth = (high * wide[places + cells] + (1 - high) * wide[places + 2 * cells]).max(axis=1)
    some = total.pmf > 0
    losses, masses = total.domain.ts[some], total.pmf[some]

    def excess(epsilon: float) -> float:
        rest = epsilon - losses
        return float(masses @ np.where(rest < y[0], -np.expm1(rest), np.interp(rest, y, worth))) - delta

    return float(brentq(excess, 0, most))


def _composed(losses: Sequence[tuple[Loss, int]], grid: prv.Domain) -> prv.DiscretePRV:
    bounded = [
        loss if hasattr(loss, "mean") else prv.TruncatedPrivacyRandomVariable(loss, grid.t_min, grid.t_max)
        for loss, _ in losses
    ]
    return prv.compose_heterogeneous([prv.discretize(loss, grid) for loss in bounded], [n for _, n in losses])


def _gaussian(q: float, z: float, sensitivity: int, added: bool) -> Loss:
    """The loss of P beside Q: (1-q) N(0) + q N(1) beside N(0), the reverse if added, or beside (1-q) N(0) + q N(-1)."""
    if q == 1:
        mu = sensitivity / z
        return Loss(lambda t: ndtr(t / mu - mu / 2))

    def replaced(t: np.ndarray) -> np.ndarray:
        size = np.abs(t)
        rest, cross = (1 - q) * -np.expm1(-size), 2 * q * np.exp(-0.5 / z**2 - size / 2)
        x = np.sign(t) * z**2 * (size + np.log(rest + np.hypot(rest, cross)) - np.log(2 * q) + 0.5 / z**2)
        return (1 - q) * ndtr(x / z) + q * ndtr((x - 1) / z)

    def reversed_(t: np.ndarray) -> np.ndarray:
        excess = (np.expm1(-t) + q) / q  # exp(x/z^2 - 1/2z^2) where the loss is t
        bound = z**2 * np.log(np.where(excess > 0, excess, 1.0)) + 0.5
        return np.where(excess > 0, ndtr(-bound / z), 1.0)

    if sensitivity == 2:
        return Loss(replaced)
    return Loss(reversed_ if added else prv.PoissonSubsampledGaussianPRV(q, z).cdf)


def _laplace(epsilon: float) -> Loss:
    def cdf(t: np.ndarray) -> np.ndarray:
        return np.where(t < -epsilon, 0.0, np.where(t < epsilon, np.exp((np.minimum(t, epsilon) - epsilon) / 2) / 2, 1))

    return Loss(cdf, epsilon + math.expm1(-epsilon))
