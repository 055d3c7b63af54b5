"""Many clients as one batch, for accelerators on which a client's step is bound by the launches of its kernels."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.client.dummy_data import dummy_batch
from dpfl_lightning.federated.client.engines import one_batch
from dpfl_lightning.federated.client.engines.engine import COUNTED, count_outcomes
from dpfl_lightning.federated.client.engines.fast import checked_clipped_sum
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.module import ClientModule, LocalTask
from dpfl_lightning.federated.messages.plan import ClassGradients, RoundPlan
from dpfl_lightning.models.optimizers import PLAIN_SGD
from dpfl_lightning.privacy.clipping.layer_rules import CUDA_GRID
from dpfl_lightning.privacy.clipping.reference import ClippedSum, summing_dtype
from dpfl_lightning.privacy.clipping.stacked import StackedSums, stacked_clipped_sums
from dpfl_lightning.privacy.clipping.state import tensors_restored
from dpfl_lightning.privacy.mechanism import Mechanism, MechanismRows
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.runtime.devices import sent

CPU_BYTES = 64 << 20  # of per-record gradients a pass: more leave the caches, and gain nothing
CUDA_SHARE = 16  # gradients take 1 / 16 of the memory: activations and copies take several times as much again
DEVIATIONS = 3.0  # a batch of a client exceeds its padded width once in about 700 steps
SLOT = 8  # records of a slot: fewer copy the parameters more often than they save padding


class StackedEngine(SerialEngine):
    """Trains the clients of a round at once: per-record gradients by `vmap` over slots and records, padded batches.

    For a GPU and many clients with small models, whose single steps leave it idle. A pass has a static shape `[S, B]`:
    S slots of B records, of which each client has as many as its batches need. On CUDA it is compiled into CUDA graphs.
    When clients have taken their last step, passes shrink, by halves, so that few shapes are compiled. Clients that
    take one step from one model are one unpadded batch instead (`one_batch.py`).

    **Guarantees** Releases equal those of `SerialEngine` up to rounding: the same draws, the same noise. They depend on
    the plan and on `description` alone, which holds the memory that bounds S.

    **Privacy** S, B and the slots of a client come from sizes and sampling rates, which are public, never from a draw;
    a larger draw takes more passes. Each step of each client is one `Mechanism.privatise`, row by row.
    """

    name = "stacked"
    batch_coupled = True  # the other clients decide how many slots a pass has

    def setup(self, module: ClientModule, population: Population, streams: Streams, sampling: str) -> None:
        super().setup(module, population, streams, sampling)
        on_cuda = module.device.type == "cuda"
        self.sums = as_run(stacked_clipped_sums(module.sample_loss), module.device)
        self.check(self.sums)
        # of the whole memory, not of what is free now: a resumed run must have the same stacks
        self.bytes = torch.cuda.mem_get_info(module.device)[1] // CUDA_SHARE if on_cuda else CPU_BYTES
        self.description = f"vmap over clients and records, gradients of {self.bytes >> 20} MiB at once"

    def choose_clipped_sum(self) -> ClippedSum:
        must, advice = "be fast for a module that overrides `configure_optimizers`", "Stacks use SGD."
        require(self.module.plain_sgd(PLAIN_SGD), "engine.name", must, self.name, advice)
        must = "be fast or serial for records that are not one tensor in memory"
        require(isinstance(self.population.x, Tensor), "engine.name", must, self.name)
        return checked_clipped_sum(self)[0]

    @torch.no_grad()  # per-record gradients turn it on where they need it
    def releases(
        self, plan: RoundPlan, models: Tensor, charge_numbers: Sequence[int]
    ) -> Iterator[tuple[int, Tensor | None]]:
        alone: list[int] = []
        for rows in one_batch.groups(plan, self.module):
            if len(rows) == 1:
                alone += rows
            else:
                yield from zip(rows, one_batch.releases(self, plan, rows, models, charge_numbers), strict=True)
        if isinstance(plan.job, ClassGradients):  # one pass over many records: no launches to save
            yield from zip(alone, self.one_by_one(plan, alone, models, charge_numbers), strict=True)
            return
        for layout in self.layouts(plan, alone):
            work = functools.partial(self.stack_releases, layout)
            yield from zip(layout.rows, self.together(work, plan, layout.rows, models, charge_numbers), strict=True)

    def layouts(self, plan: RoundPlan, rows: Sequence[int]) -> Iterator[Layout]:
        """Yield the stacks in which these rows of the plan are trained."""
        widths = [padded_width(plan.mechanism_of[row], self.population.num_records[plan.clients[row]]) for row in rows]
        return stacks(plan, rows, widths, self.most_gradients())

    def most_gradients(self) -> int:
        """Per-record gradients of a pass at most, by memory and by `CUDA_GRID`: each record is a group under `vmap`."""
        convolutions = (m for m in self.module.net.modules() if isinstance(m, nn.modules.conv._ConvNd))
        channels = max((max(m.in_channels, m.out_channels) for m in convolutions), default=1)
        return max(1, min(self.bytes // self.module.flat.nbytes, CUDA_GRID // channels))

    def stack_releases(
        self, layout: Layout, plan: RoundPlan, rows: Sequence[int], models: Tensor, charge_numbers: Sequence[int]
    ) -> list[Tensor]:
        """What each client of a stack sends; `rows` are those of the layout."""
        clients = [plan.clients[row] for row in rows]
        parts = (self.local_task(plan, row, models, charge_numbers[row]) for row in rows)
        tasks, starts, batches = zip(*parts, strict=True)
        stack = Stack(self, clients, tasks, layout)
        with tensors_restored(self.module.net):
            ends = stack.local_training(torch.stack(starts), [drawn.draws for drawn in batches])
        changes = list(map(self.change, clients, starts, ends))
        self.counts.index_add_(0, sent(torch.tensor(clients), self.counts.device), stack.counts())
        return changes

    def check(self, sums: StackedSums) -> None:
        """Run passes of 2 slots with 3 records on random data, before anything private is read or charged.

        Raises UserError if `sums`, in the form that the run uses, fails: the module cannot be run under `vmap`, or (on
        CUDA) cannot be compiled as one graph, or the machine has no compiler.
        """
        x, y = dummy_batch(self.population, records=3, device=self.module.device)
        params = vmap(self.module.unflatten)(torch.stack([self.module.flat] * 2))
        mask, clip_norm = torch.ones(2, 3, dtype=torch.bool, device=x.device), self.module.flat.new_ones(2)
        try:
            with torch.no_grad():
                for _ in range(3 if x.device.type == "cuda" else 1):  # a CUDA graph warms up, is recorded, is replayed
                    sums(params, torch.stack([x] * 2), torch.stack([y] * 2), mask, clip_norm)[0].sum().item()
        except Exception as error:  # a user's forward may raise anything when it is traced
            cause = getattr(error, "inner_exception", error)  # of a compiler
            reason = str(cause).strip().split("\n")[0] or type(cause).__name__
            raise UserError(
                "`engine.name` must be fast or serial for a model that cannot be stacked, or compiled where the engine "
                f"compiles it, got 'stacked': {reason}"
            ) from error


@dataclass(frozen=True)
class Layout:
    """The slots of a stack of clients, from public facts only.

    Args:
        rows: rows of the plan, most steps first, so that those that still train are always the first.
        slots: consecutive slots of each row.
        width: B, records of a slot.
    """

    rows: tuple[int, ...]
    slots: tuple[int, ...]
    width: int

    def size(self, active: int) -> int:
        """S, slots of a pass in which the first `active` rows train: that of all rows, halved while they fit.

        >>> layout = Layout(rows=(2, 0, 1), slots=(1, 3, 7), width=8)
        >>> [layout.size(active) for active in (3, 2, 1)]
        [12, 6, 2]
        """
        whole = _size_above(sum(self.slots))
        halvings = (whole // sum(self.slots[:active])).bit_length() - 1
        return -(-whole // 2**halvings)


def stacks(plan: RoundPlan, rows: Sequence[int], widths: Sequence[int], most: int) -> Iterator[Layout]:
    """Stacks of `rows` of the plan whose padded batches have `widths`, with at most `most` >= 1 gradients a pass."""
    if not rows:
        return
    width = min(SLOT, _size_above(max(widths)), _size_below(most))
    most_slots = _size_below(max(1, most // max(width, 2)))  # the sums are in float64
    slots = {row: min(most_slots, math.ceil(wide / width)) for row, wide in zip(rows, widths, strict=True)}
    even = sum(slots.values()) / math.ceil(sum(slots.values()) / most_slots)
    stack: list[int] = []
    # the client breaks ties, so that the order of the plan has no effect
    for row in sorted(rows, key=lambda row: (-plan.steps[row], plan.clients[row])):
        taken = sum(slots[other] for other in stack)
        if stack and (taken >= even or taken + slots[row] > most_slots):
            yield Layout(tuple(stack), tuple(slots[other] for other in stack), width)
            stack = []
        stack.append(row)
    yield Layout(tuple(stack), tuple(slots[row] for row in stack), width)


def useful_share(plan: RoundPlan, layouts: Sequence[Layout]) -> float:
    """Expected records of the stacks' clients, divided by the places for records in all their passes."""
    places = 0
    for layout in layouts:
        steps = [plan.steps[row] for row in layout.rows]
        places += layout.width * sum(layout.size(sum(n > step for n in steps)) for step in range(max(steps)))
    return sum(plan.expected_records[row] for layout in layouts for row in layout.rows) / places


