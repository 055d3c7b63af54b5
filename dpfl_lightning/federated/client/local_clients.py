"""The clients' side of a run in this process: accept a plan, charge it, then release."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserNotice
from dpfl_lightning.federated.client.answers import check_answerable
from dpfl_lightning.federated.client.budgets import Budgets
from dpfl_lightning.federated.client.dummy_data import check_fits, seconds_per_record
from dpfl_lightning.federated.client.engines.engine import Engine
from dpfl_lightning.federated.client.evaluation import evaluate
from dpfl_lightning.federated.client.folder import ClientFolder
from dpfl_lightning.federated.client.identity import configuration, identity
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.account import ClientAccount, RunPlan
from dpfl_lightning.federated.messages.diagnostics import SHOWN, Diagnostics
from dpfl_lightning.federated.messages.evaluation import Evaluation
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.messages.models import ClientModels
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import Caveat, NonPrivateEvent
from dpfl_lightning.privacy.accounting.guarantee import SIMULATED, Guarantee
from dpfl_lightning.privacy.ledger.file import Header
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.privacy.sampling import SAMPLINGS

T = TypeVar("T")


def facts_of(population: Population, **extra: Any) -> Facts:
    """What the server may know about a population; `extra` are further fields of `Facts`."""
    truth = None if population.groups is None else {"groups": population.groups}
    return Facts(population.num_records, population.num_classes, population.input_shape, truth=truth, **extra)


class LocalClients:
    """All clients of a run in this process; implements `Clients`.

    Args:
        population: the clients' records, on the device of the run.
        module: the step of one client; its parameters are the start.
        engine: how the local work is executed.
        privacy: with the key of a simulation, if it is one; None is a run without privacy.

    **Privacy** Holds records, noise, budgets and the ledger. Only what the methods return leaves.

    Raises:
        UserError: the module does not fit the records, or mixes them.
    """

    def __init__(
        self, population: Population, module: ClientModule, engine: Engine, privacy: PrivacyOptions | None
    ) -> None:
        self.population, self.module, self.privacy = population, module, privacy
        check_fits(module, population)
        self.engine = engine
        self.device = module.device
        self.simulated = privacy is not None and privacy.noise_key is not None
        self.caveats = (*((SIMULATED,) if self.simulated else ()), *population.caveats)
        self._sampling = "poisson" if privacy is None else privacy.sampling
        self._shows_counts = privacy is not None and privacy.diagnostics
        self._accepted: tuple[RoundPlan, list[int]] | None = None

    @property
    def description(self) -> str:
        return f"{self.engine.name} ({self.engine.description})"

    @property
    def noise(self) -> str:
        return Streams(b"" if self.simulated else None).words(self.device)

    def run(self, work: Callable[[], T]) -> T:
        return work()

    # -- the whole run

    def planned_rounds(self, folder: Path) -> int:
        header = ClientFolder(folder).header()
        return 0 if header is None else int(header.identity.get("rounds", 0))

    def begin(self, folder: Path, plan: RunPlan, saved: Mapping[str, Any] | None, ended: bool) -> None:
        self.folder = ClientFolder(folder)
        earlier, data_key = self.folder.header(), self.folder.data_key(ended)
        configured = self._configuration(plan)
        self.engine.setup(self.module, self.population, self.streams(plan), self._sampling)
        sealed = identity(configured, plan.schedule, self.module, plan.strategies, self.population, data_key)
        if ended and earlier is not None:  # it releases nothing more, and the key of the digests is gone
            sealed["records"] = earlier.identity.get("records")
        accountant = get_accountant(plan.accountant, "add_remove" if self.privacy is None else self.privacy.adjacency)
        header = Header(
            accountant=accountant.name,
            adjacency=accountant.adjacency,
            sampling=self._sampling,
            delta=tuple(client.delta for client in plan.schedule.clients),
            epsilon=tuple(client.epsilon for client in plan.settings),
            caveats=plan.caveats,
            identity=sealed,
        )
        self.budgets = Budgets(
            plan.schedule,
            self.folder.open_ledger(header, None if saved is None else saved["ledger"]),
            accountant,
            SAMPLINGS[self._sampling],
            simulated=self.simulated or self.privacy is None,
            caveats=[Caveat(words) for words in plan.caveats],
            unprotected=[NonPrivateEvent(SHOWN)] if self._shows_counts else [],
        )
        self._counts_before = self._counts()
        if earlier is not None and saved is None and self.budgets.releases_of_all():
            words = f"{folder / 'checkpoint.pt'} is gone, so the run begins anew; what it has spent stays spent"
            warnings.warn(words, UserNotice, stacklevel=2)

    def _configuration(self, plan: RunPlan) -> dict[str, Any]:
        return configuration(plan.rounds, plan.seed, plan.settings, self.privacy, list(plan.strategies), plan.options)

    def streams(self, plan: RunPlan) -> Streams:
        """Fresh noise for every release; in a simulation, and in a run without noise, it follows from the key."""
        key = "" if self.privacy is None else self.privacy.noise_key
        configured = json.dumps(self._configuration(plan), sort_keys=True)
        configured = configured.replace('"label_noise"', '"mislabelled"')  # its name when the finished cells were made
        return Streams() if key is None else Streams.simulated(key, plan.seed, configured)

    def change(self, schedule: RunSchedule) -> None:
        self.budgets.change(schedule)

    def state_dict(self) -> dict[str, Any]:
        return {**self.engine.state_dict(), "ledger": self.ledger_head()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.load_state_dict(state)
        self._counts_before = self._counts()

    def end(self, finished: bool) -> None:
        self.folder.save_notes(self._counts())
        if finished:
            self.folder.finish()

    def close(self) -> None:
        self.budgets.ledger.close()

    # -- releases

    def accept(self, plan: RoundPlan) -> RoundPlan:
        plan, numbers = self.budgets.charge_round(plan)
        self._accepted, self._counts_before = (plan, numbers), self._counts()
        return plan

    def train(self, plan: RoundPlan, models: Tensor, raw_weights: Tensor | None) -> ClientUpdates:
        accepted, self._accepted = self._accepted, None
        if accepted is None or accepted[0] is not plan:
            raise RuntimeError("clients train by the last plan that they have accepted, and only once")
        return self.engine.train(plan, models, accepted[1], raw_weights)

    def ask(self, query: ChargedQuery, round: int) -> Answers:
        check_answerable(query)
        clients, numbers = self.budgets.charge_query(query, round)
        return self.engine.ask(query.only(clients), round, numbers)

    # -- what was released and paid

    def can_pay(self) -> bool:
        return self.budgets.anyone_affords()

    def used(self, client: int, purpose: str) -> int:
        return self.budgets.ledger.used(client, purpose)

    def account(self, client: int) -> ClientAccount:
        return ClientAccount(self.budgets.releases(client), self.budgets.steps(client))

    def spent(self) -> tuple[float, ...]:
        return self.budgets.spent()

    def guarantees(self) -> tuple[Guarantee, ...]:
        return self.budgets.guarantees()

    def was_charged(self, round: int) -> bool:
        return self.budgets.was_charged(round)

    def diagnostics(self) -> Diagnostics | None:
        return Diagnostics.of(self._counts() - self._counts_before) if self._shows_counts else None

    def ledger_head(self) -> dict[str, Any]:
        return self.budgets.ledger.head.as_dict()

    def _counts(self) -> Tensor:
        return self.engine.state_dict()["counts"]

    # -- not covered by the guarantee

    def evaluate(self, final_models: ClientModels) -> Evaluation:
        return evaluate(self.module, self.population, final_models, self.engine)

    def seconds_per_record(self, batch_size: int) -> float:
        return seconds_per_record(self.engine, self.module, self.population, batch_size)
