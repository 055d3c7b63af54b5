"""The coordinate-wise trimmed mean of the clients' updates."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.aggregation.robust_mean import (
    RobustMean,
    coordinate_trimmed_mean,
    warn_if_none_is_left_out,
)


@dataclass
class TrimmedMean(RobustMean):
    """Replaces the weighted mean by the mean of each coordinate without its smallest and largest values.

    Of the C clients that train a model, the `floor(share * C)` smallest and as many largest values are dropped, so
    `floor(share * C)` clients cannot move the model arbitrarily far. All clients with a positive weight count equally.

    Args:
        share: share of the clients that is dropped at each end; 0 is the plain mean.

    **Privacy** Post-processing.

    Reference: Yin et al. (2018), Algorithm 1.
    """

    share: Annotated[float, Interval(ge=0, lt=0.5)] = 0.1

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        warn_if_none_is_left_out(self.config_name, self.share, view)
        return schedule

    def _centre(self, deltas: Tensor, weights: Tensor) -> Tensor:
        return coordinate_trimmed_mean(deltas, self.share)
