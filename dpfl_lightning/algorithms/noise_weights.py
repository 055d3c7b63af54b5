"""Aggregation weights from the noise variances of updates."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpfl_lightning.errors import nearest, require

OBJECTIVES = ("min_variance", "max_snr")


def weights(
    noise_var: Tensor,
    steps: Sequence[int] | None = None,
    objective: str = "min_variance",
    floor: float = 1e-6,
    max_weight: float = 1.0,
) -> Tensor:
    """Return weights `[C]` (float64, CPU, of sum 1): `w_i ~ 1 / v_i`, or `w_i ~ steps_i / v_i`; post-processing.

    Args:
        noise_var: variances v >= 0 up to a common factor, `[C]`; infinite and NaN ones give weight 0.
        steps: local steps of each update, length C; for `max_snr` only.
        objective: `min_variance` minimises the noise of the sum, and so prefers large batches, whose updates hold fewer
            steps. `max_snr` maximises its ratio of signal to noise if all steps move alike.
        floor: a variance counts as at least this share of the median, >= 0. An update with the variance 0 still gets
            nearly all the weight; only `max_weight` bounds that.
        max_weight: upper bound of a weight, in (0, 1]; the excess goes to the other clients in proportion. Fewer than
            1 / max_weight clients get equal weights.

    Reference: Malekmohammadi et al. (2024), Eq. 8. `max_snr`, floor and cap are not in the paper.

    >>> weights(torch.tensor([0.0, 2.0, 2.0]), max_weight=0.4)
    tensor([0.4000, 0.3000, 0.3000], dtype=torch.float64)
    """
    hint = nearest(objective, OBJECTIVES)
    require(objective in OBJECTIVES, "objective", f"be one of {', '.join(OBJECTIVES)}", objective, hint)
    require(floor >= 0, "floor", "be >= 0", floor)
    require(0 < max_weight <= 1, "max_weight", "be in (0, 1]", max_weight, "1 means no cap.")
    variance = noise_var.to("cpu", torch.float64)
    known = variance.isfinite()
    share = torch.zeros_like(variance)
    share[known] = 1 / _floored(variance[known], floor)
    if objective == "max_snr":
        assert steps is not None, "max_snr needs the steps of each update"
        share *= torch.tensor(steps, dtype=torch.float64)
    total = share.sum()
    return _capped(share / total, max_weight) if total > 0 else share


def _floored(variance: Tensor, floor: float) -> Tensor:
    """Limit variances to at least `floor` of the median (of positive ones if it is 0), scaled to avoid overflow."""
    positive = variance[variance > 0]
    if not len(positive):
        return torch.ones_like(variance)
    unit = variance.median() or positive.median()
    return (variance / unit).clamp_min(max(floor, 1e-300))


def _capped(share: Tensor, max_weight: float) -> Tensor:
    """Limit shares by water-filling: shares above the cap become the cap, the others grow in proportion."""
    cap = max(max_weight, 1 / int((share > 0).sum()))
    capped = torch.zeros_like(share, dtype=torch.bool)
    while bool((above_cap := (share > cap * (1 + 1e-12)) & ~capped).any()):
        capped |= above_cap
        rest = share[~capped].sum()
        share = share * (1 - cap * int(capped.sum())) / rest if rest > 0 else share
        share = share.masked_fill(capped, cap)
    return share
