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
NUM_PARAMS = 28_938  # of its CNN


@functools.cache
def noise_multipliers(
    epsilons: tuple[float, ...], batch_sizes: tuple[int, ...], records: int = RECORDS, accountant: str = "paper_ma"
) -> tuple[float, ...]:
    """z of clients with one local epoch a round for 200 rounds: as in the paper `200 N / b` steps, not rounded up.

    >>> round(noise_multipliers((1.0,), (16,))[0], 3)
    5.147
    """
    runs = [
        ClientSchedule(epsilon, DELTA, (Planned("train", GaussianEvent(size / records, None, steps), 1),))
        for epsilon, size in zip(epsilons, batch_sizes, strict=True)
        for steps in [round(ROUNDS * records / size)]
    ]
    return tuple(run.noise_multiplier("train") for run in calibrate(runs, get_accountant(accountant)))


def noise_vars(
    epsilons: Sequence[float], batch_sizes: Sequence[int], records: int = RECORDS, accountant: str = "paper_ma"
) -> list[float]:
    """Noise variance of each client's update, per parameter at learning rate 1.

    With the paper's accountant z is rounded to two decimals, also down, as in the paper's code: for its tables only.
    """
    multipliers = noise_multipliers(tuple(epsilons), tuple(batch_sizes), records, accountant)
    rounded = [round(z, 2) if accountant == "paper_ma" else z for z in multipliers]
    pairs = zip(rounded, batch_sizes, strict=True)
    return [math.ceil(records / size) * (CLIP_NORM * z / size) ** 2 for z, size in pairs]


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


def table3(dist: str, accountant: str = "paper_ma") -> dict[str, float]:
    """The noise of the sum under each method's weights, for 20 clients of a published list."""
    epsilons, batch_sizes = EPSILONS[dist][CLIENTS], BATCH_SIZES[CLIENTS]
    variances = noise_vars(epsilons, batch_sizes, accountant=accountant)
    of_smallest = noise_vars([min(epsilons)] * CLIENTS, batch_sizes, accountant=accountant)
    equal = [1.0] * CLIENTS
    return {
        "weiavg": of_sum(epsilons, variances),
        "dpfedavg": of_sum(equal, variances),
        "min_eps": of_sum(equal, of_smallest),
        "oracle": of_sum(oracle_weights(variances), variances),
    }


def weights_of_60(batch_sizes: Sequence[int], dist: str = "dist1", accountant: str = "paper_ma") -> dict[str, list]:
    """Of 60 clients with 800 records: budgets ascending, and in this order the weights of the oracle and of WeiAvg."""
    epsilons = EPSILONS[dist][60]
    oracle = oracle_weights(noise_vars(epsilons, batch_sizes, 800, accountant))
    order = sorted(range(60), key=lambda client: epsilons[client])
    return {
        "epsilon": [epsilons[client] for client in order],
        "oracle_weights": [oracle[client] for client in order],
        "weiavg_weights": [epsilons[client] / math.fsum(epsilons) for client in order],
    }


# ---- cells


def noise_by_batch_size(size: int, accountant: str = "paper_ma") -> dict[str, object]:
    """Figure 2: noise variance of an update at learning rate 0.01 by epsilon, and of Dist8's `clients`."""

    def variances(epsilons: Sequence[float]) -> list[float]:
        noise = noise_vars(epsilons, [size] * len(epsilons), accountant=accountant)
        return [NUM_PARAMS * 0.01**2 * variance for variance in noise]

    pairs = zip(EPSILONS["dist8"][CLIENTS], BATCH_SIZES[CLIENTS], strict=True)
    of_size = [epsilon for epsilon, batch_size in pairs if batch_size == size]
    grid = (0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0)
    surface = {f"eps{epsilon:g}": variance for epsilon, variance in zip(grid, variances(grid), strict=True)}
    return {**surface, "clients": list(zip(of_size, variances(of_size), strict=True))}


def noise_by_sample_rate(rate: float, accountant: str = "paper_ma") -> dict[str, float]:
    """Figure 8: noise multipliers by epsilon; they depend on sample rate and steps only."""
    records, epsilons = 60_000, (0.5, 1.0, 2.0, 5.0)
    multipliers = noise_multipliers(epsilons, (round(rate * records),) * len(epsilons), records, accountant)
    return {f"eps{epsilon:g}": z for epsilon, z in zip(epsilons, multipliers, strict=True)}


def noise_by_data_size(records: int, accountant: str = "paper_ma") -> dict[str, float]:
    """Figure 11: H(N) = N z(N)^2 at epsilon 3 and batch 32, and 1 / H(N) in millionths."""
    ((z),) = noise_multipliers((3.0,), (32,), records, accountant)
    return {"h": records * z**2, "inverse": 1e6 / (records * z**2)}


def best_weights_of_60(published: bool = False, accountant: str = "paper_ma") -> dict[str, object]:
    """Figures 12 and 13: the weights of Dist1's 60 clients at batch 128, or at the published batch sizes."""
    lists = weights_of_60(BATCH_SIZES[60] if published else [128] * 60, "dist1", accountant)
    oracle = lists["oracle_weights"]
    return {"client59": oracle[58], "largest_six": sum(sorted(oracle)[-6:]), **lists}
