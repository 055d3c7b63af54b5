"""The state of a run at the server: what strategies see of it, what a checkpoint keeps, what it reports."""

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dpfl_lightning.config.options import NetworkOptions, PrivacyOptions
from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.federated.messages.clients import Clients, RunPlan
from dpfl_lightning.federated.messages.evaluation import ClientModels, Evaluation, Score, mean_metrics
from dpfl_lightning.federated.messages.facts import ClientSettings, Facts
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery, Query
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server import summary
from dpfl_lightning.federated.server.callback import Callback, notify
from dpfl_lightning.federated.server.folder import RunFolder
from dpfl_lightning.federated.server.results import RoundReport, RunInfo, RunResult, RunTotals
from dpfl_lightning.federated.server.settings import accountant_of, default_schedule, solved
from dpfl_lightning.federated.server.strategy import Strategy, fold, overrides, sole_answer, strategy_digests
from dpfl_lightning.federated.server.summary import accuracy_of_groups, true_groups
from dpfl_lightning.federated.server.traffic import Network, Traffic
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.models.learning_rates import Constant
from dpfl_lightning.models.model import Model
from dpfl_lightning.models.optimizers import LocalOptimizer
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.accounting.guarantee import EXACT_TIMES, Guarantee, weakest
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, numbered, once_each
from dpfl_lightning.runtime.text import rounded_up_duration

T = TypeVar("T")


