"""One model for each client: without a federation, or pulled towards the mean of all models."""

import dataclasses

from dpfl_lightning.federated.messages.jobs import TRAINING
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState, View


class Local(Strategy):
    """Every client trains a separate model, and nothing is shared; all models start from the same parameters.

    This is the baseline without a federation. It is combined with an aggregation rule, which has no effect here.

    **Privacy** Nothing is released beyond the updates, which are planned, noised and charged as in any run.

    Reference: "Local" in Malekmohammadi, Taik and Farnadi (2025); Liu, Hu, Wu and Smith (2022).
    """

    jobs = TRAINING

    def initialise(self, state: ServerState, view: View) -> ServerState:
        count = view.facts.num_clients
        return dataclasses.replace(state, models=state.models[:1].repeat(count, 1), model_of=tuple(range(count)))
