"""Robust PCA of a round's updates beside the same iteration as it stands in textbooks."""

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.algorithms.robust_pca import robust_pca

#: (clients, parameters): of the noise-aware paper's CNN, and of the rows that it takes of a large net
SHAPES = ((20, 28_938), (100, 200_000))


def robust_pca_times(scale: float, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds of one estimate, ours and the textbook's, which is timed for three iterations and scaled to our number of
    them.

    Args:
        scale: share of the clients, at least three.
        repeats: timed estimates, after a warm-up; >= 1.

    Returns:
        For each shape, `clients x parameters`: `iterations`, `seconds` of each of our estimates, `svd_seconds`
        (estimated), and `ratio_vs_svd` of the medians.
    """
    found = {}
    for clients, params in SHAPES:
        clients = max(3, round(clients * scale))
        deltas, name = noisy_updates(clients, params), f"{clients} x {params:,}"
        ours, theirs = [], []
        for repeat in range(repeats + 1):
            begun = time.perf_counter()
            iterations = robust_pca(deltas).iterations
            middle = time.perf_counter()
            textbook(deltas, iterations=3)
            ended = time.perf_counter()
            if repeat:
                ours.append(round(middle - begun, 4))
                theirs.append(round((ended - middle) / 3 * iterations, 4))
            say(f"robust_pca: {name}, {f'{repeat} of {repeats}' if repeat else 'warm-up'}, {middle - begun:.2f} s")
        found[name] = {
            "iterations": iterations,
            "seconds": ours,
            "svd_seconds": theirs,
            "ratio_vs_svd": round(median(theirs) / median(ours), 2),
        }
    return found


def noisy_updates(clients: int, params: int) -> Tensor:
    """`[C, P]` float32: a shared direction and noise whose size differs by 30 between clients, the same every time."""
    draw = torch.Generator().manual_seed(0)
    shared = torch.randn(params, generator=draw)
    return 0.3 * shared + torch.logspace(-1, 0.5, clients)[:, None] * torch.randn(clients, params, generator=draw)


def textbook(deltas: Tensor, iterations: int, mu_scale: float = 0.1) -> Tensor:
    """Principal component pursuit in float64 by singular value decompositions; `|S_i|^2` `[C]`, the iterates of
    `robust_pca`."""
    matrix = deltas.double()
    mu = mu_scale * matrix.numel() / (4 * matrix.abs().sum())
    bound = 1 / math.sqrt(max(matrix.shape)) / mu
    sparse, scaled_dual = torch.zeros_like(matrix), torch.zeros_like(matrix)
    for _ in range(iterations):
        # of the transpose: several times as quick
        v, values, ut = torch.linalg.svd((matrix - sparse + scaled_dual).T, full_matrices=False)
        rest = matrix - (ut.T * (values - 1 / mu).clamp_min(0)) @ v.T + scaled_dual
        sparse = rest.sign() * (rest.abs() - bound).clamp_min(0)
        scaled_dual = rest - sparse
    return sparse.square().sum(dim=1)
