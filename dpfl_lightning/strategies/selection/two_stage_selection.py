"""DPFL-BCS as in the paper: in a first stage clients report noisy losses; then quotas avoid dissimilar clients."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.algorithms.allocation import allocate_int
from dpfl_lightning.algorithms.selection_estimates import (
    FirstStage,
    NoiseModel,
    bias_noise_ratio,
    estimated_skew,
    fit_constants,
    jain_index,
    least_differences,
    shrunken_heterogeneity,
)
from dpfl_lightning.errors import require, require_one_of, warn_user
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import LossesAroundStep, MeanLoss, NoMechanism
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.privacy.accounting.events import NonPrivateEvent
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
UNSOUND = (
    "clients report losses that are not clipped, one of them at a model before noise: no bound is known of what one "
    "record changes"
)
_LOSS = "loss"
_LARGEST = 1e6  # of options that are multiplied
_MARGIN = 1 + 1e-7  # factor on the noise, so that rounding cannot exceed the split of a budget

Report = tuple[int, int, float, float]  # (round, client, loss before, loss after or NaN)


class TwoStageSelection(QuotaSelection):
    """DPFL-BCS in two stages: clients report losses in the first rounds, from which the later quotas are computed.

    The first stage uses the quotas of least noise. The second stage minimises `sum_n noise_n T_n^(z + 1) + ratio sum_n
    unlikeness_n T_n` over the remaining rounds, with the remaining budgets; the last sum is the paper's bias term. It
    has brought no gain over `biased_selection`, even with true values, because where noise is small it leads to the few
    most similar clients instead of equal quotas.

    Args:
        warmup_rounds: number T_0 of rounds in which losses are reported, from 2 to one less than the rounds.
        ratio: cost of one unit of unlikeness (loss) in one participation, divided by the geometric mean of the clients'
            noise factors, in [0, 1e6]. null fits the paper's five constants to one number, which does not determine
            them: see `fit_constants`.
        loss_share: share of each participation's part of the budget that is spent on the loss, in (0, 1).
        loss_bound: losses are clipped to [0, loss_bound], in [1e-6, 1e6]; null is log(classes).
        estimates: `shrunken` uses the mean noisy loss, shrunk towards the mean of all clients as far as noise explains
            the differences. `least_difference` (the paper's) uses the smallest difference between a client's losses
            before and after its noisy update, which costs a second report.
        allow_unsound: with `least_difference`, losses as the paper's clients report them: not clipped, and at the
            client's own model before noise. Noise is added, but no bound on one record's influence is known, and the
            epsilon of every client that reports is infinite. For comparison only.

    **Guarantees** Quotas are whole numbers in both stages, and no client exceeds its budget, whatever the losses are.

    **Privacy** Losses are `MeanLoss` queries, planned and charged in addition to the updates. Later noise depends on
    them, so a guarantee states the whole budget (a privacy filter). This requires full batches with Gaussian noise, or
    with Laplace noise and delta 0, and noise that is solved from a budget. Beside Gaussian noise no clients may choose
    models with noise (`ifca`), because no filter is known for both; `clustered` cannot be used beside this strategy.

    Reference: Ma et al., "The Power of Bias", Algorithms 1 and 2. The paper's clients report unclipped losses, one of
    them before noise, which its sensitivity does not cover. Its quotas are real numbers, which overspend. It splits
    epsilon and delta in proportion to participations, which takes ten times the noise.
    """

    key = "strategies.two_stage_selection"
    caveats = (FILTER,)

    def __init__(
        self,
        clients_per_round: int | None = None,
        sampler: str = "quota_systematic",
        top_fraction: float | None = None,
        warmup_rounds: int = 10,
        ratio: float | None = 3.0,
        loss_share: float = 0.1,
        loss_bound: float | None = None,
        estimates: str = "shrunken",
        allow_unsound: bool = False,
    ) -> None:
        super().__init__(clients_per_round, sampler, top_fraction)
        require(warmup_rounds >= 2, f"{self.key}.warmup_rounds", "be >= 2", warmup_rounds)
        require(ratio is None or 0 <= ratio <= _LARGEST, f"{self.key}.ratio", "be in [0, 1e6]", ratio)
        require(0 < loss_share < 1, f"{self.key}.loss_share", "be in (0, 1)", loss_share)
        in_range = loss_bound is None or 1 / _LARGEST <= loss_bound <= _LARGEST
        require(in_range, f"{self.key}.loss_bound", "be in [1e-6, 1e6]", loss_bound)
        require_one_of(("shrunken", "least_difference"), f"{self.key}.estimates", estimates)
        paper = estimates == "least_difference"
        advice = "The paper's constants can be fitted only with estimates least_difference."
        require(ratio is not None or paper, f"{self.key}.ratio", "be a number with shrunken estimates", None, advice)
        must = "be false with shrunken estimates"
        require(paper or not allow_unsound, f"{self.key}.allow_unsound", must, allow_unsound)
        self._warmup, self._ratio, self._share, self._bound = warmup_rounds, ratio, loss_share, loss_bound
        self._paper, self._unsound = paper, allow_unsound
        self._losses_a_round = 2 if paper else 1
        self._reports: list[Report] = []
        self._first: Counts | None = None  # participations in the first stage; None until the second stage begins
        self._constants: dict[str, float] = {}  # the paper's constants, if they were fitted

    # -- the first stage

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        name = self.key.rpartition(".")[2]
        biased_selection.check_free_noise(schedule, name, view.facts)
        must = f"be below the {schedule.rounds} rounds"
        require(self._warmup < schedule.rounds, f"{self.key}.warmup_rounds", must, self._warmup)
        must = f"plan one full batch a round beside {name}, with delta 0 if noise is Laplace"
        advice = "Set clients.batch_size: null, and with privacy.mechanism laplace privacy.delta: 0."
        require(exact_exponent(schedule) is not None, "strategies", must, schedule.clients[0].outline, advice)
        self._bound_now = math.log(view.facts.num_classes) if self._bound is None else self._bound
        advice = "Losses of a regression have no default bound."
        require(self._bound_now > 0, f"{self.key}.loss_bound", "be a number for a regression", self._bound, advice)
        self._first, self._reports = None, []
        planned = super().plan_run(schedule, view)
        once = view.solve(with_quotas(dataclasses.replace(schedule, reserve=0), [1] * len(schedule.clients)))
        self._report_noise: list[Any] = []  # by client, with `allow_unsound`: noise of the losses

        def with_reports(client: int, client_schedule: ClientSchedule) -> ClientSchedule:
            """Split the budget of each of the client's participations between the update and the losses."""
            line, event = planned.planned(client, PURPOSE), planned.noised(client, PURPOSE)
            power = self._noise.exponent[client] / 2
            noise = _MARGIN * once.clients[client].noise_multiplier(PURPOSE) * max(line.count, 1) ** power
            of_update = dataclasses.replace(event, noise_multiplier=noise / (1 - self._share) ** power)
            of_loss = noise * (self._losses_a_round / self._share) ** power
            report = dataclasses.replace(event, noise_multiplier=of_loss, steps=1)  # also if an update has several
            reports = Planned(_LOSS, report, self._losses_a_round * line.count)
            if self._unsound:
                self._report_noise.append(report)
                reports = Planned(_LOSS, NonPrivateEvent(UNSOUND), line.count)
            others = (other for other in client_schedule.planned if other is not line)
            updates = dataclasses.replace(line, event=of_update)
            return dataclasses.replace(client_schedule, planned=(updates, reports, *others))

        return planned.replan(with_reports)

    def _quotas(self, total: int, upper: Counts, schedule: RunSchedule, view: View) -> Counts:
        self._noise = biased_selection.participation_noise(schedule, view, upper)
        return allocate_int(self._noise.factor, total, self._noise.exponent, upper=upper)

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        plan = super().plan_round(plan, view)
        if self._first is not None:
            mechanisms = tuple(view.mechanism(client, LATER) for client in plan.clients)
            return dataclasses.replace(plan, mechanism_of=mechanisms, purpose=LATER)
        if view.round <= self._warmup and plan.clients:
            if self._unsound:
                self._reports += self._asked_unsoundly(plan, view)
            else:
                answers = self._ask(view.state.models, dict(zip(plan.clients, plan.model_of, strict=True)), view)
                self._reports += [(view.round, client, loss, math.nan) for client, loss in answers.items()]
        return plan

    def _asked_unsoundly(self, plan: RoundPlan, view: View) -> list[Report]:
        mechanisms = {c: NoMechanism(UNSOUND, self._loss_mechanism(c, view.schedule, view)) for c in plan.clients}
        step_of = {
            client: (mechanism.clip_norm, mechanism.clip_order, rate)
            for client, mechanism, rate in zip(plan.clients, plan.mechanism_of, plan.learning_rate_of, strict=True)
        }
        models, row_of = view.state.models, dict(zip(plan.clients, plan.model_of, strict=True))
        asked = LossesAroundStep(purpose=_LOSS, mechanism_of=mechanisms, models=models, row_of=row_of, step_of=step_of)
        answers = view.ask(asked)
        return [(view.round, client, before, after) for client, (before, after) in answers.items()]

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return self._asks_after(view)

    def _asks_after(self, view: View) -> bool:
        """Whether clients are asked for their losses at their noisy updates, too."""
        return self._paper and not self._unsound and view.round <= self._warmup

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        if updates.deltas is not None and self._asks_after(view):
            row_of = {client: row for row, client in enumerate(updates.clients)}
            after = self._ask(view.state.models[list(updates.model_of)] + updates.deltas, row_of, view)
            self._reports = [
                (*one[:3], after.get(one[1], math.nan)) if one[0] == view.round else one for one in self._reports
            ]
        return super().after_step(state, updates, view)

    def _ask(self, models: Tensor, row_of: Mapping[int, int], view: View) -> dict[int, float]:
        mechanisms = {client: self._loss_mechanism(client, view.schedule, view) for client in row_of}
        bound = self._bound_now
        query = MeanLoss(purpose=_LOSS, mechanism_of=mechanisms, models=models, row_of=row_of, loss_bound=bound)
        return dict(view.ask(query))

    def _loss_mechanism(self, client: int, schedule: RunSchedule, view: View) -> Mechanism:
        event = self._report_noise[client] if self._unsound else schedule.noised(client, _LOSS)
        return mechanism_of(event, self._bound_now / 2, view.facts.num_records[client])

    # -- the second stage

    def replan(self, schedule: RunSchedule, view: View) -> RunSchedule:
        if view.round <= self._warmup or schedule.clients[0].planned[-1].purpose == LATER:
            return schedule

        def only_paid(client: int, client_schedule: ClientSchedule) -> ClientSchedule:
            lines = (dataclasses.replace(p, count=view.used(client, p.purpose)) for p in client_schedule.planned)
            return dataclasses.replace(client_schedule, planned=tuple(lines))

        paid = schedule.replan(only_paid)
        if self._first is None:
            self._begin_second_stage(schedule, paid, view)
        self._horizon, self._settled = view.run.rounds - self._warmup, True
        return _with_later(paid, self._quota.tolist(), schedule.reserve)

    def _begin_second_stage(self, planned: RunSchedule, paid: RunSchedule, view: View) -> None:
        counts = zip(planned.clients, paid.clients, strict=True)
        pairs = [(before.count_of(PURPOSE), after.count_of(PURPOSE)) for before, after in counts]
        able = np.array([plan == 0 or paid < plan for plan, paid in pairs])  # with quota 0 the whole budget is left
        once = view.solve(_with_later(paid, able.astype(int).tolist(), 0))
        factor = np.where(able, biased_selection.update_noise(once, LATER, view), np.inf)
        self._unlike, self._first = self._heterogeneity(planned, view), self._taken.copy()
        rounds = view.run.rounds - self._warmup
        cost = self._cost_of_unlikeness(factor[able], rounds) * self._unlike
        if self._ratio != 0 and factor[able].any() and not np.ptp(cost):
            warn_user(
                f"two_stage_selection: the {len(self._reports)} reports of losses show no difference between clients "
                "beyond their noise, so the later quotas are those of least noise alone (Proposition 1)."
            )
        total = min(self._cohort_size, int(able.sum())) * rounds
        self._quota = allocate_int(factor, total, self._noise.exponent, cost, upper=rounds)
        self._taken = np.zeros_like(self._quota)

    def _heterogeneity(self, schedule: RunSchedule, view: View) -> np.ndarray:
        """Return each client's unlikeness, estimated from its reports, `[N]`."""
        count = view.facts.num_clients
        if self._paper:
            whole = [(client, before, after) for _, client, before, after in self._reports if not math.isnan(after)]
            return least_differences(whole, count)
        clients, losses = [client for _, client, _, _ in self._reports], [loss for _, _, loss, _ in self._reports]
        reports, sums = np.bincount(clients, minlength=count), np.bincount(clients, losses, minlength=count)
        std = [self._loss_mechanism(client, schedule, view).noise_std(1, 1.0) for client in range(count)]
        positive = np.where(np.array(std) > 0, std, 1e-12)  # without noise differences are not shrunk
        return shrunken_heterogeneity(sums / np.maximum(reports, 1), reports, positive, self._bound_now)[0]

    def _cost_of_unlikeness(self, factor: np.ndarray, rounds: int) -> float:
        """Return the cost of one unit of unlikeness in one participation, in the unit of the noise factors."""
        if self._ratio is not None:
            positive = factor[factor > 0]
            return self._ratio * float(np.exp(np.log(positive).mean())) if len(positive) else 0.0
        last = {client: loss for round, client, loss, _ in self._reports if round == self._warmup}
        earlier = [client for round, client, _, _ in self._reports if round < self._warmup]
        if not last or not earlier:
            return 0.0
        counts = np.bincount(earlier, minlength=len(self._quota)).astype(float)
        noise = NoiseModel(1.0, float(self._noise.exponent[0]), self._noise.factor)
        skew, loss = estimated_skew(counts, last, self._bound_now), float(np.mean(list(last.values())))
        stage = FirstStage(self._warmup - 1, self._cohort_size, counts, self._unlike, skew, noise, loss)
        constants, _ = fit_constants(stage)
        self._constants = {"fitted_least_skew": skew, "fitted_lr_offset": constants.lr_offset}
        self._constants |= {"fitted_smoothness": constants.smoothness, "fitted_convexity": constants.strong_convexity}
        return bias_noise_ratio(constants, rounds, self._cohort_size)

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        metrics = dict(super().metrics(view))
        if self._first is not None:
            whole = self._first + self._taken
            metrics |= {
                "quota": torch.from_numpy(self._first + self._quota).double(),
                "participations": torch.from_numpy(whole).double(),
                "participation_equality": jain_index(whole),
                "unlikeness": torch.from_numpy(self._unlike).double(),
            }
        return metrics | self._constants

    def describe(self, view: View) -> tuple[str, ...]:
        losses = self._losses_a_round
        words = (
            f"In the first {self._warmup} rounds each update comes with {counted(losses, 'report')} of a loss. These "
            "are the quotas of a whole run without a second stage; the quotas of the later rounds depend on the losses."
        )
        return (*super().describe(view), words)

    def state_dict(self) -> dict[str, Any]:
        second = None
        if self._first is not None:
            second = [one.tolist() for one in (self._first, self._quota, self._unlike)]
        reports, constants = [list(one) for one in self._reports], dict(self._constants)
        return {**super().state_dict(), "reports": reports, "second": second, "constants": constants}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._reports = [(int(r), int(c), float(a), float(b)) for r, c, a, b in state["reports"]]
        self._constants = dict(state["constants"])
        if state["second"] is not None:
            first, quota, unlike = state["second"]
            self._first, self._quota = np.array(first, dtype=np.int64), np.array(quota, dtype=np.int64)
            self._unlike = np.array(unlike)


def _with_later(schedule: RunSchedule, counts: Sequence[int], reserve: int) -> RunSchedule:
    """Return the schedule with `counts[n]` more participations, whose noise uses the rest of the budget."""

    def change(client: int, client_schedule: ClientSchedule) -> ClientSchedule:
        event = dataclasses.replace(schedule.noised(client, PURPOSE), noise_multiplier=None)
        later = Planned(LATER, event, counts[client] + reserve if counts[client] else 0)
        return dataclasses.replace(client_schedule, planned=(*client_schedule.planned, later))

    return schedule.replan(change)
