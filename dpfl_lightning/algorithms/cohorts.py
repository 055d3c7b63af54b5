"""Samplers that draw the clients of a round so that quotas are kept."""

import numpy as np
from numpy.typing import NDArray

from dpfl_lightning.errors import nearest, require

Counts = NDArray[np.int64]

SAMPLERS = ("quota_systematic", "weighted_without_replacement", "with_replacement")


def draw_cohort(
    sampler: str, quota: Counts, taken: Counts, rounds_left: int, cohort_size: int, generator: np.random.Generator
) -> Counts:
    """Draw the clients of one round, ascending.

    Args:
        sampler: `quota_systematic` (the default everywhere): see `systematic`. `weighted_without_replacement` (the
            paper's text) draws one client after another in proportion to quotas; large quotas are then drawn too
            rarely, and late rounds may lack clients. `with_replacement` (the paper's analysis) may draw a client twice,
            which then releases twice, in the end beyond its quota; it is for simulations.
        quota, taken: participations in the whole run and so far, `[N]`, >= 0.
        rounds_left: number of rounds left, including this one, >= 1.
        cohort_size: K, for the two weighted samplers.
        generator: a public generator: participation is public, and amplifies nothing.
    """
    must, hint = f"be one of {', '.join(SAMPLERS)}", nearest(sampler, SAMPLERS)
    require(sampler in SAMPLERS, "sampler", must, sampler, hint)
    remaining = np.maximum(quota - taken, 0)
    if sampler == "quota_systematic":
        return systematic(remaining, rounds_left, generator)
    share = np.where(remaining > 0, quota, 0).astype(float)
    if sampler == "with_replacement" and share.any():
        return np.sort(generator.choice(len(share), cohort_size, p=share / share.sum()))
    eligible = np.flatnonzero(share > 0)
    waits = generator.exponential(size=len(eligible)) / share[eligible]  # the shortest waiting times are drawn first
    if cohort_size < len(eligible):
        eligible = eligible[np.argpartition(waits, cohort_size - 1)[:cohort_size]]
    return np.sort(eligible)


def systematic(remaining: Counts, rounds_left: int, generator: np.random.Generator) -> Counts:
    """Draw the clients whose intervals on a shuffled line hold a point s, s + h, s + 2h, ..., with s uniform below h.

    The interval of client n has the length min(remaining_n, h), h being `rounds_left`, all in integers. Each client is
    drawn at most once, with probability min(remaining_n, h) / h. If no quota exceeds the rounds and their sum is K
    times the rounds, every round has K clients, and every quota is used up.

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
