"""FedProx: local training is pulled towards the round's model."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from dpfl_lightning.federated.messages.jobs import ProximalTraining
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View


@dataclass
class FedProx(Strategy):
    """FedProx: adds `pull * (parameters - model of the round)` to every local step.

    This keeps clients from drifting apart if their data differ or they take many local steps.

    Args:
        pull: strength mu of the proximal term; 0 turns it off.

    **Privacy** The proximal term is a function of released models and is added after the noise: it costs nothing.

    Reference: Li et al. (2020), with the proximal term outside the clipping.
    """

    pull: Annotated[float, Interval(ge=0, lt=math.inf)] = 0.01

    jobs = (ProximalTraining,)

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        return dataclasses.replace(plan, job=ProximalTraining(self.pull, view.state.models))
