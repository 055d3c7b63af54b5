"""The federated loop: plan, charge, train, weigh, combine, step, refine. Callbacks own the strategy."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dpfl_lightning.config.options import ClientOptions, NetworkOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, UserNotice, require
from dpfl_lightning.federated.client.budgets import Budgets
from dpfl_lightning.federated.client.dummy_data import check_fits, seconds_per_record
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.federated.client.engines.serial import Engine
from dpfl_lightning.federated.client.evaluation import Evaluation, evaluate
from dpfl_lightning.federated.client.gradient_counts import SHOWN, Diagnostics, notes
from dpfl_lightning.federated.client.identity import configuration, identity, strategy_digests
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.plan import (
    Delivered,
    RoundPlan,
    RoundReport,
    RunInfo,
    RunResult,
    RunSchedule,
    ServerState,
    View,
)
from dpfl_lightning.federated.messages.query import Answers, Charged, Query
from dpfl_lightning.federated.server import aggregate
from dpfl_lightning.federated.server.folder import RunFolder
from dpfl_lightning.federated.server.group_metrics import accuracy_of_groups, true_groups
from dpfl_lightning.federated.server.settings import (
    accountant_of,
    client_settings,
    default_schedule,
    reported_epsilons,
    solved,
)
from dpfl_lightning.federated.server.strategy import ServerCallback, fold, one_of, register, watch
from dpfl_lightning.federated.server.summary import accuracy_over_clients, client_rows, for_json, summary, told
from dpfl_lightning.federated.server.totals import Tally
from dpfl_lightning.federated.server.traffic import Network, Traffic
from dpfl_lightning.federated.transport.ranked import RankedEngine
from dpfl_lightning.federated.transport.ranks import LostRank, Ranks
from dpfl_lightning.privacy.accounting.events import Caveat, NoisedEvent, Unprotected
from dpfl_lightning.privacy.accounting.guarantee import SIMULATED, Guarantee
from dpfl_lightning.privacy.ledger.file import Header
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.privacy.sampling import SAMPLINGS
from dpfl_lightning.reporting.guarantee_page import guarantee_page
from dpfl_lightning.runtime.stopping import between_rounds
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted

T = TypeVar("T")


class FederatedLoop:
    """Differentially private federated training of one module over a population.

    Args:
        population: the clients' private records, and what they are evaluated on.
        module: one client's step; its net's parameters are the start.
        rounds: communication rounds of the whole run, >= 1.
        clients: batch size, local epochs, learning rate; each one value, a list, or a named distribution.
        privacy: budgets and mechanism, likewise; None is a run without privacy.
        network: to simulate: how long what is sent would take.
        callbacks: strategies (at most one base rule; without one a strategy's `default_base`, else DPFedAvg) and
            watchers.
        engine: how the local work is executed; speed only.
        seed: of everything but noise and sampling.
        output_dir: a new or empty folder; default under `runs/`.
        device: "auto", or what Lightning Fabric takes as accelerator.
        evaluate_every: rounds between evaluations, >= 1; the last round is always evaluated.
        options: the resolved configuration, for the record.
        new_net: builds the module's net anew from a seed, for strategies that begin with several models, or again.

    **Guarantees** Every release is planned, charged to the synced ledger, and noised, in this order; no client exceeds
    its schedule. A complete round is on disk before anything that follows from it is shown. `run(resume=True)` goes on
    with the same run or with none: the round that a crash broke off is charged again, from `reserve_rounds`, with fresh
    noise. With `privacy.noise_key`, a simulation, it gives the parameters of the unbroken run, bit for bit (on a CPU,
    and but for nets that draw random numbers themselves, such as dropout).

    **Privacy** Record level, each client for itself, against an untrusted server that sees every update. Evaluation on
    test and held-out records is not covered.

    Raises:
        UserError: options out of range, or that contradict each other.
    """

    def __init__(
        self,
        population: Population,
        module: ClientModule,
        *,
        rounds: int,
        clients: ClientOptions | None = None,
        privacy: PrivacyOptions | None,
        network: NetworkOptions | None = None,
        callbacks: Sequence[ServerCallback] = (),
        engine: Engine | None = None,
        seed: int = 0,
        output_dir: str | Path | None = None,
        device: str = "auto",
        evaluate_every: int = 1,
        options: Mapping[str, Any] | None = None,
        new_net: Callable[[int], nn.Module] | None = None,
    ) -> None:
        advice = "Wrap a net: ClientModule(net)."
        require(isinstance(module, ClientModule), "module", "be a ClientModule", type(module).__name__, advice)
        require(rounds >= 1, "rounds", "be >= 1", rounds)
        require(evaluate_every >= 1, "evaluation.every", "be >= 1", evaluate_every)
        self.callbacks = register(_with_base(callbacks))
        self.ranks = Ranks(device)
        self.device = self.ranks.fabric.device
        self.population = population.to(self.device)
        self.module = module.to(self.device)
        self._servers_module = copy.deepcopy(self.module)
        check_fits(self.module, self.population)
        own = FastEngine() if engine is None else engine
        self.engine: Engine = own if self.ranks.size == 1 else RankedEngine(own, self.ranks)
        self.rounds, self.last_round, self.seed, self.privacy = rounds, rounds, seed, privacy
        self.simulated = privacy is not None and privacy.noise_key is not None
        of_strategies = [one for callback in self.callbacks for one in callback.caveats]
        self.caveats = (*((SIMULATED,) if self.simulated else ()), *population.caveats, *of_strategies)
        self.unprotected = (SHOWN,) if privacy is not None and privacy.diagnostics else ()
        self.evaluate_every = evaluate_every
        self.output_dir = Path(output_dir or datetime.now().strftime("runs/%Y-%m-%d_%H-%M-%S-%f"))
        self.options, self.new_net = dict(options or {}), new_net
        self.sampling = "poisson" if privacy is None else privacy.sampling
        # round -> what was made for it, of the latest such round only
        self.evaluated: dict[int, Evaluation] = {}
        self._delivered: dict[int, Delivered] = {}
        self.tally = Tally()
        self.outlined: tuple[str, ...] = ()
        clients = clients or ClientOptions()
        self.settings = client_settings(population.num_records, clients, privacy, seed)
        self.accountant = accountant_of(privacy)
        self.traffic = Traffic(Network.of(network or NetworkOptions(), len(self.settings), seed))
        self._strategy_digests = strategy_digests(self.callbacks)  # before they remember anything
        self.facts = population.facts(
            batch_size=tuple(own.batch_size for own in self.settings),
            reported_epsilon=reported_epsilons(clients, self.settings, seed),
        )

    # -- the run

    def run(self, resume: bool = False) -> RunResult:
        """Train all rounds, or (`resume`) those that are left.

        Under a launcher rank 0 does, and the other ranks, built alike, work for it until then; all return the result.

        Raises:
            UserError: the folder is taken, or has nothing to resume; a rank was lost.
        """
        if self.ranks.rank > 0:
            assert isinstance(self.engine, RankedEngine)  # for mypy: there are several
            return self.engine.serve(self.module, self.population)
        return self.ranks.lead(lambda: self._run(resume))

    def _run(self, resume: bool) -> RunResult:
        saved = self._open(resume)
        with closing(self.budgets.ledger):
            state = self._begin(resume) if saved is None else self._restore(saved)
            try:
                watch(self.callbacks, "on_run_start", self.view(state))
                with between_rounds() as check_signals:
                    reason = self.snapshot["ended"] or self.all_rounds(state, check_signals)
            except BaseException as error:
                broken = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
                again = f"go on with: {self._how_to_go_on()}"
                self._end(f"{broken}; {again}", finished=False)
                if isinstance(error, LostRank):
                    raise UserError(f"{error} The run is kept; {again}") from None
                error.add_note(f"The run is kept; when this is mended, {again}")
                raise
            result = self._end(reason, finished=True)
            check_signals()  # one that came in the last round
            return result

    def _how_to_go_on(self) -> str:
        """A run of a configuration by its command, another by the code that made it."""
        own = f"run(resume=True) of a FederatedLoop with output_dir={str(self.output_dir)!r}"
        return f"{self.ranks.command} -m dpfl_lightning.fit --resume {self.output_dir}" if self.options else own

    def all_rounds(self, state: ServerState, check_signals: Callable[[], None]) -> str:
        """Rounds until the last one, until nobody can pay, or until a callback's `stop`; returns the reason."""
        while state.round < self.last_round:
            check_signals()
            if reason := one_of(self.callbacks, "stop", self.view(state)):
                return reason
            begun = time.perf_counter()
            self.traffic.begin_round()
            after, plan, weights = self.one_round(state)
            if not plan.clients and not self.budgets.anyone_affords():
                return f"every client has spent its budget after {state.round} round{'s' * (state.round != 1)}"
            state, seconds = after, time.perf_counter() - begun
            self.tally.training_seconds += seconds
            before = self.snapshot["engine"]["counts"]
            sent = self.traffic.told(plan, self.view(state), self.tally.told)
            self.tally.told = told(self.callbacks, self.view(state), plan, weights, sent)
            self._remember(state, plan)
            report = self._report(plan, weights, seconds, before)
            watch(self.callbacks, "on_round_end", self.view(state), report)
        if self.last_round < self.rounds:
            return f"{state.round} of the {self.rounds} planned rounds are done, as was asked"
        return f"all {self.rounds} rounds are done" if self.rounds > 1 else "the one round is done"

    def one_round(self, state: ServerState) -> tuple[ServerState, RoundPlan, Tensor]:
        """Every line is one hook, or the work of one owner."""
        self._replan(state)
        view = self.view(state)
        plan = _if_enough(fold(self.callbacks, "plan_round", view.plan(self.first_purpose), view))
        plan, attempts = self.budgets.charge_round(plan)  # a crash never under-reports
        plan = _if_enough(plan)
        if not plan.clients:
            return self._unmoved(state, plan)
        say = aggregate.say_beforehand(self.callbacks, plan, view)  # None: single updates must be seen
        updates = self._clients_work(lambda: self.engine.train(plan, state, attempts, say))
        arrived, say = aggregate.without_lost(plan, updates, say)
        if not arrived.clients:
            return self._unmoved(state, plan)
        plan = arrived
        self.tally.noise_std |= dict(zip(updates.clients, updates.noise_std, strict=True))
        say = aggregate.say(self.callbacks, plan, updates, view) if say is None else say  # [K, C]
        weights = aggregate.normalised(say)  # an empty row leaves its model alone
        combined = one_of(self.callbacks, "combine", updates, weights, view)
        combined = aggregate.combine(say, updates) if combined is None else combined
        stepped = one_of(self.callbacks, "step", state, combined, view)
        state = aggregate.step(state, combined) if stepped is None else stepped
        state = fold(self.callbacks, "refine", state, updates, view)
        return dataclasses.replace(state, round=plan.round), plan, weights

    def _unmoved(self, state: ServerState, plan: RoundPlan) -> tuple[ServerState, RoundPlan, Tensor]:
        """A round in which nothing arrived."""
        return dataclasses.replace(state, round=plan.round), plan, torch.zeros(len(state.models), len(plan.clients))

    def evaluate(self, state: ServerState) -> Evaluation:
        """The delivered models on test and held-out records."""
        return evaluate(self.module, self.population, self.delivered(state), self.engine)

    def delivered(self, state: ServerState) -> Delivered:
        """What `deliver` answers, asked once a round (it may train a net), or the server's models."""
        if state.round not in self._delivered:
            answer = one_of(self.callbacks, "deliver", state, self.view(state))
            self._delivered = {state.round: Delivered(state.models, state.model_of) if answer is None else answer}
        return self._delivered[state.round]

    def view(self, state: ServerState) -> View:
        """What callbacks see before round `state.round + 1`."""
        return View(
            round=state.round + 1,
            state=state,
            facts=self.facts,
            module=self._servers_module,
            schedule=self.schedule,
            run=self.info,
            clip_norm=tuple(own.clip_norm for own in self.settings),
            learning_rate=tuple(own.learning_rate for own in self.settings),
            seed=self.seed,
            guarantees=lambda: self.budgets.guarantees(),
            ask=self._ask,
            new_model=self._new_model,
            solve=lambda schedule: solved(schedule, self.accountant),
            used=lambda client, purpose: self.budgets.ledger.used(client, purpose),
        )

    def plan_schedule(self) -> RunSchedule:
        """Every release of the run with its noise solved: what `plan` prints and the ledger holds the run to."""
        self.info = self._info(first_round=1)
        self.schedule = default_schedule(self.settings, self.privacy, self.rounds)
        self.schedule = fold(self.callbacks, "plan_run", self.schedule, self.view(self._one_model()))
        self.schedule = solved(self.schedule, self.accountant)
        self.first_purpose = self.schedule.clients[0].planned[0].purpose
        return self.schedule

    def _replan(self, state: ServerState) -> None:
        """The schedule of what is left, where a strategy plans it anew."""
        changed = fold(self.callbacks, "replan", self.schedule, self.view(state))
        if changed is not self.schedule:
            self.schedule = solved(changed, self.accountant)
            self.budgets.change(self.schedule)

    def outline(self) -> list[str]:
        """What strategies have to say of the run that `plan_schedule` has planned."""
        view = self.view(self._one_model())
        return [words for callback in self.callbacks for words in callback.outline(view)]

    # -- beginning, remembering, ending

    def _open(self, resume: bool) -> dict[str, Any] | None:
        """Everything that a round needs; the checkpoint to go on from, if any."""
        reopened = RunFolder.reopen(self.output_dir) if resume else None
        begun = None if reopened is None else reopened.begun()
        if begun is not None and self.rounds < (planned := begun.identity.get("rounds", 0)):
            self.rounds = planned  # noise was solved for them; the run stops earlier
        self.plan_schedule()  # may refuse: before anything is written
        self.outlined = tuple(self.outline())
        self.folder = RunFolder.claim(self.output_dir, self.options) if reopened is None else reopened
        saved = self.folder.load_checkpoint(self.device) if resume else None
        ended = saved is not None and saved["ended"]
        if reopened is not None and not (reopened.data_key or ended):
            raise reopened.lacks_key()
        if reopened is not None and begun is None:
            reopened.write_options(self.options)
        configured = self._configuration()
        self.engine.setup(self.module, self.population, self.streams(), self.sampling)
        self.budgets = Budgets(
            self.schedule,
            self.folder.open_ledger(self._ledger_header(self._identity(configured, begun if ended else None)), saved),
            self.accountant,
            SAMPLINGS[self.sampling],
            simulated=self.simulated or self.privacy is None,
            caveats=[Caveat(one) for one in self.caveats],
            unprotected=[Unprotected(words) for words in self.unprotected],
        )
        return saved

    def _configuration(self) -> dict[str, Any]:
        return configuration(
            self.rounds, self.seed, self.settings, self.privacy, list(self._strategy_digests), self.options
        )

    def _identity(self, configured: Mapping[str, Any], ended: Header | None) -> dict[str, Any]:
        """What the ledger is held to. A run that has ended releases nothing more: its records are not compared.

        Args:
            ended: the header of a run that has ended, whose key of the digests of records is gone.
        """
        data_key = self.folder.data_key
        whole = identity(configured, self.schedule, self.module, self._strategy_digests, self.population, data_key)
        return whole if ended is None else {**whole, "records": ended.identity.get("records")}

    def streams(self) -> Streams:
        """Fresh noise for every release; that of a simulation, and of a run without noise, follows from its key."""
        key = "" if self.privacy is None else self.privacy.noise_key
        run = json.dumps(self._configuration(), sort_keys=True)
        return Streams() if key is None else Streams.simulated(key, self.seed, run)

    def _begin(self, resumed: bool) -> ServerState:
        self.tally = Tally()
        if resumed and self.budgets.releases_of_all():
            words = f"{self.folder.checkpoint} is gone, so the run begins anew; what it has spent stays spent"
            warnings.warn(words, UserNotice, stacklevel=2)
        self.info = self._measured_info(first_round=1)
        state = self._one_model()
        state = one_of(self.callbacks, "initialise", state, self.view(state)) or state
        self._remember(state, None)
        return state

    def _one_model(self) -> ServerState:
        """The net's parameters, for everybody."""
        return ServerState(self.module.flat[None], (0,) * self.population.num_clients)

    def _restore(self, saved: dict[str, Any]) -> ServerState:
        self.state = state = ServerState(saved["models"], tuple(saved["model_of"]), saved["round"])
        for name, callback in self._named_callbacks():
            if name in saved["callbacks"]:
                callback.load_state_dict(saved["callbacks"][name])
        self.engine.load_state_dict(saved["engine"])
        self.tally = Tally.of(saved)
        self.snapshot = dict(saved)
        if not (self.simulated or saved["ended"]) and self.budgets.was_charged(state.round + 1):
            lost = (
                "" if self.schedule.reserve else ", and without privacy.reserve_rounds none is left for the last round"
            )
            words = f"round {state.round + 1} was broken off: it is charged again, with fresh noise{lost}"
            warnings.warn(words, UserNotice, stacklevel=2)
        self._replan(state)
        self.info = self._measured_info(first_round=state.round + 1)
        return state

    def _remember(self, state: ServerState, plan: RoundPlan | None) -> None:
        """Write the complete round to disk, before anything that follows from it is shown."""
        if plan is not None:
            self.tally.records += round(sum(plan.expected_records))
        self.state = state
        self.snapshot = {
            "models": state.models,
            "model_of": list(state.model_of),
            "round": state.round,
            "callbacks": {name: callback.state_dict() for name, callback in self._named_callbacks()},
            "engine": self.engine.state_dict(),
            "ledger": self.budgets.ledger.head.as_dict(),
            **self.tally.saved(),
            "ended": None,
        }
        self.folder.save_checkpoint(self.snapshot)

    def _named_callbacks(self) -> list[tuple[str, ServerCallback]]:
        """By class, and by number among equal ones: a resumed run may have other watchers."""
        kinds = [type(callback).__qualname__ for callback in self.callbacks]
        return [(f"{kind} {kinds[:i].count(kind)}", self.callbacks[i]) for i, kind in enumerate(kinds)]

    def _end(self, reason: str, finished: bool) -> RunResult:
        view = self.view(self.state)
        if finished:
            self.snapshot["ended"] = reason  # resumed, it changes nothing
            self.folder.save_checkpoint(self.snapshot)
        self.folder.save_json("private.json", notes(self.snapshot["engine"]["counts"]), private=True)
        if finished and self.state.round not in self.evaluated:
            self.evaluated = {self.state.round: self.evaluate(self.state)}
        guarantees = self.budgets.guarantees()
        model_of = self.delivered(self.state).model_of if finished else self.state.model_of
        result = self._result(reason, finished, guarantees, model_of)
        if finished:
            self.folder.save_models(self.module, self.delivered(self.state))
            promises = [one.as_dict() for one in guarantees]
            self.folder.save_json("guarantees.json", {"ledger": result.ledger, "clients": promises})
            self.folder.save_json("result.json", result.as_dict())
            self.folder.save_text("guarantee.html", guarantee_page(result, guarantees, self.info))
            self.folder.finish()
        watch(self.callbacks, "on_run_end", view, result)
        return result

    # -- what is told

    def _report(self, plan: RoundPlan, weights: Tensor, seconds: float, before: Tensor) -> RoundReport:
        if plan.round % self.evaluate_every == 0 or plan.round == self.rounds:
            self.evaluated = {plan.round: self.evaluate(self.state)}
        scores = self.evaluated.get(plan.round)
        return RoundReport(
            round=plan.round,
            rounds=self.rounds,
            seconds=seconds,
            records=round(sum(plan.expected_records)),
            clients=plan.clients,
            weights=weights,
            epsilon_spent=self.budgets.spent(),
            test_accuracy=None if scores is None else scores.test.accuracy,
            test_loss=None if scores is None else scores.test.loss,
            client_accuracy=None if scores is None else tuple(one.accuracy for one in scores.clients),
            diagnostics=Diagnostics.of(self.snapshot["engine"]["counts"] - before) if self.unprotected else None,
            told=self.tally.told,
        )

    def _result(
        self, reason: str, finished: bool, guarantees: Sequence[Guarantee], model_of: Sequence[int]
    ) -> RunResult:
        tally, seconds = self.tally, max(self.snapshot["seconds"], 1e-9)
        scores, groups = self.evaluated.get(self.state.round), true_groups(self.facts)
        accuracies = [] if scores is None else [one.accuracy for one in scores.clients]
        return RunResult(
            output_dir=str(self.output_dir),
            finished=finished,
            rounds=self.state.round,
            wall_seconds=tally.wall_seconds,
            training_seconds=tally.training_seconds,
            client_seconds=tally.client_seconds,
            records_per_second=tally.records / seconds,
            reason=reason,
            guarantee=summary(guarantees),
            ledger=self.budgets.ledger.head.as_dict(),
            noise=self.info.noise,
            simulated=self.simulated,
            clients=client_rows(self.settings, self.budgets, guarantees, scores, model_of, tally.noise_std, groups),
            test_accuracy=None if scores is None else scores.test.accuracy,
            test_loss=None if scores is None else scores.test.loss,
            told=for_json(tally.told),
            sketch=one_of(self.callbacks, "sketch", self.view(self.state)) if finished else None,
            accuracy_of_groups=accuracy_of_groups(accuracies, groups),
            **accuracy_over_clients(accuracies),
        )

    def _info(self, first_round: int, estimated_seconds: float = math.nan) -> RunInfo:
        ranks = f", {self.ranks.size} ranks" if self.ranks.size > 1 else ""
        return RunInfo(
            output_dir=self.output_dir,
            rounds=self.rounds,
            first_round=first_round,
            num_params=self.module.num_params,
            budgets=tuple(own.epsilon for own in self.settings),
            estimated_seconds=estimated_seconds,
            engine=f"{self.engine.name} ({self.engine.description})" + ranks,
            device=str(self.device),
            sampling=self.sampling,
            accountant=self.accountant.name,
            noise=Streams(b"" if self.simulated else None).words(self.device),
            simulated=self.simulated,
            options=self.options,
            outline=self.outlined,
        )

    def _measured_info(self, first_round: int) -> RunInfo:
        if any(callback.trains_on_server for callback in self.callbacks):
            return self._info(first_round)
        batch = round(median(own.batch_size for own in self.settings))
        each = seconds_per_record(self.engine, self.module, self.population, batch)
        records = sum(
            line.count * line.event.steps * line.event.sample_rate * own.num_records
            for own, schedule in zip(self.settings, self.schedule.clients, strict=True)
            for line in schedule.planned
            if isinstance(line.event, NoisedEvent)
        )
        a_round = records / (self.rounds + self.schedule.reserve)
        return self._info(first_round, each * a_round * (self.rounds - first_round + 1))

    def _ledger_header(self, sealed: Mapping[str, Any]) -> Header:
        return Header(
            accountant=self.accountant.name,
            adjacency=self.accountant.adjacency,
            sampling=self.sampling,
            delta=tuple(own.delta for own in self.schedule.clients),
            epsilon=tuple(own.epsilon for own in self.settings),
            caveats=self.caveats,
            identity=sealed,
        )

    def _ask(self, query: Query) -> Answers:
        round = self.state.round + 1
        question = Charged.of(query)
        clients, attempts = self.budgets.charge_query(question, round)
        paid = question.only(clients)
        self.traffic.ask(paid, self.state.models)
        released = self._clients_work(lambda: self.engine.ask(paid, round, attempts))
        return {client: paid.read(client, one) for client, one in released.items()}

    def _clients_work(self, work: Callable[[], T]) -> T:
        """What `work` answers; its time is counted as the clients'."""
        begun = time.perf_counter()
        answer = work()
        self.tally.client_seconds += time.perf_counter() - begun
        return answer

    def _new_model(self, seed: int) -> Tensor:
        way_out = "Give FederatedLoop what builds the net from a seed: a strategy begins with several models, or again."
        require(self.new_net is not None, "new_net", "be a function", self.new_net, way_out)
        assert self.new_net is not None  # for mypy
        with torch.random.fork_rng(devices=[]):
            model = ClientModule(self.new_net(seed)).flat.to(self.device)
        alike = len(model) == self.module.num_params
        require(alike, "new_net", f"build a net of {self.module.num_params} parameters", len(model))
        return model


def _if_enough(plan: RoundPlan) -> RoundPlan:
    """The plan, or a plan of nobody where clients are left, but fewer than its strategy asks together."""
    left = len(plan.clients)
    if left == 0 or left >= plan.fewest:
        return plan
    words = f"{left} client{'s' * (left > 1)} would be asked, fewer than the {plan.fewest} that must be; nobody is"
    warnings.warn(f"round {plan.round}: {words}, and models stay as they are", UserNotice, stacklevel=2)
    return plan.only(lambda client: False)


def _with_base(callbacks: Sequence[ServerCallback]) -> Sequence[ServerCallback]:
    """The callbacks, before them a base rule if they have none."""
    if any(callback.role == "base" for callback in callbacks):
        return callbacks
    kind = next((cb.default_base for cb in callbacks if cb.default_base is not None), SizeWeighted)
    return [kind(), *callbacks]
