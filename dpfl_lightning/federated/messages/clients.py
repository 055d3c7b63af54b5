"""The protocol by which the server asks its clients, wherever they are, with its plan of the run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.evaluation import ClientModels, Diagnostics, Evaluation
from dpfl_lightning.federated.messages.facts import ClientSettings
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.models.learning_rates import CONSTANT, Constant
from dpfl_lightning.models.optimizers import PLAIN_SGD, LocalOptimizer
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.privacy.accounting.noise_source import NoiseSource
from dpfl_lightning.privacy.accounting.units import Unit

T = TypeVar("T")


class LostClients(UserError):
    """The process of some clients ended before the run did. Only the current round is lost."""


@dataclass(frozen=True)
class RunPlan:
    """A whole run as the server proposes it to the clients before the first round.

    Args:
        seed: of everything but noise and sampling.
        schedule: every release of the run, its noise solved with `accountant`.
        caveats: sentences that every guarantee of the run must contain.
        strategies: class of each deciding strategy -> digest of its settings and source.
        changes_mechanisms: whether a strategy may change the schedule by `replan`.
        optimizer, rates: of the local steps; see `RoundPlan.optimizer`.
    """

    rounds: int
    seed: int
    settings: tuple[ClientSettings, ...]
    schedule: RunSchedule
    accountant: str
    caveats: tuple[str, ...]
    strategies: Mapping[str, str]
    changes_mechanisms: bool
    options: Mapping[str, Any]
    optimizer: LocalOptimizer | None = PLAIN_SGD
    rates: Constant = CONSTANT


@dataclass(frozen=True)
class ClientAccount:
    """The numbers of releases and of noised steps that one client has paid for so far."""

    releases: int
    steps: int


class Clients(Protocol):
    """All clients of a run, as the server sees them: it never receives a record, a key or a ledger.

    Every release is planned (`begin`), charged (`accept`, or within `ask`), computed and noised, in this order.
    `source` is where noise comes from; `unprotected` is what every client shows without noise, in words; `caveats` are
    sentences that every guarantee of these clients must contain; `unit` is what they protect.
    """

    source: NoiseSource
    sampling: str
    unprotected: tuple[str, ...]
    caveats: tuple[str, ...]
    unit: Unit
    device: torch.device

    @property
    def description(self) -> str:
        """How the clients compute, in words."""

    @property
    def noise(self) -> str:
        """Where noise and sampling come from, in words."""

    @property
    def account_words(self) -> str:
        """What the run will cost together with others on the same records; empty without an account."""

    def run(self, work: Callable[[], T]) -> T:
        """`work()`, the server's side of the run; of several processes only one does it, and all return the result."""

    def planned_rounds(self, folder: Path) -> int:
        """The number of rounds with which the ledger in a run's folder began; 0 if there is no ledger yet."""

    def seal(self, folder: Path, digest: bytes) -> bytes:
        """The clients' keyed digest (32 bytes) of the digest of a checkpoint in the run's folder.

        UserError if the key is missing or damaged.
        """

    def begin(self, folder: Path, plan: RunPlan, saved: Mapping[str, Any] | None, ended: bool) -> None:
        """Agree to the plan and open the ledger in the run's folder; UserError if it is the ledger of another run.

        `saved` is `state_dict()` of the last checkpoint; `ended` says that the run releases nothing more.
        """

    def change(self, schedule: RunSchedule) -> None:
        """Replace the rest of the schedule; what was paid for stays part of it."""

    def accept(self, plan: RoundPlan) -> RoundPlan:
        """The plan without the clients that cannot pay; the others are charged."""

    def train(self, plan: RoundPlan, models: Tensor, raw_weights: Tensor | None) -> ClientUpdates:
        """The noisy releases of an accepted plan from `models` `[K, P]`, or their sum by `raw_weights` `[K, C]`."""

    def ask(self, query: ChargedQuery, round: int) -> Answers:
        """The noisy answers of those clients that can pay for them, by client."""

    def evaluate(self, final_models: ClientModels) -> Evaluation:
        """Scores of models on the test set and on each client's held-out records. Not covered by the guarantee."""

    def personalised(self, model: Tensor, client: int) -> Tensor:
        """`model` `[P]` with the client's personal parameters, if they are in this process."""

    def outlook(self, plan: RunPlan) -> str:
        """What a run would cost together with others on the same records, in words; empty without an account."""

    def keep_scores(self, final_models: ClientModels, round: int) -> None:
        """Let each client score its final model on its held-out records. The scores stay where its records are."""

    def seconds_per_record(self, batch_size: int) -> float:
        """An estimate of the time of one record in one step, measured on random data."""

    def can_pay(self) -> bool:
        """Whether any client has any planned release left."""

    def was_charged(self, round: int) -> bool:
        """Whether any client has paid for a release of that round."""

    def used(self, client: int, purpose: str) -> int:
        """The number of releases of that purpose that the client has paid for."""

    def account(self, client: int) -> ClientAccount: ...

    def spent(self) -> tuple[float, ...]:
        """Each client's epsilon so far, rounded up."""

    def guarantees(self) -> tuple[Guarantee, ...]:
        """Each client's guarantee so far, composed again from the ledger."""

    def diagnostics(self) -> Diagnostics | None:
        """Counts of the last round's gradients; None unless `privacy.diagnostics` gives up the guarantee for them."""

    def ledger_head(self) -> dict[str, Any]:
        """How far the ledger goes: run, number of lines, and the end of its chain."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep of the clients. Opaque to the server."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def end(self, finished: bool) -> None:
        """Write the clients' private notes, and if the run is finished complete the ledger and remove keys."""

    def close(self) -> None: ...
