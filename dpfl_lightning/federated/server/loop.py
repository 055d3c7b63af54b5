"""The server's side of a run: plan, accept, train, weigh, combine, step. Strategies decide, callbacks watch."""

import dataclasses
import time
from collections.abc import Callable
from contextlib import closing
from typing import NoReturn

import torch
from torch import Tensor

from dpfl_lightning.errors import UserError, warn_user
from dpfl_lightning.federated.messages.clients import LostClients
from dpfl_lightning.federated.messages.plan import LocalTraining, RoundPlan
from dpfl_lightning.federated.server import aggregate, summary
from dpfl_lightning.federated.server.callback import answer_of, notify
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.run import Run
from dpfl_lightning.federated.server.strategy import fold, sole_answer
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.runtime.stopping import between_rounds
from dpfl_lightning.runtime.text import counted

_DIVERGED = "a parameter of the new model is not finite, or above 1e6"


class ServerLoop(Run):
    """The rounds of a run. See `Run` for its arguments."""

    def run(self, resume: bool = False) -> RunResult:
        """Train all rounds, or (`resume`) those that are left. Under a launcher all ranks call it, and return the same;
        the module is then the trained model on every rank.

        Raises UserError if the folder is taken, has nothing to resume, or some clients were lost.
        """
        return self.clients.run(lambda: self._run(resume))

    def _run(self, resume: bool) -> RunResult:
        saved = self._open(resume)
        with closing(self.clients):
            state = self._begin() if saved is None else self._restore(saved)
            with between_rounds() as check_signals:
                try:
                    notify(self.watching, "on_fit_start", self.view(state))
                    reason = self.snapshot["ended"] or self.all_rounds(state, check_signals)
                    result = self._end(reason, finished=True)
                except BaseException as error:
                    interrupted = isinstance(error, KeyboardInterrupt)
                    resume_with = f"resume with: {self.resume_command}"
                    reason = "interrupted" if interrupted else f"{type(error).__name__}: {error}"
                    note = f"The run was saved up to its last checkpoint. When you have fixed the cause, {resume_with}"
                    try:
                        self._end(f"{reason}; {resume_with}", finished=False, interrupted=interrupted)
                    except OSError as failed_write:  # of a full disk, which may have been the cause, too
                        failed_write.add_note(note)
                        raise
                    if isinstance(error, LostClients):
                        raise UserError(f"{error} The run was saved; {resume_with}") from None
                    error.add_note(note)
                    raise
                check_signals()  # a signal that came in the last round
            return result

    def all_rounds(self, state: ServerState, check_signals: Callable[[], None]) -> str:
        """Train until the last round, until no client can pay, or until a strategy stops; return the reason."""
        while state.round < self.last_round:
            check_signals()
            view = self.view(state)
            reasons = [answer_of(strategy, "stop", view) for strategy in self.strategies]
            if any(reasons):
                return "; ".join(filter(None, reasons))
            notify(self.watching, "on_round_start", view)
            begun = time.perf_counter()
            self.traffic.begin_round()
            after, plan, weights = self.one_round(state)
            if not (plan.clients or self.traffic.asked or self.clients.can_pay()):
                if state.round == 0:
                    return "nothing was trained: no client's budget pays for one round with its noise_multiplier"
                return f"every client has spent its budget after {state.round} round{'s' * (state.round != 1)}"
            state, seconds = after, time.perf_counter() - begun
            self.totals.training_seconds += seconds
            sent = self.traffic.metrics(plan, self.view(state), self.totals.metrics)
            self.totals.metrics = summary.round_metrics(self.strategies, self.view(state), plan, weights, sent)
            self.totals.records += round(sum(plan.expected_records))
            self._remember(state)
            if plan.round % self.evaluate_every == 0 or plan.round == self.rounds:
                self.evaluated = {plan.round: self.evaluate(state)}
            notify(self.watching, "on_round_end", self.view(state), self._report(plan, weights, seconds))
        if self.last_round < self.rounds:
            return f"{state.round} of the {self.rounds} planned rounds are done, as was asked"
        return f"all {self.rounds} rounds are done" if self.rounds > 1 else "the one round is done"

    def one_round(self, state: ServerState) -> tuple[ServerState, RoundPlan, Tensor]:
        """Plan, charge, train, weigh, combine, step. Every line calls one hook, or sends one message to the clients."""
        self._replan(state)
        view = self.view(state)
        plan = fold(self.strategies, "plan_round", self.plan_of_all(view), view)
        plan = _if_enough(dataclasses.replace(plan, fewest=max(plan.fewest, self.min_participants)))
        plan = _if_enough(self.clients.accept(plan))  # charged: a crash never under-reports
        if not plan.clients:
            return self._unmoved(state, plan)
        dropped = self._lost_before | self.traffic.lost(plan, view)
        raw_weights = aggregate.raw_weights_from_facts(self.strategies, plan, view)  # None: single updates must be seen
        if raw_weights is not None:
            raw_weights = raw_weights * torch.tensor([client not in dropped for client in plan.clients])
        updates = self._clients_work(lambda: self.clients.train(plan, state.models, raw_weights)).without(dropped)
        if view.module.personal and isinstance(plan.job, LocalTraining):
            updates.erase(view.module.personal_mask)  # honest updates have zeros there
        self._write_lost(updates, dropped)
        arrived, raw_weights = aggregate.without_lost(plan, updates, raw_weights, self.facts, dropped)
        if not arrived.clients and not dropped.union(updates.absent).issuperset(updates.lost):
            self._stop_before_waste(state, plan, "no update of this round is finite and below 1e6")
        plan = _if_enough(arrived, "sent an update that arrived", "models stay as they are")
        if not plan.clients:
            return self._unmoved(state, plan)
        self.totals.noise_std[list(updates.clients)] = torch.tensor(updates.noise_std, dtype=torch.float64)
        if raw_weights is None:
            raw_weights = aggregate.raw_weights(self.strategies, plan, updates, view)  # [K, C]
        weights = aggregate.normalised(raw_weights)  # a row of zeros leaves its model unchanged
        combined = sole_answer(self.strategies, "combine", updates, weights, view)
        if combined is None:
            combined = fold(self.strategies, "scale", aggregate.combine(raw_weights, updates), updates, weights, view)
        stepped = sole_answer(self.strategies, "step", state, combined, view)
        after = aggregate.step(state, combined) if stepped is None else stepped
        after = self._without_diverged(state, after, plan, weights)
        after = fold(self.strategies, "after_step", after, updates, view)
        if aggregate.diverged(after).any():
            self._stop_before_waste(state, plan, _DIVERGED)
        return dataclasses.replace(after, round=plan.round), plan, weights

    def _without_diverged(
        self, state: ServerState, after: ServerState, plan: RoundPlan, weights: Tensor
    ) -> ServerState:
        """The models after a step, but those that diverged as they were; ends the run if all that moved diverged."""
        diverged = aggregate.diverged(after)
        if not diverged.any():
            return after
        if diverged[weights.cpu().any(dim=1)].all():
            self._stop_before_waste(state, plan, _DIVERGED)
        clients = [client for client, row in zip(plan.clients, plan.model_of, strict=True) if diverged[row]]
        names = ", ".join(map(self.facts.name_of, clients))
        warn_user(
            f"round {plan.round}: {int(diverged.sum())} of {len(diverged)} models stay as they were before this round, "
            f"because they diverged: {_DIVERGED}. Charged in vain: clients {names}"
        )
        kept = diverged.to(after.models.device)[:, None]
        return dataclasses.replace(after, models=torch.where(kept, state.models, after.models))

    def _stop_before_waste(self, state: ServerState, plan: RoundPlan, got: str) -> NoReturn:
        """End the run before another round is charged, with the models before this round."""
        self._remember(dataclasses.replace(state, round=plan.round))
        raise UserError(
            f"`training` must not diverge, got in round {plan.round}: {got}. The round was charged; the run ends "
            "before the next charge, with the models before this round. Start a new run with a lower "
            "clients.learning_rate, or with other options of its strategies."
        )

    def _unmoved(self, state: ServerState, plan: RoundPlan) -> tuple[ServerState, RoundPlan, Tensor]:
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
