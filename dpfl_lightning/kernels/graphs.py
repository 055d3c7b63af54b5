"""Passes of a GPU as CUDA graphs: the hundreds of small kernels of a pass start with one call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.gradient_sums import ChunkGradients, Totals
from dpfl_lightning.privacy.clipping.inputs import Inputs, take
from dpfl_lightning.privacy.clipping.passes import Batch, passes
from dpfl_lightning.privacy.clipping.reference import ClipRequest, Params, clip_factors, require_proved

T = TypeVar("T")

_recording = threading.Lock()


class GraphedSum:
    """The sums of `clipped_sum`, with each pass repeated from a recording, for models that draw no random numbers.

    A recording is made with public `examples` of at least `size` records, on first use of an order and a number of
    groups. It is used if it repeats the bits of the pass that it was made from; otherwise kernels start one by one.
    """

    def __init__(self, clipped_sum: FastClippedSum, examples: Batch) -> None:
        self._plain = clipped_sum
        self._examples = take(examples[0], slice(clipped_sum.size)), examples[1][: clipped_sum.size]
        self._passes: dict[tuple[int, int], RecordedPass | None] = {}

    @torch.no_grad()
    def __call__(self, params: Params, x: Inputs, y: Tensor, request: ClipRequest) -> tuple[Tensor, Tensor]:
        recorded = self._recorded(params, request) if len(y) and request.only is None else None
        if recorded is None:
            return self._plain(params, x, y, request)
        require_proved(len(y), self._plain.size, recorded.terms)
        recorded.begin(params, request.clip_norm)
        totals, norms = request.zeros(params), list[Tensor]()
        for rows, *_ in passes(x, y, self._plain.size, self._plain.padding, into=recorded.records):
            sums, some = recorded.run(rows.stop - rows.start, None if request.group is None else request.group[rows])
            totals.add_(sums)
            norms.append(some.clone())  # the next pass overwrites them
        return totals, norms[0] if len(norms) == 1 else torch.cat(norms)

    def _recorded(self, params: Params, request: ClipRequest) -> RecordedPass | None:
        key = request.order, request.num_groups
        if key not in self._passes:
            try:
                self._passes[key] = RecordedPass(self._plain, params, self._examples, *key)
            except Exception as error:  # whatever CUDA or a user's code says of a recording, the pass itself works
                self._passes[key] = None
                logging.getLogger(__name__).info("no CUDA graph of a pass: %s", str(error).partition("\n")[0])
        return self._passes[key]


class RecordedPass:
    """The clipped sums of one pass, in memory that stays: parameters, records, their groups, which of them count."""

    def __init__(
        self, clipped_sum: FastClippedSum, params: Params, records: Batch, order: int, num_groups: int
    ) -> None:
        x, y = records
        self.records = tree_map(torch.clone, x), y.clone()
        self._params = {name: p.detach().clone() for name, p in params.items()}
        self._numbers = torch.arange(len(y), device=y.device)
        self._counts = torch.ones_like(self._numbers, dtype=torch.bool)
        self._group = torch.zeros_like(self._numbers)
        self._clip_norm, self._clips_at = torch.ones((), dtype=torch.float64, device=y.device), 1.0
        self._sum, self._request = clipped_sum, ClipRequest(1.0, order, num_groups=num_groups)
        self.terms = 1
        self._replay = record(self._compute)

    def begin(self, params: Params, clip_norm: float) -> None:
        """Take other parameters and another clip norm."""
        torch._foreach_copy_([*self._params.values()], [params[name] for name in self._params])
        if clip_norm != self._clips_at:
            self._clip_norm.fill_(clip_norm)
            self._clips_at = clip_norm

    def run(self, count: int, group: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sums `[G, P]` and norms `[count]` of the first `count` records, which the next run overwrites."""
        torch.lt(self._numbers, count, out=self._counts)
        if group is not None:
            self._group[:count] = group
        sums, norms = self._replay()
        return sums, norms[:count]

    def _compute(self) -> tuple[Tensor, Tensor]:
        by_name = self._sum.record_gradients(self._params, *self.records, len(self._numbers))
        grads = ChunkGradients(by_name, self._request.order)
        self.terms = grads.terms
        norms = grads.norms()
        totals = Totals(self._params, self._request.zeros(self._params))
        totals.add(grads, clip_factors(norms, self._clip_norm) * self._counts, self._group)
        return totals.result(), norms


def record(compute: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """Return what repeats the kernels of `compute` and returns its tensors, overwritten.

    Raises RuntimeError if CUDA cannot record it, or if the recording gives other bits.
    """
    with _recording:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries choose kernels and take memory on first use
                expected = compute()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = compute()

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return found

    if not all(map(torch.equal, replay(), expected)):
        raise RuntimeError("a recording gives other bits than the pass")
    return replay
