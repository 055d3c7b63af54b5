"""The protocol of engines: how clients carry out a round. Engines change speed, never results."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.privacy.clipping.inputs import Inputs
from dpfl_lightning.privacy.clipping.reference import ClippedSum
from dpfl_lightning.privacy.noise import Streams

Batch = tuple[Inputs, Tensor]  # x and y

#: what is counted: gradients of single records (one a record and step), and of these
COUNTED = ("gradients", "clipped", "not_finite")
FEW_RECORDS = 128  # expected of a client: a client with more fills a pass alone


class Engine(Protocol):
    """Runs the clients' work. Everything it returns is noised; the caller has charged it beforehand.

    A client whose work raises an error releases nothing: its update is lost, or its answer is missing. A UserError,
    which the user has to correct, is raised.

    Attributes:
        workers, clipped_sum: clients that are trained at once, and how their gradients are summed; after `setup`.
        counts: what `COUNTED` names, of each client's gradients so far, `[N, 3]`; exact and private.
        failed: the error of each client that failed in the last `train` or `ask`; private.
    """

    name: str
    description: str
    workers: int | None
    clipped_sum: ClippedSum
    failed: dict[int, Exception]

    @property
    def counts(self) -> Tensor: ...

    def setup(self, module: ClientModule, population: Population, streams: Streams, sampling: str) -> None:
        """Prepare a run. Module and population are on the device of the run."""

    def train(
        self, plan: RoundPlan, models: Tensor, charge_numbers: Sequence[int], raw_weights: Tensor | None = None
    ) -> ClientUpdates:
        """The noisy releases of the plan's clients from `models` `[K, P]`, or their sum by `raw_weights` `[K, C]`.

        `charge_numbers` `[C]` select the noise stream of each client.
        """

    def ask(self, query: ChargedQuery, round: int, charge_numbers: Sequence[int]) -> Answers:
        """The noisy answers of the clients of the query."""

    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        """Outputs `[n, ...]` of the parameters `model` `[P]` for `rows` `[n]` of the population's records."""

    def personalised(self, model: Tensor, client: int) -> Tensor:
        """`model` `[P]` with the client's personal parameters."""

    def state_dict(self) -> dict[str, Any]:
        """What stays with the clients: `personal` parameters (client -> `[p]`), and `counts`."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def count_outcomes(norms: Tensor, clip_norm: float | Tensor) -> Tensor:
    """For each gradient by its norm `[...]` the numbers 0 or 1 to add up for `COUNTED`, `[..., 3]` int64. Private.

    >>> count_outcomes(torch.tensor([0.5, 2.0, float("nan")]), clip_norm=1.0).sum(dim=0)
    tensor([3, 1, 1])
    """
    finite = torch.isfinite(norms)
    return torch.stack([torch.ones_like(finite), finite & (norms > clip_norm), ~finite], dim=-1).long()


def may_share(plan: RoundPlan, row: int, module: ClientModule) -> bool:
    """Whether a client may share a batch: one step of plain SGD and few records.

    Its passes have the same size if it is trained alone, because the others of the batch failed or are elsewhere.
    """
    alone = plan.steps[row] > 1 or bool(module.personal) or not module.plain_sgd(plan.optimizer)
    return not alone and plan.mechanism_of[row].expected_batch_size <= FEW_RECORDS
