"""One model for each client: without a federation, or pulled towards the mean of all models."""

from __future__ import annotations

import dataclasses

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.privacy.clipping.reference import summing_dtype


class Local(Strategy):
    """Every client trains a separate model, and nothing is shared; all models start from the same parameters.

    This is the baseline without a federation. It is combined with a base rule, which has no effect here.

    **Privacy** Nothing is released beyond the updates, which are planned, noised and charged as in any run.

    Reference: "Local" in Malekmohammadi, Taik and Farnadi (2025); Liu, Hu, Wu and Smith (2022).
    """

    needs_training = True

    def initialise(self, state: ServerState, view: View) -> ServerState:
        count = view.facts.num_clients
        return dataclasses.replace(state, models=state.models[:1].repeat(count, 1), model_of=tuple(range(count)))


class MrMtl(Local):
    """MR-MTL: every client trains a separate model, which is pulled towards the mean of all clients' models.

    Every step adds `pull * (parameters - mean of all clients' models)`. The result lies between `local` (pull 0) and
    one model for all clients (a large pull). The base rule has no effect, because all clients have the same weight.

    Args:
        pull: strength lambda, >= 0. A step reduces the distance to the mean by the share `pull * learning_rate`, so at
            a learning rate of 0.5 the default is strong; steps overshoot if the pull exceeds 1 / learning_rate.

    **Privacy** The pull is a function of released models and is added after the noise: it costs nothing.

    Reference: Liu, Hu, Wu and Smith (2022), "On Privacy and Personalization in Cross-Silo Federated Learning", with the
    term outside the clipping, where it does not use up the clip norm.
    """

    def __init__(self, pull: float = 1.0) -> None:
        require(pull >= 0, "strategies.mr_mtl.pull", "be >= 0", pull)
        self._pull = float(pull)

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        models = view.state.models
        mean = models.mean(dim=0, keepdim=True, dtype=summing_dtype(models)).to(models.dtype)
        return dataclasses.replace(plan, anchors=mean, anchor_of=(0,) * len(plan.clients), pull=self._pull)
