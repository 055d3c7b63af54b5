"""MR-MTL: one model for each client, pulled towards the mean of all models."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from dpfl_lightning.federated.messages.jobs import ProximalTraining
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.clipping.reference import summing_dtype
from dpfl_lightning.strategies.clustering.local import Local


@dataclass
class MrMtl(Local):
    """MR-MTL: every client trains a separate model, which is pulled towards the mean of all clients' models.

    Every step adds `pull * (parameters - mean of all clients' models)`. The result lies between `local` (pull 0) and
    one model for all clients (a large pull). The aggregation rule has no effect, as all clients have the same weight.

    Args:
        pull: strength lambda. A step reduces the distance to the mean by the share `pull * learning_rate`, so at
            a learning rate of 0.5 the default is strong; steps overshoot if the pull exceeds 1 / learning_rate.

    **Privacy** The pull is a function of released models and is added after the noise: it costs nothing.

    Reference: Liu, Hu, Wu and Smith (2022), "On Privacy and Personalization in Cross-Silo Federated Learning", with the
    term outside the clipping, where it does not use up the clip norm.
    """

    pull: Annotated[float, Interval(ge=0, lt=math.inf)] = 1.0

    jobs = (ProximalTraining,)

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        models = view.state.models
        mean = models.mean(dim=0, keepdim=True, dtype=summing_dtype(models)).to(models.dtype)
        return dataclasses.replace(plan, job=ProximalTraining(self.pull, mean, dict.fromkeys(plan.clients, 0)))
