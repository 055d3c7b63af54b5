"""One round at the server: plan, charge, train, weigh, combine, step. Strategies decide, callbacks watch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfl_lightning.errors import UserError, require, warn_user
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server import aggregate
from dpfl_lightning.federated.server.strategy import Strategy, check_job, fold, overrides, sole_answer
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.runtime.text import counted

_NOT_SOUND = "a parameter of the new model is not finite, or above 1e6"


class Diverged(UserError):
    """A round was charged, and its models are of no use; the run ends before the next charge."""

    @classmethod
    def of(cls, plan: RoundPlan, got: str = _NOT_SOUND) -> Diverged:
        return cls(
            f"`training` must not diverge, got in round {plan.round}: {got}. The round was charged; the run ends "
            "before the next charge, with the models before this round. Start a new run with a lower "
            "clients.learning_rate, or with other options of its strategies."
        )


@dataclass(frozen=True)
class Round:
    """One round of a run, from the state in `view` to the next one. It writes no file and reads no clock.

    Messages to the clients are `accept(plan)`, which charges those that can pay, and
    `train(plan, models, raw_weights)`, which returns the updates that arrive.
    """

    strategies: Sequence[Strategy]
    view: View
    min_participants: int
    accept: Callable[[RoundPlan], RoundPlan]
    train: Callable[[RoundPlan, Tensor, Tensor | None], ClientUpdates]

    def one_round(self, plan: RoundPlan) -> tuple[ServerState, RoundPlan, Tensor]:
        """Return the next state, the plan of the clients whose updates arrived, and their weights `[K, C]`.

        `plan` is the default plan of all clients. Every line calls one hook, or sends one message to the clients.
        """
        strategies, view, state = self.strategies, self.view, self.view.state
        plan = fold(strategies, "plan_round", plan, view)
        if plan.clients:
            check_job(strategies, plan.job)
        plan = _if_enough(dataclasses.replace(plan, fewest=max(plan.fewest, self.min_participants)))
        raw_weights, planned = self._weights_before_charge(plan), plan.clients  # None: single updates must be seen
        plan = _if_enough(self.accept(plan))  # charged: a crash never under-reports
        if not plan.clients:
            return _unmoved(state, plan)
        if plan.clients != planned:  # some could not pay
            raw_weights = aggregate.raw_weights_from_facts(strategies, plan, view)
        updates = self.train(plan, state.models, raw_weights)
        if view.module.personal and plan.job.trains:
            updates.erase(view.module.personal_mask)  # honest updates have zeros there
        arrived, raw_weights = aggregate.without_lost(plan, updates, raw_weights, view.facts)
        if not arrived.clients and not {*updates.absent}.issuperset(updates.lost):
            raise Diverged.of(plan, "no update of this round is finite and below 1e6")
        plan = _if_enough(arrived, "sent an update that arrived", "models stay as they are")
        if not plan.clients:
            return _unmoved(state, plan)
        if raw_weights is None:
            raw_weights = aggregate.raw_weights(strategies, plan, updates, view)  # [K, C]
        weights = aggregate.normalised(raw_weights)  # a row of zeros leaves its model unchanged
        combined = sole_answer(strategies, "combine", updates, weights, view)
        if combined is None:
            combined = fold(strategies, "scale", aggregate.combine(raw_weights, updates), updates, weights, view)
        stepped = sole_answer(strategies, "step", state, combined, view)
        after = stepped or dataclasses.replace(state, models=state.models + combined)  # FedAvg, [K, P]
        after = self._without_diverged(after, plan, weights)
        after = fold(strategies, "after_step", after, updates, view)
        if aggregate.diverged(after).any():
            raise Diverged.of(plan)
        if not weights.any() and torch.equal(after.models, state.models):
            warn_user(  # the same words in each such round, so that a command says it once
                "a round is charged and changes no model, because all aggregation weights are 0: metrics.jsonl has "
                "effective_clients 0 in each such round"
            )
        return dataclasses.replace(after, round=plan.round), plan, weights

    def _weights_before_charge(self, plan: RoundPlan) -> Tensor | None:
        """Return `raw_weights_from_facts`. Raises UserError if they are zeros: the updates would be of no use."""
        if not plan.clients:
            return None
        weights = aggregate.raw_weights_from_facts(self.strategies, plan, self.view)
        weighing = [one.config_name for one in self.strategies if overrides(one, "weigh")]
        must = f"give a client of round {plan.round} a weight above 0"
        advice = "The round was not charged. Leave out clients by `plan_round`, or read updates by `needs_updates`."
        ok = weights is None or bool(weights.any())
        require(ok, f"weigh of {', '.join(weighing)}", must, f"zeros for all {len(plan.clients)}", advice)
        return weights

    def _without_diverged(self, after: ServerState, plan: RoundPlan, weights: Tensor) -> ServerState:
        """The models after a step, but those that diverged as they were; Diverged if all that moved did."""
        diverged = aggregate.diverged(after)
        if not diverged.any():
            return after
        if diverged[weights.cpu().any(dim=1)].all():
            raise Diverged.of(plan)
        clients = [client for client, row in zip(plan.clients, plan.model_of, strict=True) if diverged[row]]
        names = ", ".join(map(self.view.facts.name_of, clients))
        warn_user(
            f"round {plan.round}: {int(diverged.sum())} of {len(diverged)} models stay as they were before this round, "
            f"because they diverged: {_NOT_SOUND}. Charged in vain: clients {names}"
        )
        kept = diverged.to(after.models.device)[:, None]
        return dataclasses.replace(after, models=torch.where(kept, self.view.state.models, after.models))


def _unmoved(state: ServerState, plan: RoundPlan) -> tuple[ServerState, RoundPlan, Tensor]:
    """Return the result of a round without updates."""
    return dataclasses.replace(state, round=plan.round), plan, torch.zeros(len(state.models), len(plan.clients))


def _if_enough(
    plan: RoundPlan, did: str = "could take part", so: str = "no client trains, and models stay as they are"
) -> RoundPlan:
    """Return the plan, or one without clients if fewer are left than are required."""
    left = len(plan.clients)
    if left == 0 or left >= plan.fewest:
        return plan
    warn_user(
        f"round {plan.round}: {counted(left, 'client')} {did}, fewer than the {plan.fewest} that are required; {so}"
    )
    return plan.only(lambda client: False)
