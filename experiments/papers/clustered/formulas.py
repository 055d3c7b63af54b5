"""The papers' formulas: noise multipliers, noise of updates, prices of releases.

The setting is that of the revised paper's Figure 3: N = 6,600 records, batch 32, one local epoch a round, 200 rounds,
delta 1e-4, clip norm 3, learning rate 5e-4 and the 11,181,642 parameters of a ResNet-18.
"""

import functools
import math

from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, Release, SelectionEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.schedule import calibrate

RECORDS, BATCH, ROUNDS, DELTA, CLIP_NORM, RATE, NUM_PARAMS = 6600, 32, 200, 1e-4, 3.0, 5e-4, 11_181_642

SELECTIONS = 20  # a tenth of the rounds
SHARE = 0.03  # of the budget: the range of one selection


@functools.cache
def noise_multiplier(
    epsilon: float,
    first_batch: int | None = RECORDS,
    batch: int = BATCH,
    first_noise: float | None = None,
    selections: int = 0,
    selection_epsilon: float = 0.0,
    records: int = RECORDS,
    rounds: int = ROUNDS,
    epochs: int = 1,
    accountant: str = "rdp",
) -> float:
    """z of the rounds after the first one, for a budget `epsilon` that pays for the whole run.

    Round 1 has a batch of `first_batch` (None: as the others) and the noise multiplier `first_noise` (None: as the
    others, as in the papers); there are `selections` choices by loss, each of range `selection_epsilon`.

    >>> round(noise_multiplier(5.0, first_batch=None), 3), round(noise_multiplier(5.0), 3)
    (1.078, 1.31)
    """
    first = batch if first_batch is None else first_batch
    lines = [
        Planned("first_round", GaussianEvent(first / records, first_noise, epochs * math.ceil(records / first)), 1),
        Planned("train", GaussianEvent(batch / records, None, epochs * math.ceil(records / batch)), rounds - 1),
    ]
    if selections:
        lines.append(Planned("select", SelectionEvent(selection_epsilon), selections))
    (solved,) = calibrate([ClientSchedule(epsilon, DELTA, tuple(lines))], get_accountant(accountant))
    return solved.noise_multiplier("train")


def epsilon_alone(event: Release, times: int = 1, accountant: str = "rdp") -> float:
    """The cost of so many such releases alone.

    >>> round(epsilon_alone(GaussianEvent(1.0, 1.31)), 2)
    3.05
    """
    return get_accountant(accountant).epsilon([event.repeated(times)], DELTA)


def update_variance(batch: int, noise_multiplier: float, epochs: int = 1) -> float:
    """Noise variance of one round's update, all parameters together: `K N lr^2 P c^2 z^2 / b^3`.

    Reference: Lemma 4.1, which neglects the sampling of batches, and takes N / b for the number of steps.

    >>> f"{update_variance(6600, 1.3104):.2e}"
    '9.92e-07'
    """
    return epochs * RECORDS * RATE**2 * NUM_PARAMS * (CLIP_NORM * noise_multiplier) ** 2 / batch**3


def selection_cost(epsilon: float, accountant: str = "rdp") -> dict[str, float]:
    """Noise multipliers, increases in per cent, and epsilons of private choices among models, as rows of the table."""
    event = SelectionEvent(SHARE * epsilon)
    alone = epsilon_alone(event, SELECTIONS, accountant)
    joint = {
        name: noise_multiplier(epsilon, selections=count, selection_epsilon=event.epsilon, accountant=accountant)
        for name, count in (("joint", SELECTIONS), ("every_round", ROUNDS // 2))
    }
    free = noise_multiplier(epsilon, accountant=accountant)
    subtracted = noise_multiplier(epsilon - alone, accountant=accountant)
    return {
        "free": free,
        **joint,
        "subtracted": subtracted,
        "joint_increase": 100 * (joint["joint"] / free - 1),
        "subtracted_increase": 100 * (subtracted / free - 1),
        "alone": alone,
        "alone_every_round": epsilon_alone(event, ROUNDS // 2, accountant),
    }


def full_batch_cost(epsilon: float, accountant: str = "rdp") -> dict[str, float]:
    """Noise multipliers beside a full-batch first round, and epsilons of that round, as rows of the table."""
    without = noise_multiplier(epsilon, first_batch=None, accountant=accountant)
    same = noise_multiplier(epsilon, accountant=accountant)
    beside = {f"own{z}": noise_multiplier(epsilon, first_noise=float(z), accountant=accountant) for z in (3, 5)}
    return {
        "without": without,
        "same": same,
        **beside,
        "increase": 100 * (same / without - 1),
        "alone": epsilon_alone(GaussianEvent(1.0, same), 1, accountant),
        "alone5": epsilon_alone(GaussianEvent(1.0, 5.0), 1, accountant),
    }


def noise_by_sample_rate(rate: float, accountant: str = "rdp") -> dict[str, float]:
    """Noise multipliers by epsilon; they depend on sample rate and number of steps only."""
    records = 60_000
    return {
        f"eps{epsilon}": noise_multiplier(epsilon, None, round(rate * records), records=records, accountant=accountant)
        for epsilon in (2, 5, 10)
    }


def noise_by_batches(first: int, accountant: str = "rdp") -> dict[str, float]:
    """Noise multipliers at epsilon 5 by the batch size of the later rounds; `first` is that of the first one."""
    sizes = (16, 32, 64, 128, 256, 512, 1024, 2048, 6600)
    return {f"b{later}": noise_multiplier(5.0, first, later, accountant=accountant) for later in sizes}


def variances_by_batches(first: int, accountant: str = "rdp") -> dict[str, float]:
    """log10 of the noise variance of updates of the first round and later; `tenfold`: factor of a tenth of `first`."""
    multipliers = {int(name[1:]): z for name, z in noise_by_batches(first, accountant).items()}
    values = {f"first_b{later}": math.log10(update_variance(first, z)) for later, z in multipliers.items()}
    values |= {f"later_b{later}": math.log10(update_variance(later, z)) for later, z in multipliers.items()}
    if first % 10 == 0:
        smaller = noise_multiplier(5.0, first // 10, accountant=accountant)
        values["tenfold"] = update_variance(first // 10, smaller) / update_variance(first, multipliers[32])
    return values