class Run:
    """One run over clients that are reached by messages alone; `ServerLoop` adds its rounds.

    `model` is the server's copy of the net, whose parameters are the start; `privacy` lacks the key of a simulation,
    and None is a run without privacy. For the other arguments see `FederatedLoop`.
    """

    def __init__(
        self,
        clients: Clients,
        model: Model,
        facts: Facts,
        settings: tuple[ClientSettings, ...],
        privacy: PrivacyOptions | None,
        strategies: Sequence[Strategy],
        callbacks: Sequence[Callback],
        *,
        rounds: int,
        optimizer: LocalOptimizer | None,
        rates: Constant,
        network: NetworkOptions,
        seed: int,
        output_dir: Path,
        evaluate_every: int,
        exact_times: bool,
        options: Mapping[str, Any],
        new_net: Callable[[int], nn.Module] | None,
        resume_command: str,
    ) -> None:
        require(rounds >= 1, "rounds", "be >= 1", rounds)
        require(evaluate_every >= 1, "evaluation.every", "be >= 1", evaluate_every)
        fewest, most = network.min_participants, len(settings)
        require(fewest <= most, "network.min_participants", f"be at most the {most} clients of the run", fewest)
        self.clients, self.facts, self.settings, self.privacy = clients, facts, settings, privacy
        self.strategies, self.callbacks = list(strategies), list(callbacks)
        self._clip_norm = tuple(client.clip_norm for client in settings)
        self._learning_rate = tuple(client.learning_rate for client in settings)
        self.model = copy.deepcopy(model)  # strategies may overwrite its parameters
        self._initial = model.flat
        self.rounds, self.last_round, self.seed, self.evaluate_every = rounds, rounds, seed, evaluate_every
        self.optimizer, self.rates = optimizer, rates
        known = optimizer is not None and math.isfinite(optimizer.independent_steps(1))
        for strategy in self.strategies:
            name = type(strategy).__name__
            advice = f"{name} must know the noise in every update. noise_aware with `noise: estimated` need not."
            got = "the optimizer of the model" if optimizer is None else type(optimizer).__name__
            require(known or not strategy.needs_noise_std, "clients.optimizer", f"be SGD with {name}", got, advice)
        self.output_dir, self.options, self.resume_command = output_dir, dict(options), resume_command
        self.new_net = new_net
        self.exact_times = exact_times or clients.simulated or privacy is None  # nobody is protected without privacy
        caveats = [one for strategy in self.strategies for one in strategy.caveats]
        self.caveats = (*clients.caveats, *caveats, *((EXACT_TIMES,) if exact_times else ()))
        self.accountant = accountant_of(privacy)
        self.min_participants = network.min_participants
        self.traffic = Traffic(Network.of(network, len(settings), seed, facts.names))
        self.totals, self.strategy_notes = RunTotals.start(len(settings)), tuple[str, ...]()
        self.evaluated: dict[int, Evaluation] = {}  # round -> scores, of the latest evaluated round only
        self._answered: set[int] = set()  # clients that answered a query of the round
        self._final_models: dict[int, ClientModels] = {}  # round -> models, of the latest such round only
        self._strategy_digests = strategy_digests(self.strategies)  # before they remember anything

    @property
    def watching(self) -> list[Callback]:
        """The strategies that watch, and the callbacks."""
        return [part for part in (*self.strategies, *self.callbacks) if isinstance(part, Callback)]

    def view(self, state: ServerState) -> View:
        """What strategies see before round `state.round + 1`."""
        return View(
            round=state.round + 1,
            state=state,
            facts=self.facts,
            module=self.model,
            schedule=self.schedule,
            run=self.info,
            clip_norm=self._clip_norm,
            learning_rate=self._learning_rates(state.round + 1),
            seed=self.seed,
            guarantees=self.clients.guarantees,
            ask=self._ask,
            new_model=self._new_model,
            solve=functools.partial(solved, accountant=self.accountant),
            used=self.clients.used,
            optimizer=self.optimizer,
        )

    def _learning_rates(self, round: int) -> tuple[float, ...]:
        factor = self.rates.factor(round, self.rounds)
        return self._learning_rate if factor == 1 else tuple(factor * rate for rate in self._learning_rate)

    def evaluate(self, state: ServerState) -> Evaluation:
        return self.clients.evaluate(self.final_models(state))

    def final_models(self, state: ServerState) -> ClientModels:
        """The models of the hook `final_models`, called once a round (it may train), or the server's models."""
        if state.round not in self._final_models:
            answer = sole_answer(self.strategies, "final_models", state, self.view(state))
            self._final_models = {state.round: answer or ClientModels(state.models, state.model_of)}
        return self._final_models[state.round]

    def _ask(self, query: Query) -> Answers:
        question = ChargedQuery.of(query)
        released = self._clients_work(lambda: self.clients.ask(question, self.state.round + 1))
        self._answered.update(released)
        released = self.traffic.ask(question.only(released), self.state.models, released, self.state.round + 1)
        return {client: question.read(client, answer) for client, answer in released.items()}

    def _new_model(self, seed: int) -> Tensor:
        advice = "Give FederatedLoop what builds the net from a seed: a strategy begins with several models, or again."
        require(self.new_net is not None, "new_net", "be a function", None, advice)
        assert self.new_net is not None  # for mypy
        with torch.random.fork_rng(devices=[]):
            model = Model(self.new_net(seed)).flat.to(self.clients.device)
        must = f"build a net of {self.model.num_params} parameters"
        require(len(model) == self.model.num_params, "new_net", must, len(model))
        return model

    def plan_schedule(self) -> RunSchedule:
        """Plan every release of the run and solve its noise. The ledger refuses any other release."""
        self.info = self._info(first_round=1)
        self.schedule = default_schedule(self.settings, self.privacy, self.rounds)
        self.schedule = fold(self.strategies, "plan_run", self.schedule, self.view(self._one_model()))
        self.schedule = solved(self.schedule, self.accountant)
        if self.replans:
            once_each(ClientSchedule.check_filter, self.schedule.clients)
        self.first_purpose = self.schedule.clients[0].planned[0].purpose
        self._plan_of_all: RoundPlan | None = None
        return self.schedule

    def plan_of_all(self, view: View) -> RoundPlan:
        """The default plan of a round of all clients; mechanisms and steps stay as long as the schedule does."""
        if self._plan_of_all is None:
            self._plan_of_all = view.plan(self.first_purpose)
        model_of, rates = tuple(view.state.model_of), view.learning_rate
        return dataclasses.replace(self._plan_of_all, round=view.round, model_of=model_of, learning_rate_of=rates)

    def run_plan(self) -> RunPlan:
        """The whole run as it is proposed to the clients; call `plan_schedule` first."""
        accountant, digests, caveats = self.accountant.name, self._strategy_digests, self.caveats
        terms = (self.rounds, self.seed, self.settings, self.schedule, accountant, caveats, digests)
        return RunPlan(*terms, self.replans, self.options, self.optimizer, self.rates)

    @property
    def replans(self) -> bool:
        """Whether a strategy may change the schedule during the run."""
        return any(overrides(strategy, "replan") for strategy in self.strategies)

    def describe(self) -> list[str]:
        """The strategies' sentences about the run; call `plan_schedule` first."""
        view = self.view(self._one_model())
        return [words for strategy in self.strategies for words in strategy.describe(view)]

    def _replan(self, state: ServerState) -> None:
        """Let strategies change the schedule of what is left."""
        changed = fold(self.strategies, "replan", self.schedule, self.view(state))
        if changed is not self.schedule:
            self.schedule, self._plan_of_all = solved(changed, self.accountant), None
            self.clients.change(self.schedule)

    def _one_model(self) -> ServerState:
        return ServerState(self._initial[None], (0,) * self.facts.num_clients)

    def _clients_work(self, work: Callable[[], T]) -> T:
        begun = time.perf_counter()
        answer = work()
        self.totals.client_seconds += time.perf_counter() - begun
        return answer

    def _open(self, resume: bool) -> dict[str, Any] | None:
        """Plan the run and open its folder and ledger; return the checkpoint to resume from, if any."""
        reopened = RunFolder.reopen(self.output_dir) if resume else None
        planned = self.clients.planned_rounds(self.output_dir) if resume else 0
        self.rounds = max(self.rounds, planned)  # noise was solved for them; the run may stop earlier
        self.plan_schedule()  # may raise, before anything is written
        self.strategy_notes = tuple(self.describe())
        self.folder = reopened or RunFolder.claim(self.output_dir, self.options)
        saved = self.folder.load_checkpoint(self.clients.device, self._seal)  # None in a new folder
        if resume and not planned:
            self.folder.write_options(self.options)
        clients, ended = (None, False) if saved is None else (saved["clients"], bool(saved["ended"]))
        try:
            self.clients.begin(self.output_dir, self.run_plan(), clients, ended)
        except BaseException:
            if not resume and not self.clients.planned_rounds(self.output_dir):
                self.folder.release()
            raise
        return saved

    def _begin(self) -> ServerState:
        self.totals = RunTotals.start(len(self.settings))
        self.info = self._info(first_round=1, measured=True)
        state = self._one_model()
        self._remember(sole_answer(self.strategies, "initialise", state, self.view(state)) or state)
        return self.state

    def _restore(self, saved: dict[str, Any]) -> ServerState:
        models, model_of, round = saved["models"], saved["model_of"].tolist(), saved["round"]
        fits = models.shape[1:] == self._initial.shape and {*model_of} <= {*range(len(models))}
        fits = fits and len(model_of) == self.facts.num_clients and 0 <= round <= self.rounds
        require(fits, "resume", "have a checkpoint of this run", f"one of round {round}, models {list(models.shape)}")
        self.state = state = ServerState(models, tuple(model_of), round)
        for name, part in self._named_parts():
            if name in saved["callbacks"]:
                part.load_state_dict(saved["callbacks"][name])
        self.clients.load_state_dict(saved["clients"])
        self.totals = RunTotals.of(saved)
        self.snapshot, self._lost_before = dict(saved), frozenset(saved["lost"])
        if not (self.clients.simulated or saved["ended"]) and self.clients.was_charged(state.round + 1):
            words, last = f"round {state.round + 1} was broken off", state.round + 1 == self.rounds
            if self.schedule.reserve or not last:
                words += ": it is charged again, with fresh noise"
            if not self.schedule.reserve:
                what = "to repeat it" if last else "for the last round"
                words += f", and without privacy.reserve_rounds nothing is left {what}"
            warn_user(words)
        self._replan(state)
        self.info = self._info(first_round=state.round + 1, measured=True)
        return state

    def _remember(self, state: ServerState) -> None:
        """Write the complete round to disk, before any result of it is shown."""
        self.state, self._lost_before = state, frozenset[int]()
        self.snapshot = {
            "models": state.models,
            "model_of": torch.from_numpy(np.array(state.model_of, dtype=np.int64)),
            "round": state.round,
            "callbacks": {name: part.state_dict() for name, part in self._named_parts()},
            "clients": self.clients.state_dict(),
            **self.totals.saved(),
            "lost": [],
            "ended": None,
        }
        self.folder.save_checkpoint(self.snapshot, self._seal)

    def _write_lost(self, updates: ClientUpdates, dropped: frozenset[int]) -> None:
        """Write down who is lost in this round, before anything is computed from it: if it is repeated they stay lost.

        `dropped` are known from the seed, or were written down before.
        """
        self.traffic.lost_updates = len(updates.lost)
        if not dropped.issuperset(updates.absent):
            self.snapshot["lost"] = sorted(self._lost_before.union(updates.absent))
            self.folder.save_checkpoint(self.snapshot, self._seal)

    def _seal(self, digest: bytes) -> bytes:
        return self.clients.seal(self.output_dir, digest)

    def _named_parts(self) -> list[tuple[str, Strategy | Callback]]:
        """Parts named by class, and by number in it, because a resumed run may have other callbacks."""
        parts: list[Strategy | Callback] = [*self.strategies, *self.callbacks]
        kinds = [type(part).__qualname__ for part in parts]
        return [(f"{kind} {kinds[:i].count(kind)}", parts[i]) for i, kind in enumerate(kinds)]

    def _end(self, reason: str, finished: bool, interrupted: bool = False) -> RunResult:
        if finished:
            self.snapshot["ended"] = reason  # resumed, it changes nothing
            self.folder.save_checkpoint(self.snapshot, self._seal)
            if self.state.round not in self.evaluated:
                self.evaluated = {self.state.round: self.evaluate(self.state)}
        self.clients.end(finished)
        guarantees = self.clients.guarantees()
        final_models = self.final_models(self.state) if finished else None
        models = self.state.models if final_models is None else final_models.models
        self.model.load(models[0] if len(models) == 1 else self._initial)
        result = self._result(reason, interrupted, guarantees, final_models)
        if final_models is not None:
            self.folder.save_models(self.model, final_models)
            different, places = numbered(guarantees)  # usually few: `clients` has the place of each client's
            statements = [guarantee.as_dict() for guarantee in different]
            rows = {"ledger": result.ledger, "guarantees": statements, "clients": places}
            self.folder.save_json("guarantees.json", rows)
            self.folder.save_json("result.json", result.as_dict())
        notify(self.watching, "on_fit_end", self.view(self.state), result)
        return result

    def _info(self, first_round: int, measured: bool = False) -> RunInfo:
        """The description of the run; `measured` estimates its time, unless a strategy's work has unknown length."""
        clients, seconds = self.clients, math.nan
        if measured and not any(strategy.trains_on_server for strategy in self.strategies):
            batch = round(median(client.batch_size for client in self.settings))
            records = sum(
                event.steps * event.sample_rate * client.num_records
                for client, schedule in zip(self.settings, self.schedule.clients, strict=True)
                for event in schedule.events()
                if isinstance(event, NoisedEvent)
            )
            records_a_round = records / (self.rounds + self.schedule.reserve)
            seconds = clients.seconds_per_record(batch) * records_a_round * (self.rounds - first_round + 1)
        return RunInfo(
            output_dir=self.output_dir,
            rounds=self.rounds,
            first_round=first_round,
            num_params=self.model.num_params,
            budgets=tuple(client.epsilon for client in self.settings),
            estimated_seconds=seconds,
            engine=clients.description,
            device=str(clients.device),
            sampling=clients.sampling,
            accountant=self.accountant,
            noise=clients.noise,
            simulated=clients.simulated,
            exact_times=self.exact_times,
            options=self.options,
            strategy_notes=self.strategy_notes,
            task=self.model.task_note,
            strategies=tuple(self.options.get("strategies") or (type(one).__name__ for one in self.strategies)),
            replans=self.replans,
        )

    def _report(self, plan: RoundPlan, weights: Tensor, seconds: float) -> RoundReport:
        scores = self.evaluated.get(plan.round)
        answered, self._answered = tuple(sorted(self._answered)), set()
        return RoundReport(
            round=plan.round,
            rounds=self.rounds,
            seconds=seconds if self.exact_times else None,
            records=round(sum(plan.expected_records)),
            clients=plan.clients,
            weights=weights,
            epsilon_spent=self.clients.spent(),
            client_accuracy=None if scores is None else tuple(score.accuracy for score in scores.clients),
            client_scores=() if scores is None else scores.clients,
            diagnostics=self.clients.diagnostics(),
            metrics=self.totals.metrics,
            answered=answered,
            **_on_test(scores),
        )

    def _result(
        self, reason: str, interrupted: bool, guarantees: Sequence[Guarantee], final_models: ClientModels | None
    ) -> RunResult:
        """The result of a run that has ended; `final_models` is None if it has not finished."""
        finished, totals = final_models is not None, self.totals
        scores, groups = self.evaluated.get(self.state.round), true_groups(self.facts)
        accuracies = [] if scores is None else [score.accuracy for score in scores.clients]
        view, shown = self.view(self.state), float if self.exact_times else rounded_up_duration
        return RunResult(
            output_dir=str(self.output_dir),
            finished=finished,
            rounds=self.state.round,
            wall_seconds=shown(totals.wall_seconds),
            training_seconds=shown(totals.training_seconds),
            client_seconds=shown(totals.client_seconds),
            records_per_second=totals.records / max(shown(self.snapshot["seconds"]), 1e-9),
            reason=reason,
            interrupted=interrupted,
            guarantee=weakest(guarantees),
            ledger=self.clients.ledger_head(),
            noise=self.info.noise,
            task=self.model.task_note,
            test_set=self.facts.test_set,
            simulated=self.clients.simulated,
            at_sites=self.facts.at_sites,
            clients=self._client_rows(guarantees, scores, self.state if final_models is None else final_models),
            metrics=summary.for_json(totals.metrics),
            client_embedding=sole_answer(self.strategies, "client_embedding", view) if finished else None,
            model=self.model.net if final_models is not None and len(final_models.models) == 1 else None,
            accuracy_of_groups=accuracy_of_groups(accuracies, groups),
            **summary.accuracy_over_clients(accuracies),
            **_on_test(scores),
            metrics_mean=mean_metrics([] if scores is None else [score.metrics for score in scores.clients]),
        )

    def _client_rows(
        self, guarantees: Sequence[Guarantee], scores: Evaluation | None, models: ClientModels | ServerState
    ) -> tuple[dict[str, Any], ...]:
        """The `clients` of the result."""
        groups, rows = true_groups(self.facts), []
        noise_multipliers = once_each(summary.noise_multiplier, self.schedule.clients)
        noise_stds = [None if math.isnan(std) else std for std in self.totals.noise_std.tolist()]
        for client, settings in enumerate(self.settings):
            schedule, account = self.schedule.clients[client], self.clients.account(client)
            score = Score(None, math.nan) if scores is None else scores.clients[client]
            row = {
                "client": client,
                "name": self.facts.name_of(client),
                "epsilon_spent": finite_or_none(guarantees[client].epsilon),
                "epsilon_budget": finite_or_none(settings.epsilon),
                "delta": schedule.delta,
                "noise_multiplier": noise_multipliers[client],
                "noise_std": noise_stds[client],
                "batch_size": schedule.batch_size(settings.num_records),
                "num_records": settings.num_records,
                "releases": account.releases,
                "steps": account.steps,
                "accuracy": score.accuracy,
                "loss": finite_or_none(score.loss),
                "metrics": dict(score.metrics),
                "model": models.model_of[client],
                "true_group": None if groups is None else groups[client],
            }
            rows.append(row)
        return tuple(rows)


def _on_test(scores: Evaluation | None) -> dict[str, Any]:
    if scores is None:
        return {"test_accuracy": None, "test_loss": None}
    test = scores.test
    return {"test_accuracy": test.accuracy, "test_loss": test.loss, "test_metrics": dict(test.metrics)}
