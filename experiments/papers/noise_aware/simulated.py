"""Weights of several rules on simulated updates, held to the best ones."""

from collections.abc import Sequence
from statistics import fmean
from types import SimpleNamespace
from typing import Literal, cast

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from dpfl_lightning.algorithms.noise_estimators import EstimatorOptions, estimate
from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.algorithms.random_effects import most_influence
from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware
from experiments.papers.noise_aware.formulas import CLIENTS, NUM_PARAMS, RECORDS, noise_vars

DRAWS = range(10)  # of `signal_to_noise`


def updates(
    signal: str,
    ratio: float,
    seed: int,
    models: int = 1,
    rounds: int = 1,
    lasting: bool = False,
    budgets: str = "dist1",
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Simulated updates `[20, 28938]` of the clients of `budgets` in each round, lengths of signal, and variances.

    The signal is one direction, common to the clients of a model (client modulo `models`), with a separate one of each
    client a tenth as long: `equal` for all, or in proportion to local `steps`. `ratio` is the length of the quietest
    client's signal / length of its noise. Directions are drawn anew in each round, unless they are `lasting`. Variances
    are summed over coordinates.
    """
    sizes = BATCH_SIZES[CLIENTS]
    variances = NUM_PARAMS * torch.tensor(noise_vars(EPSILONS[budgets][CLIENTS], sizes, "rdp"))
    steps = torch.tensor([RECORDS / size if signal == "steps" else 1.0 for size in sizes])
    quietest = int(variances.argmin())
    length = steps * ratio * variances[quietest] ** 0.5 / steps[quietest]
    generator = torch.Generator().manual_seed(seed)

    def directions(count: int) -> Tensor:
        drawn = torch.randn(count, NUM_PARAMS, generator=generator)
        return drawn / drawn.norm(dim=1, keepdim=True)

    def signals() -> Tensor:
        return length[:, None] * (directions(models)[torch.arange(CLIENTS) % models] + 0.1 * directions(CLIENTS))

    def noise() -> Tensor:
        return torch.randn(CLIENTS, NUM_PARAMS, generator=generator) * (variances[:, None] / NUM_PARAMS) ** 0.5

    same = signals() if lasting else None
    return [(signals() if same is None else same) + noise() for _ in range(rounds)], length, variances


def signal_to_noise(models: int, signal: str, ratio: float) -> dict[str, float]:
    """Squared ratio of signal to noise of the weighted sum / the best one; mean over models and `DRAWS`.

    The best weights know signals and noise. For ours they have the same bound on one client's share; for weights of
    least noise, by robust PCA or from the true noise (`inverse`), and uniform ones they have none. Ours are those of
    the first and tenth of 30 rounds, with `planned` or `estimated` noise; in `lasting` rounds directions last over
    rounds, so that ours take the clients' own for bias; `lasting200` is the tenth of 200 rounds.
    """
    shares: dict[str, list[float]] = {}
    rows_of = [list(range(model, CLIENTS, models)) for model in range(models)]
    for seed in DRAWS:
        setting = signal, float(ratio), seed, models, 10
        rounds, length, variances = updates(*setting)
        lasting, _, _ = updates(*setting, lasting=True)
        found: dict[str, np.ndarray] = {}
        for noise in ("planned", "estimated"):
            ours = noise_aware_weights(noise, rounds, length, variances, models)
            found |= {f"{noise}_first": ours[0], f"{noise}_tenth": ours[-1]}
            for name, planned in (("lasting", 30), ("lasting200", 200)):
                ours = noise_aware_weights(noise, lasting, length, variances, models, planned)
                found[f"{noise}_{name}"] = ours[-1]
        rpca = weights(estimate(rounds[0], EstimatorOptions("rpca", rows=None)).noise_var).numpy()
        rivals = {"rpca": rpca, "inverse": 1 / variances.numpy(), "uniform": np.ones(CLIENTS)}
        for rows in rows_of:
            truth = length[rows].double().numpy(), variances[rows].double().numpy()
            bounded, free = best_ratio(*truth, most_influence(len(rows))), best_ratio(*truth, 1.0)
            for name, weight in (found | rivals).items():
                best = free if name in rivals else bounded
                shares.setdefault(name, []).append(_ratio(weight[rows], *truth) / best)
    return {name: fmean(values) for name, values in shares.items()}


def noise_aware_weights(
    noise: Literal["planned", "estimated"],
    rounds: Sequence[Tensor],
    length: Tensor,
    variances: Tensor,
    models: int,
    planned: int = 30,
) -> list[np.ndarray]:
    """The weights `[20]` of the strategy `noise_aware` in each of these rounds, the first of a run of `planned`."""
    strategy, found = NoiseAware(noise), []
    everyone = range(CLIENTS)
    model_of, std = tuple(client % models for client in everyone), (variances / NUM_PARAMS).sqrt()
    facts = SimpleNamespace(num_clients=CLIENTS, num_records=(RECORDS,) * CLIENTS)
    module = SimpleNamespace(sent=lambda deltas: deltas)
    rates, steps = tuple((length / length.max()).tolist()), (1,) * CLIENTS  # the length of an update without noise
    for number, deltas in enumerate(rounds, start=1):
        seen = ClientUpdates(tuple(everyone), steps, tuple(std.tolist()), deltas, model_of=model_of)
        schedule = SimpleNamespace(rounds=planned)
        read = SimpleNamespace(facts=facts, module=module, schedule=schedule, round=number, learning_rate=rates)
        found.append(strategy.weigh(seen, cast(View, read)).numpy())
    return found


def best_ratio(length: np.ndarray, variance: np.ndarray, bound: float) -> float:
    """Best squared ratio of signal to noise if no client has more than `bound` of the signal."""
    start = np.full(len(length), 1 / len(length))
    best = minimize(
        lambda share: -np.log(_ratio(share / length, length, variance)),
        start,
        bounds=[(0.0, max(bound, 1 / len(length)))] * len(length),
        constraints=[{"type": "eq", "fun": lambda share: share.sum() - 1}],
        options={"maxiter": 1000, "ftol": 1e-12},
    )
    return float(np.exp(-best.fun))


def _ratio(weight: np.ndarray, length: np.ndarray, variance: np.ndarray) -> float:
    return float((weight @ length) ** 2 / (weight**2 @ variance))
