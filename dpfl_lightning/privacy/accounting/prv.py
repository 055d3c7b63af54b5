"""Numerical composition of privacy losses (Opacus' PRV) in bounded time and memory."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.fft import next_fast_len
from scipy.integrate import IntegrationWarning
from scipy.special import ndtr

from dpfl_lightning.privacy.accounting.events import Composed
from dpfl_lightning.privacy.accounting.rdp import ORDERS, converted, laplace_rdp, sampled_gaussian_rdp

EPS_ERROR, _MAX_EPS_ERROR = 0.01, 0.1
# Points of the discretised privacy loss: each distinct event takes a second or two and about 300 MB.
_MAX_GRID = 2**21


class NoPrv(Exception):
    """PRV gives no value; the message says why."""


@functools.lru_cache(maxsize=4096)
def prv_epsilon(releases: Composed, delta: float, adjacency: str, time_limit_s: float) -> tuple[float, float]:
    """Return an upper bound of epsilon, and the error that it includes (Gopi, Lee, Wutschitz, 2021), or raise NoPrv.

    For add_remove both directions are composed, and the larger epsilon is returned. A selection is composed as the
    randomised response of an epsilon-private choice. `releases` is neither free nor noiseless.
    """
    # The tail of the composed loss is a sum of rounding errors of 1e-16. Compared with exact values, Opacus' result is
    # 0.1 too low at delta 1e-10 after 60,000 steps. This condition keeps a distance of two orders of magnitude.
    steps = [steps for _, _, steps in releases.gaussian] + [n for _, n in (*releases.laplace, *releases.selection)]
    if delta < max(1e-9, 1e-12 * sum(steps)):
        raise NoPrv(f"PRV's rounding errors matter at delta {delta:g}")
    delta_error = delta / 1000  # Opacus' default
    eps_error, reach, mesh = _grid(releases, steps, adjacency, delta_error)
    both_directions = adjacency == "add_remove" and any(rate < 1 for rate, _, _ in releases.gaussian)
    directions = [_losses(releases, adjacency, added) for added in ((False, True) if both_directions else (False,))]
    tick = _clock(time_limit_s, len(directions) * len(steps))
    try:
        with np.errstate(all="ignore"):
            sums = [_composed(losses, reach, mesh, tick) for losses in directions]
            epsilon = max(total.compute_epsilon(delta, delta_error, eps_error)[2] for total in sums)
    except (RuntimeError, ValueError, IntegrationWarning, MemoryError) as error:  # errors of Opacus
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise NoPrv(f"PRV failed ({reason})") from error
    if not math.isfinite(epsilon):
        raise NoPrv("PRV gave no finite value")
    return max(float(epsilon), 0.0), eps_error


def _clock(time_limit_s: float, total: int) -> Callable[[], None]:
    """Return a function to call after each of `total` parts. It raises NoPrv if the time is over or predicted to be."""
    start, done = time.monotonic(), 0

    def tick() -> None:
        nonlocal done
        done, elapsed = done + 1, time.monotonic() - start
        if elapsed / done * total > time_limit_s:
            raise NoPrv(f"PRV would need more than its {time_limit_s:g} s")

    return tick


def _composed(losses: list[tuple[Loss, int]], reach: float, mesh: float, tick: Callable[[], None]) -> Any:
    """Return Opacus' discrete distribution of the sum of the losses, each repeated by its count."""
    from opacus.accountants.analysis import prv

    half = next_fast_len(math.ceil(reach / mesh) + 1, real=True) - 1  # of a grid of 2 * half + 2 points
    grid = prv.Domain.create_aligned((0.5 - half) * mesh, (half - 0.5) * mesh, mesh)
    total: Any = None
    with warnings.catch_warnings():
        warnings.simplefilter("error", IntegrationWarning)  # the mean would be unreliable
        for loss, steps in losses:
            bounded = loss if loss.mean else prv.TruncatedPrivacyRandomVariable(loss, grid.t_min, grid.t_max)
            density = prv.discretize(bounded, grid)
            if abs(density.pmf.sum() - 1) > 1e-9:  # a jump fell between two cells
                raise ValueError("the discretised loss has lost mass")
            density = prv.compose_heterogeneous([density], [steps])
            total = density if total is None else prv.compose_heterogeneous([total, density], [1, 1])
            tick()
        return total


