"""DPFL-BCS in two stages: in the first one clients report noisy losses; then quotas avoid dissimilar clients.

Comments name the lines of the paper's Algorithm 1 (server) and Algorithm 2 (client) where they are carried out.

| symbol            | meaning                                           | here                                     |
| ----------------- | ------------------------------------------------- | ---------------------------------------- |
| N, K              | clients, and clients of a round                   | `view.facts.num_clients`, `_cohort_size` |
| T, T_0            | rounds, and rounds of the first stage             | `view.run.rounds`, `warmup_rounds`       |
| T_n               | quota of a client in the present stage            | `_quota`                                 |
| C_n               | participations so far in the first, second stage  | `_taken`, `_first + _taken`              |
| Lambda Phi_n, z   | noise of one participation; it grows with T_n^z   | `participation_noise`                    |
| Gamma_n           | dissimilarity of a client, in units of the loss   | `_gamma`                                 |
| Omega_B / Omega_A | cost of bias over cost of noise in the problem P1 | `ratio`, `_cost_of_bias`                 |
| Theta             | bound of a loss                                   | `_bound`, the option `loss_bound`        |
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.algorithms.allocation import allocate_int
from dpfl_lightning.algorithms.selection_estimates import jain_index, shrunken_heterogeneity
from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import MeanLoss
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.mechanism import Mechanism, mechanism_of
from dpfl_lightning.runtime.text import counted
from dpfl_lightning.strategies.selection import biased_selection
from dpfl_lightning.strategies.selection.quotas import (
    LATER,
    PURPOSE,
    Counts,
    QuotaSelection,
    exact_exponent,
    with_quotas,
)

FILTER = (
    "the noise of later rounds was chosen from noisy losses of the first ones: what holds is the client's whole "
    "budget, and any smaller epsilon is a reading"
)
_LOSS = "loss"
_MARGIN = 1 + 1e-7  # factor on the noise, so that rounding cannot exceed the split of a budget

Report = tuple[int, int, float]  # (round, client, noisy loss)


@dataclass
class TwoStageSelection(QuotaSelection):
    """DPFL-BCS in two stages: clients report losses in the first rounds, from which the later quotas are computed.

    The first stage uses the quotas of least noise. The second one minimises `sum_n noise_n T_n^(z + 1) + ratio sum_n
    Gamma_n T_n` over the remaining rounds, with the remaining budgets. It has brought no gain over
    `biased_selection`, even with true values: where noise is small it selects the few most similar clients.

    Args:
        warmup_rounds: number T_0 of rounds in which losses are reported; fewer than the rounds.
        ratio: cost of one unit of Gamma_n (loss) in one participation, divided by the geometric mean of the clients'
            noise factors.
        loss_share: share of each participation's part of the budget that is spent on the loss.
        loss_bound: losses are clipped to [0, loss_bound]; null is log(classes).

    **Privacy** Losses are `MeanLoss` queries, planned and charged in addition to the updates. Later noise depends on
    them, so a guarantee states the whole budget (a privacy filter), which no client exceeds. This requires solved noise
    of full batches, Gaussian or Laplace with delta 0. `clustered` cannot be used beside this strategy, nor `ifca` with
    noised choices beside Gaussian noise, because no filter is known for both.

    Reference: Ma et al., "The Power of Bias", Algorithms 1 and 2, with other estimates: see `_begin_second_stage`.
    """

    warmup_rounds: Annotated[int, Interval(ge=2)] = 10
    ratio: Annotated[float, Interval(ge=0, le=1e6)] = 3.0
    loss_share: Annotated[float, Interval(gt=0, lt=1)] = 0.1
    loss_bound: Annotated[float, Interval(ge=1e-6, le=1e6)] | None = None

    caveats = (FILTER,)
    _losses_a_round = 1  # reports of each client in a round of the first stage

    def __post_init__(self) -> None:
        super().__post_init__()
        self._reports: list[Report] = []
        self._first: Counts | None = None  # participations in the first stage; None until the second stage begins
        self._gamma = np.zeros(0)  # [N], in the second stage
        self._bound = 0.0  # of a loss
        self._planned_first: list[int] = []  # participations that the first plan pays for, the reserve included

    # -- the first stage: Algorithm 1, lines 4 to 20. Line 6, the choice of K clients by p_n, is `QuotaSelection`, and
    # -- line 17, the mean of the noisy gradients, is the strategy `uniform`

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        biased_selection.check_free_noise(schedule, self.config_name, view.facts)
        must = f"be below the {schedule.rounds} rounds"
        require(self.warmup_rounds < schedule.rounds, self._key("warmup_rounds"), must, self.warmup_rounds)
        must = f"plan one full batch a round beside {self.config_name}, with delta 0 if noise is Laplace"
        advice = "Set clients.batch_size: null, and with privacy.mechanism laplace privacy.delta: 0."
        require(exact_exponent(schedule) is not None, "strategies", must, schedule.clients[0].outline, advice)
        self._bound = math.log(view.facts.num_classes) if self.loss_bound is None else self.loss_bound
        advice = "Losses of a regression have no default bound."
        require(self._bound > 0, self._key("loss_bound"), "be a number for a regression", self.loss_bound, advice)
        self._first, self._reports = None, []
        planned = super().plan_run(schedule, view)
        self._planned_first = [own.count_of(PURPOSE) for own in planned.clients]
        noises = self._noise_of_one(schedule, self._planned_first, view)

        def with_reports(client: int, client_schedule: ClientSchedule) -> ClientSchedule:
            """Split the budget of each participation between update and losses.

            Algorithm 2, lines 3 and 5 (epsilon / T_n) and 15 (noise on losses). The paper also divides delta by T_n,
            which takes ten times the noise.
            """
            line, event = planned.planned(client, PURPOSE), planned.noised(client, PURPOSE)
            power = self._noise.exponent[client] / 2
            noise = _MARGIN * noises[client]
            of_update = event.with_noise(noise / (1 - self.loss_share) ** power)
            of_loss = noise * (self._losses_a_round / self.loss_share) ** power
            report = event.with_noise(of_loss, steps=1)  # also if an update has several
            reports = Planned(_LOSS, report, self._losses_a_round * line.count)
            others = (other for other in client_schedule.planned if other is not line)
            updates = dataclasses.replace(line, event=of_update)
            return dataclasses.replace(client_schedule, planned=(updates, reports, *others))

        return planned.replan(with_reports)

    def _noise_of_one(self, schedule: RunSchedule, counts: Sequence[int], view: View) -> list[float]:
        """Return the noise multiplier of one of a client's `counts` participations, which use up its budget."""
        once = view.solve(with_quotas(dataclasses.replace(schedule, reserve=0), [1] * len(counts)))
        return [
            one.noise_multiplier(PURPOSE) * max(count, 1) ** (self._noise.exponent[client] / 2)
            for client, (one, count) in enumerate(zip(once.clients, counts, strict=True))
        ]

    def _quotas(self, total: int, upper: Counts, schedule: RunSchedule, view: View) -> Counts:
        self._noise = biased_selection.participation_noise(schedule, view, upper)
        # line 4, p_n by Proposition 1: in whole numbers, because parts of a participation would overspend, and with at
        # most one participation in a round
        return allocate_int(self._noise.factor, total, self._noise.exponent, upper=upper)

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        plan = super().plan_round(plan, view)
        if self._first is not None:
            mechanisms = tuple(view.mechanism(client, LATER) for client in plan.clients)
            return dataclasses.replace(plan, mechanism_of=mechanisms, purpose=LATER)
        if view.round <= self.warmup_rounds and plan.clients:
            # line 19, noisy losses while t <= T_0 (Algorithm 2, line 13): at the round's model, clipped. The paper's
            # are not clipped, and a second one, at the client's model without noise, is beyond its sensitivity
            answers = self._ask(view.state.models, dict(zip(plan.clients, plan.model_of, strict=True)), view)
            self._reports += [(view.round, client, loss) for client, loss in answers.items()]
        return plan

    def _ask(self, models: Tensor, row_of: Mapping[int, int], view: View) -> dict[int, float]:
        mechanisms = {client: self._loss_mechanism(client, view.schedule, view) for client in row_of}
        question = MeanLoss(
            purpose=_LOSS, mechanism_of=mechanisms, models=models, row_of=row_of, loss_bound=self._bound
        )
        return dict(view.ask(question))

    def _loss_mechanism(self, client: int, schedule: RunSchedule, view: View) -> Mechanism:
        return mechanism_of(schedule.noised(client, _LOSS), self._bound / 2, view.facts.num_records[client])

    # -- the second stage: Algorithm 1, lines 21 to 28

    def replan(self, schedule: RunSchedule, view: View) -> RunSchedule:
        if view.round <= self.warmup_rounds or _has_later(schedule):
            return schedule

        def only_paid(client: int, client_schedule: ClientSchedule) -> ClientSchedule:
            lines = (dataclasses.replace(p, count=view.used(client, p.purpose)) for p in client_schedule.planned)
            return dataclasses.replace(client_schedule, planned=tuple(lines))

        paid = schedule.replan(only_paid)
        if self._first is None:
            self._begin_second_stage(schedule, paid, view)
        self._horizon, self._settled = view.run.rounds - self.warmup_rounds, True
        return self._later(paid, self._quota.tolist(), schedule.reserve, view)

    def _later(self, paid: RunSchedule, counts: Sequence[int], reserve: int, view: View) -> RunSchedule:
        """Return the schedule with the second stage's participations; their noise uses the rest of the budget."""
        return with_later(paid, counts, reserve)

    def _begin_second_stage(self, planned: RunSchedule, paid: RunSchedule, view: View) -> None:
        counts = zip(planned.clients, paid.clients, strict=True)
        pairs = [(before.count_of(PURPOSE), after.count_of(PURPOSE)) for before, after in counts]
        able = np.array([plan == 0 or paid < plan for plan, paid in pairs])  # with quota 0 the whole budget is left
        once = view.solve(with_later(paid, able.astype(int).tolist(), 0))
        # line 22, Lambda and Phi_n by equation 7: from the budget that is left (Algorithm 2, line 5)
        factor = np.where(able, biased_selection.update_noise(once, LATER, view), np.inf)
        # line 23, Gamma_n: shrunken mean losses instead of equation 8
        self._gamma, self._first = self._heterogeneity(planned, view), self._taken.copy()
        rounds = view.run.rounds - self.warmup_rounds
        # lines 24 and 25, rho_min, gamma, L and mu: `ratio` instead of equation 9 and the fit P2, which is in
        # `two_stages_as_printed`
        cost = self._cost_of_bias(factor[able], rounds) * self._gamma
        if self.ratio != 0 and factor[able].any() and not np.ptp(cost):
            warn_user(
                f"{self.config_name}: the {len(self._reports)} reports of losses show no difference between clients "
                "beyond their noise, so the later quotas are those of least noise alone (Proposition 1)."
            )
        # lines 26 and 27, T_n and p_n by the problem P1: in whole numbers
        total = min(self._cohort_size, int(able.sum())) * rounds
        self._quota = allocate_int(factor, total, self._noise.exponent, cost, upper=rounds)
        self._taken = np.zeros_like(self._quota)

    def _heterogeneity(self, schedule: RunSchedule, view: View) -> np.ndarray:
        """Return each client's dissimilarity Gamma_n, estimated from its reports, `[N]`."""
        count = view.facts.num_clients
        clients, losses = [client for _, client, _ in self._reports], [loss for _, _, loss in self._reports]
        reports, sums = np.bincount(clients, minlength=count), np.bincount(clients, losses, minlength=count)
        std = [self._loss_mechanism(client, schedule, view).noise_std(1, 1.0) for client in range(count)]
        positive = np.where(np.array(std) > 0, std, 1e-12)  # without noise differences are not shrunk
        return shrunken_heterogeneity(sums / np.maximum(reports, 1), reports, positive, self._bound)[0]

    def _cost_of_bias(self, factor: np.ndarray, rounds: int) -> float:
        """Return the cost of one unit of dissimilarity in one participation, in the unit of the noise factors."""
        positive = factor[factor > 0]
        return self.ratio * float(np.exp(np.log(positive).mean())) if len(positive) else 0.0

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        metrics = dict(super().metrics(view))
        if self._first is not None:
            whole = self._first + self._taken
            metrics |= {
                "quota": torch.from_numpy(self._first + self._quota).double(),
                "participations": torch.from_numpy(whole).double(),
                "participation_equality": jain_index(whole),
                "unlikeness": torch.from_numpy(self._gamma).double(),
            }
        return metrics

    def describe(self, view: View) -> tuple[str, ...]:
        losses = self._losses_a_round
        words = (
            f"In the first {self.warmup_rounds} rounds each update comes with {counted(losses, 'report')} of a loss. "
            "These are the quotas of a whole run without a second stage; those of later rounds depend on the losses."
        )
        return (*super().describe(view), words)

    def state_dict(self) -> dict[str, Any]:
        second = None
        if self._first is not None:
            second = [one.tolist() for one in (self._first, self._quota, self._gamma)]
        return {**super().state_dict(), "reports": [list(one) for one in self._reports], "second": second}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._reports = [(int(round), int(client), float(loss)) for round, client, loss in state["reports"]]
        if state["second"] is not None:
            first, quota, gamma = state["second"]
            self._first, self._quota = np.array(first, dtype=np.int64), np.array(quota, dtype=np.int64)
            self._gamma = np.array(gamma)


def _has_later(schedule: RunSchedule) -> bool:
    """Return whether the second stage is planned, for which `with_later` gives each client a last line."""
    return schedule.clients[0].planned[-1].purpose == LATER


def with_later(schedule: RunSchedule, counts: Sequence[int], reserve: int) -> RunSchedule:
    """Return the schedule with `counts[n]` more participations, whose noise uses the rest of the budget."""

    def change(client: int, client_schedule: ClientSchedule) -> ClientSchedule:
        event = schedule.noised(client, PURPOSE).with_noise(None)
        later = Planned(LATER, event, counts[client] + reserve if counts[client] else 0)
        return dataclasses.replace(client_schedule, planned=(*client_schedule.planned, later))

    return schedule.replan(change)
