"""The protocol of engines: how clients carry out a round. Engines change speed, never results."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.client import Client, HeldClients
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery
from dpfl_lightning.federated.messages.requests import Ask, Train
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.models.optimizers import LocalOptimizer
from dpfl_lightning.privacy.clipping.inputs import Inputs
from dpfl_lightning.privacy.clipping.reference import ClippedSum
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.noise import Streams

Batch = tuple[Inputs, Tensor]  # x and y

FEW_RECORDS = 128  # expected of a client: a client with more fills a pass alone


class Engine(Protocol):
    """Runs the clients' work. Everything it returns is noised; the caller has charged it beforehand.

    A client whose work raises an error releases nothing: its update is lost, or its answer is missing. A UserError,
    which the user has to correct, is raised.

    Attributes:
        workers, clipped_sum: clients that are trained at once, and how their gradients are summed; after `setup`.
        clients: those whose records are in this process, with what stays with them; after `setup`.
        failed: the error of each client that failed in the last `train` or `ask`; private.
    """

    name: str
    description: str
    workers: int | None
    clipped_sum: ClippedSum
    failed: dict[int, Exception]

    @property
    def clients(self) -> HeldClients: ...

    def setup(
        self,
        module: ClientModule,
        population: Population,
        streams: Streams,
        sampling: str,
        clients: HeldClients | None = None,
    ) -> None:
        """Prepare a run. Module and population are on the device of the run; `clients` (None: all) are those in it."""

    def train(
        self, plan: RoundPlan, models: Tensor, charge_numbers: Sequence[int], raw_weights: Tensor | None = None
    ) -> ClientUpdates:
        """The noisy releases of the plan's clients from `models` `[K, P]`, or their sum by `raw_weights` `[K, C]`.

        `charge_numbers` `[C]` select the noise stream of each client.
        """

    def ask(self, query: ChargedQuery, round: int, charge_numbers: Sequence[int]) -> Answers:
        """The noisy answers of the clients of the query."""

    def carry_out(self, client: Client, request: Train | Ask, charge_number: int) -> Any:
        """The noisy release, or answer, of one client. Raises its error if it fails."""

    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        """Outputs `[n, ...]` of the parameters `model` `[P]` for `rows` `[n]` of the population's records."""

    def personalised(self, model: Tensor, client: int) -> Tensor:
        """`model` `[P]` with the client's personal parameters."""


def count_outcomes(norms: Tensor, clip_norm: float | Tensor) -> Tensor:
    """For each gradient by its norm `[...]` the numbers 0 or 1 to add up for `COUNTED`, `[..., 3]` int64. Private.

    >>> count_outcomes(torch.tensor([0.5, 2.0, float("nan")]), clip_norm=1.0).sum(dim=0)
    tensor([3, 1, 1])
    """
    finite = torch.isfinite(norms)
    return torch.stack([torch.ones_like(finite), finite & (norms > clip_norm), ~finite], dim=-1).long()


def may_share(module: ClientModule, mechanism: Mechanism, steps: int, optimizer: LocalOptimizer | None) -> bool:
    """Whether a client may share a batch: one step of plain SGD and few records.

    Its passes have the same size if it is trained alone, because the others of the batch failed or are elsewhere.
    """
    alone = steps > 1 or bool(module.personal) or not module.plain_sgd(optimizer)
    return not alone and mechanism.expected_batch_size <= FEW_RECORDS
