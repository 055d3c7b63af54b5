"""The selection paper's second stage as printed, but for what clients report: noised, clipped losses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.papers.selection.two_stage_selection import Report, TwoStageSelection
from experiments.papers.selection.estimates import (
    FirstStage,
    NoiseModel,
    bias_noise_ratio,
    estimated_skew,
    fit_constants,
    least_differences,
)


@dataclass
class PaperTwoStages(TwoStageSelection):
    """Two stages with the paper's estimates: least differences of two losses, and five constants fitted to one number.

    One loss is reported at the server's model, the other at the client's noisy update. `ratio` is fitted, too.
    """

    _losses_a_round = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._after: list[Report] = []  # losses at the noisy updates
        self._constants: dict[str, float] = {}

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        self._after = []
        return super().plan_run(schedule, view)

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return view.round <= self.warmup_rounds

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        if updates.deltas is not None and view.round <= self.warmup_rounds:
            row_of = {client: row for row, client in enumerate(updates.clients)}
            answers = self._ask(view.state.models[list(updates.model_of)] + updates.deltas, row_of, view)
            self._after += [(view.round, client, loss) for client, loss in answers.items()]
        return super().after_step(state, updates, view)

    def _heterogeneity(self, schedule: RunSchedule, view: View) -> np.ndarray:
        """Line 23, Gamma_n by equation 8."""
        after = {(round, client): loss for round, client, loss in self._after}
        pairs = [
            (client, loss, after[round, client]) for round, client, loss in self._reports if (round, client) in after
        ]
        return least_differences(pairs, view.facts.num_clients)

    def _cost_of_bias(self, factor: np.ndarray, rounds: int) -> float:
        """Lines 24 and 25, rho_min by equation 9, and gamma, L and mu by equation 10 and the problem P2."""
        last = {client: loss for round, client, loss in self._reports if round == self.warmup_rounds}
        earlier = [client for round, client, _ in self._reports if round < self.warmup_rounds]
        if not last or not earlier:
            return 0.0
        counts = np.bincount(earlier, minlength=len(self._quota)).astype(float)
        noise = NoiseModel(1.0, float(self._noise.exponent[0]), self._noise.factor)
        skew, loss = estimated_skew(counts, last, self._bound), float(np.mean(list(last.values())))
        stage = FirstStage(self.warmup_rounds - 1, self._cohort_size, counts, self._gamma, skew, noise, loss)
        constants, _ = fit_constants(stage)
        self._constants = {"fitted_least_skew": skew, "fitted_lr_offset": constants.lr_offset}
        self._constants |= {"fitted_smoothness": constants.smoothness, "fitted_convexity": constants.strong_convexity}
        return bias_noise_ratio(constants, rounds, self._cohort_size)

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        return {**super().metrics(view), **self._constants}

    def state_dict(self) -> dict[str, Any]:
        after = [list(one) for one in self._after]
        return {**super().state_dict(), "after": after, "constants": dict(self._constants)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._after = [(int(round), int(client), float(loss)) for round, client, loss in state["after"]]
        self._constants = dict(state["constants"])
