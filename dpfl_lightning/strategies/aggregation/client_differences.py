"""Base of strategies that learn from products of updates how much clients differ, and say so at the end of a run."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpfl_lightning.algorithms.mixed_effects import RandomEffects, RoundProducts, layers_of
from dpfl_lightning.federated.server.results import ClientEmbedding
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.runtime.text import counted

_LEAST_OWN = 0.5  # mean weight of a client's own updates from which on clients differ, each from all others
_MOST_NAMES = 6  # of a group in a sentence


class FoundGroups(NamedTuple):
    """Points `[n, k]` of these clients `[n]` along the directions in which they differ, and the groups they form."""

    clients: NDArray[np.int64]
    points: NDArray[np.float64]
    groups: list[NDArray[np.int64]]


class ClientDifferences(Strategy):
    """Keeps products of updates of different rounds, and reports groups of clients. Post-processing of releases."""

    _advice = ""  # added to a sentence on clients that differ

    _products: RoundProducts | None = None
    _saved: dict[str, Any] | None = None  # of a resumed run, until the layers of its model are known

    def _products_of(self, view: View) -> RoundProducts:
        if self._products is None:
            layers = layers_of(view.module.named_trainable, view.module.personal)
            self._products = RoundProducts(layers, view.facts.num_clients)
            if self._saved is not None:
                self._products.load_state_dict(self._saved)
        return self._products

    def remarks(self, view: View) -> tuple[str, ...]:
        effects = self._products_of(view).effects()
        if len(effects.clients) < 2:
            return ()
        (_, points, groups), own = self._groups_of(effects), effects.own_weight()
        if len(groups) > 1:
            parts = [", ".join(_some([view.facts.name_of(int(one)) for one in group])) for group in groups]
            return (f"The updates show {len(groups)} groups of clients: {'; '.join(parts)}.{self._advice}",)
        if not points.shape[1] and not effects.covariance.any():
            return ("The updates show no differences between clients beyond their noise.",)
        weight = f"a client's own updates have {own:.0%} of the weight in the best prediction of its gradient"
        if own <= _LEAST_OWN:
            return (f"The updates show few differences between clients: {weight}.",)
        if self._may_be_random(effects, view):
            return ("The updates show that clients differ no more than random samples of so few records may.",)
        return (f"The updates show that clients differ, and no groups: {weight}.{self._advice}",)

    def _groups_of(self, effects: RandomEffects) -> FoundGroups:
        return FoundGroups(effects.clients, effects.points(), effects.groups())

    def _may_be_random(self, effects: RandomEffects, view: View) -> bool:
        """Whether random samples of one distribution, as large as the clients' data, may differ as much."""
        return False  # unknown: what clients with models of their own still differ in says nothing of their data

    def client_embedding(self, view: View) -> ClientEmbedding | None:
        effects = self._products_of(view).effects()
        clients, points, groups = self._groups_of(effects)
        if not points.shape[1] or (not groups and self._may_be_random(effects, view)):
            return None
        group_of = {int(client): number for number, group in enumerate(groups) for client in group}
        return ClientEmbedding(
            title="Mean gradients along the two directions in which clients differ most",
            clients=tuple(clients.tolist()),
            points=tuple((x, y) for x, y in np.pad(points[:, ::-1], ((0, 0), (0, 1)))[:, :2].tolist()),
            cluster=tuple(group_of.get(int(client), 0) for client in clients),
            membership=(1.0,) * len(clients),
            num_clusters=max(len(groups), 1),
            separation=None,
            confident=len(groups) > 1,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"products": self._saved if self._products is None else self._products.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._products, self._saved = None, state["products"]


def _some(names: list[str]) -> list[str]:
    more = len(names) - _MOST_NAMES
    return names if more < 2 else [*names[:_MOST_NAMES], f"and {counted(more, 'other')}"]
