"""A run at the server: its folder and checkpoints, its totals, and what it reports."""

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.config.options import NetworkOptions
from dpfl_lightning.errors import UserError, require, warn_user
from dpfl_lightning.federated.messages.clients import Clients, LostClients, RunPlan
from dpfl_lightning.federated.messages.evaluation import ClientModels, Evaluation, Score, mean_metrics
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery, Query
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server import summary
from dpfl_lightning.federated.server.callback import Callback, answer_of, notify
from dpfl_lightning.federated.server.curves import of_round
from dpfl_lightning.federated.server.folder import RunFolder
from dpfl_lightning.federated.server.results import (
    FORMAT,
    GUARANTEES,
    RESULT,
    PlannedClients,
    RoundReport,
    RunInfo,
    RunResult,
    RunTotals,
)
from dpfl_lightning.federated.server.round import Diverged, Round
from dpfl_lightning.federated.server.run import assumptions
from dpfl_lightning.federated.server.settings import RunConfig, default_schedule, solved
from dpfl_lightning.federated.server.strategy import Strategy, clients_train, fold, sole_answer, strategy_digests
from dpfl_lightning.federated.server.summary import accuracy_of_groups, true_groups
from dpfl_lightning.federated.server.traffic import Network, Traffic
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.models.model import Model
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.accounting.guarantee import FILTER, Guarantee, weakest
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, numbered, once_each
from dpfl_lightning.runtime.stopping import between_rounds
from dpfl_lightning.runtime.text import counted, rounded_up_duration

T = TypeVar("T")


