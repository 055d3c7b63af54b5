"""Estimates of each update's noise variance from the updates of one round."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from dpfl_lightning.algorithms.update_geometry import double_columns, gram_of
from dpfl_lightning.papers.robust_hdp.robust_pca import robust_pca

_ENOUGH = 8  # fewest clients of one model whose noise variances are estimated among themselves
_DIAGNOSTICS = ("iterations", "primal_residual", "dual_residual", "converged", "rank", "dual_norm")


@dataclass(frozen=True)
class EstimatorOptions:
    """The estimator and its options; `rpca` uses all but `rank`, `hetero_pca` only that.

    Args:
        name: one of `ESTIMATORS`, or `oracle` (the true variances of a simulation).
        rows: number of parameters that robust PCA reads together, >= 1 (p' of the paper); None takes all. All have the
            same noise, so some suffice, with a relative error of a variance of about `sqrt(2 / rows)`.
        blocks: number of such blocks, over which variances are averaged, >= 1, as far as there are so many (Q of the
            paper); None takes all.
        row_choice: `random` draws the parameters once from a public seed; `head` takes them in order (as in the paper):
            the first ones are those of the first layers, whose signal is not typical.
        rank: number of directions that clients share, >= 1, as far as C clients can show them.
    """

    name: str = "rpca"
    rows: int | None = 200_000
    blocks: int | None = 1
    row_choice: str = "random"
    rank: int = 1


@dataclass(frozen=True)
class Estimate:
    """Noise variance of each update of a round.

    Args:
        noise_var: `[C]` float64 on the CPU, >= 0, summed over coordinates; infinite for an update that is not finite.
            It is meant for weights, so it is most accurate where it is small (see `robust_pca`).
        diagnostics: numbers to log.
    """

    noise_var: Tensor
    diagnostics: Mapping[str, float] = field(default_factory=dict)


@torch.no_grad()
def estimate(deltas: Tensor, options: EstimatorOptions, truth: Tensor | None = None) -> Estimate:
    """Estimate the noise variances of released updates `[C, P]`; `truth` `[C]` is for `oracle` only.

    One or two updates do not allow separating signal from noise; their squared lengths are returned.

    **Privacy** Post-processing of released updates. Reads nothing that a client reports, except for `oracle`.

    >>> deltas = torch.tensor([[0.0, 2.0], [3.0, 4.0], [float("nan"), 0.0]])
    >>> estimate(deltas, EstimatorOptions("raw_norm")).noise_var
    tensor([ 4., 25., inf], dtype=torch.float64)
    """
    if options.name == "oracle":
        assert truth is not None, "the oracle needs the true variances, which only a simulation knows"
        return Estimate(truth.to("cpu", torch.float64))
    deltas = deltas.cpu() if deltas.device.type == "mps" else deltas  # MPS has no float64
    finite = torch.stack([row.isfinite().all() for row in deltas]).cpu()
    if not bool(finite.all()):
        deltas = deltas[finite.to(deltas.device)]
    estimated = (ESTIMATORS[options.name] if len(deltas) > 2 else _raw_norm)(deltas, options)
    noise_var = torch.full((len(finite),), math.inf, dtype=torch.float64)
    noise_var[finite] = estimated.noise_var
    return Estimate(noise_var, estimated.diagnostics)


def estimate_by_group(
    deltas: Tensor, models: Sequence[Sequence[int]], options: EstimatorOptions, truth: Tensor | None = None
) -> Estimate:
    """Return the `estimate` of each group of updates `[C, P]` separately, with the worst of the diagnostics.

    `models` are the rows of each model. Models that are judged together show at least one direction each. `truth`
    `[C]` holds the true variances, for the estimator `oracle`.
    """
    noise_var, diagnostics = torch.zeros(len(deltas), dtype=torch.float64), list[Mapping[str, float]]()
    groups = judged_groups(models, len(deltas))
    together = len(models) if len(groups) == 1 else 1
    options = dataclasses.replace(options, rank=max(options.rank, together))
    for rows in groups:
        group_deltas = deltas if len(rows) == len(deltas) else deltas[rows]
        group_estimate = estimate(group_deltas, options, None if truth is None else truth[rows])
        noise_var[rows] = group_estimate.noise_var
        diagnostics.append(group_estimate.diagnostics)
    return Estimate(noise_var, _worst(diagnostics))


def _worst(diagnostics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for one in diagnostics for key in one)
    values = {key: [one[key] for one in diagnostics if key in one] for key in keys}
    return {key: (min if key == "converged" else max)(found) for key, found in values.items()}


def judged_groups(models: Sequence[Sequence[int]], num_clients: int) -> list[list[int]]:
    """Return the rows within which noise variances are estimated: those of each model if all have 8 clients or more."""
    return list(map(list, models)) if min(map(len, models)) >= _ENOUGH else [list(range(num_clients))]


def _raw_norm(deltas: Tensor, options: EstimatorOptions) -> Estimate:
    """Return `|delta_i|^2`, which is right if noise outweighs signal, as it mostly does under local privacy."""
    if not len(deltas):
        return Estimate(torch.zeros(0, dtype=torch.float64))
    return Estimate(torch.stack([vector_norm(row, dtype=torch.float64) for row in deltas]).cpu() ** 2)


def _mean_residual(deltas: Tensor, options: EstimatorOptions) -> Estimate:
    """Return `|delta_i - mean|^2`, a baseline; noisy clients distort the mean."""
    gram = gram_of(double_columns(deltas))
    return Estimate((gram.diagonal() - 2 * gram.mean(dim=1) + gram.mean()).clamp_min(0))


def _hetero_pca(deltas: Tensor, options: EstimatorOptions) -> Estimate:
    """Return `G_ii - A_ii`, where A is the low-rank matrix that explains the Gram matrix G off its diagonal.

    Independent noise adds only to the diagonal of G. The rank is limited so that the diagonal remains determined.
    Reference: Zhang, Cai, Wu (2022), HeteroPCA.
    """
    gram = gram_of(double_columns(deltas))
    count = len(gram)
    rank = min(options.rank, int((2 * count + 1 - math.sqrt(8 * count + 1)) / 2))
    shared = gram.clone().fill_diagonal_(0)
    for _ in range(100):
        values, vectors = torch.linalg.eigh(shared)
        top = values.abs().topk(rank).indices
        low_rank = (vectors[:, top] * values[top]) @ vectors[:, top].T
        last_move = float((low_rank.diagonal() - shared.diagonal()).norm() / gram.diagonal().norm().clamp_min(1e-300))
        shared.diagonal().copy_(low_rank.diagonal())
    return Estimate((gram - low_rank).diagonal().clamp_min(0), {"rank": rank, "last_move": last_move})


def _rpca(deltas: Tensor, options: EstimatorOptions) -> Estimate:
    """Return `|S_i|^2` of principal component pursuit of some parameters, times P / rows: the mean over the blocks."""
    noise_var, diagnostics = torch.zeros(len(deltas), dtype=torch.float64), list[Mapping[str, float]]()
    blocks = blocks_of(deltas.shape[1], options)
    for columns in blocks:
        block = deltas[:, columns]
        split = robust_pca(block)
        noise_var += split.noise_var * (deltas.shape[1] / block.shape[1] / len(blocks))
        diagnostics.append({key: float(getattr(split, key)) for key in _DIAGNOSTICS})
    return Estimate(noise_var, _worst(diagnostics))


#: name -> `estimator(deltas, options)`
ESTIMATORS: dict[str, Callable[[Tensor, EstimatorOptions], Estimate]] = {
    "rpca": _rpca,
    "hetero_pca": _hetero_pca,
    "raw_norm": _raw_norm,
    "mean_residual": _mean_residual,
}


def blocks_of(num_params: int, options: EstimatorOptions) -> list[slice] | list[Tensor]:
    """Return the parameters of each block that `rpca` reads; with `head` the last of all blocks are the last ones.

    Reference: Malekmohammadi et al. (2024), section 3.6.

    >>> blocks_of(10, EstimatorOptions(rows=4, row_choice="head", blocks=None))
    [slice(0, 4, None), slice(6, 10, None)]
    """
    rows = min(options.rows or num_params, num_params)
    most = num_params // rows
    count = min(options.blocks or most, most)
    if rows == num_params or options.row_choice == "head":
        firsts = [*range(0, (most - 1) * rows, rows), num_params - rows]
        return [slice(first, first + rows) for first in firsts[:count]]
    drawn = np.random.default_rng(0).choice(num_params, (count, rows), replace=False)
    return [torch.from_numpy(np.sort(block)) for block in drawn]
