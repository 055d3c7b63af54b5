"""Leaves out clients whose updates are shorter than the noise that they announced permits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.algorithms.update_geometry import double_columns
from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.federated.messages.jobs import LocalTraining
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.mechanism import MECHANISMS

_KURTOSIS = max(one.distribution.kurtosis for one in MECHANISMS)  # that of sums is smaller


@dataclass
class NoiseFloor(Strategy):
    """Leaves out of a round each client whose update is shorter than its planned noise can be.

    The noise in an update has a known standard deviation sigma in each of the P parameters that are not personal. A
    squared length of these below

        P sigma^2 (1 - sqrt(2 * 6 * log(1 / false_alarm) / P))

    has at most the probability `false_alarm` for noise alone, of any mechanism, and a signal makes updates longer. A
    client below it did not add its noise, or made its update small to look quiet. Large learning rates shorten updates
    somewhat, which the bound ignores; weight decay and proximal terms shorten them further and are refused.

    Args:
        false_alarm: bound on the probability that noise alone is removed, for one update.

    **Privacy** Post-processing of released updates and public noise; nothing is charged.

    Reference: Maurer (2003), "A bound on the deviation probability for sums of non-negative random variables".
    """

    false_alarm: Annotated[float, Interval(gt=0, lt=1)] = 1e-6

    role = "mask"
    jobs = (LocalTraining,)  # a proximal term makes updates shorter than their noise
    needs_noise_std = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._removed = 0

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        decay = getattr(view.optimizer, "weight_decay", 0.0)
        advice = "It makes updates shorter than their noise, which noise_floor takes for false."
        require(decay == 0, "clients.optimizer.weight_decay", "be 0 with noise_floor", decay, advice)
        return schedule

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        deltas = view.module.sent(updates.released.flatten(1))
        squared = torch.zeros((), dtype=torch.float64)
        for columns in double_columns(deltas):
            squared = squared + columns.square().sum(dim=1).cpu()
        num_params = deltas.shape[1]
        noise = num_params * torch.tensor(updates.noise_std, dtype=torch.float64).square()
        kept = squared >= noise * lowest_share(num_params, self.false_alarm)
        self._removed = int((~kept).sum())
        if not kept.any():
            warn_user(f"round {view.round}: noise_floor left out every client; models stay as they are")
        return kept.double()

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        return {"below_noise_floor": float(self._removed)}


def lowest_share(num_params: int, false_alarm: float) -> float:
    """Return the squared length of noise / its mean that it falls below with at most this probability.

    >>> round(lowest_share(28_938, 1e-6), 3), lowest_share(10, 1e-6)
    (0.924, 0.0)
    """
    return max(0.0, 1 - math.sqrt(2 * _KURTOSIS * math.log(1 / false_alarm) / max(num_params, 1)))
