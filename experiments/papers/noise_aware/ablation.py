"""The paper's estimator of noise beside others on made-up updates, as the common signal grows."""

from statistics import fmean

import torch
from torch import Tensor

from dpfl_lightning.algorithms.noise_estimators import EstimatorOptions, estimate
from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS
from experiments.papers.noise_aware.formulas import CLIENTS, NUM_PARAMS, RECORDS, noise_vars, of_sum, oracle_weights

SEEDS = (0, 1, 2)
#: row -> estimator
_ESTIMATORS = {name: EstimatorOptions(name) for name in ("hetero_pca", "raw_norm", "mean_residual")} | {
    "rpca": EstimatorOptions("rpca", rows=None),
    "rpca5000": EstimatorOptions("rpca", rows=5000),
}


def updates(signal: str, ratio: float, seed: int, accountant: str = "rdp") -> tuple[Tensor, list[float]]:
    """Simulated updates of the 20 clients of Dist1 (learning rate 1), and the true noise variance of each.

    Args:
        signal: `equal`: as long for every client; `steps`: in proportion to its local steps.
        ratio: length of the quietest client's signal / length of its noise.

    Returns:
        `[20, 28938]` float32: one common direction, a separate one of each client a tenth as long, and noise; and
        `[20]` variances summed over coordinates.
    """
    sizes = BATCH_SIZES[CLIENTS]
    noise = noise_vars(EPSILONS["dist1"][CLIENTS], sizes, accountant=accountant)
    variances = [NUM_PARAMS * variance for variance in noise]
    steps = [RECORDS / size if signal == "steps" else 1.0 for size in sizes]
    quietest = min(range(CLIENTS), key=variances.__getitem__)
    length = torch.tensor(steps) * ratio * variances[quietest] ** 0.5 / steps[quietest]

    def directions(count: int) -> Tensor:
        drawn = torch.randn(count, NUM_PARAMS, generator=generator)
        return drawn / drawn.norm(dim=1, keepdim=True)

    generator = torch.Generator().manual_seed(seed)
    signals = length[:, None] * (directions(1) + 0.1 * directions(CLIENTS))
    drawn = torch.randn(CLIENTS, NUM_PARAMS, generator=generator)
    return signals + drawn * (torch.tensor(variances)[:, None] / NUM_PARAMS) ** 0.5, variances


def excess_noise(signal: str, ratio: float, accountant: str = "rdp") -> dict[str, float]:
    """Noise of the sum under each estimator's weights, divided by the least possible; mean over `SEEDS`."""
    excess: dict[str, list[float]] = {name: [] for name in (*_ESTIMATORS, "uniform")}
    for seed in SEEDS:
        deltas, truth = updates(signal, float(ratio), seed, accountant)
        least = of_sum(oracle_weights(truth), truth)
        excess["uniform"].append(of_sum([1.0] * len(truth), truth) / least)
        for name, options in _ESTIMATORS.items():
            excess[name].append(of_sum(weights(estimate(deltas, options).noise_var).tolist(), truth) / least)
    return {name: fmean(values) for name, values in excess.items()}
