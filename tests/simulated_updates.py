"""Updates with known signals and noise, and the best weights for them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Literal, cast

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from dpfl_lightning.config.published import BATCH_SIZES, EPSILONS
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware
from experiments.papers.noise_aware.formulas import CLIENTS, RECORDS, noise_vars

NUM_PARAMS = 28_938  # of the noise-aware paper's CNN


def simulated(
    signal: str,
    ratio: float,
    seed: int,
    rounds: int = 1,
    budgets: str = "dist1",
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Simulated updates `[20, 28938]` of the clients of `budgets` in each round, lengths of signal, and variances.

    The signal is one direction, common to all clients, with a separate one of each client a tenth as long: `equal` for
    all, or in proportion to local `steps`. `ratio` is the length of the quietest client's signal / length of its noise.
    Directions are drawn anew in each round. Variances are summed over coordinates.
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
        return length[:, None] * (directions(1) + 0.1 * directions(CLIENTS))

    def noise() -> Tensor:
        return torch.randn(CLIENTS, NUM_PARAMS, generator=generator) * (variances[:, None] / NUM_PARAMS) ** 0.5

    return [signals() + noise() for _ in range(rounds)], length, variances


def noise_aware_weights(
    noise: Literal["planned", "estimated"],
    rounds: Sequence[Tensor],
    length: Tensor,
    variances: Tensor,
) -> list[np.ndarray]:
    """The weights `[20]` of the strategy `noise_aware` in each of these rounds, the first of a run of 30."""
    strategy, found = NoiseAware(noise), []
    everyone = range(CLIENTS)
    std = (variances / NUM_PARAMS).sqrt()
    facts = SimpleNamespace(num_clients=CLIENTS, num_records=(RECORDS,) * CLIENTS)
    module = SimpleNamespace(
        sent=lambda deltas: deltas, personal=(), named_trainable={"weight": torch.zeros(NUM_PARAMS)}
    )
    rates, steps = tuple((length / length.max()).tolist()), (1,) * CLIENTS  # the length of an update without noise
    for number, deltas in enumerate(rounds, start=1):
        seen = ClientUpdates(tuple(everyone), steps, tuple(std.tolist()), deltas, model_of=(0,) * CLIENTS)
        schedule = SimpleNamespace(rounds=30)
        read = SimpleNamespace(facts=facts, module=module, schedule=schedule, round=number, learning_rate=rates)
        found.append(strategy.weigh(seen, cast(View, read)).numpy())
    return found


def best_ratio(length: np.ndarray, variance: np.ndarray, bound: float) -> float:
    """Best squared ratio of signal to noise if no client has more than `bound` of the signal."""
    start = np.full(len(length), 1 / len(length))
    best = minimize(
        lambda share: -np.log(signal_to_noise(share / length, length, variance)),
        start,
        bounds=[(0.0, max(bound, 1 / len(length)))] * len(length),
        constraints=[{"type": "eq", "fun": lambda share: share.sum() - 1}],
        options={"maxiter": 1000, "ftol": 1e-12},
    )
    return float(np.exp(-best.fun))


def signal_to_noise(weight: np.ndarray, length: np.ndarray, variance: np.ndarray) -> float:
    return float((weight @ length) ** 2 / (weight**2 @ variance))
