"""DPFL-BCS with the estimates that the paper prints, and with its budgets and losses where they are asked for."""

# Printed                                                          Here
#   Gamma_n, equation 8: least differences of two noisy losses     `least_differences`
#   rho_min, equation 9; gamma, L and mu, equation 10 and P2       `_cost_of_bias`
#   epsilon_n / T_n, delta_n / T_n (Algorithm 2, lines 3 and 5)    `calibration: linear`
#   F_n at w - g, the noiseless step (Algorithm 2, Loss)           `second_loss: noiseless_step`
#   quotas T_n that are no whole numbers                           never: a client takes part ceil(T_n) times, and
#                                                                  spends ceil(T_n) / T_n of its budget
#   losses that are not clipped                                    with `second_loss: noiseless_step` the second one

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import LossOfOwnStep, NoMechanism
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.papers.selection.printed_estimates import (
    FirstStage,
    NoiseModel,
    bias_noise_ratio,
    estimated_skew,
    fit_constants,
    least_differences,
)
from dpfl_lightning.papers.selection.two_stage_selection import Report, TwoStageSelection, with_later
from dpfl_lightning.privacy.accounting.events import NonPrivateEvent
from dpfl_lightning.privacy.accounting.noise_source import require_simulated
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.noise import RandomGenerator, stream_words
from dpfl_lightning.strategies.selection.quotas import PURPOSE

_OWN_STEP = LossOfOwnStep.purpose
_LEAK = "losses after a step without noise, which records move by an unknown amount"
_WHY_SIMULATED = "It sends losses after a step without noise. noisy_update sends noised ones."


@dataclass
class TwoStagesAsPrinted(TwoStageSelection):
    """DPFL-BCS with the paper's estimates: least differences of two losses, and five constants fitted to one number.

    Use it to compare with the paper; `biased_selection` needs no losses and is as accurate. `ratio` is fitted, too.
    Two losses are reported in each participation of the first stage: one at the server's model, and a second one.

    Args:
        second_loss: `noisy_update`: clipped and noised, at the client's noisy update. `noiseless_step`: as printed, at
            the client's step without noise, so that every epsilon is infinite. It is refused outside simulations.
        calibration: `exact` composes all participations; `linear` gives each one epsilon / T_n and delta / T_n, as
            printed: valid, with several times the noise.

    **Privacy** As `two_stage_selection`, but for `noiseless_step`.

    Reference: Ma et al., "The Power of Bias", Algorithms 1 and 2, equations 7 to 10, problem P2.
    """

    second_loss: Literal["noisy_update", "noiseless_step"] = "noisy_update"
    calibration: Literal["exact", "linear"] = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._losses_a_round = 1 if self.second_loss == "noiseless_step" else 2
        self._after: list[Report] = []  # second losses
        self._constants: dict[str, float] = {}

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        self._after = []
        planned = super().plan_run(schedule, view)
        if self.second_loss == "noisy_update":
            return planned
        require_simulated(view.run.source, self._key("second_loss"), self.second_loss, _WHY_SIMULATED)

        def with_plain(client: int, own: ClientSchedule) -> ClientSchedule:
            line = Planned(_OWN_STEP, NonPrivateEvent(_LEAK), own.count_of(PURPOSE))
            return dataclasses.replace(own, planned=(*own.planned, line))

        return planned.replan(with_plain)

    def _noise_of_one(self, schedule: RunSchedule, counts: Sequence[int], view: View) -> list[float]:
        """Algorithm 2, line 3: the budget of a participation is a T_n-th of epsilon and of delta."""
        if self.calibration == "exact":
            return super()._noise_of_one(schedule, counts, view)
        return super()._noise_of_one(_shares(schedule, counts), [1] * len(counts), view)

    def _later(self, paid: RunSchedule, counts: Sequence[int], reserve: int, view: View) -> RunSchedule:
        """Algorithm 2, line 5: what is left of epsilon and delta is divided by the later participations."""
        if self.calibration == "exact":
            return super()._later(paid, counts, reserve, view)

        def left(client: int, own: ClientSchedule) -> ClientSchedule:
            spent = own.count_of(PURPOSE) / max(self._planned_first[client], 1) if counts[client] else 0.0
            epsilon, delta = own.target_epsilon * (1 - spent), own.delta * (1 - spent)
            free = Planned(PURPOSE, paid.noised(client, PURPOSE).with_noise(None), 1)
            return dataclasses.replace(own, target_epsilon=epsilon, delta=delta, planned=(free,))

        noises = self._noise_of_one(paid.replan(left), counts, view)
        later = with_later(paid, counts, reserve)

        def noised(client: int, own: ClientSchedule) -> ClientSchedule:
            *others, line = own.planned
            event = paid.noised(client, PURPOSE).with_noise(noises[client])
            return dataclasses.replace(own, planned=(*others, dataclasses.replace(line, event=event)))

        return later.replan(noised)

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return view.round <= self.warmup_rounds

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        if updates.deltas is not None and view.round <= self.warmup_rounds:
            self._after += [(view.round, client, loss) for client, loss in self._second_losses(updates, view).items()]
        return super().after_step(state, updates, view)

    def _second_losses(self, updates: ClientUpdates, view: View) -> dict[int, float]:
        assert updates.deltas is not None
        if self.second_loss == "noisy_update":
            row_of = {client: row for row, client in enumerate(updates.clients)}
            return self._ask(view.state.models[list(updates.model_of)] + updates.deltas, row_of, view)
        asked = dict(zip(updates.clients, updates.model_of, strict=True))
        question = LossOfOwnStep(
            mechanism_of=dict.fromkeys(asked, NoMechanism(_LEAK)),
            models=view.state.models,
            row_of=asked,
            learning_rate_of={client: view.learning_rate[client] for client in asked},
            clip_norm_of={client: view.clip_norm[client] for client in asked},
            clip_order=view.mechanism(updates.clients[0], PURPOSE).clip_order,
        )
        answers: Mapping[int, float] = view.ask(question)
        return {client: loss + self._printed_noise(client, view) for client, loss in answers.items()}

    def _printed_noise(self, client: int, view: View) -> float:
        """Noise as on a coordinate of the mean gradient, which the server of a simulation adds: it protects nothing.

        Algorithm 2: both losses are coordinates d + 1 and d + 2 of the released vector.
        """
        key = np.random.SeedSequence(view.seed, spawn_key=stream_words(f"{_OWN_STEP} {client}", view.round))
        generator = RandomGenerator(key.generate_state(8, np.uint32).tobytes())
        of_gradient = view.mechanism(client, PURPOSE).privatise(torch.zeros(1, 1), generator, torch.float64)
        return float(of_gradient) * (1 + self._bound / view.clip_norm[client])

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


def _shares(schedule: RunSchedule, counts: Sequence[int]) -> RunSchedule:
    """Return the schedule in which a client has the budget of one of its `counts` participations."""

    def share(client: int, own: ClientSchedule) -> ClientSchedule:
        count = max(counts[client], 1)
        return dataclasses.replace(own, target_epsilon=own.target_epsilon / count, delta=own.delta / count)

    return schedule.replan(share)
