"""The protocol of engines: how clients carry out a round. Engines change speed, never results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.privacy.clipping.reference import ClippedSum
from dpfl_lightning.privacy.noise import Streams

Batch = tuple[Tensor, Tensor]


class Engine(Protocol):
    """Runs clients. Everything it returns is noised and was charged by the caller beforehand."""

    name: str
    description: str
    workers: int | None  # clients at the same time, known after setup
    clipped_sum: ClippedSum  # after setup
    seconds: dict[int, float]  # client -> seconds of its last release here, for who spreads the work
    batch_coupled: bool  # whether who else is in a plan decides bits of a release (groups of `one_step` aside)

    def setup(self, module: ClientModule, population: Population, streams: Streams, sampling: str) -> None:
        """Once a run, before the first round: module and population are on their device."""
        ...

    def train(
        self, plan: RoundPlan, models: Tensor, charge_numbers: Sequence[int], raw_weights: Tensor | None = None
    ) -> ClientUpdates:
        """The releases of the plan's clients; `charge_numbers` `[C]` picks each one's noise stream.

        With `raw_weights` `[K, C]` they are streamed into the sum `raw_weights @ deltas`, and none is kept.
        """
        ...

    def ask(self, query: ChargedQuery, round: int, charge_numbers: Sequence[int]) -> Answers:
        """The noised answers of the query's clients."""
        ...

    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        """The net's outputs `[n, ...]` with parameters `model` `[P]` for `rows` `[n]` of the population's storage."""
        ...

    def personalised(self, model: Tensor, client: int) -> Tensor:
        """`model` `[P]` with the client's own personal parameters in place."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What stays with the clients: `personal` parameters, client -> `[p]`; `counts` of gradients, `[N, 3]`."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
