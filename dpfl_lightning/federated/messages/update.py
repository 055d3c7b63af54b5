"""The noisy updates of a round as they arrive at the server, and their weighted sum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from dpfl_lightning.federated.messages.inbox import Inbox
from dpfl_lightning.federated.messages.jobs import Job
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.privacy.mechanism import Mechanism

_BLOCK = 1 << 16  # numbers that are added at once on a CPU, so that intermediate results stay in the cache

_READ_AT_ONCE = frozenset({"cpu"})  # devices for whose results nothing waits


class WeightedSum:
    """Computes `weights [K, C] @ deltas [C, ...]` client by client; their order does not change the result.

    Every entry is a pair of float64 numbers (Knuth's two-sum), so that the effect of the order lies far below the last
    bit of the float32 to which the sum is rounded once. A client with weight 0 in row k does not change model k.

    >>> total = WeightedSum(torch.tensor([[0.25, 0.75]]))
    >>> total.add(1, torch.tensor([4.0]))
    >>> total.add(0, torch.tensor([2.0]))
    >>> total.rounded()
    tensor([[3.5000]])
    """

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights.to("cpu", torch.float64)
        self.pair: Tensor | None = None  # [2, K, ...]: high and low parts
        self.dtype = torch.float32

    def add(self, column: int, delta: Tensor) -> None:
        self.dtype = delta.dtype
        delta = delta.to("cpu") if delta.device.type == "mps" else delta  # MPS has no float64
        if self.pair is None:
            self.pair = delta.new_zeros(2, len(self.weights), *delta.shape, dtype=torch.float64)
        for row in self.weights[:, column].nonzero().flatten().tolist():
            self._add(row, delta, float(self.weights[row, column]))

    def merge(self, other: WeightedSum, rows: Sequence[int] | None = None) -> None:
        """Add a sum over other clients, for all models or for those at `rows`."""
        if other.pair is None:
            return
        if self.pair is None:
            self.pair = other.pair.new_zeros(2, len(self.weights), *other.pair.shape[2:])
            self.dtype = other.dtype
        models = range(len(self.weights)) if rows is None else rows
        for row, parts in zip(models, other.pair.to(self.pair.device).unbind(dim=1), strict=True):
            for part in parts:
                self._add(row, part)

    def rounded(self, divisor: Tensor | None = None) -> Tensor:
        """The sums `[K, ...]` in the dtype of the updates, each divided by its `divisor` `[K]` unless that is 0."""
        assert self.pair is not None, "a sum of no updates has no shape"
        total = self.pair.sum(dim=0)
        if divisor is not None:
            by = torch.where(divisor > 0, divisor, 1.0).to(total.device, torch.float64)
            total /= by.view(-1, *[1] * (total.dim() - 1))
        return total.to(self.dtype)

    def _add(self, row: int, value: Tensor, weight: float = 1.0) -> None:
        assert self.pair is not None
        block = _BLOCK if value.device.type == "cpu" else max(1, value.numel())
        blocks = [one.reshape(-1).split(block) for one in (self.pair[0, row], self.pair[1, row], value)]
        for high, low, part in zip(*blocks, strict=True):
            part = part.double() * weight
            total = high + part
            rest = total - high
            low += (high - (total - rest)).add_(part - rest)
            high.copy_(total)


@dataclass(frozen=True)
class ClientUpdates:
    """The noisy updates of the C clients whose updates arrived. What is computed from them is post-processing.

    Args:
        noise_std: standard deviation of the noise in each number of an update, known from mechanism and steps; NaN if
            the optimiser makes it unknown.
        deltas: parameter changes `[C, P]`, or class gradients `[C, G, P]`. None if they were only added up in `total`,
            because no strategy needs single ones.
        lost: clients whose update was not finite, too large, or did not arrive (`absent`). They are in no other field.
        model_of: row of the server's models that each client started from.
        route: which updates are added to which model, `[K, C]`, without weights; None until it is known.
    """

    clients: tuple[int, ...]
    steps: tuple[int, ...]
    noise_std: tuple[float, ...]
    deltas: Tensor | None = None
    total: WeightedSum | None = field(default=None, repr=False)
    lost: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    model_of: tuple[int, ...] = ()
    mechanism_of: tuple[Mechanism, ...] = ()
    route: Tensor | None = None

    @classmethod
    def announced(cls, plan: RoundPlan) -> ClientUpdates:
        """The fields of the updates of a plan that are known before they arrive."""
        rows = zip(plan.mechanism_of, map(plan.independent_steps, plan.steps), plan.learning_rate_of, strict=True)
        noise_std = tuple(plan.job.noise_std(*row) for row in rows)
        return cls(plan.clients, plan.steps, noise_std, model_of=plan.model_of, mechanism_of=plan.mechanism_of)

    def without(self, lost: frozenset[int]) -> ClientUpdates:
        """The updates of all but these clients, which are `absent`; a sum must have been taken without them."""
        rows = [row for row, client in enumerate(self.clients) if client not in lost]
        columns = ("clients", "steps", "noise_std", "model_of", "mechanism_of")
        kept: dict[str, Any] = {name: tuple(getattr(self, name)[row] for row in rows) for name in columns}
        deltas = None if self.deltas is None else self.deltas[rows]
        kept |= {name: tuple(sorted({*getattr(self, name), *lost})) for name in ("lost", "absent")}
        return dataclasses.replace(self, **kept, deltas=deltas)

    @property
    def rows_by_model(self) -> list[list[int]]:
        """The rows of the updates that are added up: those of each model, or of models that share updates."""
        if self.route is None:
            return [
                [row for row, one in enumerate(self.model_of) if one == model] for model in dict.fromkeys(self.model_of)
            ]
        together = (self.route > 0).double().cpu().numpy()
        count, label = connected_components(together.T @ together)
        return [np.flatnonzero(label == one).tolist() for one in range(count)]

    def erase(self, entries: Tensor) -> None:
        """Set entries, a mask `[P]` (bool), of the updates and of their sum to 0."""
        for numbers in (self.deltas, None if self.total is None else self.total.pair):
            if numbers is not None:
                numbers[..., entries.to(numbers.device)] = 0.0

    @property
    def released(self) -> Tensor:
        """`deltas`, which exist only for strategies that need single updates."""
        if self.deltas is None:
            raise RuntimeError("a strategy that reads single updates must return True from `needs_updates`")
        return self.deltas


def is_sound(delta: Tensor, job: Job) -> Tensor:
    """Whether all numbers of a release are finite, and none is beyond `job.largest`, a truth value on its device."""
    size = torch.linalg.vector_norm(delta, math.inf)  # NaN if any number is
    return (size <= job.largest) & size.isfinite()


class UpdateBuffer(Inbox):
    """Collects the updates of a round, or adds them up if `weights` `[K, C]` are known before training.

    Updates that are not finite, or too large for their job, are dropped. The sum of a part has the rows
    `models` of the whole one.
    """

    def __init__(self, plan: RoundPlan, weights: Tensor | None = None, models: Sequence[int] | None = None) -> None:
        super().__init__()
        self.plan, self.models = plan, models
        self.total = None if weights is None else WeightedSum(weights)
        self.deltas: Tensor | None = None
        self._row_of = {client: row for row, client in enumerate(plan.clients)}
        self._absent: set[int] = set()  # clients
        self._sound: dict[int, Tensor] = {}  # by row

    def take(self, client: int, released: Tensor) -> None:
        row, delta = self._row_of[client], released
        self._sound[row] = sound = is_sound(delta, self.plan.job)
        if delta.device.type not in _READ_AT_ONCE:
            delta = torch.where(sound, delta, 0.0)  # adds nothing
        elif not sound:  # 0 x NaN is NaN, so a zero weight would not be enough
            return
        if self.total is not None:
            self.total.add(row, delta)
        else:
            if self.deltas is None:
                self.deltas = delta.new_empty(len(self.plan.clients), *delta.shape)
            self.deltas[row] = delta

    def lose(self, client: int) -> None:
        self._absent.add(client)

    def part(self, clients: Sequence[int]) -> UpdateBuffer:
        plan = dataclasses.replace(self.plan.only({*clients}.__contains__), job=self.plan.job.asked)
        if self.total is None:
            return UpdateBuffer(plan)
        weights = self.total.weights[:, [self._row_of[client] for client in plan.clients]]
        models = weights.any(dim=1).nonzero().flatten().tolist()  # others need no memory
        return UpdateBuffer(plan, weights[models], models)

    def merge(self, part: UpdateBuffer) -> None:
        super().merge(part)
        self._absent |= part._absent
        for row, sound in part._sound.items():
            client = part.plan.clients[row]
            if part.deltas is not None and sound:
                self.take(client, part.deltas[row])
            self._sound[self._row_of[client]] = sound
        if self.total is not None and part.total is not None:
            self.total.merge(part.total, part.models)

    def updates(self) -> ClientUpdates:
        sound = torch.stack(list(self._sound.values())).tolist() if self._sound else []
        unsound = {self.plan.clients[row] for row, found in zip(self._sound, sound, strict=True) if not found}
        lost = unsound | self._absent
        kept, deltas = self.plan.only(lambda client: client not in lost), self.deltas
        if deltas is not None and lost:
            deltas = deltas[[row for client, row in self._row_of.items() if client not in lost]]
        found = ClientUpdates.announced(kept)
        gone, absent = tuple(sorted(lost)), tuple(sorted(self._absent))
        return dataclasses.replace(found, deltas=deltas, total=self.total, lost=gone, absent=absent)
