"""The noised updates of a round, as they arrive at the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dpfl_lightning.federated.messages.jobs import ClassGradients
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.weighted_sum import WeightedSum
from dpfl_lightning.privacy.mechanism import Mechanism


@dataclass(frozen=True)
class ClientUpdates:
    """The noised updates of the C clients whose updates arrived. What is computed from them is post-processing.

    Args:
        noise_std: standard deviation of the noise in each number of an update, known from mechanism and steps.
        deltas: parameter changes `[C, P]`, or class gradients `[C, G, P]`. None if updates were only added up, and for
            strategies whose `needs_updates` is false.
        total: the weighted sum of the updates, if no strategy needs single ones.
        lost: clients whose update was not finite. They are in none of the other fields.
        model_of: row of the server's models that each client started from.
    """

    clients: tuple[int, ...]
    steps: tuple[int, ...]
    noise_std: tuple[float, ...]
    deltas: Tensor | None = None
    total: WeightedSum | None = field(default=None, repr=False)
    lost: tuple[int, ...] = ()
    model_of: tuple[int, ...] = ()
    mechanism_of: tuple[Mechanism, ...] = ()

    @classmethod
    def announced(cls, plan: RoundPlan) -> ClientUpdates:
        """The known fields of the updates of a plan, before they arrive."""
        rows = zip(plan.mechanism_of, plan.steps, plan.learning_rate_of, strict=True)
        sums = isinstance(plan.job, ClassGradients)  # one step, without a learning rate
        noise_std = tuple(m.noise_std(1, 1.0) if sums else m.noise_std(steps, rate) for m, steps, rate in rows)
        return cls(plan.clients, plan.steps, noise_std, model_of=plan.model_of, mechanism_of=plan.mechanism_of)

    @property
    def released(self) -> Tensor:
        """`deltas`, which exist only for strategies that need single updates."""
        if self.deltas is None:
            raise RuntimeError("a strategy that reads single updates must return True from `needs_updates`")
        return self.deltas


class UpdateBuffer:
    """Collects the updates of a round: keeps them, or adds them up. Updates that are not finite are dropped.

    Args:
        weights: `[K, C]` if they are known before training; None keeps every update.
    """

    def __init__(self, plan: RoundPlan, weights: Tensor | None = None) -> None:
        self.plan = plan
        self.total = None if weights is None else WeightedSum(weights)
        self.deltas: Tensor | None = None
        self.lost: list[int] = []

    def take(self, row: int, delta: Tensor) -> None:
        """Add the update of the client at `row` of the plan."""
        if not bool(delta.isfinite().all()):  # 0 x NaN is NaN, so a zero weight would not be enough
            self.lost.append(row)
        elif self.total is not None:
            self.total.add(row, delta)
        else:
            if self.deltas is None:
                self.deltas = delta.new_empty(len(self.plan.clients), *delta.shape)
            self.deltas[row] = delta

    def merge(self, part: ClientUpdates, models: Sequence[int] | None = None) -> None:
        """Add the updates of another process; its sum is for all models, or for those at rows `models`."""
        row_of = {client: row for row, client in enumerate(self.plan.clients)}
        self.lost += [row_of[client] for client in part.lost]
        if part.total is not None and self.total is not None:
            self.total.merge(part.total, models)
        elif part.deltas is not None:
            for client, delta in zip(part.clients, part.deltas, strict=True):
                self.take(row_of[client], delta)

    def updates(self) -> ClientUpdates:
        lost = tuple(sorted(self.plan.clients[row] for row in self.lost))
        kept = self.plan.only(lambda client: client not in lost)
        deltas = self.deltas
        if deltas is not None and lost:
            deltas = deltas[[row for row in range(len(self.plan.clients)) if row not in self.lost]]
        return dataclasses.replace(ClientUpdates.announced(kept), deltas=deltas, total=self.total, lost=lost)
