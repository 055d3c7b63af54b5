"""Robust PCA of a round's updates: the clients' common signal has low rank, and the rest is noise."""

from __future__ import annotations

import functools
import math
import queue
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.linalg import vector_norm

from dpfl_lightning.errors import UserNotice, require
from dpfl_lightning.papers.robust_hdp.noise_weights import weights
from dpfl_lightning.runtime.devices import products
from dpfl_lightning.runtime.threads import cores, one_thread_an_operator, side_by_side

_BLOCK = 150_000  # numbers of a matrix in a block, so that it stays in a CPU's caches
_COLUMNS = 8192  # columns of a block at most, so that float32 sums are exact enough
_PARTS = 32  # at most; sums are taken within a part, then over parts, for any number of workers
_LOOK = 5  # iterations between two checks of the residuals, each of which costs as much as an iteration
_SETTLED = 25  # iterations in which the weights must be stable; no check before twice as many


@dataclass(frozen=True)
class PcpSettings:
    """Penalty mu and stop rule; the optimum does not depend on mu, but a result after few iterations does.

    Args:
        mu_scale: mu / (`C P / (4 |M|_1)`), > 0, where |M|_1 is the sum of all absolute entries; 1 is Candes' value.
        primal_tol: tolerance of `|M - L - S|_F / |M|_F`, >= 0.
        dual_tol: tolerance of `mu |S_new - S|_F / |Y|_F`, >= 0; infinite disables this test.
        weight_tol: also stop if the weights of the noise variances moved by less (total variation) within 25
            iterations, after 50, with a dual residual of at most 0.1 and mu at most Candes' value; 0 disables it.
        double: work in float64 for any type of the updates; tolerances below 1e-6 need it.
    """

    mu_scale: float = 0.1
    primal_tol: float = 1e-5
    dual_tol: float = 1e-2
    weight_tol: float = 1e-3
    max_iterations: int = 1000
    double: bool = False


_DEFAULT = PcpSettings()


@dataclass(frozen=True)
class Split:
    """`M = L + S`, and its accuracy. It holds the working arrays; delete it to free them.

    Args:
        noise_var: `|S_i|^2` of each client's row, `[C]` float64 on the CPU.
        primal_residual: `|M - L - S|_F / |M|_F`.
        dual_residual: `mu |S_new - S|_F / |Y|_F`.
        rank: rank of L.
        singular_values: those of M and of L, `[2, C]` float64, descending.
        dual_norm: largest singular value of Y; 1 at the optimum, unless L = 0.
    """

    noise_var: Tensor
    iterations: int
    primal_residual: float
    dual_residual: float
    converged: bool
    rank: int
    singular_values: Tensor
    dual_norm: float
    _arrays: tuple[Tensor, Tensor, Tensor] = field(repr=False)
    _mu: float = field(repr=False)

    @property
    def sparse(self) -> Tensor:
        """S `[C, P]`."""
        matrix, ahead, scaled_dual = self._arrays
        return matrix + scaled_dual - ahead

    @property
    def low_rank(self) -> Tensor:
        """`M - S` `[C, P]`: L up to the primal residual."""
        _, ahead, scaled_dual = self._arrays
        return ahead - scaled_dual

    @property
    def dual(self) -> Tensor:
        """Y `[C, P]`."""
        return self._arrays[2] * self._mu


@torch.no_grad()
def robust_pca(deltas: Tensor, settings: PcpSettings = _DEFAULT, workers: int | None = None) -> Split:
    """Principal component pursuit: `min |L|_* + lambda |S|_1` with `L + S = M`, lambda = 1 / sqrt(max(C, P)).

    M are finite updates `[C, P]`. The result is bitwise equal for any number of `workers` (threads; None is one for
    each core). A `UserNotice` warns if it did not converge. If it stops early, variances of noisy clients may be
    several times too small, and an update with far less noise than the mean may get nearly all the weight.
    Post-processing.

    Reference: Candes et al. (2009); Malekmohammadi et al. (2024), Algorithm 3, but for its wrong sign of Y in the step
    for L.

    >>> shared = torch.ones(6, 1) @ torch.arange(1.0, 401.0)[None]
    >>> noise = torch.zeros(6, 400)
    >>> noise[2, 7] = 5.0
    >>> robust_pca(shared + noise).noise_var.sqrt().round().tolist()
    [0.0, 0.0, 5.0, 0.0, 0.0, 0.0]
    """
    require(workers is None or workers >= 1, "workers", "be >= 1", workers)
    with one_thread_an_operator():
        matrix, sizes = _prepared(deltas, settings)
        mu = settings.mu_scale * matrix.numel() / (4 * max(float(sizes.sum()), 1e-150))
        bound = 1 / math.sqrt(max(matrix.shape)) / mu
        sweep = _Sweep(matrix, bound, workers or (cores() if matrix.device.type == "cpu" else 1))
        return _iterate(sweep, mu, settings)


