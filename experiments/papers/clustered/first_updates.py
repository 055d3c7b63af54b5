"""The first round of real clients without the rest of a run: their exact clipped gradients, with noise of every plan.

The full-batch update of a client is -(learning rate) * (sum of its clipped gradients + noise) / N at the initial model.
The sums are computed once for each cell; the noise is that of the plans of the methods and budgets that are compared.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.build import build_net, build_population
from dpfl_lightning.config.options import Options
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.local_clients import facts_of
from dpfl_lightning.loop import build_loop
from dpfl_lightning.papers.clustered.first_round import DISTANCE, PURPOSE
from dpfl_lightning.papers.clustered.update_mixture import Mixture, paper_mixture, robust_mixture
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from experiments.papers.run import CellContext

PAPER = {"num_clusters": 4, "mixture": "paper", "first_round_noise_multiplier": "same"}
PAPER |= {"selection": "paper_argmin", "reuse_first_round": False}
METHODS: Mapping[str, Mapping[str, Any]] = {"ours": {}, "paper": PAPER}


def found(context: CellContext, epsilons: Sequence[float], methods: Sequence[str]) -> dict[str, Any]:
    """Values `<method>_eps<epsilon>_perfect` (1 or 0), `_groups`, and `_probability`."""
    options = context.options
    population = build_population(options)
    sums = clipped_sums(options, population)
    values: dict[str, float] = {}
    for epsilon in epsilons:
        for method in methods:
            noises = planned_noise(options, population, epsilon, METHODS[method])
            values |= _one(f"{method}_eps{epsilon}", sums, population, noises, METHODS[method], options.seed)
    return {"values": values}


def clipped_sums(options: Options, population: Population) -> Tensor:
    """Return the sums of clipped gradients of all clients at the initial model, `[C, P]`."""
    net = build_net(options, facts_of(population))
    x, y = population.empty_batch
    compute, _ = clipped_sum_for(net, None, x, y)
    assert options.privacy is not None and isinstance(options.privacy.clip_norm, int | float)  # for mypy
    request, params = ClipRequest(float(options.privacy.clip_norm)), dict(net.named_parameters())
    sums = []
    for client in range(population.num_clients):
        records = population.records(client, torch.arange(population.num_records[client]))
        sums.append(compute(params, *records, request)[0])
    return torch.cat(sums)


def planned_noise(options: Options, population: Population, epsilon: float, clustered: Mapping[str, Any]) -> np.ndarray:
    """Return the noise multipliers of the first round in the plan of a run with this budget, `[N]`."""
    assert options.privacy is not None  # for mypy
    privacy = dataclasses.replace(options.privacy, epsilon=epsilon)
    strategies: dict[str, Any] = {"clustered": dict(clustered)}
    loop = build_loop(dataclasses.replace(options, privacy=privacy, strategies=strategies), population=population)
    schedule = loop.plan_schedule()
    return np.array([client.noise_multiplier(PURPOSE) for client in schedule.clients])


def _one(
    name: str,
    sums: Tensor,
    population: Population,
    noises: np.ndarray,
    clustered: Mapping[str, Any],
    seed: int,
) -> dict[str, float]:
    mixture = mixture_of(sums, population.num_records, noises, clustered, seed)
    labels = mixture.responsibilities.argmax(dim=1).numpy()
    values = {"groups": float(mixture.num_groups), "probability": mixture.probability}
    if population.groups is not None:
        true = np.array(population.groups)
        right = (labels[:, None] == labels) == (true[:, None] == true)
        values["perfect"] = float(right.all())
    return {f"{name}_{key}": value for key, value in values.items()}


def mixture_of(
    sums: Tensor, num_records: Sequence[int], noises: np.ndarray, clustered: Mapping[str, Any], seed: int
) -> Mixture:
    """Return the mixture of updates at clip norm 1 and learning rate 1."""
    generator = torch.Generator().manual_seed(seed)
    records = torch.tensor(num_records, dtype=torch.float64)
    noise_std = torch.from_numpy(noises) / records
    updates = sums / records[:, None] + noise_std[:, None] * torch.randn(sums.shape, generator=generator)
    if clustered.get("mixture") == "paper":
        return paper_mixture(updates, clustered["num_clusters"], seed)
    return robust_mixture(updates, noise_std.tolist(), distance=DISTANCE)
