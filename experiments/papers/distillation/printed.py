"""DistDD where the paper's print differs from `distillation`: clients' means, their median, noise on means, eq. 41."""

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.accounting.planned import ClientSchedule
from dpfl_lightning.strategies.distillation.distillation import COUNTS, Distillation, divisors


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
        """Return the centre of clients' means, times the records of all that count, as `scale` would divide them."""
        weigh, deltas = weights[0].to(updates.released), updates.released
        divisor = torch.tensor(divisors(updates), dtype=torch.float64)
        self._records_of_sum = float(divisor.sum())
        numbers = deltas[..., -COUNTS:] * (divisor.to(deltas) * (weigh > 0))[:, None, None]  # [C, num_classes, 2]
        drawn = numbers.round()[..., 0]
        means = deltas[..., :-COUNTS] * (divisor.to(deltas)[:, None] / drawn.clamp_min(1.0))[..., None]
        sums = self._centre(means, weigh[:, None] * (drawn > 0)) * drawn.sum(dim=0)[:, None]
        return (torch.cat([sums, numbers.sum(dim=0)], dim=1) / self._records_of_sum)[None]

    def _centre(self, means: Tensor, weights: Tensor) -> Tensor:
        """Return the centre `[G, d]` of `means` `[C, G, d]` with `weights` `[C, G]`; zeros where all are zero."""
        total = torch.einsum("cg,cgd->gd", weights, means)
        return total / weights.sum(dim=0).clamp_min(torch.finfo(means.dtype).tiny)[:, None]


@dataclass
class MedianOfMeans(AsPrinted):
    """DistDD + Median: the median of every coordinate over the class means of clients that hold the class.

    Reference: the paper's defence against wrong labels; Yin et al. (2018).
    """

    reinit_every: int | None = None

    def _centre(self, means: Tensor, weights: Tensor) -> Tensor:
        """With fewer than three holders their mean."""
        rows = []
        for of_class, holds in zip(means.unbind(dim=1), (weights > 0).unbind(dim=1), strict=True):
            values = of_class[holds]
            if len(values) >= 3:
                # in pieces, because torch.quantile takes at most 16 million numbers
                rows.append(torch.cat([part.quantile(0.5, dim=0) for part in values.split(1 << 16, dim=1)]))
            else:
                rows.append(values.mean(dim=0) if len(values) else torch.zeros_like(of_class[0]))
        return torch.stack(rows)


@dataclass
class NoiseOnMeans(Distillation):
    """DistDD whose given noise multipliers refer to the mean of a class, as in the paper's appendix C.

    **Privacy** Plan and ledger hold the multipliers of the sums: those of the means times the public number of records
    of a class that a client is expected to draw.
    """

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        def on_sums(client: int, one: ClientSchedule) -> ClientSchedule:
            event = schedule.noised(client, "train")
            noise = event.noise_multiplier
            advice = "A budget is solved for noise on the sum."
            given = event.clip_order == 2 and noise is not None
            require(given, "privacy.noise_multiplier", "be given for noise on means", noise, advice)
            drawn = (event.sample_rate if self.sampling == "poisson" else 1.0) * view.facts.num_records[client]
            records = drawn / view.facts.num_classes
            if self.sampling == "fixed":
                records = min(records, self.records_per_class)
            event = event.with_noise((noise or 0.0) * records)
            lines = (
                dataclasses.replace(line, event=event) if line.purpose == "train" else line for line in one.planned
            )
            return dataclasses.replace(one, planned=tuple(lines))

        return super().plan_run(schedule.replan(on_sums), view)


def paper_epsilon(noise_multiplier: float, delta: float, clip_norm: float = 1.0) -> float:
    """Return eq. 41 of the paper, `sqrt(2 ln(1.25 / delta)) 2 clip_norm / noise_multiplier`, for comparison only.

    It is not a valid epsilon: it counts one release of the whole run, uses the noise multiplier (noise std / clip norm)
    as a standard deviation, and rests on a formula that holds only below 1.

    Reference: Wang and Wang (2024), eqs. 40 and 41; Dwork and Roth (2014), theorem A.1.
    """
    return math.sqrt(2 * math.log(1.25 / delta)) * 2 * clip_norm / noise_multiplier
