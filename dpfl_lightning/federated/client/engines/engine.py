"""The protocol of engines: how clients carry out a round. Engines change speed, never results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.requests import Charged
from dpfl_lightning.models.optimizers import LocalOptimizer
from dpfl_lightning.privacy.clipping.inputs import Inputs
from dpfl_lightning.privacy.clipping.reference import ClippedSum
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.privacy.noise import Streams

Batch = tuple[Inputs, Tensor]  # x and y

FEW_RECORDS = 128  # expected of a client: a client with more fills a pass alone


class Engine(Protocol):
    """Computes what clients were asked for and have paid for. Everything it returns is noised.

    Attributes:
        workers: how many copies compute at the same time; None: one a core, one on a GPU.
        clipped_sum: how gradients are summed; after `setup`.
        clients: those whose records are in this process, with what stays with them; after `setup`.
    """

    name: str
    description: str
    workers: int | None
    clipped_sum: ClippedSum
    clients: HeldClients

    def setup(self, module: ClientModule, clients: HeldClients, streams: Streams, sampling: str) -> None:
        """Prepare a run. Module and records are on the device of the run."""

    def copy(self) -> Engine:
        """An engine that computes the same in another thread at the same time; after `setup`."""

    def batches(self, requests: Sequence[Charged]) -> list[list[int]]:
        """The places of the requests of each batch that is computed together. It does not depend on other batches."""

    def compute(self, batch: Sequence[Charged]) -> list[Any]:
        """The noisy release, or answer, of each request of a batch; for a client that fails its error.

        Raises UserError for what the user has to correct.
        """

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
