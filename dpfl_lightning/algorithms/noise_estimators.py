"""Estimates of each update's noise variance from the updates of one round, and the true value of a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from dpfl_lightning.algorithms.robust_pca import PcpSettings, robust_pca
from dpfl_lightning.errors import nearest, require

ROW_CHOICES = ("random", "head")
_COLUMNS = 1 << 13  # columns that are converted to float64 at once


@dataclass(frozen=True)
class EstimatorOptions:
    """The estimator and its options.

    Args:
        name: one of `ESTIMATORS`.
        pcp: for `rpca`: penalty and stop rule.
        rows: for `rpca`: number of parameters p' in a block, >= 1; None takes all at once. All parameters have the same
            noise, so a part of them suffices; it adds a relative error of about `sqrt(2 / rows)` to a client's
            variance.
        blocks: for `rpca`: number of blocks to average over, >= 1, of the P // rows blocks; None takes all.
        row_choice: for `rpca`: `random` draws the parameters once from a public seed; `head` takes them in order (as in
            the paper), so that a few blocks are the first layers, whose signal is not typical.
        rank: for `hetero_pca`: number of directions that clients share, >= 1; limited to what C clients can distinguish
            from noise.
    """

    name: str = "rpca"
    pcp: PcpSettings = field(default_factory=PcpSettings)
    rows: int | None = 200_000
    blocks: int | None = 1
    row_choice: str = "random"
    rank: int = 1

    def __post_init__(self) -> None:
        for key, value, known in (("estimator", self.name, ESTIMATORS), ("row_choice", self.row_choice, ROW_CHOICES)):
            require(value in known, key, f"be one of {', '.join(known)}", value, nearest(value, known))
        for key in ("rows", "blocks", "rank"):
            value = getattr(self, key)
            require(value is None or value >= 1, key, "be at least 1", value)


@dataclass(frozen=True)
class Estimate:
    """Noise variance of each update of a round.

    Args:
        noise_var: `[C]` float64 on the CPU, >= 0, summed over coordinates. It is meant for weights, so it is most
            accurate where it is small (see `robust_pca`). Infinite for an update that is not finite.
        diagnostics: numbers to log; the worst of several blocks.
    """

    noise_var: Tensor
    diagnostics: Mapping[str, float] = field(default_factory=dict)


@torch.no_grad()
def estimate(deltas: Tensor, options: EstimatorOptions, truth: Tensor | None = None) -> Estimate:
    """Estimate each update's noise variance by the estimator in `options`.

    One or two updates do not allow separating signal from noise; their squared lengths are returned.

    Args:
        deltas: released updates, `[C, P]`.
        options: estimator and its options.
        truth: true variances `[C]`, only for `oracle` in a simulation: see `update_noise_var`.

    **Privacy** Post-processing of released updates. Reads nothing that a client reports, except for `oracle`.

    >>> deltas = torch.tensor([[0.0, 2.0], [3.0, 4.0], [float("nan"), 0.0]])
    >>> estimate(deltas, EstimatorOptions("raw_norm")).noise_var
    tensor([ 4., 25., inf], dtype=torch.float64)
    """
    if options.name == "oracle":
        return _oracle(deltas, options, truth)
    deltas = deltas.cpu() if deltas.device.type == "mps" else deltas  # MPS has no float64
    finite = torch.stack([row.isfinite().all() for row in deltas]).cpu()
    if not bool(finite.all()):
        deltas = deltas[finite.to(deltas.device)]
    estimated = (ESTIMATORS[options.name] if len(deltas) > 2 else _raw_norm)(deltas, options, None)
    noise_var = torch.full((len(finite),), math.inf, dtype=torch.float64)
    noise_var[finite] = estimated.noise_var
    return Estimate(noise_var, estimated.diagnostics)


def _oracle(deltas: Tensor, options: EstimatorOptions, truth: Tensor | None) -> Estimate:
    assert truth is not None, "the oracle needs the true variances, which only a simulation knows"
    return Estimate(truth.to("cpu", torch.float64))


def _raw_norm(deltas: Tensor, options: EstimatorOptions, truth: Tensor | None) -> Estimate:
    """Return `|delta_i|^2`, which is right if noise outweighs signal, as it mostly does under local privacy."""
    if not len(deltas):
        return Estimate(torch.zeros(0, dtype=torch.float64))
    return Estimate(torch.stack([vector_norm(row, dtype=torch.float64) for row in deltas]).cpu() ** 2)


def _mean_residual(deltas: Tensor, options: EstimatorOptions, truth: Tensor | None) -> Estimate:
    """Return `|delta_i - mean|^2`, a baseline; noisy clients distort the mean."""
    gram = _gram(deltas)
    return Estimate((gram.diagonal() - 2 * gram.mean(dim=1) + gram.mean()).clamp_min(0))


def _hetero_pca(deltas: Tensor, options: EstimatorOptions, truth: Tensor | None) -> Estimate:
    """Return `G_ii - A_ii`, where A is the low-rank matrix that explains the Gram matrix G off its diagonal.

    Independent noise adds only to the diagonal of G. The rank is limited so that the diagonal remains determined.

    Reference: Zhang, Cai, Wu (2022), HeteroPCA.
    """
    gram = _gram(deltas)
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


def _rpca(deltas: Tensor, options: EstimatorOptions, truth: Tensor | None) -> Estimate:
    """Return `|S_i|^2` of principal component pursuit, times P / rows, averaged over blocks of parameters."""
    totals, diagnostics = [], []
    for columns in chosen_rows(deltas.shape[1], options):
        block = deltas[:, columns]
        split = robust_pca(block, options.pcp)
        totals.append(split.noise_var * (deltas.shape[1] / block.shape[1]))
        diagnostics.append({key: float(getattr(split, key)) for key in _DIAGNOSTICS})
        del split  # frees its arrays for the next block
    worst = {key: _DIAGNOSTICS[key](block[key] for block in diagnostics) for key in _DIAGNOSTICS}
    return Estimate(torch.stack(totals).mean(dim=0), {**worst, "blocks": len(diagnostics)})


_DIAGNOSTICS: dict[str, Callable[..., float]] = {
    "iterations": max,
    "primal_residual": max,
    "dual_residual": max,
    "converged": min,
    "rank": max,
    "dual_norm": max,
    "zero_share": max,
}

#: name -> `estimator(deltas, options, truth)`
ESTIMATORS: dict[str, Callable[[Tensor, EstimatorOptions, Tensor | None], Estimate]] = {
    "rpca": _rpca,
    "hetero_pca": _hetero_pca,
    "raw_norm": _raw_norm,
    "mean_residual": _mean_residual,
    "oracle": _oracle,
}


def chosen_rows(num_params: int, options: EstimatorOptions) -> list[slice | Tensor]:
    """Return the parameters of each block that `rpca` reads.

    With `head`, block j is [j rows, (j + 1) rows), but the last of all P // rows blocks holds the last `rows`
    parameters.

    >>> chosen_rows(10, EstimatorOptions(rows=4, blocks=None, row_choice="head"))
    [slice(0, 4, None), slice(6, 10, None)]
    >>> chosen_rows(10, EstimatorOptions(rows=12))
    [slice(0, 10, None)]
    """
    rows = min(options.rows or num_params, num_params)
    num_blocks = num_params // rows
    blocks = min(options.blocks or num_blocks, num_blocks)
    if rows < num_params and options.row_choice == "random":
        drawn = np.random.default_rng(0).choice(num_params, (blocks, rows), replace=False)
        return [torch.from_numpy(np.sort(block)) for block in drawn]
    starts = [*range(0, (num_blocks - 1) * rows, rows), num_params - rows]
    return [slice(start, start + rows) for start in starts[:blocks]]


def _gram(deltas: Tensor) -> Tensor:
    """Return `deltas @ deltas.T` `[C, C]` in float64, on the CPU."""
    parts = (part.double() for part in deltas.split(_COLUMNS, dim=1))
    return sum((part @ part.T for part in parts), deltas.new_zeros((), dtype=torch.float64)).cpu()


# ---- true values


def update_noise_var(
    noise_multiplier: Sequence[float],
    expected_batch_size: Sequence[float],
    steps: Sequence[int],
    learning_rate: float,
    clip_norm: float,
    num_params: int,
    sampling_var: float | Sequence[float] = 0.0,
) -> Tensor:
    """Return the true noise variance of updates, `steps lr^2 (sampling_var + P clip^2 z^2 / b^2)`, for `oracle`.

    It is exact except for feedback: it neglects that noise in one step changes later gradients.

    Args:
        noise_multiplier: z of the noise on the sum of a batch, length C.
        expected_batch_size: b, length C.
        steps: steps of each client in the round, length C.
        learning_rate: learning rate of plain SGD.
        clip_norm: L2 bound of a record's gradient.
        num_params: P.
        sampling_var: variance of one step's gradient without noise, one value or length C; 0 neglects it, as P is
            large.

    Returns:
        `[C]` float64, summed over coordinates.

    **Privacy** Trusts what clients report: only for simulations, as an upper bound on what estimators can reach.

    Reference: Malekmohammadi et al. (2024), Eqs. 3, 5 and 7.

    >>> update_noise_var([2.0], [10.0], [5], learning_rate=0.1, clip_norm=1.0, num_params=100)
    tensor([0.2000], dtype=torch.float64)
    """
    z, b, count, sampling = (
        torch.as_tensor(values, dtype=torch.float64)
        for values in (noise_multiplier, expected_batch_size, steps, sampling_var)
    )
    return count * learning_rate**2 * (sampling + num_params * (clip_norm * z / b) ** 2)


def clipped_sampling_var(
    clip_norm: float, batch_size: float, mean_norm: float = 0.0, sample_rate: float | None = None
) -> float:
    """Return the variance of a batch's gradient due to sampling, if every record's gradient is clipped to `clip_norm`.

    Args:
        clip_norm: length c of every clipped gradient.
        batch_size: expected batch size b, the divisor.
        mean_norm: length of the mean of all clipped gradients; ignored if `sample_rate` is given.
        sample_rate: None for b independent draws, `(c^2 - mean_norm^2) / b` (the paper's Eq. 3); q for Poisson sampling
            from fixed data, as in this package: `(1 - q) c^2 / b`.

    >>> clipped_sampling_var(3.0, 100.0, mean_norm=1.0), clipped_sampling_var(3.0, 100.0, sample_rate=0.5)
    (0.08, 0.045)
    """
    if sample_rate is None:
        return (clip_norm**2 - mean_norm**2) / batch_size
    return (1 - sample_rate) * clip_norm**2 / batch_size
