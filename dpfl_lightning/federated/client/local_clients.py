"""The clients' side of a run in this process: accept a plan, charge it, then release."""

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
from dpfl_lightning.federated.client.budgets import Budgets, check_budgets
from dpfl_lightning.federated.client.checks import check_fits, naming_layers
from dpfl_lightning.federated.client.draws import fixed_rng
from dpfl_lightning.federated.client.dummy_data import seconds_per_record
from dpfl_lightning.federated.client.engines.engine import Engine
from dpfl_lightning.federated.client.evaluation import evaluate
from dpfl_lightning.federated.client.folder import ClientFolder, run_of
from dpfl_lightning.federated.client.holders import DataHolders
from dpfl_lightning.federated.client.identity import configuration, identity
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.clients import ClientAccount, RunPlan
from dpfl_lightning.federated.messages.evaluation import SHOWN, ClientModels, Diagnostics, Evaluation
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.messages.plan import ClassGradients, RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.models import check_net
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import noised_steps
from dpfl_lightning.privacy.accounting.guarantee import SEVERAL_RECORDS, SIMULATED, Guarantee
from dpfl_lightning.privacy.ledger.file import Head, Header
from dpfl_lightning.privacy.ledger.ledger import Ledger, check_resumed
from dpfl_lightning.privacy.noise import Streams

T = TypeVar("T")


def facts_of(population: Population, **extra: Any) -> Facts:
    """What the server may know about a population; `extra` are further fields of `Facts`."""
    truth = None if population.groups is None else {"groups": population.groups}
    shape = population.num_records, population.num_classes, population.input_shape
    extra |= {
        "unit": "record" if population.rows_per_person is None else "person",
        "test_set": population.test is not None,
        "features": population.features,
        "origin": population.origin,
        "empty_x": population.empty_batch[0],
    }
    return Facts(*shape, truth=truth, names=population.names, **extra)