class Stack:
    """k clients in training. A pass has the slots of those that still train: slot s serves client `owner[s]`.

    Slots behind those of the clients are padding, as are places of a slot without a record.
    """

    def __init__(
        self, engine: StackedEngine, clients: Sequence[int], tasks: Sequence[LocalTask], layout: Layout
    ) -> None:
        self.engine, self.layout, population = engine, layout, engine.population
        like, mechanisms = engine.module.flat, [task.mechanism for task in tasks]
        self.noise = MechanismRows(mechanisms, [task.noise for task in tasks], like, len(like))
        self.order = mechanisms[0].clip_order
        self.ends = np.cumsum(layout.slots)
        padding = layout.size(len(tasks)) - self.ends[-1]
        owner = np.repeat(np.arange(len(tasks)), [*layout.slots[:-1], layout.slots[-1] + padding])
        self.owner = torch.from_numpy(owner).to(like.device)  # [S]
        clip_norms = like.new_tensor([m.clip_norm for m in mechanisms], dtype=summing_dtype(like))
        self.clip_norm = clip_norms[self.owner]  # [S]
        self.learning_rate = like.new_tensor([task.learning_rate for task in tasks])[:, None]  # [k, 1]
        anchors = [task.anchor for task in tasks if task.anchor is not None]  # all have one, or none has
        self.anchors, self.pull = (torch.stack(anchors) if anchors else None), tasks[0].pull
        self.norms: dict[int, list[Tensor]] = defaultdict(list)  # of the passes so far, `[S, B]` each, by S
        self.rows_of = torch.cat([population.train_of[client] for client in clients])  # of all clients, end to end
        self.first = np.cumsum([0, *(population.num_records[client] for client in clients)])

    def local_training(self, starts: Tensor, draws: Sequence[Sequence[np.ndarray]]) -> Tensor:
        """The clients' parameters `[k, P]` after their steps from `starts` `[k, P]`; most steps first."""
        theta = starts.clone()
        for step in range(len(draws[0])):
            active = [steps[step] for steps in draws if step < len(steps)]  # those of the first clients
            now = theta[: len(active)]
            move = self.noise.privatise(self.clipped_sums(now, active)[:, None])[:, 0]
            if self.anchors is not None:
                move.add_(now - self.anchors[: len(active)], alpha=self.pull)
            now.sub_(move.mul_(self.learning_rate[: len(active)]))
        return theta

    def clipped_sums(self, theta: Tensor, draws: Sequence[np.ndarray]) -> Tensor:
        """`[k, P]` in float64 at `theta` `[k, P]`, of one draw `[b]` of each of the first k clients."""
        population, size = self.engine.population, self.layout.size(len(draws))
        # slots behind those of the active clients are padding, with the parameters of the last of them
        owner, clip_norm = self.owner[:size].clamp(max=len(draws) - 1), self.clip_norm[:size]
        params = vmap(self.engine.module.unflatten)(theta[owner])
        total = torch.zeros_like(theta, dtype=summing_dtype(theta))
        for index in self.passes(draws, size):
            rows = self.rows_of[index.clamp(min=0)]  # padding takes any record
            x, y = population.x[rows], population.y[rows]
            sums, norms = self.engine.sums(params, x, y, index >= 0, clip_norm, self.order)
            total.index_add_(0, owner, sums)
            self.norms[size].append(norms.clone())  # the next pass may reuse their memory
        return total

    def passes(self, draws: Sequence[np.ndarray], size: int) -> Tensor:
        """`[passes, S, B]`: places in `rows_of`, -1 for padding; as many passes as the draws take."""
        slots, width = self.layout.slots, self.layout.width
        count = max(1, *(math.ceil(len(draw) / (n * width)) for draw, n in zip(draws, slots, strict=False)))
        places = np.full((count, size, width), -1)
        for draw, n, end, first in zip(draws, slots, self.ends, self.first, strict=False):
            of_client = np.full(count * n * width, -1)
            of_client[: len(draw)] = first + draw
            places[:, end - n : end] = of_client.reshape(count, n, width)
        return sent(torch.from_numpy(places), self.rows_of.device)

    def counts(self) -> Tensor:
        """What `COUNTED` names, of each client's gradients, `[k, 3]`."""
        counts = self.owner.new_zeros(len(self.layout.rows), len(COUNTED))
        for size, norms in self.norms.items():
            counted = count_outcomes(torch.cat(norms, dim=1), self.clip_norm[:size, None]).sum(dim=1)
            counts.index_add_(0, self.owner[:size], counted)
        return counts


