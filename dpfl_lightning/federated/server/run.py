"""The state of a run at the server: what strategies see of it, what a checkpoint keeps, what it reports."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dpfl_lightning.config.options import NetworkOptions, PrivacyOptions
from dpfl_lightning.errors import UserNotice, require
from dpfl_lightning.federated.messages.clients import Clients, RunPlan
from dpfl_lightning.federated.messages.evaluation import ClientModels, Evaluation
from dpfl_lightning.federated.messages.facts import ClientSettings, Facts
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery, Query
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server import summary
from dpfl_lightning.federated.server.callback import Callback, notify
from dpfl_lightning.federated.server.folder import RunFolder
from dpfl_lightning.federated.server.group_metrics import accuracy_of_groups, true_groups
from dpfl_lightning.federated.server.results import RoundReport, RunInfo, RunResult
from dpfl_lightning.federated.server.settings import accountant_of, default_schedule, solved
from dpfl_lightning.federated.server.strategy import Strategy, fold, sole_answer, strategy_digests
from dpfl_lightning.federated.server.totals import RunTotals
from dpfl_lightning.federated.server.traffic import Network, Traffic
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.models.model import Model
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.accounting.guarantee import Guarantee

T = TypeVar("T")


class Run:
    """One run over clients that are reached by messages alone; `ServerLoop` adds its rounds.

    Args:
        clients: all clients of the run.
        model: the server's copy of the net; its parameters are the start.
        facts: what the server knows of the clients.
        settings: each client's settings.
        privacy: budgets and mechanism, without the key of a simulation; None is a run without privacy.
        strategies: with exactly one base rule.
        callbacks: watch the run.
        rounds, network, seed, output_dir, evaluate_every, options, new_net: as `FederatedLoop` has them.
        resume_command: what a person types to resume the run.
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
        network: NetworkOptions,
        seed: int,
        output_dir: Path,
        evaluate_every: int,
        options: Mapping[str, Any],
        new_net: Callable[[int], nn.Module] | None,
        resume_command: str,
    ) -> None:
        require(rounds >= 1, "rounds", "be >= 1", rounds)
        require(evaluate_every >= 1, "evaluation.every", "be >= 1", evaluate_every)
        self.clients, self.facts, self.settings, self.privacy = clients, facts, settings, privacy
        self.strategies, self.callbacks = list(strategies), list(callbacks)
        self.model = copy.deepcopy(model)  # strategies may overwrite its parameters
        self._initial = model.flat
        self.rounds, self.last_round, self.seed, self.evaluate_every = rounds, rounds, seed, evaluate_every
        self.output_dir, self.options, self.new_net = output_dir, dict(options), new_net
        self.resume_command = resume_command
        self.caveats = (*clients.caveats, *(one for strategy in self.strategies for one in strategy.caveats))
        self.accountant = accountant_of(privacy)
        self.traffic = Traffic(Network.of(network, len(settings), seed))
        self.totals, self.strategy_notes = RunTotals(), tuple[str, ...]()
        # round -> what was made for it, of the latest such round only
        self.evaluated: dict[int, Evaluation] = {}
        self._final_models: dict[int, ClientModels] = {}
        self._strategy_digests = strategy_digests(self.strategies)  # before they remember anything

    # -- what strategies and callbacks see and ask for

    @property
    def watching(self) -> list[Callback]:
        """Callbacks, after the strategies that watch, too."""
        return [one for one in (*self.strategies, *self.callbacks) if isinstance(one, Callback)]

    def view(self, state: ServerState) -> View:
        """What strategies see before round `state.round + 1`."""
        return View(
            round=state.round + 1,
            state=state,
            facts=self.facts,
            module=self.model,
            schedule=self.schedule,
            run=self.info,
            clip_norm=tuple(client.clip_norm for client in self.settings),
            learning_rate=tuple(client.learning_rate for client in self.settings),
            seed=self.seed,
            guarantees=lambda: self.clients.guarantees(),
            ask=self._ask,
            new_model=self._new_model,
            solve=lambda schedule: solved(schedule, self.accountant),
            used=lambda client, purpose: self.clients.used(client, purpose),
        )

    def evaluate(self, state: ServerState) -> Evaluation:
        """Scores of the delivered models on test and held-out records."""
        return self.clients.evaluate(self.final_models(state))

    def final_models(self, state: ServerState) -> ClientModels:
        """What `final_models` answers, asked once a round (it may train a net), or the server's models."""
        if state.round not in self._final_models:
            answer = sole_answer(self.strategies, "final_models", state, self.view(state))
            self._final_models = {state.round: ClientModels(state.models, state.model_of) if answer is None else answer}
        return self._final_models[state.round]

    def _ask(self, query: Query) -> Answers:
        question = ChargedQuery.of(query)
        released = self._clients_work(lambda: self.clients.ask(question, self.state.round + 1))
        self.traffic.ask(question.only(released), self.state.models)
        return {client: question.read(client, one) for client, one in released.items()}

    def _new_model(self, seed: int) -> Tensor:
        way_out = "Give FederatedLoop what builds the net from a seed: a strategy begins with several models, or again."
        require(self.new_net is not None, "new_net", "be a function", self.new_net, way_out)
        assert self.new_net is not None  # for mypy
        with torch.random.fork_rng(devices=[]):
            model = Model(self.new_net(seed)).flat.to(self.clients.device)
        alike = len(model) == self.model.num_params
        require(alike, "new_net", f"build a net of {self.model.num_params} parameters", len(model))
        return model

    # -- planning

    def plan_schedule(self) -> RunSchedule:
        """Every release of the run with its noise solved: what `plan` prints and the ledger holds the run to."""
        self.info = self._info(first_round=1)
        self.schedule = default_schedule(self.settings, self.privacy, self.rounds)
        self.schedule = fold(self.strategies, "plan_run", self.schedule, self.view(self._one_model()))
        self.schedule = solved(self.schedule, self.accountant)
        self.first_purpose = self.schedule.clients[0].planned[0].purpose
        return self.schedule

    def run_plan(self) -> RunPlan:
        """The whole run as it is proposed to the clients; `plan_schedule` comes first."""
        return RunPlan(
            rounds=self.rounds,
            seed=self.seed,
            settings=self.settings,
            schedule=self.schedule,
            accountant=self.accountant.name,
            caveats=self.caveats,
            strategies=self._strategy_digests,
            options=self.options,
        )

    def describe(self) -> list[str]:
        """What strategies have to say of the run that `plan_schedule` has planned."""
        view = self.view(self._one_model())
        return [words for strategy in self.strategies for words in strategy.describe(view)]

    def _replan(self, state: ServerState) -> None:
        """The schedule of what is left, where a strategy plans it anew."""
        changed = fold(self.strategies, "replan", self.schedule, self.view(state))
        if changed is not self.schedule:
            self.schedule = solved(changed, self.accountant)
            self.clients.change(self.schedule)

    def _one_model(self) -> ServerState:
        """The net's parameters, for everybody."""
        return ServerState(self._initial[None], (0,) * self.facts.num_clients)

    def _clients_work(self, work: Callable[[], T]) -> T:
        """What `work` answers; its time is counted as the clients'."""
        begun = time.perf_counter()
        answer = work()
        self.totals.client_seconds += time.perf_counter() - begun
        return answer

    # -- beginning, remembering, ending

    def _open(self, resume: bool) -> dict[str, Any] | None:
        """Everything that a round needs; the checkpoint to go on from, if any."""
        reopened = RunFolder.reopen(self.output_dir) if resume else None
        planned = 0 if reopened is None else self.clients.planned_rounds(self.output_dir)
        self.rounds = max(self.rounds, planned)  # noise was solved for them; the run may stop earlier
        self.plan_schedule()  # may refuse: before anything is written
        self.strategy_notes = tuple(self.describe())
        self.folder = RunFolder.claim(self.output_dir, self.options) if reopened is None else reopened
        saved = None if reopened is None else reopened.load_checkpoint(self.clients.device)
        if reopened is not None and not planned:
            reopened.write_options(self.options)
        ended = saved is not None and bool(saved["ended"])
        self.clients.begin(self.output_dir, self.run_plan(), None if saved is None else saved["clients"], ended)
        return saved

    def _begin(self) -> ServerState:
        self.totals = RunTotals()
        self.info = self._info(first_round=1, measured=True)
        state = self._one_model()
        state = sole_answer(self.strategies, "initialise", state, self.view(state)) or state
        self._remember(state, None)
        return state

    def _restore(self, saved: dict[str, Any]) -> ServerState:
        self.state = state = ServerState(saved["models"], tuple(saved["model_of"]), saved["round"])
        for name, one in self._named_parts():
            if name in saved["callbacks"]:
                one.load_state_dict(saved["callbacks"][name])
        self.clients.load_state_dict(saved["clients"])
        self.totals = RunTotals.of(saved)
        self.snapshot = dict(saved)
        if not (self.clients.simulated or saved["ended"]) and self.clients.was_charged(state.round + 1):
            lost = (
                "" if self.schedule.reserve else ", and without privacy.reserve_rounds none is left for the last round"
            )
            words = f"round {state.round + 1} was broken off: it is charged again, with fresh noise{lost}"
            warnings.warn(words, UserNotice, stacklevel=2)
        self._replan(state)
        self.info = self._info(first_round=state.round + 1, measured=True)
        return state

    def _remember(self, state: ServerState, plan: RoundPlan | None) -> None:
        """Write the complete round to disk, before anything that follows from it is shown."""
        if plan is not None:
            self.totals.records += round(sum(plan.expected_records))
        self.state = state
        self.snapshot = {
            "models": state.models,
            "model_of": list(state.model_of),
            "round": state.round,
            "callbacks": {name: one.state_dict() for name, one in self._named_parts()},
            "clients": self.clients.state_dict(),
            **self.totals.saved(),
            "ended": None,
        }
        self.folder.save_checkpoint(self.snapshot)

    def _named_parts(self) -> list[tuple[str, Strategy | Callback]]:
        """Strategies and callbacks by class, and by number among equal ones: a resumed run may have other callbacks."""
        parts: list[Strategy | Callback] = [*self.strategies, *self.callbacks]
        kinds = [type(one).__qualname__ for one in parts]
        return [(f"{kind} {kinds[:i].count(kind)}", parts[i]) for i, kind in enumerate(kinds)]

    def _end(self, reason: str, finished: bool) -> RunResult:
        view = self.view(self.state)
        if finished:
            self.snapshot["ended"] = reason  # resumed, it changes nothing
            self.folder.save_checkpoint(self.snapshot)
            if self.state.round not in self.evaluated:
                self.evaluated = {self.state.round: self.evaluate(self.state)}
        guarantees = self.clients.guarantees()
        final_models = self.final_models(self.state) if finished else None
        result = self._result(reason, finished, guarantees, final_models)
        if final_models is not None:
            self.folder.save_models(self.model, final_models)
            promises = [one.as_dict() for one in guarantees]
            self.folder.save_json("guarantees.json", {"ledger": result.ledger, "clients": promises})
            self.folder.save_json("result.json", result.as_dict())
        self.clients.end(finished)
        notify(self.watching, "on_fit_end", view, result)
        return result

    # -- reports

    def _info(self, first_round: int, measured: bool = False) -> RunInfo:
        """The description of a run; `measured` estimates its time, unless a strategy does work of unknown length."""
        clients, seconds = self.clients, math.nan
        if measured and not any(strategy.trains_on_server for strategy in self.strategies):
            batch = round(median(client.batch_size for client in self.settings))
            rounds = self.rounds + self.schedule.reserve
            a_round = self._planned_records() / rounds
            seconds = clients.seconds_per_record(batch) * a_round * (self.rounds - first_round + 1)
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
            accountant=self.accountant.name,
            noise=clients.noise,
            simulated=clients.simulated,
            options=self.options,
            strategy_notes=self.strategy_notes,
        )

    def _planned_records(self) -> float:
        """Records that all clients process in the whole run, in expectation."""
        return sum(
            line.count * line.event.steps * line.event.sample_rate * client.num_records
            for client, schedule in zip(self.settings, self.schedule.clients, strict=True)
            for line in schedule.planned
            if isinstance(line.event, NoisedEvent)
        )

    def _report(self, plan: RoundPlan, weights: Tensor, seconds: float) -> RoundReport:
        """What callbacks receive after a round."""
        scores = self.evaluated.get(plan.round)
        return RoundReport(
            round=plan.round,
            rounds=self.rounds,
            seconds=seconds,
            records=round(sum(plan.expected_records)),
            clients=plan.clients,
            weights=weights,
            epsilon_spent=self.clients.spent(),
            test_accuracy=None if scores is None else scores.test.accuracy,
            test_loss=None if scores is None else scores.test.loss,
            client_accuracy=None if scores is None else tuple(one.accuracy for one in scores.clients),
            diagnostics=self.clients.diagnostics(),
            metrics=self.totals.metrics,
        )

    def _result(
        self, reason: str, finished: bool, guarantees: Sequence[Guarantee], final_models: ClientModels | None
    ) -> RunResult:
        """The result of a run that has ended; `final_models` are its models if it has finished."""
        totals, seconds = self.totals, max(self.snapshot["seconds"], 1e-9)
        scores, groups = self.evaluated.get(self.state.round), true_groups(self.facts)
        accuracies = [] if scores is None else [one.accuracy for one in scores.clients]
        model_of = self.state.model_of if final_models is None else final_models.model_of
        accounts = [self.clients.account(client) for client in range(self.facts.num_clients)]
        return RunResult(
            output_dir=str(self.output_dir),
            finished=finished,
            rounds=self.state.round,
            wall_seconds=totals.wall_seconds,
            training_seconds=totals.training_seconds,
            client_seconds=totals.client_seconds,
            records_per_second=totals.records / seconds,
            reason=reason,
            guarantee=summary.in_words(guarantees),
            ledger=self.clients.ledger_head(),
            noise=self.info.noise,
            simulated=self.clients.simulated,
            clients=summary.client_rows(
                self.settings, accounts, self.schedule.clients, guarantees, scores, model_of, totals.noise_std, groups
            ),
            test_accuracy=None if scores is None else scores.test.accuracy,
            test_loss=None if scores is None else scores.test.loss,
            metrics=summary.for_json(totals.metrics),
            client_embedding=sole_answer(self.strategies, "client_embedding", self.view(self.state))
            if finished
            else None,
            accuracy_of_groups=accuracy_of_groups(accuracies, groups),
            **summary.accuracy_over_clients(accuracies),
        )
