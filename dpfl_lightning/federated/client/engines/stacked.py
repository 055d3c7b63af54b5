"""Many clients as one batch, for accelerators on which a client's step is bound by the launches of its kernels."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.client.dummy_data import dummy_batch
from dpfl_lightning.federated.client.engines import one_batch
from dpfl_lightning.federated.client.engines.engine import count_outcomes
from dpfl_lightning.federated.client.engines.fast import checked_clipped_sum
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.module import ClientModule, LocalTask
from dpfl_lightning.federated.messages.plan import ClassGradients, RoundPlan
from dpfl_lightning.privacy.clipping.reference import ClippedSum, summing_dtype
from dpfl_lightning.privacy.clipping.stacked import StackedSums, stacked_clipped_sums
from dpfl_lightning.privacy.mechanism import Mechanism, MechanismRows
from dpfl_lightning.privacy.noise import Streams

CPU_BYTES = 64 << 20  # of per-record gradients a pass: more leave the caches, and gain nothing
CUDA_SHARE = 16  # gradients take 1 / 16 of the memory: activations and copies take several times as much again
DEVIATIONS = 3.0  # a batch of the widest client exceeds its padded width once in about 700 steps
SHAPES = 64  # of passes that may be compiled in a run; by default the ninth is an error


class StackedEngine(SerialEngine):
    """Trains the clients of a round at once: per-record gradients by `vmap` over clients and records, padded batches.

    For a GPU and many clients with small models, whose single steps leave it idle. A pass has one static shape `[S, B]`
    for S clients of B records; on CUDA it is compiled into CUDA graphs. Clients that take one step from one model are
    one unpadded batch instead (`one_batch.py`).

    **Guarantees** Releases equal those of `SerialEngine` up to rounding: the same draws, the same noise. They depend on
    the plan and on `description` alone, which holds the memory that bounds S.

    **Privacy** B comes from sizes and sampling rates, which are public, never from a draw; a larger draw takes more
    passes. Each step of each client is one `Mechanism.privatise`, row by row.
    """

    name = "stacked"
    batch_coupled = True  # a stack is as wide as its widest client needs

    def setup(self, module: ClientModule, population: Population, streams: Streams, sampling: str) -> None:
        super().setup(module, population, streams, sampling)
        on_cuda = module.device.type == "cuda"
        sums = stacked_clipped_sums(module.sample_loss)
        self.check(captured(sums, backend="eager") if on_cuda else sums)  # traced, not compiled: seconds
        self.sums = captured(sums, mode="reduce-overhead") if on_cuda else sums
        # of the whole memory, not of what is free now: a resumed run must have the same stacks
        self.bytes = torch.cuda.mem_get_info(module.device)[1] // CUDA_SHARE if on_cuda else CPU_BYTES
        self.description = f"vmap over clients and records, gradients of {self.bytes >> 20} MiB at once"

    def choose_clipped_sum(self) -> ClippedSum:
        must, advice = (
            "be fast for a module that overrides `configure_optimizers` or `training_step`",
            "Stacks use SGD.",
        )
        require(self.module.plain_sgd, "engine.name", must, self.name, advice)
        return checked_clipped_sum(self)[0]

    @torch.no_grad()  # per-record gradients turn it on where they need it
    def releases(self, plan: RoundPlan, models: Tensor, charge_numbers: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        alone: list[int] = []
        for rows in one_batch.groups(plan, self.module):
            if len(rows) == 1:
                alone += rows
            else:
                yield from zip(rows, one_batch.releases(self, plan, rows, models, charge_numbers), strict=True)
        if isinstance(plan.job, ClassGradients):  # one pass over many records: no launches to save
            yield from ((row, self.release(plan, row, models, charge_numbers[row])) for row in alone)
            return
        for rows, shape in self.stacks(plan, alone):
            yield from zip(rows, self.stack_releases(plan, rows, shape, models, charge_numbers), strict=True)

    def stacks(self, plan: RoundPlan, rows: Sequence[int]) -> Iterator[tuple[list[int], tuple[int, int]]]:
        """Rows that are trained at once, most steps first, and the shape (S, B) of every pass, of public facts only."""
        if not rows:
            return
        num_records = self.population.num_records
        widest = max(padded_width(plan.mechanism_of[row], num_records[plan.clients[row]]) for row in rows)
        most = max(1, self.bytes // self.module.flat.nbytes)  # gradients at once
        width = min(_size_above(widest), _size_below(most))
        most_clients = _size_below(max(1, most // max(width, 2)))  # the sums are in float64
        size = _size_above(math.ceil(len(rows) / math.ceil(len(rows) / most_clients)))
        # equal numbers of steps share a stack; the client breaks ties, so that the order of the plan has no effect
        ordered = sorted(rows, key=lambda row: (-plan.steps[row], plan.clients[row]))
        for first in range(0, len(rows), size):
            yield ordered[first : first + size], (size, width)

    def stack_releases(
        self, plan: RoundPlan, rows: Sequence[int], shape: tuple[int, int], models: Tensor, numbers: Sequence[int]
    ) -> list[Tensor]:
        """What each client of a stack sends. `rows` `[k]`, most steps first, k <= S: the other rows are padding."""
        clients = [plan.clients[row] for row in rows]
        tasks, starts, batches = zip(*(self.local_task(plan, row, models, numbers[row]) for row in rows), strict=True)
        stack = Stack(self, clients, tasks, shape)
        ends = stack.local_training(torch.stack(starts), [drawn.draws for drawn in batches])
        changes = list(map(self.change, clients, starts, ends))
        counts = count_outcomes(torch.cat(stack.norms, dim=1), stack.clip_norm[:, None]).sum(dim=1)
        self.counts.index_add_(0, torch.tensor(clients, device=counts.device), counts[: len(clients)])
        return changes

    def check(self, sums: StackedSums) -> None:
        """Run a pass of 2 clients with 3 records on random data, before anything private is read or charged.

        Raises UserError if the module cannot be run under `vmap` (on CUDA: cannot be compiled as one graph).
        """
        x, y = dummy_batch(self.population, records=3, device=self.module.device)
        params = vmap(self.module.unflatten)(torch.stack([self.module.flat] * 2))
        mask, clip_norm = torch.ones(2, 3, dtype=torch.bool, device=x.device), self.module.flat.new_ones(2)
        try:
            with torch.no_grad():
                sums(params, torch.stack([x] * 2), torch.stack([y] * 2), mask, clip_norm)
        except Exception as error:  # a user's forward may raise anything when it is traced
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise UserError(
                f"`engine.name` must be fast or serial for a model that cannot be stacked, got 'stacked': {reason}"
            ) from error


class Stack:
    """k <= S clients in training in passes of one `shape` (S, B): row s of every tensor is client s, or padding."""

    def __init__(
        self, engine: StackedEngine, clients: Sequence[int], tasks: Sequence[LocalTask], shape: tuple[int, int]
    ) -> None:
        self.engine, self.shape, population = engine, shape, engine.population
        like, mechanisms = engine.module.flat, [task.mechanism for task in tasks]
        self.noise = MechanismRows(mechanisms, [task.noise for task in tasks], like, len(like))
        self.order = mechanisms[0].clip_order
        clip_norms = [m.clip_norm for m in mechanisms] + [1.0] * (shape[0] - len(tasks))
        self.clip_norm = like.new_tensor(clip_norms, dtype=summing_dtype(like))  # [S]
        self.learning_rate = like.new_tensor([task.learning_rate for task in tasks])[:, None]  # [k, 1]
        anchors = [task.anchor for task in tasks if task.anchor is not None]  # all have one, or none has
        self.anchors, self.pull = (torch.stack(anchors) if anchors else None), tasks[0].pull
        self.norms: list[Tensor] = []  # of the passes so far, [S, B] each
        self.rows_of = torch.cat([population.train_of[client] for client in clients])  # of all clients, end to end
        self.first = np.cumsum([0, *(population.num_records[client] for client in clients)])

    def local_training(self, starts: Tensor, draws: Sequence[Sequence[np.ndarray]]) -> Tensor:
        """The clients' parameters `[k, P]` after their steps from `starts` `[k, P]`; most steps first."""
        theta = starts.new_zeros(self.shape[0], starts.shape[1])
        theta[: len(starts)] = starts
        for step in range(len(draws[0])):
            active = [steps[step] for steps in draws if step < len(steps)]  # those of the first clients
            now = theta[: len(active)]
            move = self.noise.privatise(self.clipped_sums(theta, active)[:, None])[:, 0]
            if self.anchors is not None:
                move.add_(now - self.anchors[: len(active)], alpha=self.pull)
            now.sub_(move.mul_(self.learning_rate[: len(active)]))
        return theta[: len(starts)]

    def clipped_sums(self, theta: Tensor, draws: Sequence[np.ndarray]) -> Tensor:
        """`[k, P]` in float64 at `theta` `[S, P]`, of one draw `[b]` of each of the first k clients."""
        population, params = self.engine.population, vmap(self.engine.module.unflatten)(theta)
        total = torch.zeros_like(theta, dtype=summing_dtype(theta))
        for index in self.passes(draws):
            rows = self.rows_of[index.clamp(min=0)]  # padding takes any record
            x, y = population.x[rows], population.y[rows]
            sums, norms = self.engine.sums(params, x, y, index >= 0, self.clip_norm, self.order)
            total.add_(sums)
            self.norms.append(norms.clone())  # the next pass may reuse their memory
        return total[: len(draws)]

    def passes(self, draws: Sequence[np.ndarray]) -> Tensor:
        """`[passes, S, B]`: places in `rows_of`, -1 for padding; as many passes as the largest draw takes."""
        size, width = self.shape
        count = max(1, math.ceil(max(map(len, draws)) / width))
        places = np.full((size, count * width), -1)
        for row, first, draw in zip(places, self.first, draws, strict=False):
            row[: len(draw)] = first + draw
        index = torch.from_numpy(places.reshape(size, count, width).swapaxes(0, 1).copy())
        device = self.rows_of.device
        return (index.pin_memory() if device.type == "cuda" else index).to(device, non_blocking=True)


