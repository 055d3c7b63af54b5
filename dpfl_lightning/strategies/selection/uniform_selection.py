"""Every client equally often: a cohort a round, as most federations draw it, but with exact counts."""

from __future__ import annotations

import numpy as np

from dpfl_lightning.algorithms.allocation import allocate_int
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.selection.quotas import Counts, QuotaSelection


class UniformSelection(QuotaSelection):
    """K clients a round, each client in K T / N rounds (the first clients in one more, if that is no whole number).

    Independent draws would give every other client more rounds than its noise was solved for.

    Args: those of `QuotaSelection`.

    **Guarantees** and **Privacy** those of `QuotaSelection`; nothing is trusted but with `top_fraction`.

    With a base rule it is a rival of `biased_selection`: `uniform` is DPSGD (with Laplace noise DMLDP, without noise
    FedSGD), `epsilon_weighted` WeiAvg, `inverse_noise` the least noise that weights can give.
    """

    key = "strategies.uniform_selection"

    def _quotas(self, total: int, upper: Counts, schedule: RunSchedule, view: View) -> Counts:
        return allocate_int(np.ones(len(upper)), total, upper=upper)
