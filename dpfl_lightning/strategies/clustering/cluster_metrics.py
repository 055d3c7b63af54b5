"""Who was in which group in a round: noted by strategies that form groups, and told to watchers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.summary import of_all
from dpfl_lightning.federated.server.view import View


class TellsGroups(Strategy):
    """Tells `group` `[N]` of every round in which updates arrived: what `_note` was given, NaN for absent clients."""

    needs_training = True

    _noted: tuple[int, Tensor] | None = None

    def _note(self, view: View, clients: Sequence[int], groups: Sequence[int]) -> None:
        """`groups` `[C]` of the round's `clients` `[C]`."""
        self._noted = view.round, of_all(clients, groups, view.facts.num_clients)

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        noted = self._noted
        return {"group": noted[1]} if noted is not None and noted[0] == view.state.round else {}