class RunSession:
    """One run of `config` over clients that are reached by messages alone: what is planned, on disk and counted.

    `model` is the server's copy of the module, whose parameters are the start.
    """

    def __init__(self, clients: Clients, model: Model, config: RunConfig) -> None:
        self.clients, self.config, self.last_round = clients, config, config.rounds
        self.model = copy.deepcopy(model)  # strategies may overwrite its parameters
        self._initial = model.flat
        terms = config.network, len(config.settings), config.seed, config.facts.names
        self.traffic = Traffic(self.model, None if config.network == NetworkOptions() else Network(*terms))
        self.totals = RunTotals.start(len(config.settings))
        self.evaluated: dict[int, Evaluation] = {}  # round -> scores, of the latest evaluated round only
        self._final_models: dict[int, ClientModels] = {}  # round -> models, of the latest such round only
        self._strategy_digests = strategy_digests(config.strategies)  # before they remember anything

    @property
    def output_dir(self) -> Path:
        return self.config.output_dir

    # -- the plan

    def plan_schedule(self) -> RunSchedule:
        """Plan every release of the run and solve its noise. The ledger refuses any other release."""
        config = self.config
        self.info = self._described()
        self.schedule = default_schedule(config.settings, config.privacy, config.rounds)
        self._plan_for(fold(config.strategies, "plan_run", self.schedule, self.view(self._one_model())))
        if config.replans:
            once_each(ClientSchedule.check_filter, self.schedule.clients)
        return self.schedule

    def _plan_for(self, schedule: RunSchedule) -> None:
        """Solve the noise of a schedule, and keep the default plan of its rounds."""
        self.schedule = solved(schedule, self.config.accountant)
        self._default_plan = self.view(self._one_model()).plan(self.schedule.clients[0].planned[0].purpose)

    def run_plan(self) -> RunPlan:
        """The whole run as it is proposed to the clients; call `plan_schedule` first."""
        config = self.config
        terms = (config.rounds, config.seed, config.settings, self.schedule, config.accountant.name, config.caveats)
        changes = config.replans, config.options, config.optimizer, config.rates
        return RunPlan(*terms, self._strategy_digests, *changes)

    def _code(self) -> dict[str, Any]:
        from dpfl_lightning.models.saved import code_of

        facts, model = self.config.facts, self.config.options.get("model", {})
        return code_of(self.model.net, model, facts.input_shape, facts.num_classes)

    def describe(self) -> list[str]:
        """The strategies' sentences about the run; call `plan_schedule` first."""
        view = self.view(self._one_model())
        return [words for strategy in self.config.strategies for words in strategy.describe(view)]

    def _one_model(self) -> ServerState:
        return ServerState(self._initial[None], (0,) * self.config.facts.num_clients)

    # -- what strategies see, and ask

    def view(self, state: ServerState) -> View:
        """What strategies see before round `state.round + 1`."""
        config, round = self.config, state.round + 1
        scores = self.evaluated.get(state.round) if config.facts.test_set else None
        return View(
            round=round,
            state=state,
            facts=config.facts,
            module=self.model,
            schedule=self.schedule,
            run=self.info,
            clip_norm=config.clip_norm,
            learning_rate=config.learning_rates(round),
            seed=config.seed,
            guarantees=self._stated,
            ask=self._ask,
            new_model=self._new_model,
            solve=functools.partial(solved, accountant=config.accountant),
            used=self.clients.used,
            optimizer=config.optimizer,
            test_score=None if scores is None else scores.test,
        )

    def evaluate(self, state: ServerState) -> Evaluation:
        return self.clients.evaluate(self.final_models(state))

    def _evaluate_round(self, state: ServerState) -> None:
        if state.round % self.config.evaluate_every == 0 or state.round == self.config.rounds:
            self.evaluated = {state.round: self.evaluate(state)}

    def final_models(self, state: ServerState) -> ClientModels:
        """The models of the hook `final_models`, called once a round (it may train), or the server's models."""
        if state.round not in self._final_models:
            answer = sole_answer(self.config.strategies, "final_models", state, self.view(state))
            self._final_models = {state.round: answer or ClientModels(state.models, state.model_of)}
        return self._final_models[state.round]

    def _ask(self, query: Query) -> Answers:
        question, round = ChargedQuery.of(query), self.state.round + 1
        released = self._clients_work(lambda: self.clients.ask(question, round))
        released = self.traffic.ask(question.only(released), self.state.models, released, round)
        return {client: question.read(client, answer) for client, answer in released.items()}

    def _new_model(self, seed: int) -> Tensor:
        build = self.config.new_net
        if build is None:
            advice = "Give FederatedLoop what builds the model: a strategy begins with several models, or again."
            raise UserError(f"`new_net` must be a function, got None. {advice}")
        with torch.random.fork_rng(devices=[]):
            model = Model(build(seed)).flat.to(self.clients.device)
        must = f"build a model of {self.model.num_params} parameters"
        require(len(model) == self.model.num_params, "new_net", must, len(model))
        return model

    def _clients_work(self, work: Callable[[], T]) -> T:
        begun = time.perf_counter()
        answer = work()
        self.totals.client_seconds += time.perf_counter() - begun
        return answer

    # -- begin, resume, end

    def run(self, resume: bool = False) -> RunResult:
        """Train all rounds, or (`resume`) those that are left. Under a launcher all ranks call it, and return the same;
        the module is then the trained model on every rank.

        Raises UserError if the folder is taken, has nothing to resume, or some clients were lost.
        """
        return self.clients.run(lambda: self._run(resume))

    def _run(self, resume: bool) -> RunResult:
        saved = self._open(resume)
        with closing(self.clients):
            if saved is None:
                self._begin()
            else:
                self._restore(saved)
            self._describe_plan()
            with between_rounds() as check_signals:
                try:
                    notify(self.config.watching, "on_fit_start", self.view(self.state))
                    reason = self.snapshot["ended"] or self.all_rounds(check_signals)
                    result = self._end(reason, finished=True)
                except BaseException as error:
                    self._break_off(error)
                    raise
                check_signals()  # a signal that came in the last round
            return result

    def _break_off(self, error: BaseException) -> None:
        """Report a run that an error or a signal ends, and say how to resume it, unless it has diverged."""
        if isinstance(error, Diverged):
            self._end("training diverged", finished=False)
            return
        resume, interrupted = f"resume with: {self.config.resume_command}", isinstance(error, KeyboardInterrupt)
        reason = "interrupted" if interrupted else f"{type(error).__name__}: {error}"
        note = f"The run was saved up to its last checkpoint. When you have fixed the cause, {resume}"
        try:
            self._end(f"{reason}; {resume}", finished=False, interrupted=interrupted)
        except OSError as failed_write:  # of a full disk, which may have been the cause, too
            failed_write.add_note(note)
            raise
        if isinstance(error, LostClients):
            raise UserError(f"{error} The run was saved; {resume}") from None
        error.add_note(note)

    def _open(self, resume: bool) -> dict[str, Any] | None:
        """Plan the run and open its folder and ledger; return the checkpoint to resume from, if any."""
        path = self.output_dir
        reopened = RunFolder.reopen(path) if resume else None
        planned = self.clients.planned_rounds(path) if resume else 0
        if planned > self.config.rounds:  # noise was solved for them; the run may stop earlier
            self.config = dataclasses.replace(self.config, rounds=planned)
        self.plan_schedule()  # may raise, before anything is written
        self.info = dataclasses.replace(self.info, strategy_notes=tuple(self.describe()))
        self.folder = reopened or RunFolder.claim(path, self.config.options)
        saved = self.folder.load_checkpoint(self.clients.device, self._seal)  # None in a new folder
        if resume and not planned:
            self.folder.write_options(self.config.options)
        clients, ended = (None, False) if saved is None else (saved["clients"], bool(saved["ended"]))
        try:
            self.clients.begin(path, self.run_plan(), clients, ended)
        except BaseException:
            if not resume and not self.clients.planned_rounds(path):
                self.folder.release()
            raise
        self.info = dataclasses.replace(self.info, engine=self.clients.description, account=self.clients.account_words)
        return saved

    def _begin(self) -> None:
        self.totals = RunTotals.start(len(self.config.settings))
        self._estimate_time(first_round=1)
        state = self._one_model()
        state = sole_answer(self.config.strategies, "initialise", state, self.view(state)) or state
        own = len(state.models) > 1 and state.model_of == tuple(range(len(state.models)))
        self._one_start = own and bool((state.models == state.models[:1]).all())
        self._remember(state)

    def _restore(self, saved: dict[str, Any]) -> None:
        round = saved["round"]
        self.state = ServerState(saved["models"], tuple(saved["model_of"].tolist()), round)
        self._one_start = saved["one_start"]
        for name, part in self._named_parts():
            if name in saved["callbacks"]:
                part.load_state_dict(saved["callbacks"][name])
        self.clients.load_state_dict(saved["clients"])
        self.totals = RunTotals.of(saved)
        self.snapshot, self._lost_before = dict(saved), frozenset(saved["lost"])
        if not (self.clients.source.repeats or saved["ended"]) and self.clients.was_charged(round + 1):
            words, last = f"round {round + 1} was broken off", round + 1 == self.config.rounds
            if self.schedule.reserve or not last:
                words += ": it is charged again, with fresh noise"
            if not self.schedule.reserve:
                what = "to repeat it" if last else "for the last round"
                words += f", and without privacy.reserve_rounds nothing is left {what}"
            warn_user(words)
        if round and not saved["ended"]:
            self._evaluate_round(self.state)  # checkpoints are written before
        self._replan()
        self._estimate_time(first_round=round + 1)

    def _remember(self, state: ServerState) -> None:
        """Write the complete round to disk, before any result of it is shown."""
        self.state, self._lost_before = state, frozenset[int]()
        self.snapshot = {
            "models": state.models,
            "model_of": torch.from_numpy(np.array(state.model_of, dtype=np.int64)),
            "round": state.round,
            "one_start": self._one_start,  # of models that each client has of its own: their mean is a model, too
            "callbacks": {name: part.state_dict() for name, part in self._named_parts()},
            "clients": self.clients.state_dict(),
            **self.totals.saved(),
            "lost": [],
            "ended": None,
        }
        self.folder.save_checkpoint(self.snapshot, self._seal)

    def _seal(self, digest: bytes) -> bytes:
        return self.clients.seal(self.output_dir, digest)

    def _named_parts(self) -> list[tuple[str, Strategy | Callback]]:
        """Parts named by class, and by number in it, because a resumed run may have other callbacks."""
        parts: list[Strategy | Callback] = [*self.config.strategies, *self.config.callbacks]
        kinds = [type(part).__qualname__ for part in parts]
        return [(f"{kind} {kinds[:i].count(kind)}", parts[i]) for i, kind in enumerate(kinds)]

    def _end(self, reason: str, finished: bool, interrupted: bool = False) -> RunResult:
        if finished:
            self.snapshot["ended"] = reason  # resumed, it changes nothing
            self.folder.save_checkpoint(self.snapshot, self._seal)
            if self.state.round not in self.evaluated:
                self.evaluated = {self.state.round: self.evaluate(self.state)}
            self.clients.keep_scores(self.final_models(self.state), self.state.round)
        self.clients.end(finished)
        guarantees = self._stated()
        final_models = self.final_models(self.state) if finished else None
        models = self.state.models if final_models is None else final_models.models
        single = len(models) == 1 or self._one_start
        self.model.load(models.double().mean(dim=0).to(models) if single else self._initial)
        result = self._result(reason, interrupted, guarantees, final_models, single)
        if final_models is not None:
            self.folder.save_models(self.model, final_models, single, self._code())
            different, places = numbered(guarantees)  # usually few: `clients` has the place of each client's
            statements = [guarantee.as_dict() for guarantee in different]
            rows = {"format": FORMAT, "ledger": result.ledger, "guarantees": statements, "clients": places}
            self.folder.save_json(GUARANTEES, rows)
            self.folder.save_json(RESULT, result.as_dict())
        notify(self.config.watching, "on_fit_end", self.view(self.state), result)
        return result

    def _stated(self) -> tuple[Guarantee, ...]:
        """The clients' guarantees; those of the whole plan if when to end follows from releases."""
        guarantees = self.clients.guarantees()
        if not self.config.ends_by_results:
            return guarantees
        bounds = once_each(self._planned_bound, self.schedule.clients)
        return tuple(
            one if one.epsilon >= epsilon else dataclasses.replace(one, epsilon=epsilon, accountant=method)
            for one, (epsilon, method) in zip(guarantees, bounds, strict=True)
        )

    def _planned_bound(self, schedule: ClientSchedule) -> tuple[float, str]:
        epsilon, method = self.config.accountant.bound(schedule.events(), schedule.delta)
        return epsilon, f"{method}, {FILTER}"

    # -- rounds

    def all_rounds(self, check_signals: Callable[[], None]) -> str:
        """Train until the last round, until no client can pay, or until a strategy stops; return the reason."""
        config = self.config
        while self.state.round < self.last_round:
            check_signals()
            view = self.view(self.state)
            reasons = [
                answer_of(strategy, hook, view) for strategy in config.strategies for hook in ("exhausted", "stop")
            ]
            if any(reasons):
                return "; ".join(filter(None, reasons))
            notify(config.watching, "on_round_start", view)
            begun = time.perf_counter()
            self.traffic.begin_round()
            after, plan, weights = self._one_round()
            if not (plan.clients or self.traffic.asked or self.clients.can_pay()):
                if self.state.round == 0:
                    return "nothing was trained: no client's budget pays for one round with its noise_multiplier"
                return f"every client has spent its budget after {counted(self.state.round, 'round')}"
            seconds = time.perf_counter() - begun
            self.totals.training_seconds += seconds
            stds = ClientUpdates.announced(plan).noise_std
            self.totals.noise_std[list(plan.clients)] = torch.tensor(stds, dtype=torch.float64)
            view = self.view(after)
            sent = self.traffic.metrics(plan, self.totals.metrics)
            self.totals.metrics = summary.round_metrics(config.strategies, view, plan, weights, sent)
            self.totals.records += round(sum(plan.expected_records))
            self._remember(after)
            self._evaluate_round(after)
            notify(config.watching, "on_round_end", view, self._report(plan, weights, seconds))
        if self.last_round < config.rounds:
            return f"{self.state.round} of the {config.rounds} planned rounds are done, as was asked"
        return f"all {config.rounds} rounds are done" if config.rounds > 1 else "the one round is done"

    def _one_round(self) -> tuple[ServerState, RoundPlan, Tensor]:
        self._replan()
        view = self.view(self.state)
        try:
            fewest = self.config.network.min_participants
            one = Round(self.config.strategies, view, fewest, self.clients.accept, self._train)
            model_of, rates = view.state.model_of, view.learning_rate
            plan = dataclasses.replace(self._default_plan, round=view.round, model_of=model_of, learning_rate_of=rates)
            return one.one_round(plan)
        except Diverged:
            self._remember(dataclasses.replace(self.state, round=view.round))
            raise

    def _replan(self) -> None:
        """Let strategies change the schedule of the remaining rounds."""
        changed = fold(self.config.strategies, "replan", self.schedule, self.view(self.state))
        if changed is not self.schedule:
            self._plan_for(changed)
            self.clients.change(self.schedule)

    def _train(self, plan: RoundPlan, models: Tensor, raw_weights: Tensor | None) -> ClientUpdates:
        """The updates that arrive. Who is lost is written down before anything is computed from them.

        If the round is repeated, they stay lost. What the network loses is known from the seed.
        """
        dropped = self._lost_before | self.traffic.lost(plan)
        if raw_weights is not None:
            raw_weights = raw_weights * torch.tensor([client not in dropped for client in plan.clients])
        updates = self._clients_work(lambda: self.clients.train(plan, models, raw_weights))
        if not dropped.issuperset(updates.absent):
            self.snapshot["lost"] = sorted(self._lost_before.union(updates.absent))
            self.folder.save_checkpoint(self.snapshot, self._seal)
        updates = updates.without(dropped) if dropped else updates
        self.traffic.lost_updates = len(updates.lost)
        return updates

    # -- what it reports

    def _described(self) -> RunInfo:
        config, clients = self.config, self.clients
        return RunInfo(
            output_dir=config.output_dir,
            rounds=config.rounds,
            first_round=1,
            num_params=self.model.num_params,
            estimated_seconds=math.nan,
            engine=clients.description,
            device=str(clients.device),
            sampling=clients.sampling,
            accountant=config.accountant,
            noise=clients.noise,
            source=clients.source,
            exact_times=config.exact_times,
            options=config.options,
            task=self.model.task_note,
            strategies=tuple(config.options.get("strategies") or (one.config_name for one in config.strategies)),
            replans=config.replans,
            ends_by_results=config.ends_by_results,
            unit=str(config.facts.unit),
            measures=dict(self.model.scores),
        )

    def _describe_plan(self) -> None:
        """Keep what is planned in the description of the run."""
        config = self.config
        clients = PlannedClients.of(config.facts, config.settings, self.schedule.clients)
        self.info = dataclasses.replace(self.info, clients=clients, assumptions=assumptions(self.view(self.state)))

    def _estimate_time(self, first_round: int) -> None:
        """Say which rounds are left, and how long they take, unless the work is the server's, of unknown length."""
        config, clients, seconds = self.config, self.clients, math.nan
        if clients_train(config.strategies):
            batch = round(median(client.batch_size for client in config.settings))
            records = sum(
                event.steps * event.sample_rate * client.num_records
                for client, schedule in zip(config.settings, self.schedule.clients, strict=True)
                for event in schedule.events()
                if isinstance(event, NoisedEvent)
            )
            records_a_round = records / (config.rounds + self.schedule.reserve)
            seconds = clients.seconds_per_record(batch) * records_a_round * (config.rounds - first_round + 1)
        self.info = dataclasses.replace(self.info, first_round=first_round, estimated_seconds=seconds)

    def _report(self, plan: RoundPlan, weights: Tensor, seconds: float) -> RoundReport:
        scores = self.evaluated.get(plan.round)
        report = RoundReport(
            round=plan.round,
            rounds=self.config.rounds,
            seconds=seconds if self.config.exact_times else None,
            records=round(sum(plan.expected_records)),
            clients=plan.clients,
            weights=weights,
            epsilon_spent=self.clients.spent(),
            client_accuracy=None if scores is None else tuple(score.accuracy for score in scores.clients),
            client_scores=() if scores is None else scores.clients,
            diagnostics=self.clients.diagnostics(),
            metrics=self.totals.metrics,
            answered=tuple(sorted(self.traffic.answered)),
            fairness={} if scores is None else dict(scores.fairness),
            **_on_test(scores),
        )
        return dataclasses.replace(report, curves=of_round(report, self.config.facts))

    def _result(
        self,
        reason: str,
        interrupted: bool,
        guarantees: Sequence[Guarantee],
        final_models: ClientModels | None,
        single: bool,
    ) -> RunResult:
        """The result of a run that has ended; `final_models` is None if it has not finished."""
        finished, totals, config, info = final_models is not None, self.totals, self.config, self.info
        scores, groups = self.evaluated.get(self.state.round), true_groups(config.facts)
        accuracies = [] if scores is None else [score.accuracy for score in scores.clients]
        rows = self._client_rows(guarantees, scores, self.state if final_models is None else final_models)
        view, shown = self.view(self.state), float if info.exact_times else rounded_up_duration
        return RunResult(
            output_dir=str(config.output_dir),
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
            noise=info.noise,
            task=info.task,
            test_set=config.facts.test_set,
            at_sites=config.facts.at_sites,
            clients=rows,
            metrics=summary.for_json(totals.metrics),
            client_embedding=sole_answer(config.strategies, "client_embedding", view) if finished else None,
            remarks=tuple(words for one in config.strategies if finished for words in answer_of(one, "remarks", view)),
            model=self.model.net.eval() if final_models is not None and single else None,
            baseline={} if scores is None else dict(scores.baseline),
            measures={} if scores is None else dict(scores.measures),
            undefined={} if scores is None else dict(scores.test.undefined),
            test_tables={} if scores is None else dict(scores.test.tables),
            accuracy_of_groups=accuracy_of_groups(accuracies, groups),
            fairness={} if scores is None else dict(scores.fairness),
            accuracy_mean=mean_metrics({"accuracy": one} for one in accuracies).get("accuracy"),
            **summary.headline_over_clients(rows, info.measures),
            **_on_test(scores),
            metrics_mean=mean_metrics([] if scores is None else [score.metrics for score in scores.clients]),
        )

    def _client_rows(
        self, guarantees: Sequence[Guarantee], scores: Evaluation | None, models: ClientModels | ServerState
    ) -> tuple[dict[str, Any], ...]:
        """The `clients` of the result."""
        groups, rows = true_groups(self.config.facts), []
        noise_multipliers = [schedule.main_noise for schedule in self.schedule.clients]
        noise_stds = [None if math.isnan(std) else std for std in self.totals.noise_std.tolist()]
        for client, settings in enumerate(self.config.settings):
            schedule, account = self.schedule.clients[client], self.clients.account(client)
            score = Score(None, math.nan) if scores is None else scores.clients[client]
            row = {
                "client": client,
                "name": self.config.facts.name_of(client),
                "epsilon_spent": finite_or_none(guarantees[client].epsilon),
                "epsilon_budget": finite_or_none(settings.epsilon),
                "delta": schedule.delta,
                "noise_multiplier": noise_multipliers[client],
                "noise_std": noise_stds[client],
                "batch_size": schedule.batch_size(settings.num_records),
                "num_records": settings.num_records,
                "unit": self.config.facts.unit.name,
                "releases": account.releases,
                "steps": account.steps,
                "accuracy": score.accuracy,
                "loss": finite_or_none(score.loss),
                "metrics": dict(score.metrics),
                "undefined": dict(score.undefined),
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
