"""What the distillation paper's appendix on convergence quotes, on quadratics where all of it is known exactly.

These formulas are no claims of ours, and the paper's proof is not about the method that is run. Its first part (eqs. 13
to 26) is the known result for federated averaging: convex smooth clients, all of them in every round, tau local steps,
plain means, learning rate <= 1 / (4 L). Distillation has no local steps. Its second part (eqs. 27 to 38) is gradient
descent on one fixed convex smooth function; a net's matching distance is not convex in the images, and net, batch and
target change in every round.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest

# --- federated averaging: eqs. 15 to 26


class Setting(NamedTuple):
    """Constants of the theorem: numbers, or arrays of many settings at once."""

    smoothness: float
    distance: float  # from the start to the optimum
    noise: float  # standard deviation of a stochastic gradient
    unlikeness: float  # most that a client's gradient differs from the mean one
    clients: int
    local_steps: int
    rounds: int


def gap_bound(own, rate):
    """Eq. 24: the expected gap to the optimum, averaged over all local steps of all rounds."""
    steps = own.local_steps * own.rounds
    return (
        own.distance**2 / (2 * rate * steps)
        + rate * own.noise**2 / own.clients
        + 4 * own.local_steps * rate**2 * own.smoothness * own.noise**2
        + 18 * own.local_steps**2 * rate**2 * own.smoothness * own.unlikeness**2
    )


def theorems_rate(own):
    """Eq. 25."""
    steps = own.local_steps * own.rounds
    each = (own.rounds * own.smoothness) ** (1 / 3)
    choices = (
        1 / (4 * own.smoothness),
        np.sqrt(own.clients / steps) * own.distance / own.noise,
        own.distance ** (2 / 3) / (own.local_steps ** (2 / 3) * each * own.noise ** (2 / 3)),
        own.distance ** (2 / 3) / (own.local_steps * each * own.unlikeness ** (2 / 3)),
    )
    return np.minimum.reduce(choices)


def gap_bound_at_theorems_rate(own):
    """Eq. 26."""
    steps = own.local_steps * own.rounds
    far = own.smoothness ** (1 / 3) * own.distance ** (4 / 3) / own.rounds ** (2 / 3)
    return (
        2 * own.smoothness * own.distance**2 / steps
        + 2 * own.noise * own.distance / np.sqrt(own.clients * steps)
        + 5 * far * own.noise ** (2 / 3) / own.local_steps ** (1 / 3)
        + 19 * far * own.unlikeness ** (2 / 3)
    )


def test_the_theorems_learning_rate_gives_its_bound():
    """200,000 settings, log-uniform over eight decades of each constant, seed 0: near equality, and never above."""
    draw, count = np.random.default_rng(0), 200_000
    constants = 10 ** draw.uniform(-4, 4, (4, count))
    sizes = np.ceil(10 ** draw.uniform(0, 4, (3, count)))
    own = Setting(*constants, *sizes)
    ratio = gap_bound(own, theorems_rate(own)) / gap_bound_at_theorems_rate(own)
    assert 0.999 < ratio.max() <= 1 + 1e-9


CURVATURE = np.array([1.0, 0.5, 0.2])  # of `(x - centre)' A (x - centre) / 2`: smoothness 1
CLIENTS, RUNS = 5, 400


def averaged(local_steps, rounds, rate, noise=0.5, spread=1.0, away=1.0):
    """Federated averaging of five quadratics, seed 0: its `Setting`, the mean gap, the mean drift [step, client].

    The gap of eq. 24 is that of the mean point after each local step; the drift of eq. 23 is each client's squared
    distance from it before the step.

    Args:
        spread: how far clients' optima lie apart.
        away: how far from the best point the start is.
    """
    draw = np.random.default_rng(0)
    centres = spread * draw.standard_normal((CLIENTS, 3))
    best, start = centres.mean(axis=0), away * draw.standard_normal(3)
    unlike = np.linalg.norm(CURVATURE * (centres - best), axis=1).max()
    own = Setting(1.0, np.linalg.norm(start), noise, unlike, CLIENTS, local_steps, rounds)
    mean, gaps, drift = np.tile(best + start, (RUNS, 1)), [], np.zeros((local_steps, CLIENTS))
    for _ in range(rounds):
        x = np.repeat(mean[:, None], CLIENTS, axis=1)  # [runs, clients, 3]
        for step in range(local_steps):
            drift[step] += ((x - mean[:, None]) ** 2).sum(axis=2).mean(axis=0) / rounds
            drawn = noise / np.sqrt(3) * draw.standard_normal(x.shape)  # its squared length is noise^2 on average
            x = x - rate * (CURVATURE * (x - centres) + drawn)
            mean = x.mean(axis=1)
            gaps.append(((mean - best) ** 2 * CURVATURE).sum(axis=1).mean() / 2)
    return own, float(np.mean(gaps)), drift


@pytest.mark.parametrize(
    ("run", "least"),
    [
        ({"local_steps": 4, "rounds": 50, "rate": 0.2}, 1e-4),
        ({"local_steps": 4, "rounds": 50, "rate": 0.05}, 1e-3),
        ({"local_steps": 8, "rounds": 50, "rate": 0.24}, 1e-5),
        ({"local_steps": 1, "rounds": 20, "rate": 0.02, "noise": 0.0, "spread": 0.0}, 0.1),
        ({"local_steps": 1, "rounds": 1000, "rate": 0.005, "spread": 0.0, "away": 0.0}, 0.1),
    ],
    ids=["large steps", "small steps", "many local steps", "only a far start", "only noise"],
)
def test_the_theorem_holds_on_quadratics(run, least):
    """400 runs: the mean gap, whose standard error is a few per cent of it, is at most a quarter of the bound.

    Args:
        least: of the bound. It is near the gap where one of its first two terms decides, and wide where clients differ:
            with equal curvature local steps have no bias.
    """
    own, gap, _ = averaged(**run)
    assert least < gap / gap_bound(own, run["rate"]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("apart", [{}, {"noise": 0.0}, {"spread": 0.0}], ids=["both", "only unlike", "only noise"])
@pytest.mark.parametrize(("local_steps", "rate"), [(4, 0.05), (4, 0.2), (8, 0.24)])
def test_clients_drift_no_further_than_lemma_2_says(local_steps, rate, apart):
    """Eq. 23 for every client and local step, means over 400 runs and 50 rounds: at most a fifth of the bound."""
    own, _, drift = averaged(local_steps, 50, rate, **apart)
    bound = 18 * (local_steps * rate * own.unlikeness) ** 2 + 4 * local_steps * (rate * own.noise) ** 2
    assert 0.005 * bound < drift.max() <= bound


def test_gradients_of_windows_are_biased_and_those_of_random_batches_are_not():
    """Eq. 15 takes the mean over batches of neighbours: ten records, batches of four, only the first has a gradient."""
    gradient, size = [Fraction(1)] + [Fraction(0)] * 9, 4
    windows = [range(first, first + size) for first in range(len(gradient) - size + 1)]

    def mean_over(batches):
        return sum(sum(gradient[one] for one in batch) / size for batch in batches) / len(batches)

    assert mean_over(windows) == Fraction(1, 28)
    assert mean_over(list(itertools.combinations(range(10), size))) == Fraction(1, 10)


# --- descent on one fixed function: eqs. 33 to 38


def quadratic(draw):
    """`x -> (value, gradient)` of a random convex quadratic of least value 0, its smoothness, and a start."""
    width = int(draw.integers(2, 6))
    factor, best = draw.standard_normal((width, width)), draw.standard_normal(width)
    curvature = factor @ factor.T

    def at(x):
        gradient = curvature @ (x - best)
        return (x - best) @ gradient / 2, gradient

    return at, float(np.linalg.eigvalsh(curvature)[-1]), 3 * draw.standard_normal(width)


def one_step(draw):
    """A step with a learning rate in (0, 2 / L): value before and after, learning rate, smoothness, squared slope."""
    at, smoothness, x = quadratic(draw)
    rate = draw.uniform(0.01, 1.99) / smoothness
    value, gradient = at(x)
    return value, at(x - rate * gradient)[0], rate, smoothness, gradient @ gradient


def test_a_step_descends_as_the_smoothness_promises_and_not_as_printed():
    """Eq. 34 holds in all of 3,000 draws, seed 0; eq. 35, which has a plus for its last minus, in none; eq. 36 has it
    right again."""
    draw = np.random.default_rng(0)
    for _ in range(3000):
        before, after, rate, smoothness, slope = one_step(draw)
        assert after <= before - (rate - smoothness * rate**2 / 2) * slope + 1e-12 * before
        assert after > before - (rate + smoothness * rate**2 / 2) * slope


def test_all_slopes_together_are_bounded_by_the_first_value():
    """Eq. 38, 200 quadratics, seed 0, 100 steps each."""
    draw = np.random.default_rng(0)
    for _ in range(200):
        at, smoothness, x = quadratic(draw)
        rate, slopes, start = draw.uniform(0.01, 1.99) / smoothness, 0.0, at(x)[0]
        for _ in range(100):
            gradient = at(x)[1]
            slopes, x = slopes + gradient @ gradient, x - rate * gradient
        assert 0 < slopes <= start / (rate - smoothness * rate**2 / 2) * (1 + 1e-9)
