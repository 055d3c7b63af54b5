"""FedProx: local training is pulled towards the round's model."""

import dataclasses
import math

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View


class FedProx(Strategy):
    """FedProx: adds `pull * (parameters - model of the round)` to every local step.

    This keeps clients from drifting apart if their data differ or they take many local steps.

    Args:
        pull: strength mu of the proximal term, >= 0; 0 turns it off.

    **Privacy** The pull is a function of released models and is added after the noise: it costs nothing.

    Reference: Li et al. (2020), with the proximal term outside the clipping.
    """

    needs_training = True
    pulls = True

    def __init__(self, pull: float = 0.01) -> None:
        require(0 <= pull < math.inf, "strategies.fedprox.pull", "be >= 0 and finite", pull)
        self._pull = float(pull)

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        return dataclasses.replace(plan, anchors=view.state.models, anchor_of=plan.model_of, pull=self._pull)
