"""Uniform selection: all clients take part equally often."""

import numpy as np

from dpfl_lightning.algorithms.allocation import allocate_int
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.selection.quotas import Counts, QuotaSelection


class UniformSelection(QuotaSelection):
    """Selects K of N clients in each round, so that each client trains in K T / N of the T rounds.

    If K T / N is not a whole number, the first clients train in one round more. With independent draws, about half of
    the clients would be drawn in more rounds than their noise was solved for. As a baseline of `biased_selection` it
    is, with `uniform`, DPSGD (DMLDP with Laplace noise, FedSGD without noise); and with `epsilon_weighted`, WeiAvg.

    **Privacy** Post-processing of public facts. Claimed budgets are trusted only with `top_fraction`. The server knows
    which clients take part, so there is no amplification by selection.
    """

    def _quotas(self, total: int, upper: Counts, schedule: RunSchedule, view: View) -> Counts:
        return allocate_int(np.ones(len(upper)), total, upper=upper)
