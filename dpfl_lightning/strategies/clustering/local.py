"""Everybody for itself: a model for each client, which only its own updates move."""

from __future__ import annotations

import dataclasses

from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState, View


class Local(Strategy):
    """Every client trains a model of its own; all begin alike, and nothing is shared.

    What a client gets without a federation: the mark to beat. Goes beside a base rule, which has no say here.

    **Privacy** Nothing beyond the updates, which are planned, noised and charged as in any run.

    Reference: "Local" in Malekmohammadi, Taik and Farnadi (2025); Liu, Hu, Wu and Smith (2022).
    """

    needs_training = True

    def initialise(self, state: ServerState, view: View) -> ServerState:
        count = view.facts.num_clients
        return dataclasses.replace(state, models=state.models[:1].repeat(count, 1), model_of=tuple(range(count)))
