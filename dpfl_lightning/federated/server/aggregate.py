"""Aggregation as one matrix product, `weights [K, C] @ deltas [C, P]`."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.messages.jobs import LARGEST
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates, WeightedSum
from dpfl_lightning.federated.server.callback import answer_of
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState, View


def raw_weights(strategies: Sequence[Strategy], plan: RoundPlan, updates: ClientUpdates, view: View) -> Tensor:
    """The product of all strategies' factors (`[C]` or `[K, C]`, >= 0): `[K, C]` in float64, not normalised.

    It starts from the one-hot rows of `plan.model_of`, or from a `route` `[K, C]`, which the other strategies see. Only
    strategies whose `needs_updates` is true receive the updates.
    """
    num_models, num_clients = len(view.state.models), len(plan.clients)
    route = torch.zeros(num_models, num_clients, dtype=torch.float64)
    route[list(plan.model_of), range(num_clients)] = 1.0

    def answer(strategy: Strategy, updates: ClientUpdates) -> Tensor | None:
        visible = answer_of(strategy, "needs_updates", plan, view)
        shown = updates if visible else dataclasses.replace(updates, deltas=None, total=None)
        factor = answer_of(strategy, "weigh", shown, view)
        return None if factor is None else _checked(factor, strategy, num_models, num_clients)

    for strategy in strategies:
        if strategy.role == "route" and (answered := answer(strategy, updates)) is not None:
            route = answered
    product, routed = route, dataclasses.replace(updates, route=route)
    for strategy in strategies:
        if strategy.role != "route" and (factor := answer(strategy, routed)) is not None:
            product = product * factor
    return product


def _checked(answer: Tensor, strategy: Strategy, num_models: int, num_clients: int) -> Tensor:
    """A strategy's factor in float64 on the CPU; UserError for another shape (never broadcast) or a negative number."""
    whose, shapes = f"weigh of {strategy.config_name}", [(num_clients,), (num_models, num_clients)]
    must = f"give a tensor of {num_clients} clients, or of {num_models} models and {num_clients} clients, [K, C]"
    shape = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
    require(shape in shapes, whose, must, shape)
    answer = answer.to("cpu", torch.float64)
    require(bool((answer >= 0).all() & answer.isfinite().all()), whose, "give numbers >= 0 and finite", answer.tolist())
    return answer


def normalised(raw_weights: Tensor) -> Tensor:
    """Weights `[K, C]` whose rows sum to 1; rows of models without clients are zero."""
    total = raw_weights.sum(dim=1, keepdim=True)
    return torch.where(total > 0, raw_weights / total.clamp_min(torch.finfo(torch.float64).tiny), 0.0)


def raw_weights_from_facts(strategies: Sequence[Strategy], plan: RoundPlan, view: View) -> Tensor | None:
    """`raw_weights` before the training, for updates that are streamed; None if a strategy reads single updates."""
    if any(answer_of(strategy, "needs_updates", plan, view) for strategy in strategies):
        return None
    return raw_weights(strategies, plan, ClientUpdates.announced(plan), view)


def without_lost(
    plan: RoundPlan, updates: ClientUpdates, raw_weights: Tensor | None, facts: Facts
) -> tuple[RoundPlan, Tensor | None]:
    """The plan and the raw weights `[K, C]` without the lost clients; warns of those that sent no sound update."""
    if not updates.lost:
        return plan, raw_weights
    if not_finite := [client for client in updates.lost if client not in updates.absent]:
        names = ", ".join(map(facts.name_of, not_finite))
        why = "their updates are not finite, or above 1e6"
        warn_user(f"round {plan.round}: left out of this round, because {why}: clients {names}")
    kept = [row for row, client in enumerate(plan.clients) if client not in updates.lost]
    return plan.only(lambda client: client not in updates.lost), None if raw_weights is None else raw_weights[:, kept]


def combine(raw_weights: Tensor, updates: ClientUpdates) -> Tensor:
    """`normalised(raw_weights) [K, C] @ deltas [C, ...]`, rounded once; the order of clients does not change a bit.

    `raw_weights` are those of the clients that arrived. A streamed sum was taken with the same weights.
    """
    if updates.total is not None:
        return updates.total.rounded(raw_weights.sum(dim=1))
    different, row_of = raw_weights.unique(dim=0, return_inverse=True)  # equal rows are added up once
    total = WeightedSum(different)
    for column, delta in enumerate(updates.released):
        total.add(column, delta)
    return total.rounded(different.sum(dim=1))[row_of]


def diverged(state: ServerState) -> Tensor:
    """For each model, whether a parameter is not finite, or so large that arithmetic with it is meaningless: `[K]`.

    **Privacy** Post-processing of releases.
    """
    return ~(state.models.abs() <= LARGEST).all(dim=1).cpu()
