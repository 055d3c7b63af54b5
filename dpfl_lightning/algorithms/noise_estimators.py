"""How noisy is each update? Estimates from the updates of one round alone, and the truth that a simulation knows."""

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
_COLUMNS = 1 << 13  # that are converted to float64 at once


@dataclass(frozen=True)
class EstimatorOptions:
    """Which estimate, and its details.

    Args:
        name: of `ESTIMATORS`.
        pcp: `rpca`: penalty and stop rule.
        rows: `rpca`: parameters p' of one block, >= 1; None takes all at once. Noise is alike in all parameters, so
            some of them will do: that adds a relative error of about `sqrt(2 / rows)` to a client's variance.
        blocks: `rpca`: blocks to average over, >= 1, of the P // rows that there are; None takes them all.
        row_choice: `rpca`: `random` draws the parameters once and for all from a public seed; `head` takes them in
            their order (the paper), so that few blocks are the first layers, whose signal is not typical.
        rank: `hetero_pca`: directions that clients share, >= 1; at most what C clients can tell from noise.
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
        noise_var: `[C]` float64 on the CPU, >= 0, summed over coordinates; made for weights, so best where it is small
            (see `robust_pca`). Infinite for an update that is not finite.
        diagnostics: numbers to log; of several blocks the worst.
    """

    noise_var: Tensor
    diagnostics: Mapping[str, float] = field(default_factory=dict)


