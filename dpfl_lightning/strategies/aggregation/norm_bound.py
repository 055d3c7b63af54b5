"""The weighted mean of updates whose lengths are bounded by the median length."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.strategies.aggregation.robust_mean import RobustMean


@dataclass
class NormBound(RobustMean):
    """Shortens updates that are longer than a multiple of the median length of a model's updates, then takes the mean.

    A single client cannot move the model by more than its weight times the bound. Long updates of half of a model's
    clients, which may be one of two, raise the bound without a limit. The weights of the other strategies count.
    Privacy noise is shortened, too, so noisy clients count for less.

    Args:
        factor: the bound / the median length.

    **Privacy** Post-processing.

    Reference: Sun et al. (2019), "Can You Really Backdoor Federated Learning?", with the median in place of a constant.
    """

    factor: Annotated[float, Interval(gt=0, lt=math.inf)] = 1.0

    def _centre(self, deltas: Tensor, weights: Tensor) -> Tensor:
        flat = deltas.flatten(1)
        length = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
        bound = self.factor * length.quantile(0.5)
        share = weights.double() * (bound / length.clamp_min(1e-300)).clamp(max=1.0)
        return (share @ flat.double()).to(deltas.dtype).view(deltas.shape[1:])