class LocalClients(DataHolders):
    """All clients of a run in this process; implements `Clients`. UserError if the module does not fit the records.

    `privacy` holds the key of a simulation, if it is one; None is a run without privacy.

    **Privacy** Holds records, noise, budgets and the ledger. Only what the methods return leaves.
    """

    def __init__(
        self, population: Population, module: ClientModule, engine: Engine, privacy: PrivacyOptions | None
    ) -> None:
        super().__init__(population, privacy)
        self.module, self.engine = module, engine
        counts_persons = privacy is not None and privacy.unit == "person"
        fits = counts_persons == (population.rows_per_person is not None)
        require(fits, "privacy.unit", "be what the population counts", "person" if counts_persons else "record")
        check_fits(module, population)
        self._seconds = math.nan
        self.device = module.device
        self.unprotected: tuple[str, ...] = (SHOWN,) if privacy is not None and privacy.diagnostics else ()
        self.most_records = None if privacy is None else privacy.rows_per_person
        silent = (
            population.persons is not None and population.rows_per_person is None and self.most_records in (None, 1)
        )
        several = (SEVERAL_RECORDS,) if silent and privacy is not None else ()
        self.caveats = (*((SIMULATED,) if self.simulated else ()), *several, *population.caveats)
        self._baseline: Mapping[str, float | None] | None = None  # known after the first evaluation
        self._accepted: tuple[RoundPlan, list[int]] | None = None

    @property
    def description(self) -> str:
        parts = [self.engine.description, "without TF32" * (self.device.type == "cuda")]
        words = ", ".join(filter(None, parts))
        return f"{self.engine.name} ({words})" if words else self.engine.name

    @property
    def noise(self) -> str:
        return Streams(b"" if self.simulated else None).words(self.device)

    @property
    def account_words(self) -> str:
        account = self.budgets.account
        return "" if account is None else self._said_of(account, account.together(planned=True))

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def planned_rounds(self, folder: Path) -> int:
        header = ClientFolder(folder).header()
        return 0 if header is None else int(header.identity.get("rounds", 0))

    def seal(self, folder: Path, digest: bytes) -> bytes:
        return ClientFolder(folder).seal(digest)

    def begin(self, folder: Path, plan: RunPlan, saved: Mapping[str, Any] | None, ended: bool) -> None:
        check_budgets(plan.schedule, plan.settings, self.population.name_of)
        self.folder, self._may_change = ClientFolder(folder), plan.changes_mechanisms
        self._streams = self.streams(plan)
        if self.population.rows_per_person is not None:
            self.population = self.population.chosen(self._streams.simulation or self.folder.data_key(ended))
        with naming_layers(self.module.net):
            self.engine.setup(self.module, self.population, self._streams, self.sampling)
            with fixed_rng(self.device):
                self.seconds_per_record(batch_size=1)
        try:
            self._open_ledger(plan, saved, ended)
        except BaseException:
            if not self.folder.ledger_file.is_file():
                self.folder.forget_data_key()
            raise

    def _open_ledger(self, plan: RunPlan, saved: Mapping[str, Any] | None, ended: bool) -> None:
        earlier, data_key = self.folder.header(), self.folder.data_key(ended)  # nothing is written before
        filters = self.filters(plan)
        sealed = identity(plan, self.privacy, self.module, self.population, data_key, filters)
        if ended and earlier is not None:  # it releases nothing more, and the key of the digests is gone
            sealed |= {name: earlier.identity[name] for name in ("records", "tables") if name in earlier.identity}
        accountant = get_accountant(plan.accountant, "add_remove" if self.privacy is None else self.privacy.relation)
        header = Header(
            accountant=accountant.name,
            adjacency=accountant.adjacency,
            sampling=self.sampling,
            delta=tuple(client.delta for client in plan.schedule.clients),
            epsilon=tuple(client.epsilon for client in plan.settings),
            caveats=plan.caveats,
            identity=sealed,
            run=run_of(data_key),
        )
        checkpoint = None if saved is None else Head(**saved["ledger"])
        if earlier is not None:  # before the account hears of it: what is refused must not change who has paid
            check_resumed(self.folder.ledger_file, earlier, header)
        self.require_charged(plan)
        if (account := self._account()) is not None:
            inside = self.folder.path.resolve() in account.path.resolve().parents
            require(not inside, "privacy.account", "be outside of the run's folder", str(account.path))
            account.enter(self._entry(plan, account, (earlier or header).run, self.folder.ledger_file), ended)
        self.ledger = Ledger(self.folder.ledger_file, header, checkpoint, account)
        simulated = self.simulated or self.privacy is None
        terms = (
            accountant,
            self.sampling,
            simulated,
            plan.caveats,
            self.unprotected,
            self.population.name_of,
            self.most_records,
            account,
            filters,
        )
        self.budgets = Budgets(plan.schedule, self.ledger, *terms)
        self._counts_before = self.engine.counts.clone()
        if earlier is not None and saved is None and any(map(self.ledger.events, self._everyone)):
            missing = f"{self.folder.path / 'checkpoint.pt'} is missing, so the run starts again"
            warn_user(f"{missing}; the budget that it has spent remains spent")

    def streams(self, plan: RunPlan) -> Streams:
        """Fresh noise for every release; in a simulation, and in a run without noise, it follows from the key."""
        key = "" if self.privacy is None else self.privacy.noise_key
        if key is None:
            return Streams()
        return Streams.simulated(key, plan.seed, json.dumps(configuration(plan, self.privacy), sort_keys=True))

    def change(self, schedule: RunSchedule) -> None:
        if not self._may_change:  # the header of the ledger says so
            raise RuntimeError("a strategy changes mechanisms only by its method `replan`")
        self.budgets.change(schedule)

    def state_dict(self) -> dict[str, Any]:
        return {**self.engine.state_dict(), "ledger": self.ledger_head()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.load_state_dict(state)
        self._counts_before = self.engine.counts.clone()

    def end(self, finished: bool) -> None:
        self.folder.save_notes(self.engine.counts)
        if finished:  # nobody needs to compare records any more
            self.folder.forget_data_key()

    def close(self) -> None:
        self.ledger.close()

    def accept(self, plan: RoundPlan) -> RoundPlan:
        check_net(self.module.net)  # a callback may have changed the mode of a BatchNorm
        by_class = self.population.rows_per_person is not None and isinstance(plan.job, ClassGradients)
        advice = "Rows of a person may have several classes."
        require(not by_class, "privacy.unit", "be record with gradients of classes", "person", advice)
        plan, numbers = self.budgets.charge_round(plan)
        self._accepted, self._counts_before = (plan, numbers), self.engine.counts.clone()
        return plan

    def train(self, plan: RoundPlan, models: Tensor, raw_weights: Tensor | None) -> ClientUpdates:
        accepted, self._accepted = self._accepted, None
        if accepted is None or accepted[0] is not plan:
            raise RuntimeError("clients train by the last plan that they have accepted, and only once")
        with self._secret_draws("training", plan.round):
            updates = self.engine.train(plan, models, accepted[1], raw_weights)
        self._tell_failures(plan.round, plan.clients)
        return updates

    def ask(self, query: ChargedQuery, round: int) -> Answers:
        check_answerable(query, of_persons=self.population.rows_per_person is not None)
        check_net(self.module.net)
        clients, numbers = self.budgets.charge_query(query, round)
        with self._secret_draws(query.purpose, round):
            answers = self.engine.ask(query.only(clients), round, numbers)
        self._tell_failures(round, clients)
        return answers

    def _tell_failures(self, round: int, clients: Sequence[int]) -> None:
        """Warn of the clients that failed, whose errors are kept in the folder; raise the error if all of them did.

        **Privacy** That a client failed, and the type of its error, may depend on its records: no guarantee covers it.
        """
        failed = self.engine.failed
        if not failed:
            return
        if len(failed) == len(clients):
            error = next(iter(failed.values()))
            error.add_note(f"Every client of round {round} failed.")
            raise error
        self.folder.keep_errors(round, failed)
        who = ", ".join(f"{self.population.name_of(one)} ({type(failed[one]).__name__})" for one in sorted(failed))
        words = f"round {round}: clients failed, and are left out of it: {who}; they have paid"
        warn_user(f"{words}. Tracebacks are in {self.folder.errors_file}")
        failed.clear()  # tracebacks hold tensors

    def _secret_draws(self, purpose: str, round: int) -> AbstractContextManager[None]:
        """Seed what models draw, such as dropout, as secretly as noise.

        If the draws of each record were known, one record more or less would move those of all others, and a sum by
        more than the clip norm. Draws that nobody knows have the same distribution for each record.
        """
        seed = self._streams.generator(f"draws of nets, {purpose}", round, client=0).words(1)[0]
        return fixed_rng(self.device, int(seed))

    def can_pay(self) -> bool:
        return self.budgets.can_pay()

    def was_charged(self, round: int) -> bool:
        return any(self.ledger.charges(client, round) for client in self._everyone)

    def used(self, client: int, purpose: str) -> int:
        return self.ledger.used(client, purpose)

    def account(self, client: int) -> ClientAccount:
        events = self.ledger.events(client)
        return ClientAccount(len(events), noised_steps(events))

    def spent(self) -> tuple[float, ...]:
        return self.budgets.spent()

    def guarantees(self) -> tuple[Guarantee, ...]:
        return self.budgets.guarantees()

    def diagnostics(self) -> Diagnostics | None:
        return Diagnostics.of(self.engine.counts - self._counts_before) if self.unprotected else None

    def ledger_head(self) -> dict[str, Any]:
        return self.ledger.head.as_dict()

    def evaluate(self, final_models: ClientModels) -> Evaluation:
        scores = evaluate(self.module, self.population, final_models, self.engine, self._baseline)
        self._baseline = scores.baseline
        return scores

    def keep_scores(self, final_models: ClientModels, round: int) -> None:
        """Nothing: `evaluate` shows the scores to the one who runs all clients in this process."""

    def seconds_per_record(self, batch_size: int) -> float:
        if not self.module.large or math.isnan(self._seconds):
            self._seconds = seconds_per_record(self.engine, self.module, self.population, batch_size)
        return self._seconds
