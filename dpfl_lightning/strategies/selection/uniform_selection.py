"""Uniform selection: all clients take part equally often, with exact counts instead of independent draws."""

from __future__ import annotations

import numpy as np

from dpfl_lightning.algorithms.allocation import allocate_int
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.selection.quotas import Counts, QuotaSelection


class UniformSelection(QuotaSelection):
    """Selects K of N clients in each round, so that each client trains in K T / N of the T rounds.

    If K T / N is not a whole number, the first clients train in one round more. With independent draws, about half of
    the clients would be drawn in more rounds than their noise was solved for. The strategy is combined with a base
    rule. As a baseline of `biased_selection` it is, with `uniform`, DPSGD (DMLDP with Laplace noise, FedSGD without
    noise); with `epsilon_weighted`, WeiAvg; and with `inverse_noise`, the least noise that weights can give.

    Args:
        clients_per_round: number K of clients in each round, from 1 to N; null is a fifth of the clients.
        sampler: `quota_systematic` (exact: see `cohorts.systematic`) or `weighted_without_replacement` (as the paper
            describes it).
        top_fraction: null, or a share of the clients, in (0, 1): a round is drawn again, at most 20 times, until it
            contains one of this share of clients with the largest claimed budgets. Use it with `pfa`, which projects
            onto their updates.

    **Guarantees** As `QuotaSelection`: no client trains more often than its quota, for which its noise was solved.

    **Privacy** Post-processing of public facts. Claimed budgets are trusted only with `top_fraction`. The server knows
    which clients take part, so there is no amplification by selection.
    """

    key = "strategies.uniform_selection"

    def _quotas(self, total: int, upper: Counts, schedule: RunSchedule, view: View) -> Counts:
        return allocate_int(np.ones(len(upper)), total, upper=upper)
