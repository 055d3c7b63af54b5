"""The coordinate-wise median of the clients' updates."""

from torch import Tensor

from dpfl_lightning.strategies.aggregation.robust_mean import RobustMean, coordinate_median


class Median(RobustMean):
    """Replaces the weighted mean by the coordinate-wise median over the clients that train a model.

    Fewer than half of a model's clients cannot move it arbitrarily far. All clients with a positive weight count
    equally. Privacy noise makes a median less accurate than a mean, by up to a factor of pi / 2 in variance.

    **Privacy** Post-processing.

    Reference: Yin et al. (2018), Algorithm 1.
    """

    def _centre(self, deltas: Tensor, weights: Tensor) -> Tensor:
        return coordinate_median(deltas)