def _grid(releases: Composed, steps: list[int], adjacency: str, delta_error: float) -> tuple[float, float, float]:
    """Return (error of epsilon, reach, mesh) of Opacus' grid; the error grows if the grid would not fit."""
    sensitivity = 2 if adjacency == "replace_one" else 1
    rates, noises = [rate for rate, _, _ in releases.gaussian], [noise for _, noise, _ in releases.gaussian]
    pure = [epsilon * sensitivity for epsilon, _ in releases.selection]
    rdp_per_step = np.concatenate(
        [
            sampled_gaussian_rdp(rates, noises, adjacency=adjacency).reshape(-1, len(ORDERS)),
            *(laplace_rdp(noise / sensitivity)[None] for noise, _ in releases.laplace),
            *(np.minimum(np.array(ORDERS) * epsilon**2 / 2, epsilon)[None] for epsilon in pure),
        ]
    )
    whole_run = converted(np.array(steps) @ rdp_per_step, ORDERS, delta_error / 4).min()
    one_step = converted(rdp_per_step, ORDERS, delta_error / (8 * sum(steps))).min(axis=1).max()
    largest_loss = max([*pure, *(sensitivity / noise for noise, _ in releases.laplace)], default=0.0)
    reach = max(whole_run, one_step, largest_loss, EPS_ERROR) + 3  # Gopi et al. (2021), remark 5.6, as in Opacus
    relative_mesh = 1 / math.sqrt(sum(steps) * math.log(12 / delta_error) / 2)
    eps_error = max(EPS_ERROR, math.ceil(100 * 2 * reach / relative_mesh / _MAX_GRID) / 100)
    if eps_error > _MAX_EPS_ERROR:
        raise NoPrv("PRV's grid would not fit its memory")
    return eps_error, reach, eps_error * relative_mesh


@dataclass(frozen=True)
class Loss:
    """Distribution function of a privacy loss; `mean` is set if its support is bounded (Opacus integrates others)."""

    cdf: Callable[[np.ndarray], np.ndarray]
    mean: Callable[[], float] | None = None


def _losses(releases: Composed, adjacency: str, added: bool) -> list[tuple[Loss, int]]:
    """Return each distinct loss and its count; `added` means that the record is in Q instead of P."""
    sensitivity = 2 if adjacency == "replace_one" else 1
    losses = [
        (_replaced(rate, noise) if sensitivity == 2 else _added(rate, noise) if added else _removed(rate, noise), n)
        for rate, noise, n in releases.gaussian
    ]
    losses += [(_laplace(sensitivity / noise), n) for noise, n in releases.laplace]
    return losses + [(_randomised_response(sensitivity * epsilon), n) for epsilon, n in releases.selection]


def _removed(q: float, z: float) -> Loss:
    """P = (1-q) N(0) + q N(1), Q = N(0), computed by Opacus."""
    from opacus.accountants.analysis import prv

    return Loss(prv.PoissonSubsampledGaussianPRV(q, z).cdf)


def _added(q: float, z: float) -> Loss:
    """P = N(0), Q = (1-q) N(0) + q N(1)."""

    def cdf(t: np.ndarray) -> np.ndarray:
        excess = (np.expm1(-t) + q) / q  # exp(x/z^2 - 1/2z^2) where the loss is t
        bound = z**2 * np.log(np.where(excess > 0, excess, 1.0)) + 0.5
        return np.where(excess > 0, ndtr(-bound / z), 1.0)

    return Loss(cdf)


def _replaced(q: float, z: float) -> Loss:
    """P = (1-q) N(0) + q N(1), Q = (1-q) N(0) + q N(-1): odd and increasing in x, so it is inverted for |t|."""

    def cdf(t: np.ndarray) -> np.ndarray:
        size = np.abs(t)
        rest, cross = (1 - q) * -np.expm1(-size), 2 * q * np.exp(-0.5 / z**2 - size / 2)
        x = np.sign(t) * z**2 * (size + np.log(rest + np.hypot(rest, cross)) - np.log(2 * q) + 0.5 / z**2)
        return (1 - q) * ndtr(x / z) + q * ndtr((x - 1) / z)

    return Loss(cdf)


def _laplace(epsilon: float) -> Loss:
    """Laplace noise of scale sensitivity / epsilon: half of the mass at epsilon, exp(-epsilon) / 2 at -epsilon."""

    def cdf(t: np.ndarray) -> np.ndarray:
        return np.where(t < -epsilon, 0.0, np.where(t < epsilon, np.exp((np.minimum(t, epsilon) - epsilon) / 2) / 2, 1))

    return Loss(cdf, lambda: epsilon + math.expm1(-epsilon))


def _randomised_response(epsilon: float) -> Loss:
    """The worst pair of any epsilon-private choice: the loss is epsilon or -epsilon."""
    low = 1 / (1 + math.exp(epsilon))

    def cdf(t: np.ndarray) -> np.ndarray:
        return np.where(t < -epsilon, 0.0, np.where(t < epsilon, low, 1.0))

    return Loss(cdf, lambda: epsilon * math.tanh(epsilon / 2))