@torch.no_grad()
def estimate(deltas: Tensor, options: EstimatorOptions, truth: Tensor | None = None) -> Estimate:
    """Each update's noise variance by the estimator that `options` name.

    Nothing tells signal from noise in one or two updates: their squared lengths are taken.

    Args:
        deltas: `[C, P]`, released.
        options: see there.
        truth: `[C]`, for `oracle` alone, in a simulation: see `update_noise_var`.

    **Privacy** Post-processing of released updates. Reads nothing that a client claims, except for `oracle`.

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
    found = (ESTIMATORS[options.name] if len(deltas) > 2 else _raw_norm)(deltas, options, None)
    noise_var = torch.full((len(finite),), math.inf, dtype=torch.float64)
    noise_var[finite] = found.noise_var
    return Estimate(noise_var, found.diagnostics)


def _oracle(deltas: Tensor, options: EstimatorOptions, truth: Tensor | None) -> Estimate:
    assert truth is not None, "the oracle must be told: a run that can do so is a simulation"
    return Estimate(truth.to("cpu", torch.float64))


def _raw_norm(deltas: Tensor, options: EstimatorOptions, truth: Tensor | None) -> Estimate:
    """`|delta_i|^2`: right when noise outweighs signal, as it mostly does under local privacy."""
    if not len(deltas):
        return Estimate(torch.zeros(0, dtype=torch.float64))
    return Estimate(torch.stack([vector_norm(row, dtype=torch.float64) for row in deltas]).cpu() ** 2)


def _mean_residual(deltas: Tensor, options: EstimatorOptions, truth: Tensor | None) -> Estimate:
    """`|delta_i - mean|^2`: a rival; the noisy clients spoil the mean for all."""
    gram = _gram(deltas)
    return Estimate((gram.diagonal() - 2 * gram.mean(dim=1) + gram.mean()).clamp_min(0))


def _hetero_pca(deltas: Tensor, options: EstimatorOptions, truth: Tensor | None) -> Estimate:
    """`G_ii - A_ii`, A being the low-rank matrix that explains the Gram matrix G off its diagonal.

    Independent noises add to the diagonal of G alone. At most so many directions as leave the diagonal determined.

    Reference: Zhang, Cai, Wu (2022), HeteroPCA.
    """
    gram = _gram(deltas)
    count = len(gram)
    rank = min(options.rank, int((2 * count + 1 - math.sqrt(8 * count + 1)) / 2))
    shared = gram.clone().fill_diagonal_(0)
    for _ in range(100):
        values, vectors = torch.linalg.eigh(shared)
        top = values.abs().topk(rank).indices
        low = (vectors[:, top] * values[top]) @ vectors[:, top].T
        moved = float((low.diagonal() - shared.diagonal()).norm() / gram.diagonal().norm().clamp_min(1e-300))
        shared.diagonal().copy_(low.diagonal())
    return Estimate((gram - low).diagonal().clamp_min(0), {"rank": rank, "last_move": moved})


def _rpca(deltas: Tensor, options: EstimatorOptions, truth: Tensor | None) -> Estimate:
    """`|S_i|^2` of principal component pursuit, times P / rows, averaged over blocks of parameters."""
    totals, told = [], []
    for columns in chosen_rows(deltas.shape[1], options):
        block = deltas[:, columns]
        split = robust_pca(block, options.pcp)
        totals.append(split.noise_var * (deltas.shape[1] / block.shape[1]))
        told.append({key: float(getattr(split, key)) for key in _TOLD})
        del split  # its arrays make room for the next block's
    worst = {key: _TOLD[key](one[key] for one in told) for key in _TOLD}
    return Estimate(torch.stack(totals).mean(dim=0), {**worst, "blocks": len(told)})


_TOLD: dict[str, Callable[..., float]] = {
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
    """The parameters of each block that `rpca` works on: all that it needs to see of an update.

    In order, block j is [j rows, (j + 1) rows), but the last of all P // rows blocks is the last `rows` parameters.

    >>> chosen_rows(10, EstimatorOptions(rows=4, blocks=None, row_choice="head"))
    [slice(0, 4, None), slice(6, 10, None)]
    >>> chosen_rows(10, EstimatorOptions(rows=12))
    [slice(0, 10, None)]
    """
    rows = min(options.rows or num_params, num_params)
    there = num_params // rows
    used = min(options.blocks or there, there)
    if rows < num_params and options.row_choice == "random":
        drawn = np.random.default_rng(0).choice(num_params, (used, rows), replace=False)
        return [torch.from_numpy(np.sort(block)) for block in drawn]
    starts = [*range(0, (there - 1) * rows, rows), num_params - rows]
    return [slice(start, start + rows) for start in starts[:used]]


def _gram(deltas: Tensor) -> Tensor:
    """`deltas @ deltas.T` `[C, C]` in float64, on the CPU."""
    parts = (part.double() for part in deltas.split(_COLUMNS, dim=1))
    return sum((part @ part.T for part in parts), deltas.new_zeros((), dtype=torch.float64)).cpu()


# ---- the truth


def update_noise_var(
    noise_multiplier: Sequence[float],
    expected_batch_size: Sequence[float],
    steps: Sequence[int],
    learning_rate: float,
    clip_norm: float,
    num_params: int,
    sampling_var: float | Sequence[float] = 0.0,
) -> Tensor:
    """True noise variance of updates, `steps lr^2 (sampling_var + P clip^2 z^2 / b^2)`: what `oracle` is told.

    Exact but for feedback: noise in one step is taken not to change later gradients.

    Args:
        noise_multiplier: length C, z, of the noise on the sum of a batch.
        expected_batch_size: length C, b.
        steps: length C, of each client in the round.
        learning_rate: of plain SGD.
        clip_norm: L2 bound of a record's gradient.
        num_params: P.
        sampling_var: of one step's gradient without noise, one or length C; 0 neglects it, as P is large.

    Returns:
        `[C]` float64, summed over coordinates.

    **Privacy** Trusts what clients say of themselves: for simulations, as the rival that cannot be beaten.

    Reference: Malekmohammadi et al. (2024), Eqs. 3, 5 and 7.

    >>> update_noise_var([2.0], [10.0], [5], learning_rate=0.1, clip_norm=1.0, num_params=100)
    tensor([0.2000], dtype=torch.float64)
    """
    z, b, count, drawn = (
        torch.as_tensor(values, dtype=torch.float64)
        for values in (noise_multiplier, expected_batch_size, steps, sampling_var)
    )
    return count * learning_rate**2 * (drawn + num_params * (clip_norm * z / b) ** 2)


def clipped_sampling_var(
    clip_norm: float, batch_size: float, mean_norm: float = 0.0, sample_rate: float | None = None
) -> float:
    """Variance of a batch's gradient from drawing the batch, if every record's gradient is clipped to `clip_norm`.

    Args:
        clip_norm: length c of every clipped gradient.
        batch_size: b, expected; the divisor.
        mean_norm: length of the mean of all clipped gradients; the second form does not need it.
        sample_rate: None for b independent draws, `(c^2 - mean_norm^2) / b` (the paper's Eq. 3); q for Poisson
            sampling from fixed data, as this package does it: `(1 - q) c^2 / b`.

    >>> clipped_sampling_var(3.0, 100.0, mean_norm=1.0), clipped_sampling_var(3.0, 100.0, sample_rate=0.5)
    (0.08, 0.045)
    """
    if sample_rate is None:
        return (clip_norm**2 - mean_norm**2) / batch_size
    return (1 - sample_rate) * clip_norm**2 / batch_size