def shrinkage(gram: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return `W` `[C, C]` such that `W @ A` is A with its singular values reduced by `threshold`, and these `[C]`.

    `gram` is `A @ A.T`, `[C, C]` float64; the values are descending and at least 0.
    """
    squares, vectors = torch.linalg.eigh(gram)
    values = squares.clamp_min(0).sqrt()
    reduced = (values - threshold).clamp_min(0)
    factors = torch.where(reduced > 0, reduced / values, 0.0)
    return (vectors * factors) @ vectors.T, reduced.flip(0)


def _prepared(deltas: Tensor, settings: PcpSettings) -> tuple[Tensor, Tensor]:
    """Return the updates in the working type, and the sum of each one's absolute entries `[C]`.

    Float32, with Gram matrices and norms in float64, unless `double` is set, squares may overflow, or torch uses less
    precise products.
    """
    matrix = deltas.cpu() if deltas.device.type == "mps" else deltas  # MPS has no float64
    sizes = torch.stack([vector_norm(row, 1, dtype=torch.float64) for row in matrix])
    mean = float(sizes.sum()) / matrix.numel()
    float32_suffices = not settings.double and 1e-12 < mean < 1e9 and products() == "highest"
    dtype = torch.promote_types(matrix.dtype, torch.float32) if float32_suffices else torch.float64
    return matrix.to(dtype), sizes.cpu()


def _iterate(sweep: _Sweep, mu: float, settings: PcpSettings) -> Split:
    gram = sweep.run(sweep.first_gram)[0]
    size = max(float(gram.trace()), 1e-300) ** 0.5  # |M|_F
    values = shrinkage(gram, 0.0)[1]
    moves: list[Tensor] = []
    for iteration in range(1, settings.max_iterations + 1):
        shrink, reduced = shrinkage(gram, 1 / mu)
        check = iteration % _LOOK == 0 or iteration == settings.max_iterations
        gram, squares = sweep.run(functools.partial(sweep.advance, shrink.to(sweep.matrix), check))
        if not check:
            continue
        change, drift, dual_size, _ = squares.sum(dim=1).tolist()
        primal = change**0.5 / size
        dual = (drift / max(dual_size, 1e-300)) ** 0.5
        moves.append(weights(squares[3]))
        converged = primal <= settings.primal_tol and dual <= settings.dual_tol
        if settings.mu_scale <= 1 and iteration >= 2 * _SETTLED and dual <= 0.1:
            converged |= float((moves[-1] - moves[-1 - _SETTLED // _LOOK]).abs().sum()) / 2 < settings.weight_tol
        if converged:
            break
    else:
        warnings.warn(
            f"robust PCA did not converge in {iteration} iterations (primal residual {primal:.1e}, dual {dual:.1e}): "
            "its noise estimates may be wrong",
            UserNotice,
            stacklevel=4,  # the caller of `robust_pca`, past its decorator
        )
    dual_gram = sweep.run(sweep.certificate)[0]
    return Split(
        noise_var=squares[3],
        iterations=iteration,
        primal_residual=primal,
        dual_residual=dual,
        converged=converged,
        rank=int((reduced > 0).sum()),
        singular_values=torch.stack([values, reduced]),
        dual_norm=mu * max(float(torch.linalg.eigvalsh(dual_gram)[-1]), 0.0) ** 0.5,
        _arrays=(sweep.matrix, sweep.ahead, sweep.scaled_dual),
        _mu=mu,
    )


class _Sweep:
    """Passes over the columns of M `[C, P]`, of `ahead` = M - S + Y / mu (which is shrunk next) and of Y / mu.

    Parts and blocks depend on the shape alone, and their sums are added in order, so the number of workers does not
    change the result. `bound` = lambda / mu is the largest entry of Y / mu.
    """

    def __init__(self, matrix: Tensor, bound: float, workers: int) -> None:
        self.matrix, self.bound = matrix, bound
        self.ahead = matrix.clone(memory_format=torch.contiguous_format)
        self.scaled_dual = torch.zeros_like(self.ahead)
        num_clients, num_params = matrix.shape
        on_cpu = matrix.device.type == "cpu"
        block, columns = (_BLOCK, _COLUMNS) if on_cpu else (100 * _BLOCK, num_params)
        blocks = max(-(-num_clients * num_params // block), -(-num_params // columns))
        blocks = blocks if blocks == 1 else -(-blocks // 4) * 4  # balances the load of two or four workers
        self._width = -(-num_params // blocks)
        starts = range(0, num_params, self._width)
        blocks_per_part = -(-len(starts) // _PARTS)
        self._parts = [starts[first : first + blocks_per_part] for first in range(0, len(starts), blocks_per_part)]
        self._exact_products = not on_cpu or matrix.dtype == torch.float64
        self._scratch: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(workers):
            self._scratch.put(matrix.new_empty(num_clients, self._width))
        self._workers = workers

    def run(self, work: Callable[[slice, Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the sums of `work(columns, scratch)` over all blocks, float64 on the CPU."""

        def part(starts: range) -> tuple[Tensor, Tensor]:
            scratch = self._scratch.get()
            try:
                done = [work(slice(start, start + self._width), scratch) for start in starts]
                return sum_of(done)
            finally:
                self._scratch.put(scratch)

        def sum_of(done: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
            grams, squares = zip(*done, strict=True)
            return sum(grams[1:], grams[0].double()), sum(squares[1:], squares[0])

        gram, squares = sum_of(side_by_side(part, self._parts, self._workers))
        return gram.cpu(), squares.cpu()

    def first_gram(self, columns: slice, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """Return `M @ M.T`, before the first step."""
        return self._product(self.ahead[:, columns]), self.matrix.new_zeros(0)

    def certificate(self, columns: slice, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """Return `Y @ Y.T / mu^2`, after the last step."""
        return self._product(self.scaled_dual[:, columns]), self.matrix.new_zeros(0)

    def advance(self, shrink: Tensor, check: bool, columns: slice, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """Run one iteration of the paper's Algorithm 3 on some columns; return their part of the next Gram matrix.

        If `check`, also return their part of the squares `[4, C]` of Y's and S's change (over mu), of Y / mu, and of S.
        """
        matrix, ahead, dual = (full[:, columns] for full in (self.matrix, self.ahead, self.scaled_dual))
        previous = (dual.clone(), dual - ahead) if check else None
        # line 22: L = D_(1 / mu)(M - S + Y / mu); L is `shrink @ ahead`, and `rest` is L - Y / mu
        rest = torch.addmm(dual, shrink, ahead, beta=-1, out=scratch[:, : ahead.shape[1]])
        # next line: S = S_(lambda / mu)(X), where X = M - L + Y / mu is M - `rest`: X without its part within the bound
        # last line of the loop: Y = Y + mu (M - L - S), so that Y / mu = X - S: the part of X within the bound
        torch.sub(matrix, rest, out=dual).clamp_(-self.bound, self.bound)
        # M - S + Y / mu of the next line 22
        torch.add(rest, dual, alpha=2, out=ahead)
        if previous is None:
            return self._product(ahead), matrix.new_zeros(0)
        negative_rest = dual - ahead  # S - M
        parts = (dual - previous[0], negative_rest - previous[1], dual, negative_rest + matrix)
        return self._product(ahead), torch.stack([vector_norm(part, dim=1).double() ** 2 for part in parts])

    def _product(self, block: Tensor) -> Tensor:
        block = block.double() if self._exact_products else block  # a CPU's blocks are short enough for float32
        return block @ block.T
