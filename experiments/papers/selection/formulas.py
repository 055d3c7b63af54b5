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
#: 100 equal clients, of whom 20 take part in each of 10 rounds: two participations and Gamma 0.02 each, rho_min 1,
#: noise of Lambda 0.1 and Phi 1, and the loss of guessing among ten classes
STAGE = FirstStage(10, 20, np.full(100, 2.0), np.full(100, 0.02), 1.0, NoiseModel(0.1, 1.0, np.ones(100)), math.log(10))


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
