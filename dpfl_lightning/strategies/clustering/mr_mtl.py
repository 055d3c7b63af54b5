"""Mean-regularised multi-task learning: a model for each client, pulled to the mean of all."""

from __future__ import annotations

import dataclasses

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.clipping.reference import summing_dtype
from dpfl_lightning.strategies.clustering.local import Local


class MrMtl(Local):
    """Every client trains a model of its own; `pull * (parameters - mean of all clients' models)` joins every step.

    Between `local` (pull 0) and one model for all (a large pull). Goes beside a base rule, which has no say here: the
    mean counts every client alike.

    Args:
        pull: the strength lambda, >= 0. A step takes off `pull * learning_rate` of the distance to the mean: at a
            learning rate of 0.5 the default is strong; beyond 1 / learning_rate steps overshoot.

    **Privacy** The pull is a function of released models, added after the noise: it costs nothing.

    Reference: Liu, Hu, Wu and Smith (2022), "On Privacy and Personalization in Cross-Silo Federated Learning", with the
    term outside the clipping, where it does not wear out the clip norm.
    """

    def __init__(self, pull: float = 1.0) -> None:
        require(pull >= 0, "strategies.mr_mtl.pull", "be >= 0", pull)
        self._pull = float(pull)

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        models = view.state.models
        mean = models.mean(dim=0, keepdim=True, dtype=summing_dtype(models)).to(models.dtype)
        return dataclasses.replace(plan, anchors=mean, anchor_of=(0,) * len(plan.clients), pull=self._pull)
