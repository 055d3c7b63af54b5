"""DistDD where the paper's print differs from `distillation`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.papers.distillation.distillation import COUNTS, Distillation, divisors


@dataclass
class AsPrinted(Distillation):
    """DistDD as printed: the unweighted sum of clients' class means (eq. 3), and one initialisation (Algorithm 1).

    Only for runs without noise, because means need the numbers of records that were drawn.
    """

    reinit_every: int | None = 0

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        plan = super().plan_run(schedule, view)
        require(not self._private, "privacy", "be null for clients' means, whose divisors are private", "noise")
        return plan

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        return torch.ones(len(updates.clients), dtype=torch.float64)

    def combine(self, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        """Return the mean of clients' means, times the records of all that count, as `scale` would divide them."""
        weigh, deltas = weights[0].to(updates.released), updates.released
        divisor = torch.tensor(divisors(updates), dtype=torch.float64)
        self._records_of_sum = float(divisor.sum())
        numbers = deltas[..., -COUNTS:] * (divisor.to(deltas) * (weigh > 0))[:, None, None]  # [C, num_classes, 2]
        drawn = numbers.round()[..., 0]
        means = deltas[..., :-COUNTS] * (divisor.to(deltas)[:, None] / drawn.clamp_min(1.0))[..., None]
        holders = weigh[:, None] * (drawn > 0)  # [C, num_classes]
        total = torch.einsum("cg,cgd->gd", holders, means)
        centre = total / holders.sum(dim=0).clamp_min(torch.finfo(means.dtype).tiny)[:, None]
        sums = centre * drawn.sum(dim=0)[:, None]
        return (torch.cat([sums, numbers.sum(dim=0)], dim=1) / self._records_of_sum)[None]
