"""The geometric median of the clients' updates."""

import math

import torch
from torch import Tensor

from dpfl_lightning.algorithms.update_geometry import double_columns, gram_of, squared_distances
from dpfl_lightning.strategies.aggregation.robust_mean import RobustMean

_ITERATIONS = 1000
_DECREASE = 1e-12  # of the sum of distances, as a share of it, at which the iteration stops
_SMOOTHING = 1e-6  # of the median distance: keeps an update that is the centre from having all weight at once


class GeometricMedian(RobustMean):
    """Replaces the weighted mean by the vector with the smallest weighted sum of distances to the updates.

    Clients with less than half of the weight cannot move the model arbitrarily far. The weights of the other strategies
    count. Privacy noise has nearly the same length in all updates of one budget, and then the geometric median is close
    to the mean; a noisier update counts for less, in proportion to its length.

    **Privacy** Post-processing.

    Reference: Pillutla et al. (2022), "Robust Aggregation for Federated Learning", Algorithm 2 (smoothed Weiszfeld).
    """

    def _centre(self, deltas: Tensor, weights: Tensor) -> Tensor:
        flat = deltas.flatten(1)
        gram, weights = gram_of(double_columns(flat)), weights.double().cpu()
        share = _weiszfeld(gram, weights / weights.sum())
        return (share.to(flat.device) @ flat.double()).to(deltas.dtype).view(deltas.shape[1:])


def _weiszfeld(gram: Tensor, weights: Tensor) -> Tensor:
    """Return the coefficients `[C]` of sum 1 of the geometric median, from the Gram matrix of the vectors, `[C, C]`."""
    size, objective = gram.diagonal(), math.inf
    pairwise = torch.from_numpy(squared_distances(gram.numpy())).sqrt()
    distance = _weighted_median(pairwise, weights)  # to begin with, so that huge updates count for nothing
    share = weights
    for _ in range(_ITERATIONS):
        if not (scale := float(_weighted_median(distance, weights))) > 0:  # half of the weight is at the centre
            share = weights * (distance == 0)
            return share / share.sum()
        share = weights / distance.clamp_min(_SMOOTHING * scale)
        share /= share.sum()
        distance = (size - 2 * gram @ share + share @ gram @ share).clamp_min(0).sqrt()
        before, objective = objective, float(weights @ distance)
        if before - objective < _DECREASE * objective:
            break
    return share


def _weighted_median(values: Tensor, weights: Tensor) -> Tensor:
    """Return the least of the values `[..., C]` up to which there is half of the weights `[C]`, of sum 1: `[...]`."""
    ordered, order = values.sort(dim=-1)
    at = (weights[order].cumsum(dim=-1) < 0.5 - 1e-12).sum(dim=-1, keepdim=True)
    return ordered.gather(-1, at).squeeze(-1)
