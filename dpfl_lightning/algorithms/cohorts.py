"""Who takes part in a round, drawn so that quotas are kept: pure functions of quotas and a generator."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpfl_lightning.errors import nearest, require

Counts = NDArray[np.int64]

SAMPLERS = ("quota_systematic", "weighted_without_replacement", "with_replacement")


def draw_cohort(
    sampler: str, quota: Counts, taken: Counts, rounds_left: int, cohort_size: int, generator: np.random.Generator
) -> Counts:
    """The clients of one round, by one of three samplers.

    Args:
        sampler: `quota_systematic` (default everywhere) gives client n the inclusion probability
            (quota_n - taken_n) / rounds_left exactly, distinct clients, and every quota is used to the last; see
            `systematic`. `weighted_without_replacement` (the paper's words: by their shares, until the quota is used)
            draws one after the other in proportion to quotas; large quotas are then drawn too rarely, and late rounds
            may lack clients. `with_replacement` (what the paper's analysis assumes) may name a client twice, who then
            releases twice, beyond its quota at the end: for simulations, as a round of a run holds each client once.
        quota: `[N]`, participations of the whole run, >= 0; 0 for a client that is away.
        taken: `[N]`, participations so far.
        rounds_left: with this one, >= 1.
        cohort_size: K, for the two weighted samplers.
        generator: public: who takes part is public, and amplifies nothing.

    Returns:
        Client numbers, ascending.

    Raises:
        UserError: an unknown sampler.
    """
    must, hint = f"be one of {', '.join(SAMPLERS)}", nearest(sampler, SAMPLERS)
    require(sampler in SAMPLERS, "sampler", must, sampler, hint)
    remaining = np.maximum(quota - taken, 0)
    if sampler == "quota_systematic":
        return systematic(remaining, rounds_left, generator)
    share = np.where(remaining > 0, quota, 0).astype(float)
    if sampler == "with_replacement":
        return np.sort(generator.choice(len(share), cohort_size, p=share / share.sum())) if share.any() else _nobody()
    return _one_after_the_other(share, cohort_size, generator)


def systematic(remaining: Counts, rounds_left: int, generator: np.random.Generator) -> Counts:
    """Clients whose stretches of a shuffled line hold one of the points s, s + h, s + 2h, ..., s uniform below h.

    Client n's stretch is as long as the participations it has left, at most h, the rounds that are left: all in whole
    numbers, so nothing is rounded.

    Args:
        remaining: `[N]`, >= 0; what exceeds `rounds_left` cannot be used any more.
        rounds_left: h, with this one, >= 1.

    Returns:
        Client numbers, ascending; floor or ceiling of sum(min(remaining, h)) / h of them, exactly K if that is K.

    **Guarantees** Each client once, with probability min(remaining_n, h) / h. If no quota exceeds the rounds and their
    sum is K times the rounds, every round has K clients, and every quota is used.

    >>> draw, remaining = np.random.default_rng(0), np.array([4, 1, 2, 1])
    >>> rounds = []
    >>> for rounds_left in (4, 3, 2, 1):
    ...     rounds.append(systematic(remaining, rounds_left, draw))
    ...     remaining[rounds[-1]] -= 1
    >>> [len(clients) for clients in rounds], remaining.tolist()
    ([2, 2, 2, 2], [0, 0, 0, 0])
    """
    order = generator.permutation(len(remaining))
    ends = np.cumsum(np.minimum(remaining, rounds_left)[order])
    points = np.arange(generator.integers(rounds_left), ends[-1], rounds_left)
    return np.sort(order[np.searchsorted(ends, points, side="right")])


def _one_after_the_other(share: NDArray[np.float64], count: int, generator: np.random.Generator) -> Counts:
    """Each time in proportion to the shares of who is left, `share` >= 0: the smallest of exponential waiting times."""
    able = np.flatnonzero(share > 0)
    waits = generator.exponential(size=len(able)) / share[able]
    first = able[np.argpartition(waits, count - 1)[:count]] if count < len(able) else able
    return np.sort(first)


def _nobody() -> Counts:
    return np.empty(0, dtype=np.int64)
