"""Aggregation weights from the noise variances of updates."""

import torch
from torch import Tensor

from dpfl_lightning.algorithms.random_effects import limited_shares


def weights(noise_var: Tensor, floor: float = 1e-6, max_weight: float = 1.0) -> Tensor:
    """Return the weights of least noise, `w_i ~ 1 / v_i`: `[C]` (float64, CPU, of sum 1). Post-processing.

    `noise_var` are variances v >= 0 up to a common factor, `[C]`; infinite and NaN ones give weight 0. A variance
    counts as at least `floor` times the median. An update with the variance 0 still gets nearly all the weight; only
    `max_weight` in (0, 1] bounds that, whose excess goes to the other clients in proportion.

    Reference: Malekmohammadi et al. (2024), Eq. 8. Floor and cap are not in the paper.

    >>> weights(torch.tensor([0.0, 2.0, 2.0]), max_weight=0.4)
    tensor([0.4000, 0.3000, 0.3000], dtype=torch.float64)
    """
    variance = noise_var.to("cpu", torch.float64)
    known = variance.isfinite()
    share = torch.zeros_like(variance)
    share[known] = 1 / _floored(variance[known], floor)
    counted = share > 0
    share[counted] = torch.from_numpy(limited_shares(share[counted].numpy(), max_weight))
    return share


def _floored(variance: Tensor, floor: float) -> Tensor:
    """Raise variances to at least `floor` times the median (of positive ones if it is 0), scaled to avoid overflow."""
    positive = variance[variance > 0]
    if not len(positive):
        return torch.ones_like(variance)
    unit = variance.median() or positive.median()
    return (variance / unit).clamp_min(max(floor, 1e-300))
