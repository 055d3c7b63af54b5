"""Base class of strategies that form groups: the metric `group` of a round."""

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from dpfl_lightning.federated.messages.jobs import TRAINING
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.summary import of_all
from dpfl_lightning.federated.server.view import ServerState, View


class GroupingStrategy(Strategy):
    """Reports the metric `group` `[N]` of each round in which updates arrived; absent clients have NaN.

    A group is the clients that train one model, unless a subclass passes other groups to `_note`.
    """

    jobs = TRAINING

    _noted: tuple[int, Tensor] | None = None

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        """Keep the model that each client trained as its model."""
        self._note(view, updates.clients, updates.model_of)
        trained = dict(zip(updates.clients, updates.model_of, strict=True))
        return dataclasses.replace(
            state, model_of=tuple(trained.get(client, row) for client, row in enumerate(state.model_of))
        )

    def _note(self, view: View, clients: Sequence[int], groups: Sequence[int]) -> None:
        """Record the `groups` `[C]` of the round's `clients` `[C]`."""
        self._noted = view.round, of_all(clients, groups, view.facts.num_clients)

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        noted = self._noted
        return {"group": noted[1]} if noted is not None and noted[0] == view.state.round else {}
