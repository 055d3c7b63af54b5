"""The clients' side of a run in this process: accept a plan, charge it, then release."""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.federated.client.answers import check_answerable
from dpfl_lightning.federated.client.channel import Channel, send_round
from dpfl_lightning.federated.client.checks import check_fits, naming_layers
from dpfl_lightning.federated.client.client import Client, HeldClients
from dpfl_lightning.federated.client.draws import fixed_rng
from dpfl_lightning.federated.client.dummy_data import seconds_per_record
from dpfl_lightning.federated.client.engines.engine import Engine
from dpfl_lightning.federated.client.evaluation import evaluate
from dpfl_lightning.federated.client.holders import DataHolders
from dpfl_lightning.federated.client.identity import configuration, data_digests
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.client.run_log import RunLog
from dpfl_lightning.federated.messages.clients import RunPlan
from dpfl_lightning.federated.messages.evaluation import ClientModels, Diagnostics, Evaluation
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.messages.inbox import AnswerBox
from dpfl_lightning.federated.messages.jobs import Job
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery
from dpfl_lightning.federated.messages.requests import Ask, Charged, Train
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.models import check_net
from dpfl_lightning.privacy.accounting.noise_source import key_of
from dpfl_lightning.privacy.accounting.units import unit_of
from dpfl_lightning.privacy.noise import Streams

T = TypeVar("T")


def facts_of(population: Population, **extra: Any) -> Facts:
    """What the server may know about a population; `extra` are further fields of `Facts`."""
    truth = None if population.groups is None else {"groups": population.groups}
    shape = population.num_records, population.num_classes, population.input_shape
    extra |= {
        "unit": population.unit,
        "test_set": population.test is not None,
        "features": population.features,
        "origin": population.origin,
        "empty_x": population.empty_batch[0],
    }
    return Facts(*shape, truth=truth, names=population.names, **extra)