def as_run(sums: StackedSums, device: torch.device) -> StackedSums:
    """`sums` as a run on the device uses it: compiled on CUDA."""
    return captured(sums, mode="reduce-overhead") if device.type == "cuda" else sums


def captured(sums: StackedSums, **compiler: Any) -> StackedSums:
    """`sums` compiled by `torch.compile`, once for each shape: with `mode="reduce-overhead"` as CUDA graphs."""
    torch.compiler.reset()  # shapes that earlier runs of this process compiled would count against the limit
    # by default the ninth shape is an error; the shapes follow from `SIZES`
    torch._dynamo.config.cache_size_limit = max(len(SIZES), torch._dynamo.config.cache_size_limit)
    compiled = torch.compile(sums, fullgraph=True, dynamic=False, **compiler)

    def one_pass(*args: Any) -> tuple[Tensor, Tensor]:
        torch.compiler.cudagraph_mark_step_begin()  # the results of the last pass are no longer needed
        return compiled(*args)

    return cast(StackedSums, one_pass)


#: numbers of slots a pass: at most a fifth of it is padding, and a process sees few shapes
SIZES = sorted({1, 2, 3, *(base << power for base in (4, 5, 6, 7) for power in range(40))})


def _size_above(number: int) -> int:
    """The least of `SIZES` that is not below `number`.

    >>> [_size_above(number) for number in (1, 5, 64, 65, 100)]
    [1, 5, 64, 80, 112]
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