def captured(sums: StackedSums, **compiler: Any) -> StackedSums:
    """`sums` compiled by `torch.compile`, once for each shape: with `mode="reduce-overhead"` as CUDA graphs."""
    torch.compiler.reset()  # shapes that earlier runs of this process compiled would count against the limit
    torch._dynamo.config.cache_size_limit = max(SHAPES, torch._dynamo.config.cache_size_limit)
    compiled = torch.compile(sums, fullgraph=True, dynamic=False, **compiler)

    def one_pass(*args: Any) -> tuple[Tensor, Tensor]:
        torch.compiler.cudagraph_mark_step_begin()  # the results of the last pass are no longer needed
        return compiled(*args)

    return cast(StackedSums, one_pass)


#: numbers of clients and records a pass: at most a third of it is padding, and a process sees few shapes
SIZES = sorted({1, *(base << power for base in (2, 3) for power in range(40))})


def _size_above(number: int) -> int:
    """The least of `SIZES` that is not below `number`.

    >>> [_size_above(number) for number in (1, 5, 64, 65, 100)]
    [1, 6, 64, 96, 128]
    """
    return SIZES[bisect_left(SIZES, number)]


def _size_below(number: int) -> int:
    return SIZES[bisect_right(SIZES, number) - 1]


def padded_width(mechanism: Mechanism, num_records: int) -> int:
    """Records that a Poisson draw rarely exceeds: mean and `DEVIATIONS` standard deviations, from public facts.

    >>> from dpfl_lightning.privacy.mechanism import Gaussian
    >>> padded_width(Gaussian(1.0, 1.0, sample_rate=0.5, expected_batch_size=50.0), num_records=100)
    65
    """
    rate = mechanism.sample_rate
    mean = rate * num_records
    return max(1, min(num_records, math.ceil(mean + DEVIATIONS * math.sqrt(mean * (1 - rate)))))