class LocalClients(RunLog):
    """The clients whose records are in this process, by default all of a run; implements `Clients`.

    Args:
        privacy: None is a run without privacy.
        names: of all clients of the plan (default: those of the population); empty if they have only numbers.
        numbers, count: those of the population's clients in a plan of `count` clients; None: they are all.

    Raises UserError if the module does not fit the records.

    **Privacy** Holds records, noise, budgets and the ledger. Only what the methods return leaves.
    """

    def __init__(
        self,
        population: Population,
        module: ClientModule,
        channel: Channel,
        privacy: PrivacyOptions | None,
        names: Sequence[str] | None = None,
        numbers: Sequence[int] | None = None,
        count: int | None = None,
    ) -> None:
        unit, has_ids = unit_of(privacy), population.unit_ids is not None
        fits = unit.name == population.unit.name
        require(fits, "privacy.unit", f"be what the population counts, {population.unit}", unit.name)
        check_fits(module, population)
        several = () if privacy is None else unit.caveats(has_ids)
        super().__init__(privacy, population.names if names is None else names, (*several, *population.caveats))
        self.module, self.channel, self.device = module, channel, module.device
        self.held = HeldClients(population, numbers, count)
        self._seconds = math.nan
        self._baseline: Mapping[str, float | None] | None = None  # known after the first evaluation
        self._accepted: tuple[RoundPlan, list[int]] | None = None

    @property
    def engine(self) -> Engine:
        return self.channel.engine

    @property
    def population(self) -> Population:
        return self.held.population

    @property
    def description(self) -> str:
        parts = [self.engine.description, "without TF32" * (self.device.type == "cuda")]
        words = ", ".join(filter(None, parts))
        how = f"{self.engine.name} ({words})" if words else self.engine.name
        return ", ".join(filter(None, (how, self.channel.description)))

    @property
    def noise(self) -> str:
        return self.source.words(self.device.type)

    @property
    def holders(self) -> DataHolders:
        return DataHolders(self.held, self.names, self.privacy)

    @property
    def account_words(self) -> str:
        account = self.budgets.account
        return "" if account is None else self.holders.said_of(account, account.together(planned=True))

    def outlook(self, plan: RunPlan) -> str:
        return self.holders.outlook(plan)

    def run(self, work: Callable[[], T]) -> T:
        return self.channel.run(self.module, self.held, work)

    def begin(self, folder: Path, plan: RunPlan, saved: Mapping[str, Any] | None, ended: bool) -> None:
        self.prepare(folder, plan)
        self._streams = self.streams(plan)
        if self.unit.is_group:
            self.held = self.held.chosen(self._streams.secret or self.folder.data_key(ended))
        self.held.trainer, self.held.log = self.engine, self
        with naming_layers(self.module.net):
            self.channel.setup(self.module, self.held, self._streams, self.sampling)
            with fixed_rng(self.device):
                self.seconds_per_record(batch_size=1)
        records = functools.partial(data_digests, self.held)
        self.open(plan, self.module, records, saved, ended, self.holders)
        self._counts_before = self.held.counts.clone()

    def streams(self, plan: RunPlan) -> Streams:
        """The streams of the run's source of noise."""
        key = key_of(self.privacy)
        if key is None:
            return Streams()
        return Streams.of_key(key, plan.seed, json.dumps(configuration(plan, self.privacy), sort_keys=True))

    def change(self, schedule: RunSchedule) -> None:
        if not self._may_change:  # the header of the ledger says so
            raise RuntimeError("a strategy changes mechanisms only by its method `replan`")
        self.budgets.change(schedule)

    def state_dict(self) -> dict[str, Any]:
        return {**self.held.state_dict(), "ledger": self.ledger_head()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held.load_state_dict(state)
        self._counts_before = self.held.counts.clone()

    def end(self, finished: bool) -> None:
        self.folder.save_notes(self.held)
        if finished:  # nobody needs to compare records any more
            self.folder.forget_data_key()

    def accept(self, plan: RoundPlan) -> RoundPlan:
        check_net(self.module.net)  # a callback may have changed the mode of a BatchNorm
        self._require_job(plan.job)
        plan, numbers = self.budgets.charge_round(plan)
        self._accepted, self._counts_before = (plan, numbers), self.held.counts.clone()
        return plan

    def _require_job(self, job: Job) -> None:
        advice = f"Rows of {self.unit.one_group} may have several classes."
        fits = not self.unit.is_group or job.any_unit
        require(fits, "privacy.unit", f"be record where {job.does}", self.unit.name, advice)

    def train(self, plan: RoundPlan, models: Tensor, raw_weights: Tensor | None) -> ClientUpdates:
        accepted, self._accepted = self._accepted, None
        if accepted is None or accepted[0] is not plan:
            raise RuntimeError("clients train by the last plan that they have accepted, and only once")
        with self.secret_draws("training", plan.round):
            inbox = send_round(self.channel, plan, models, accepted[1], raw_weights)
        self._tell_failures(plan.round, plan.clients, inbox.failed)
        return inbox.updates()

    def ask(self, query: ChargedQuery, round: int) -> Answers:
        check_answerable(query, self.unit)
        check_net(self.module.net)
        clients, numbers = self.budgets.charge_query(query, round)
        asked, inbox = Ask(round, query.only(clients)), AnswerBox()
        with self.secret_draws(query.purpose, round):
            pairs = zip(clients, numbers, strict=True)
            self.channel.send([Charged(client, asked, number) for client, number in pairs], inbox)
        self._tell_failures(round, clients, inbox.failed)
        return inbox.of(clients)

    def charge(self, client: int, request: Train | Ask) -> int | None:
        check_net(self.module.net)
        if isinstance(request, Ask):
            assert isinstance(request.question, ChargedQuery), "a question is copied before it is charged"
            check_answerable(request.question, self.unit)
        else:
            self._require_job(request.job)
        return self.budgets.charge(client, request)

    def client(self, number: int) -> Client:
        """One of the clients, which charges and answers what it is asked."""
        return self.held.client(number)

    def _tell_failures(self, round: int, clients: Sequence[int], failed: Mapping[int, Exception]) -> None:
        """Warn of the clients that failed, whose errors are kept in the folder; raise the error if all of them did.

        **Privacy** That a client failed, and the type of its error, may depend on its records: no guarantee covers it.
        """
        if not failed:
            return
        if len(failed) == len(clients):
            error = next(iter(failed.values()))
            error.add_note(f"Every client of round {round} failed.")
            raise error
        self.folder.keep_errors(round, failed)
        who = ", ".join(f"{self.name_of(one)} ({type(failed[one]).__name__})" for one in sorted(failed))
        words = f"round {round}: clients failed, and are left out of it: {who}; they have paid"
        warn_user(f"{words}. Tracebacks are in {self.folder.errors_file}")

    def secret_draws(self, purpose: str, round: int) -> AbstractContextManager[None]:
        """Seed what models draw, such as dropout, as secretly as noise.

        If the draws of each record were known, one record more or less would move those of all others, and a sum by
        more than the clip norm. Draws that nobody knows have the same distribution for each record.
        """
        seed = self._streams.generator(f"draws of nets, {purpose}", round, client=0).words(1)[0]
        return fixed_rng(self.device, int(seed))

    def diagnostics(self) -> Diagnostics | None:
        return Diagnostics.of(self.held.counts - self._counts_before) if self.unprotected else None

    def personalised(self, model: Tensor, client: int) -> Tensor:
        """`model` `[P]` with the client's personal parameters."""
        return self.channel.personalised(model, client)

    def evaluate(self, final_models: ClientModels) -> Evaluation:
        scores = evaluate(self.module, self.population, final_models, self.channel, self._baseline)
        self._baseline = scores.baseline
        return scores

    def keep_scores(self, final_models: ClientModels, round: int) -> None:
        """Nothing: `evaluate` shows the scores to the one who runs all clients in this process."""

    def seconds_per_record(self, batch_size: int) -> float:
        if not self.module.large or math.isnan(self._seconds):
            self._seconds = seconds_per_record(self.channel, self.module, self.population, batch_size)
        return self._seconds
