"""Traffic of a distillation run, and from how many trainings on it pays."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from dpfl_lightning.federated.server.traffic import BYTES
from dpfl_lightning.runtime.text import data_size


class Sent(NamedTuple):
    """Numbers sent to all clients together (`down`) and by all clients together (`up`)."""

    down: int
    up: int

    @property
    def total(self) -> int:
        return self.down + self.up


def traffic(participations: int, num_params: int, release: int) -> Sent:
    """Return what is sent in all rounds: in each participation one model down and one `release` of this size up."""
    return Sent(participations * num_params, participations * release)


def participations(cohorts: Iterable[Collection[int]], releases: Sequence[int], fewest: int) -> int:
    """Return the number of clients of a round that have releases left, summed over the `cohorts` of all rounds.

    A round with fewer than `fewest` of them is skipped.
    """
    taken = [0] * len(releases)
    for cohort in cohorts:
        able = [client for client in cohort if taken[client] < releases[client]]
        for client in able if len(able) >= fewest else ():
            taken[client] += 1
    return sum(taken)


def traffic_words(distillation: Sent, training_round: Sent, clients: int) -> str:
    """Describe what a run sends in total, and from how many trainings it sends less.

    `training_round` is sent in one round of federated training of the same model with this number of clients.
    """
    rounds = f"{distillation.total / training_round.total:,.1f}".removesuffix(".0")
    down, up = (data_size(BYTES * floats) for floats in distillation)
    return (
        f"The run sends {down} to clients and {up} back, as much as {rounds} rounds of training this model with "
        f"{clients} clients. One distilled set and one training after it therefore send less than n trainings of R "
        f"rounds each if n is above 1 + {rounds} / R."
    )
