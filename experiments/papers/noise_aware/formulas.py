"""The paper's formulas: noise multipliers, noise of updates and sums, best weights.

Everything is "per parameter, at learning rate 1": the variance of one coordinate of an update, divided by the squared
learning rate, `ceil(N / b) (c z / b)^2` (its Eqs. 3, 5 and 7 without the sampling term).
"""

import functools
import math
from collections.abc import Sequence

from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.schedule import calibrate

ROUNDS, DELTA, CLIP_NORM, RECORDS, CLIENTS = 200, 1e-4, 3.0, 2400, 20
LIAR = 0.95  # the epsilon of the client that reports another one


@functools.cache
def noise_multipliers(
    epsilons: tuple[float, ...], batch_sizes: tuple[int, ...], accountant: str = "paper_ma", rounds: int = ROUNDS
) -> tuple[float, ...]:
    """z of clients with one local epoch a round: as in the paper `rounds N / b` steps, not rounded up.

    >>> round(noise_multipliers((1.0,), (16,))[0], 3)
    5.147
    """
    runs = [
        ClientSchedule(epsilon, DELTA, (Planned("train", GaussianEvent(size / RECORDS, None, steps), 1),))
        for epsilon, size in zip(epsilons, batch_sizes, strict=True)
        for steps in [round(rounds * RECORDS / size)]
    ]
    return tuple(run.noise_multiplier("train") for run in calibrate(runs, get_accountant(accountant)))


def noise_vars(epsilons: Sequence[float], batch_sizes: Sequence[int], accountant: str = "paper_ma") -> list[float]:
    """Noise variance of each client's update, per parameter at learning rate 1.

    With the paper's accountant z is rounded to two decimals, also down, as in the paper's code: for its tables only.
    """
    multipliers = noise_multipliers(tuple(epsilons), tuple(batch_sizes), accountant)
    rounded = [round(z, 2) if accountant == "paper_ma" else z for z in multipliers]
    pairs = zip(rounded, batch_sizes, strict=True)
    return [math.ceil(RECORDS / size) * (CLIP_NORM * z / size) ** 2 for z, size in pairs]


def of_sum(weights: Sequence[float], variances: Sequence[float]) -> float:
    """Noise variance of the sum of independent updates under these weights, scaled to sum 1.

    >>> of_sum([1, 1], [2.0, 4.0])
    1.5
    """
    total = math.fsum(weights)
    return math.fsum((weight / total) ** 2 * variance for weight, variance in zip(weights, variances, strict=True))


def oracle_weights(variances: Sequence[float]) -> list[float]:
    """The weights of least noise, ~ 1 / variance (Eq. 8).

    >>> oracle_weights([1.0, 3.0])
    [0.75, 0.25]
    """
    total = math.fsum(1 / variance for variance in variances)
    return [1 / variance / total for variance in variances]


def table3(dist: str) -> dict[str, float]:
    """The noise of the sum under each method's weights, for 20 clients of a published list."""
    epsilons, batch_sizes = EPSILONS[dist][CLIENTS], BATCH_SIZES[CLIENTS]
    variances = noise_vars(epsilons, batch_sizes)
    of_smallest = noise_vars([min(epsilons)] * CLIENTS, batch_sizes)
    equal = [1.0] * CLIENTS
    return {
        "weiavg": of_sum(epsilons, variances),
        "dpfedavg": of_sum(equal, variances),
        "min_eps": of_sum(equal, of_smallest),
        "oracle": of_sum(oracle_weights(variances), variances),
    }


def accountant_cost(dist: str, accountant: str, rounds: int) -> dict[str, float]:
    """Noise variance by the paper's accountant / that by another one: the least and the most of a list's 20 clients."""
    epsilons, batch_sizes = tuple(EPSILONS[dist][CLIENTS]), tuple(BATCH_SIZES[CLIENTS])
    theirs, others = (noise_multipliers(epsilons, batch_sizes, name, rounds) for name in ("paper_ma", accountant))
    ratios = [(z / other) ** 2 for z, other in zip(theirs, others, strict=True)]
    return {"least": min(ratios), "most": max(ratios)}


def falsified(reported: float) -> dict[str, float]:
    """Figure 5, right: the noise of the sum if one client of Dist5 with epsilon 0.95 reports another one.

    `weiavg` is WeiAvg's, `liar` its weight of that client; no other rule of Table 3 reads what a client reports.
    """
    epsilons, batch_sizes = EPSILONS["dist5"][CLIENTS], BATCH_SIZES[CLIENTS]
    variances = noise_vars(epsilons, batch_sizes)
    liar = epsilons.index(LIAR)
    claimed = [*epsilons[:liar], reported, *epsilons[liar + 1 :]]
    return {
        "weiavg": of_sum(claimed, variances),
        "oracle": of_sum(oracle_weights(variances), variances),
        "liar": reported / math.fsum(claimed),
    }
