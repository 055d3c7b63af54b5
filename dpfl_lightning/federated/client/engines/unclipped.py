"""Sums of gradients that are not clipped: one backward pass, without the gradients of single records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.models.thread_safe_loss import ThreadSafeLoss
from dpfl_lightning.privacy.clipping.checked import CheckedSum
from dpfl_lightning.privacy.clipping.inputs import Inputs, take
from dpfl_lightning.privacy.clipping.reference import (
    ClippedSum,
    ClipRequest,
    Params,
    SampleLoss,
)
from dpfl_lightning.runtime.threads import thread_pool

Pass = slice | Tensor  # its records

CHUNK = 64  # records of a pass
FEWEST = 16  # records a group on average: below, a separate pass for each group costs more than it saves


class UnclippedSum:
    """A `ClippedSum` that is quicker on a CPU where nothing is clipped (`clip_norm = inf`).

    The sum `clipped` computes all else: gradients that are clipped, groups of few records, and a batch in which some
    gradient is not finite and has to be left out.

    **Privacy** Private, as every `ClippedSum`; no noise protects gradients that are not clipped.
    """

    def __init__(self, clipped: ClippedSum, loss: ThreadSafeLoss) -> None:
        self._clipped, self._loss = clipped, loss
        self._pool: ThreadPoolExecutor | None = None

    @torch.no_grad()  # except for the passes
    def __call__(self, params: Params, x: Inputs, y: Tensor, request: ClipRequest) -> tuple[Tensor, Tensor]:
        if request.clip_norm == math.inf and len(y) >= FEWEST * request.num_groups:
            total = self._summed(params, x, y, request)
            if torch.linalg.vector_norm(total, dim=1).isfinite().all():  # so every gradient is finite
                return total, torch.zeros(len(y))  # norms that count as finite and not clipped
        return self._clipped(params, x, y, request)

    def _summed(self, params: Params, x: Inputs, y: Tensor, request: ClipRequest) -> Tensor:
        """`[G, P]`, chunks added in float64."""
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        chosen = request.chosen(leaves)
        x = self._clipped.enter(x)

        def gradient(records: Pass) -> Tensor:
            with torch.enable_grad():
                loss = self._loss(leaves, take(x, records), y[records]).sum()
                parts = torch.autograd.grad(loss, list(chosen.values()), allow_unused=True, materialize_grads=True)
            return torch.cat([one.flatten() for one in parts])

        rows, passes = zip(*_passes(len(y), request.group, CHUNK), strict=True)
        total = request.zeros(chosen)
        for row, part in zip(rows, self._side_by_side(gradient, passes), strict=True):
            total[row] += part
        return total

    def _side_by_side(self, work: Callable[[Pass], Tensor], passes: Sequence[Pass]) -> Iterator[Tensor]:
        """`work` of every pass, in as many threads as a client may have within an operator."""
        threads = torch.get_num_threads()
        if threads == 1 or len(passes) == 1:
            return map(work, passes)
        self._pool = self._pool or thread_pool(threads, "pass", threads_within=1)
        return self._pool.map(work, passes)

    def copy_for(self, net: nn.Module, sample_loss: SampleLoss) -> UnclippedSum:
        return UnclippedSum(self._clipped.copy_for(net, sample_loss), self._loss)  # the loss serves several threads

    def enter(self, x: Inputs) -> Inputs:
        return self._clipped.enter(x)


def quicker_without_clipping(clipped_sum: CheckedSum, module: ClientModule) -> ClippedSum:
    """The same sum, as an `UnclippedSum` on a CPU, for a model that does not mix records."""
    if module.device.type != "cpu" or not clipped_sum.by_rules:
        return clipped_sum
    return UnclippedSum(clipped_sum, ThreadSafeLoss(module))


def _passes(num_records: int, group: Tensor | None, chunk: int) -> Iterator[tuple[int, Pass]]:
    if group is None:
        yield from ((0, slice(first, first + chunk)) for first in range(0, num_records, chunk))
        return
    for row in group.unique().tolist():
        records = (group == row).nonzero().flatten()
        yield from ((row, part) for part in records.split(chunk))
