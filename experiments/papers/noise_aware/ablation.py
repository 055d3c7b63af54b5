"""Estimators of noise, and weights, on simulated updates as the common signal grows."""

from statistics import fmean

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from dpfl_lightning.algorithms.noise_estimators import EstimatorOptions, estimate
from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.algorithms.signal_weights import contributions, estimate_signals, most_influence
from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS
from dpfl_lightning.strategies.aggregation.noise_aware import MEMORY
from experiments.papers.noise_aware.formulas import CLIENTS, NUM_PARAMS, RECORDS, noise_vars, of_sum, oracle_weights

SEEDS = (0, 1, 2)
#: row -> estimator
_ESTIMATORS = {name: EstimatorOptions(name) for name in ("hetero_pca", "raw_norm", "mean_residual")} | {
    "rpca": EstimatorOptions("rpca", rows=None),
    "rpca5000": EstimatorOptions("rpca", rows=5000),
}


def updates(
    signal: str, ratio: float, seed: int, accountant: str = "rdp", models: int = 1, rounds: int = 1
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Simulated updates `[20, 28938]` of the clients of Dist1 in each round, their lengths of signal, and variances.

    The signal is one direction, common to the clients of a model (client modulo `models`), with a separate one of each
    client a tenth as long: `equal` for all, or in proportion to local `steps`. `ratio` is the length of the quietest
    client's signal / length of its noise. Variances are summed over coordinates.
    """
    sizes = BATCH_SIZES[CLIENTS]
    variances = NUM_PARAMS * torch.tensor(noise_vars(EPSILONS["dist1"][CLIENTS], sizes, accountant=accountant))
    steps = torch.tensor([RECORDS / size if signal == "steps" else 1.0 for size in sizes])
    quietest = int(variances.argmin())
    length = steps * ratio * variances[quietest] ** 0.5 / steps[quietest]
    generator = torch.Generator().manual_seed(seed)

    def directions(count: int) -> Tensor:
        drawn = torch.randn(count, NUM_PARAMS, generator=generator)
        return drawn / drawn.norm(dim=1, keepdim=True)

    def one_round() -> Tensor:
        common = directions(models)[torch.arange(CLIENTS) % models]
        noise = torch.randn(CLIENTS, NUM_PARAMS, generator=generator) * (variances[:, None] / NUM_PARAMS) ** 0.5
        return length[:, None] * (common + 0.1 * directions(CLIENTS)) + noise

    return [one_round() for _ in range(rounds)], length, variances


def excess_noise(signal: str, ratio: float, accountant: str = "rdp") -> dict[str, float]:
    """Noise of the sum under each estimator's weights, divided by the least possible; mean over `SEEDS`."""
    excess: dict[str, list[float]] = {name: [] for name in (*_ESTIMATORS, "uniform")}
    for seed in SEEDS:
        (deltas,), _, variances = updates(signal, float(ratio), seed, accountant)
        truth = variances.tolist()
        least = of_sum(oracle_weights(truth), truth)
        excess["uniform"].append(of_sum([1.0] * len(truth), truth) / least)
        for name, options in _ESTIMATORS.items():
            excess[name].append(of_sum(weights(estimate(deltas, options).noise_var).tolist(), truth) / least)
    return {name: fmean(values) for name, values in excess.items()}


def signal_to_noise(models: int, signal: str, ratio: float, accountant: str = "rdp") -> dict[str, float]:
    """Squared ratio of signal to noise of the weighted sum / the best one; mean over models and `SEEDS`.

    The best weights know signals and noise. For our default, after its first and its tenth round, they have the same
    bound on one client's influence; for weights of least noise, by robust PCA, and uniform ones they have none.
    """
    shares: dict[str, list[float]] = {}
    rows_of = [list(range(model, CLIENTS, models)) for model in range(models)]
    faded = MEMORY ** np.arange(9.0, -1.0, -1.0)
    for seed in SEEDS:
        rounds, length, variances = updates(signal, float(ratio), seed, accountant, models, rounds=10)
        lengths = [deltas.double().norm(dim=1).numpy() for deltas in rounds]
        pairs = zip(rounds, lengths, strict=True)
        cosines = [(deltas.double() @ deltas.double().T).numpy() / np.outer(norms, norms) for deltas, norms in pairs]
        rpca = weights(estimate(rounds[0], EstimatorOptions("rpca", rows=None)).noise_var).numpy()
        ours = {"first": cosines[0], "tenth": np.average(cosines, axis=0, weights=faded)}
        precision = {"first": NUM_PARAMS, "tenth": NUM_PARAMS * faded.sum() ** 2 / (faded**2).sum()}
        signals = {
            name: estimate_signals(seen, lengths[-1], rows_of, np.full(seen.shape, precision[name]))
            for name, seen in ours.items()
        }
        for model, rows in enumerate(rows_of):
            truth = length[rows].double().numpy(), variances[rows].double().numpy()
            bound = most_influence(len(rows))
            bounded, free = best_ratio(*truth, bound), best_ratio(*truth, 1.0)
            for name in ours:
                share = contributions(signals[name][model], 30, bound)
                shares.setdefault(name, []).append(_ratio(share / lengths[-1][rows], *truth) / bounded)
            for name, weight in (("rpca", rpca[rows]), ("uniform", np.ones(len(rows)))):
                shares.setdefault(name, []).append(_ratio(weight, *truth) / free)
    return {name: fmean(values) for name, values in shares.items()}


def best_ratio(length: np.ndarray, variance: np.ndarray, bound: float) -> float:
    """Best squared ratio of signal to noise if no client has more than `bound` of the summed lengths."""
    whole = np.sqrt(length**2 + variance)
    start = np.full(len(length), 1 / len(length))
    best = minimize(
        lambda share: -np.log(_ratio(share / whole, length, variance)),
        start,
        bounds=[(0.0, max(bound, 1 / len(length)))] * len(length),
        constraints=[{"type": "eq", "fun": lambda share: share.sum() - 1}],
        options={"maxiter": 1000, "ftol": 1e-12},
    )
    return float(np.exp(-best.fun))


def _ratio(weight: np.ndarray, length: np.ndarray, variance: np.ndarray) -> float:
    return float((weight @ length) ** 2 / (weight**2 @ variance))
