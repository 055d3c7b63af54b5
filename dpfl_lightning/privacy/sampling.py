"""Sampling of the records of a step: Poisson sampling, which the accountants assume, or shuffled batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # it loads torch, which reports of a ledger do not need
    from dpfl_lightning.privacy.noise import RandomGenerator

#: sampling mode -> its description in a guarantee
SAMPLINGS = {
    "poisson": "Poisson sampling",
    "shuffle": "shuffled batches accounted as if they were Poisson samples: this epsilon is NOT proven",
}


def poisson_rows(num_records: int, sample_rate: float, generator: RandomGenerator) -> np.ndarray:
    """Draw every record independently with probability `sample_rate`: row numbers `[B]`, ascending, B may be 0."""
    if sample_rate >= 1.0:
        return np.arange(num_records)
    return np.flatnonzero(generator.coins(num_records, sample_rate))


def rows_of_each_class(labels: np.ndarray, most: int, generator: RandomGenerator) -> np.ndarray:
    """Draw at most `most` records of each class without replacement: row numbers `[B]`, ascending.

    An added record can push another one out, so it moves a sum over the draw by up to two records. This sampling
    therefore never amplifies privacy.
    """
    order = generator.permutation(len(labels))
    chosen_rows = [class_rows[:most] for label in np.unique(labels) if len(class_rows := order[labels[order] == label])]
    return np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *chosen_rows]))


def shuffled_rows(num_records: int, batch_size: int, generator: RandomGenerator) -> Iterator[np.ndarray]:
    """Yield shuffled batches of `batch_size` over endless epochs (the last batch of an epoch may be smaller)."""
    while True:
        order = generator.permutation(num_records)
        for start in range(0, num_records, batch_size):
            yield order[start : start + batch_size]


def draw_steps(
    sampling: str, num_records: int, sample_rate: float, steps: int, generator: RandomGenerator
) -> Iterator[np.ndarray]:
    """Yield the rows `[B]` of each of `steps` steps of "poisson" or "shuffle" sampling.

    `sample_rate` is in (0, 1]; "shuffle" uses batches of `round(sample_rate * num_records)`.
    """
    if sampling == "poisson":
        for _ in range(steps):
            yield poisson_rows(num_records, sample_rate, generator)
    else:
        batches = shuffled_rows(num_records, max(1, round(sample_rate * num_records)), generator)
        yield from itertools.islice(batches, steps)
