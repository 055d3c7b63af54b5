"""Decay of the local learning rate over the rounds."""

import dataclasses
import math

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View


class LearningRateDecay(Strategy):
    """Divides every client's learning rate in round t by `1 + t / half_after`.

    Args:
        half_after: number of rounds after which the learning rate has halved, > 0.

    **Privacy** The decay is a function of the round: it costs nothing, and noise multipliers do not depend on it.

    Reference: Ma et al., "The Power of Bias", section VI, with `half_after` 200, or 100 on CIFAR-10.
    """

    needs_training = True

    def __init__(self, half_after: float = 200.0) -> None:
        must = "be above 0 and finite"
        require(0 < half_after < math.inf, "strategies.learning_rate_decay.half_after", must, half_after)
        self._half_after = half_after

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        factor = 1 / (1 + view.round / self._half_after)
        return dataclasses.replace(plan, learning_rate_of=tuple(factor * rate for rate in plan.learning_rate_of))
