"""The paper's formulas: constants that fit one loss (problem P2), and budgets with quotas that are no whole numbers."""

import math
from collections.abc import Sequence

import numpy as np

from dpfl_lightning.papers.selection.printed_estimates import (
    Constants,
    FirstStage,
    NoiseModel,
    bias_noise_ratio,
    fit_constants,
)

ROUNDS = 190
#: two clients: participations 4 and 2, Gamma 1/2 and 1/4, Phi 1 and 2, and a reported loss of 12
STAGE = FirstStage(
    3, 2, np.array([4.0, 2.0]), np.array([0.5, 0.25]), 0.5, NoiseModel(3.0, 1.0, np.array([1.0, 2.0])), 12.0
)


def fitted(start: Sequence[float]) -> dict[str, float]:
    """Constants that fit the loss of `STAGE` from a start, and the ratio of bias to noise, as rows of the table."""
    (found, residual), (first, _) = fit_constants(STAGE, Constants(*start)), fit_constants(STAGE)
    ratio, of_first = (bias_noise_ratio(one, ROUNDS, 1) for one in (found, first))
    constants = {name: float(getattr(found, name)) for name in ("smoothness", "strong_convexity", "lr_offset")}
    return {**constants, "residual": float(residual), "ratio": float(ratio), "relative": float(ratio / of_first)}


def spent(quota: float) -> dict[str, float]:
    """Participations of a client with the quota T_n, and the share of its budget that they spend, with Laplace noise.

    >>> spent(0.4)
    {'up': 1.0, 'spent': 2.5}
    """
    times = math.ceil(quota)
    return {"up": float(times), "spent": times / quota}
