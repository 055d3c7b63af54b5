"""FedProx: local steps are pulled back to the round's model."""

from __future__ import annotations

import dataclasses

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View


class FedProx(Strategy):
    """Adds `pull * (parameters - model of the round)` to every local step; goes beside a base rule.

    Against clients drifting apart when data differ or local steps are many.

    Args:
        pull: the proximal strength mu, >= 0; 0 is no pull.

    **Privacy** The pull is a function of released models, added after the noise: it costs nothing.

    Reference: Li et al. (2020), with the proximal term outside the clipping.
    """

    needs_training = True

    def __init__(self, pull: float = 0.01) -> None:
        require(pull >= 0, "strategies.fedprox.pull", "be >= 0", pull)
        self._pull = float(pull)

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        return dataclasses.replace(plan, anchors=view.state.models, anchor_of=plan.model_of, pull=self._pull)
