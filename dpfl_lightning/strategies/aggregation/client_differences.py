"""Base of strategies that learn from products of updates how much clients differ, and say so at the end of a run."""

from typing import Any

import numpy as np

from dpfl_lightning.algorithms.mixed_effects import RandomEffects, RoundProducts, layers_of
from dpfl_lightning.federated.server.results import ClientEmbedding
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.runtime.text import counted

_MOSTLY = 0.5  # weight of its own update in the prediction of a client that mostly differs from the others
_MOST_NAMES = 6  # of a group in a sentence


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
        groups, own = effects.groups(), effects.own_weight()
        if len(groups) > 1:
            parts = [", ".join(_some([view.facts.name_of(int(one)) for one in group])) for group in groups]
            return (f"The updates show {len(groups)} groups of clients: {'; '.join(parts)}.{self._advice}",)
        if not groups or own > _MOSTLY:
            words = "mostly differ" if own > _MOSTLY else "differ"
            return (f"The updates show that clients {words}, and no groups.{self._advice}",)
        return ("The updates show no differences between clients beyond their noise.",)

    def client_embedding(self, view: View) -> ClientEmbedding | None:
        effects = self._products_of(view).effects()
        groups = effects.groups()
        if not effects.positions.shape[1]:
            return None
        strongest = (effects.positions * effects.scale[:, None])[:, ::-1]
        points = np.pad(strongest, ((0, 0), (0, 1)))[:, :2]
        cluster = _labels(effects, groups)
        return ClientEmbedding(
            title="Mean gradients along the two directions in which clients differ most",
            clients=tuple(effects.clients.tolist()),
            points=tuple((x, y) for x, y in points.tolist()),
            cluster=tuple(cluster),
            membership=(1.0,) * len(cluster),
            num_clusters=max(len(groups), 1),
            separation=None,
            confident=len(groups) > 1,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"products": self._saved if self._products is None else self._products.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._products, self._saved = None, state["products"]


def _labels(effects: RandomEffects, groups: list[Any]) -> list[int]:
    """Return the number of each client's group; 0 without groups."""
    label = {int(client): number for number, group in enumerate(groups) for client in group}
    return [label.get(int(client), 0) for client in effects.clients]


def _some(names: list[str]) -> list[str]:
    more = len(names) - _MOST_NAMES
    return names if more < 2 else [*names[:_MOST_NAMES], f"and {counted(more, 'other')}"]
