"""The data holders of a run in this process, and the account of what all runs on their records cost together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.errors import require
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.folder import ClientFolder
from dpfl_lightning.federated.messages.clients import RunPlan
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import Release
from dpfl_lightning.privacy.accounting.filters import whole_budgets
from dpfl_lightning.privacy.accounting.guarantee import ENDS_BY_RESULTS, CumulativeGuarantee
from dpfl_lightning.privacy.accounting.noise_source import source_of
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, once_each
from dpfl_lightning.privacy.accounting.units import Relation, unit_of
from dpfl_lightning.privacy.ledger.account import AUTO, NAMELESS, PrivacyAccount
from dpfl_lightning.privacy.ledger.account_file import RunRecord, users_file


class DataHolders:
    """Those whose records are in this process, and their account. What a plan costs them does not depend on a model.

    Args:
        held: their records.
        names: of all clients of the plan; empty if they have only numbers.
        privacy: None is a run without privacy.
    """

    def __init__(self, held: HeldClients, names: Sequence[str], privacy: PrivacyOptions | None) -> None:
        self.held, self.names, self.privacy = held, names, privacy
        self.source = source_of(privacy)

    def outlook(self, plan: RunPlan) -> str:
        """What a run would cost together with those in the account, in words; empty without an account."""
        account = self.account()
        if account is None or not account.path.is_file():
            return ""
        return self.said_of(account, account.projected_cost(self._entry(plan, account, "planned", Path("none"))))

    def account(self) -> PrivacyAccount | None:
        """The account of the data holders; None for public data and without protection."""
        chosen = self.privacy.account if self.privacy is not None and self.source.protects else None
        public = chosen == AUTO and bool(self.held.population.origin)
        population = self.held.population
        if chosen is None or public or not any(map(len, (*population.train_of, *population.held_out_of))):
            return None
        return PrivacyAccount(users_file() if chosen == AUTO else Path(chosen).expanduser())

    def enter(self, plan: RunPlan, run: str, folder: ClientFolder, ended: bool) -> PrivacyAccount | None:
        """Enter a run into the account, and return it; None without one.

        Raises UserError, before anything is written, if the run has to be charged, or its account lies in its folder.
        """
        self._require_charged(plan)
        if (account := self.account()) is None:
            return None
        inside = folder.path.resolve() in account.path.resolve().parents
        require(not inside, "privacy.account", "be outside of the run's folder", str(account.path))
        account.enter(self._entry(plan, account, run, folder.ledger_file), ended)
        return account

    def _require_charged(self, plan: RunPlan) -> None:
        """Raise UserError for a run that no account counts on records whose holder has a limit."""
        account = PrivacyAccount(users_file())
        if self.account() is not None or self.held.population.origin or not account.path.is_file():
            return
        if not account.has_limits():  # nothing needs to be recognised
            return
        limited = account.limits_on(self._entry(plan, account, "planned", Path("none")))
        limit = f"because there is a limit on {', '.join(limited)}"
        advice = "Train on other records, within the limit, or remove it by `dpfl account unlimit`."
        option, must = self.source.option or "privacy.account", self.source.must or "be set"
        require(not limited, option, f"{must}, {limit}", None if must == "be set" else "a key", advice)

    def _entry(self, plan: RunPlan, account: PrivacyAccount, run: str, ledger: Path) -> RunRecord:
        own, filters, population = self._with_records(), bounding_events(plan, self.privacy), self.held.population
        schedules = [plan.schedule.clients[client] for client in own]
        return RunRecord(
            run=run,
            ledger=str(ledger.absolute()),
            adjacency=Relation.of(self.privacy).key,
            sampling="poisson" if self.privacy is None else self.privacy.sampling,
            accountant=plan.accountant,
            holders={client: self.names[client] if self.names else NAMELESS for client in own},
            delta=tuple(schedule.delta for schedule in schedules),
            planned=tuple(once_each(_releases, schedules)),
            evidence=population.evidence(account.key),
            rows=tuple(map(self._most_rows, own.values())),
            filters=tuple(filters[client] for client in own),
            whole=ENDS_BY_RESULTS in plan.caveats,
        )

    def _with_records(self) -> dict[int, int]:
        """Number -> place of the clients with records."""
        data = self.held.population
        places = ((number, self.held.places[number]) for number in self.held.numbers)
        return {number: place for number, place in places if len(data.train_of[place]) or len(data.held_out_of[place])}

    def _most_rows(self, place: int) -> int | None:
        """The most rows of one id: as the records show, or else as the operator says. It stays in the account."""
        data = self.held.population
        if data.unit_ids is None or data.unit.is_group:
            return unit_of(self.privacy).rows
        rows = torch.cat([data.train_of[place], data.held_out_of[place]])
        return int(data.unit_ids[rows].unique(return_counts=True)[1].max())

    def said_of(self, account: PrivacyAccount, together: Mapping[int, CumulativeGuarantee]) -> str:
        client, worst = max(together.items(), key=lambda one: one[1].urgency)
        most = "the largest" if worst.used is None else "the nearest to its limit"
        name = self.names[client] if self.names else str(client)
        who = f", {name}, {most}" if len(together) > 1 else ""
        return f"Account {account.path}{who}: {worst.words()}"


def bounding_events(plan: RunPlan, privacy: PrivacyOptions | None) -> list[Release | None]:
    """What bounds all releases of each client, if results decide its noise, else None; see `whole_budgets`."""
    if not plan.changes_mechanisms:
        return [None] * len(plan.schedule.clients)
    adjacency = Relation.of(privacy).adjacency
    return whole_budgets(plan.schedule.clients, get_accountant(plan.accountant, adjacency))


def _releases(schedule: ClientSchedule) -> tuple[tuple[Release, int], ...]:
    """The different releases of a schedule, and their numbers."""
    counts = Counter[Release]()
    for line in schedule.planned:
        counts[line.event] += line.count
    return tuple(counts.items())
