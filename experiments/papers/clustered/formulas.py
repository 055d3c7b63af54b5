"""The papers' formulas: noise multipliers and prices of releases.

The setting is that of the revised paper: N = 6,600 records, batch 32, one local epoch a round, 200 rounds, delta 1e-4.
"""

import functools
import math

from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, Release, SelectionEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.schedule import calibrate

RECORDS, BATCH, ROUNDS, DELTA = 6600, 32, 200, 1e-4

SELECTIONS = 20  # a tenth of the rounds
SHARE = 0.03  # of the budget: the range of one selection


@functools.cache
def noise_multiplier(
    epsilon: float,
    first_batch: int | None = RECORDS,
    first_noise: float | None = None,
    selections: int = 0,
    selection_epsilon: float = 0.0,
) -> float:
    """z of the rounds after the first one, for a budget `epsilon` that pays for the whole run.

    Round 1 has a batch of `first_batch` (None: as the others) and the noise multiplier `first_noise` (None: as the
    others, as in the papers); there are `selections` choices by loss, each of range `selection_epsilon`.

    >>> round(noise_multiplier(5.0, first_batch=None), 3), round(noise_multiplier(5.0), 3)
    (1.078, 1.31)
    """
    first = BATCH if first_batch is None else first_batch
    lines = [
        Planned("first_round", GaussianEvent(first / RECORDS, first_noise, math.ceil(RECORDS / first)), 1),
        Planned("train", GaussianEvent(BATCH / RECORDS, None, math.ceil(RECORDS / BATCH)), ROUNDS - 1),
    ]
    if selections:
        lines.append(Planned("select", SelectionEvent(selection_epsilon), selections))
    (solved,) = calibrate([ClientSchedule(epsilon, DELTA, tuple(lines))], get_accountant("rdp"))
    return solved.noise_multiplier("train")


def first_round_variance(epsilon: float, batch: int, times: int) -> dict[str, float]:
    """Lemma 4.1: z and the variance of a first update, z^2 / b^3 times a constant, for batch `batch` and `times` that.

    >>> round(first_round_variance(5.0, 660, 10)["factor"])
    740
    """
    small, large = noise_multiplier(epsilon, batch), noise_multiplier(epsilon, batch * times)
    return {"small": small, "large": large, "factor": times**3 * (small / large) ** 2}


def epsilon_alone(event: Release, times: int = 1) -> float:
    """The cost of so many such releases alone.

    >>> round(epsilon_alone(GaussianEvent(1.0, 1.31)), 2)
    3.05
    """
    return get_accountant("rdp").epsilon([event.repeated(times)], DELTA)


def selection_cost(epsilon: float) -> dict[str, float]:
    """Noise multipliers, increases in per cent, and epsilons of private choices among models, as rows of the table."""
    event = SelectionEvent(SHARE * epsilon)
    joint = {
        name: noise_multiplier(epsilon, selections=count, selection_epsilon=event.epsilon)
        for name, count in (("joint", SELECTIONS), ("every_round", ROUNDS // 2))
    }
    free = noise_multiplier(epsilon)
    return {
        "free": free,
        **joint,
        "joint_increase": 100 * (joint["joint"] / free - 1),
        "alone": epsilon_alone(event, SELECTIONS),
        "alone_every_round": epsilon_alone(event, ROUNDS // 2),
    }


def full_batch_cost(epsilon: float) -> dict[str, float]:
    """Noise multipliers beside a full-batch first round, and epsilons of that round, as rows of the table."""
    without = noise_multiplier(epsilon, first_batch=None)
    same = noise_multiplier(epsilon)
    beside = {f"own{z}": noise_multiplier(epsilon, first_noise=float(z)) for z in (3, 5)}
    return {
        "without": without,
        "same": same,
        **beside,
        "increase": 100 * (same / without - 1),
        "alone": epsilon_alone(GaussianEvent(1.0, same)),
        "alone5": epsilon_alone(GaussianEvent(1.0, 5.0)),
    }
