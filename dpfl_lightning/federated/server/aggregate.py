"""Aggregation as one matrix product, `weights [K, C] @ deltas [C, P]`: weights, their sum, the plain step."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from dpfl_lightning.errors import UserNotice, require
from dpfl_lightning.federated.messages.plan import ClientUpdates, RoundPlan, ServerState, View
from dpfl_lightning.federated.server.strategy import ServerCallback, answer_of

_BLOCK = 1 << 16  # numbers that are added at once: the intermediate ones stay in the caches


def say(callbacks: Sequence[ServerCallback], plan: RoundPlan, updates: ClientUpdates, view: View) -> Tensor:
    """Every callback's say, multiplied: `[K, C]` in float64, not normalised.

    Starts from the one-hot rows of `plan.model_of` (or from a `route` `[K, C]`) and multiplies by every factor
    (`[C]` or `[K, C]`, >= 0): that is why noise-aware x clustered x selected composes. Only callbacks that `sees` the
    round's updates are shown them.
    """
    facts_only = dataclasses.replace(updates, deltas=None, total=None)
    num_models, num_clients = len(view.state.models), len(plan.clients)
    product = torch.zeros(num_models, num_clients, dtype=torch.float64)
    product[list(plan.model_of), range(num_clients)] = 1.0
    factors = []
    for callback in callbacks:
        answer = answer_of(callback, "weigh", updates if answer_of(callback, "sees", plan, view) else facts_only, view)
        if answer is None:
            continue
        answer = _checked(answer, callback, num_models, num_clients)
        if callback.role == "route":
            product = answer
        else:
            factors.append(answer)
    for factor in factors:
        product = product * factor
    return product


def _checked(answer: Tensor, callback: ServerCallback, num_models: int, num_clients: int) -> Tensor:
    """A callback's say in float64 on the CPU; broadcast, another shape would pass for other weights.

    Raises:
        UserError: another shape than `[C]` or `[K, C]`, or a number below 0 or not finite.
    """
    whose, shapes = f"weigh of {type(callback).__name__}", [(num_clients,), (num_models, num_clients)]
    must = f"give a tensor of {num_clients} clients, or of {num_models} models and {num_clients} clients, [K, C]"
    got = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
    require(got in shapes, whose, must, got)
    answer = answer.to("cpu", torch.float64)
    require(bool((answer >= 0).all() & answer.isfinite().all()), whose, "give numbers >= 0 and finite", answer.tolist())
    return answer


def normalised(say: Tensor) -> Tensor:
    """Weights `[K, C]`: each row of sum 1, or all zero for a model that nobody moves."""
    total = say.sum(dim=1, keepdim=True)
    return torch.where(total > 0, say / total.clamp_min(torch.finfo(torch.float64).tiny), 0.0)


def say_beforehand(callbacks: Sequence[ServerCallback], plan: RoundPlan, view: View) -> Tensor | None:
    """`say` before anybody has trained, for updates that are streamed; None if a callback sees single ones."""
    if any(answer_of(callback, "sees", plan, view) for callback in callbacks):
        return None
    return say(callbacks, plan, ClientUpdates.announced(plan), view)


class WeightedSum:
    """`weights [K, C] @ deltas [C, ...]` as the clients come in: the same bits in whatever order they come.

    Every entry is a pair of float64 numbers whose sum is never rounded to one (Knuth's two-sum): what the order
    changes lies far below the last bit of the float32 that it is rounded to once. The memory is that of 2 K models in
    float64, however many clients there are.

    Args:
        weights: `[K, C]`, >= 0; a client with a zero in row k leaves model k alone.

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
        """The update of the client of `column`, with its weight in each model."""
        self.dtype = delta.dtype
        here = delta.to("cpu") if delta.device.type == "mps" else delta  # MPS has no float64
        if self.pair is None:
            self.pair = here.new_zeros(2, len(self.weights), *here.shape, dtype=torch.float64)
        for row in self.weights[:, column].nonzero().flatten().tolist():
            self._add(row, here, float(self.weights[row, column]))

    def merge(self, other: WeightedSum, rows: Sequence[int] | None = None) -> None:
        """Another part of the same sum: of other clients, and of all models or of those at `rows`."""
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
        """The sums `[K, ...]`, each divided by its `divisor` `[K]` (by nothing if that is 0), in the updates' dtype."""
        assert self.pair is not None, "a sum of no updates has no shape"
        total = self.pair.sum(dim=0)
        if divisor is not None:
            by = torch.where(divisor > 0, divisor, 1.0).to(total.device, torch.float64)
            total /= by.view(-1, *[1] * (total.dim() - 1))
        return total.to(self.dtype)

    def _add(self, row: int, value: Tensor, weight: float = 1.0) -> None:
        assert self.pair is not None
        blocks = [one.reshape(-1).split(_BLOCK) for one in (self.pair[0, row], self.pair[1, row], value)]
        for high, low, part in zip(*blocks, strict=True):
            part = part.double() * weight
            total = high + part
            rest = total - high
            low += (high - (total - rest)).add_(part - rest)
            high.copy_(total)


class Received:
    """A round's releases as they come in: kept, or added up with known weights; those that are not finite are left out.

    Args:
        weights: `[K, C]` if they are known beforehand; None keeps every update.
    """

    def __init__(self, plan: RoundPlan, weights: Tensor | None = None) -> None:
        self.plan = plan
        self.total = None if weights is None else WeightedSum(weights)
        self.deltas: Tensor | None = None
        self.lost: list[int] = []

    def take(self, row: int, delta: Tensor) -> None:
        """The release of the plan's client at `row`."""
        if not bool(delta.isfinite().all()):  # 0 x NaN is NaN, so a zero weight would not be enough
            self.lost.append(row)
        elif self.total is not None:
            self.total.add(row, delta)
        else:
            if self.deltas is None:
                self.deltas = delta.new_empty(len(self.plan.clients), *delta.shape)
            self.deltas[row] = delta

    def merge(self, part: ClientUpdates, models: Sequence[int] | None = None) -> None:
        """What arrived elsewhere of other clients of the plan; a sum for all models, or for those at rows `models`."""
        row_of = {client: row for row, client in enumerate(self.plan.clients)}
        self.lost += [row_of[client] for client in part.lost]
        if part.total is not None and self.total is not None:
            self.total.merge(part.total, models)
        elif part.deltas is not None:
            for client, delta in zip(part.clients, part.deltas, strict=True):
                self.take(row_of[client], delta)

    def updates(self) -> ClientUpdates:
        """What arrived."""
        lost = tuple(sorted(self.plan.clients[row] for row in self.lost))
        kept = self.plan.only(lambda client: client not in lost)
        deltas = self.deltas
        if deltas is not None and lost:
            deltas = deltas[[row for row in range(len(self.plan.clients)) if row not in self.lost]]
        return dataclasses.replace(ClientUpdates.announced(kept), deltas=deltas, total=self.total, lost=lost)


def without_lost(plan: RoundPlan, updates: ClientUpdates, say: Tensor | None) -> tuple[RoundPlan, Tensor | None]:
    """The plan, and what was said `[K, C]`, without the clients whose release is not finite; warns of them."""
    if not updates.lost:
        return plan, say
    words = f"round {plan.round}: the updates of clients {updates.lost} are not finite; they are left out of this round"
    warnings.warn(words, UserNotice, stacklevel=2)
    kept = [row for row, client in enumerate(plan.clients) if client not in updates.lost]
    return plan.only(lambda client: client not in updates.lost), None if say is None else say[:, kept]


def combine(say: Tensor, updates: ClientUpdates) -> Tensor:
    """`normalised(say) [K, C] @ deltas [C, ...]`, rounded once: the order of clients does not change a bit.

    Args:
        say: `[K, C]` of the clients that arrived; a streamed sum was taken with the same numbers.
    """
    if updates.total is not None:
        return updates.total.rounded(say.sum(dim=1))
    different, row_of = say.unique(dim=0, return_inverse=True)  # what many models add is added up once
    total = WeightedSum(different)
    for column, delta in enumerate(updates.released):
        total.add(column, delta)
    return total.rounded(different.sum(dim=1))[row_of]


def step(state: ServerState, combined: Tensor) -> ServerState:
    """FedAvg: `models + combined`, `[K, P]`."""
    return dataclasses.replace(state, models=state.models + combined)
