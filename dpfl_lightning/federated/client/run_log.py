"""The log of a run in its folder: what each client has paid for, and what that guarantees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.errors import warn_user
from dpfl_lightning.federated.client.budgets import Budgets, check_budgets
from dpfl_lightning.federated.client.folder import ClientFolder, run_of
from dpfl_lightning.federated.client.holders import DataHolders, bounding_events
from dpfl_lightning.federated.client.identity import identity
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.clients import ClientAccount, RunPlan
from dpfl_lightning.federated.messages.evaluation import SHOWN
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import noised_steps
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.privacy.accounting.noise_source import source_of
from dpfl_lightning.privacy.accounting.units import Relation, unit_of
from dpfl_lightning.privacy.ledger.file import Head, Header
from dpfl_lightning.privacy.ledger.ledger import Ledger, check_resumed


class Closes(Protocol):
    """A log, or a connection."""

    def close(self) -> None: ...


@contextmanager
def closed_on_error(one: Closes) -> Iterator[None]:
    """Close it if an error is raised: another run may then use it, in this process, too."""
    try:
        yield
    except BaseException:
        one.close()
        raise


class RunLog:
    """What the clients of a run pay for: the ledger in its folder, and the budgets of its plan.

    Args:
        privacy: None is a run without privacy.
        names: of all clients of the plan; empty if they have only numbers.
        caveats: sentences about the records that every guarantee must contain.
    """

    def __init__(self, privacy: PrivacyOptions | None, names: Sequence[str], caveats: Sequence[str] = ()) -> None:
        self.privacy, self.names = privacy, names
        self.source = source_of(privacy)
        self.sampling: str = "poisson" if privacy is None else privacy.sampling
        self.unit = unit_of(privacy)
        self.unprotected: tuple[str, ...] = (SHOWN,) if privacy is not None and privacy.diagnostics else ()
        self.caveats = (*self.source.caveats, *caveats)

    def name_of(self, client: int) -> str:
        return self.names[client] if self.names else str(client)

    def planned_rounds(self, folder: Path) -> int:
        header = ClientFolder(folder).header()
        return 0 if header is None else int(header.identity.get("rounds", 0))

    def seal(self, folder: Path, digest: bytes) -> bytes:
        return ClientFolder(folder).seal(digest)

    def prepare(self, folder: Path, plan: RunPlan) -> None:
        """Check the plan, of which nothing was charged yet, against the budgets."""
        check_budgets(plan.schedule, plan.settings, self.name_of)
        self.folder, self._may_change = ClientFolder(folder), plan.changes_mechanisms

    def open(
        self,
        plan: RunPlan,
        module: ClientModule,
        records: Callable[[bytes], Iterable[bytes]],
        saved: Mapping[str, Any] | None,
        ended: bool,
        holders: DataHolders | None = None,
    ) -> None:
        """Open the ledger of the run, see `Clients.begin`. `records` returns digests of the records, given a key.

        The account of the data `holders` is charged, too. UserError, before anything is written, for another run.
        """
        with self._no_key_without_a_ledger():
            earlier, data_key = self.folder.header(), self.folder.data_key(ended)
            filters, digests = bounding_events(plan, self.privacy), [digest.hex() for digest in records(data_key)]
            sealed = identity(plan, self.privacy, module, self.names, digests, data_key, filters)
            if ended and earlier is not None:  # it releases nothing more, and the key of the digests is gone
                sealed |= {name: earlier.identity[name] for name in ("records", "tables") if name in earlier.identity}
            relation = Relation.of(self.privacy)
            accountant = get_accountant(plan.accountant, relation.adjacency)
            header = Header(
                accountant=accountant.name,
                adjacency=relation.key,
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
            account = None if holders is None else holders.enter(plan, (earlier or header).run, self.folder, ended)
            self.ledger = Ledger(self.folder.ledger_file, header, checkpoint, account)
            with closed_on_error(self.ledger):
                self.budgets = Budgets(
                    plan.schedule,
                    self.ledger,
                    accountant,
                    self.sampling,
                    self.source.repeats,
                    plan.caveats,
                    self.unprotected,
                    self.name_of,
                    self.unit,
                    account,
                    filters,
                )
        if earlier is not None and saved is None and self.ledger.payers():
            missing = f"{self.folder.path / 'checkpoint.pt'} is missing, so the run starts again"
            warn_user(f"{missing}; the budget that it has spent remains spent")

    @contextmanager
    def _no_key_without_a_ledger(self) -> Iterator[None]:
        """Forget the key of the records if an error leaves no ledger that needs it."""
        try:
            yield
        except BaseException:
            if not self.folder.ledger_file.is_file():
                self.folder.forget_data_key()
            raise

    def can_pay(self) -> bool:
        return self.budgets.can_pay()

    def was_charged(self, round: int) -> bool:
        return any(self.ledger.charges(client, round) for client in self.ledger.payers())

    def used(self, client: int, purpose: str) -> int:
        return self.ledger.used(client, purpose)

    def account(self, client: int) -> ClientAccount:
        events = self.ledger.events(client)
        return ClientAccount(len(events), noised_steps(events))

    def spent(self) -> tuple[float, ...]:
        return self.budgets.spent()

    def guarantees(self) -> tuple[Guarantee, ...]:
        return self.budgets.guarantees()

    def ledger_head(self) -> dict[str, Any]:
        return self.ledger.head.as_dict()

    def close(self) -> None:
        self.ledger.close()
