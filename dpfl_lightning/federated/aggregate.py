"""Aggregation as one matrix product, `weights [K, C] @ deltas [C, P]`: where weights come from, and the plain step."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from dpfl_lightning.errors import UserNotice
from dpfl_lightning.federated.callback import ServerCallback
from dpfl_lightning.federated.state import ClientUpdates, RoundPlan, ServerState, View


def rows(plan: RoundPlan, num_models: int, factors: Sequence[Tensor], route: Tensor | None = None) -> Tensor:
    """Weights `[K, C]` in float64, each row of sum 1, or all zero for a model that nobody moves.

    Starts from the one-hot rows of `plan.model_of` (or from `route` `[K, C]`), multiplies by every factor (`[C]` or
    `[K, C]`, >= 0), and normalises once: that is why noise-aware x clustered x selected composes.
    """
    num_clients = len(plan.clients)
    if route is None:
        route = torch.zeros(num_models, num_clients, dtype=torch.float64)
        route[list(plan.model_of), range(num_clients)] = 1.0
    weights = route.to("cpu", torch.float64)
    for factor in factors:
        weights = weights * factor.to("cpu", torch.float64)
    if not bool((weights >= 0).all() & weights.isfinite().all()):
        raise RuntimeError("a strategy's `weigh` gave a negative or non-finite factor")
    total = weights.sum(dim=1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp_min(torch.finfo(torch.float64).tiny), 0.0)


def weigh(callbacks: Sequence[ServerCallback], plan: RoundPlan, updates: ClientUpdates, view: View) -> Tensor:
    """Every callback's say, as `rows`. Callbacks that need facts only do not see the deltas."""
    facts_only = dataclasses.replace(updates, deltas=None)
    route, factors = None, []
    for callback in callbacks:
        answer = callback.weigh(updates if callback.needs == "deltas" else facts_only, view)
        if answer is None:
            continue
        if callback.role == "route":
            route = answer
        else:
            factors.append(answer)
    return rows(plan, len(view.state.models), factors, route)


def combine(weights: Tensor, deltas: Tensor) -> Tensor:
    """`weights [K, C] @ deltas [C, ...]`, summed in float64 and rounded once: the order of clients does not matter."""
    flat = deltas.reshape(len(deltas), -1)
    out = torch.empty(len(weights), flat.shape[1], dtype=deltas.dtype, device=deltas.device)
    weights = weights.to(deltas.device)
    for part, target in zip(flat.split(1 << 20, dim=1), out.split(1 << 20, dim=1), strict=True):
        target.copy_(weights @ part.double())
    return out.reshape(len(weights), *deltas.shape[1:])


def step(state: ServerState, combined: Tensor) -> ServerState:
    """FedAvg: `models + combined`, `[K, P]`."""
    return dataclasses.replace(state, models=state.models + combined)


def drop_non_finite(plan: RoundPlan, updates: ClientUpdates) -> tuple[RoundPlan, ClientUpdates]:
    """Without the clients whose release is not finite: 0 x NaN is NaN, so a zero weight would not be enough."""
    deltas = updates.released
    finite = deltas.reshape(len(deltas), -1).isfinite().all(dim=1).tolist()
    if all(finite):
        return plan, updates
    lost = tuple(client for client, ok in zip(updates.clients, finite, strict=True) if not ok)
    words = f"round {plan.round}: the updates of clients {lost} are not finite; they are left out of this round"
    warnings.warn(words, UserNotice, stacklevel=2)
    kept = [row for row, ok in enumerate(finite) if ok]
    updates = ClientUpdates(
        clients=tuple(updates.clients[row] for row in kept),
        deltas=deltas[kept],
        steps=tuple(updates.steps[row] for row in kept),
        noise_std=tuple(updates.noise_std[row] for row in kept),
    )
    return plan.only(lambda client: client not in lost), updates
