"""DPFL-BCS: clients with large budgets and many records take part more often, so the mean update has less noise."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Interval
from numpy.typing import NDArray

from dpfl_lightning.algorithms.allocation import allocate_int, anchor_strength, noise_gain
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.mechanism import mechanism_of
from dpfl_lightning.strategies.selection.quotas import PURPOSE, Counts, QuotaSelection, exact_exponent, with_quotas

Vector = NDArray[np.float64]

_L1_SCALE = 0.25  # for the anchor: assumed ratio of a gradient's L2 norm to the L1 norm to which it is clipped
_FITS = 2  # first around equal quotas, then around the quotas found
_LEAST_GROWTH = 0.1  # of noise: exponent that quotas can still be allocated with
_FAR = 2  # the growth of noise is fitted between half of a quota and twice the quota


@dataclass(frozen=True)
class ParticipationNoise:
    """Noise of the mean gradient in one of T_n participations: `E|Z_n|^2 = factor_n T_n^exponent_n`, all coordinates.

    `factor` `[N]` is 0 without noise. `exponent` `[N]` is that of `NoisedEvent.growth`, and fitted if
    batches are sampled.
    """

    factor: Vector
    exponent: Vector


def participation_noise(schedule: RunSchedule, view: View, quota: Counts) -> ParticipationNoise:
    """Return the noise that the run's accountant requires of each client, by the number of its participations.

    The result is exact for full batches. Otherwise the noise is solved at half and at twice each client's `quota`
    `[N]`, and an exponent is fitted for each client.
    """
    exponent = exact_exponent(schedule)
    if exponent is not None:
        return ParticipationNoise(_noise_of(schedule, np.ones_like(quota), view), np.full(len(quota), exponent))
    most = max(client_schedule.count_of(PURPOSE) for client_schedule in schedule.clients)
    few, many = np.clip(quota // _FAR, 1, most), np.clip(quota * _FAR, 2, most)
    low, high = _noise_of(schedule, few, view), _noise_of(schedule, many, view)
    noised = (low > 0) & (high > 0) & (many > few)
    growth = np.log(high, where=noised, out=np.ones_like(low)) - np.log(low, where=noised, out=np.zeros_like(low))
    powers = np.where(noised, np.maximum(growth / np.log(np.where(noised, many / few, math.e)), _LEAST_GROWTH), 1.0)
    return ParticipationNoise(np.where(noised, high / many**powers, low), powers)


def _noise_of(schedule: RunSchedule, counts: Counts, view: View) -> Vector:
    """Return `E|Z_n|^2` of each client `[N]` if it takes part `counts[n]` times."""
    alone = with_quotas(dataclasses.replace(schedule, reserve=0), counts)
    return update_noise(view.solve(alone), PURPOSE, view)


def update_noise(schedule: RunSchedule, purpose: str, view: View) -> Vector:
    """Return `E|Z_n|^2` of the mean gradient in each client's planned update of a purpose, `[N]`."""
    noise = []
    for client in range(len(schedule.clients)):
        event, rate = schedule.noised(client, purpose), view.learning_rate[client]
        mechanism = mechanism_of(event, view.clip_norm[client], view.facts.num_records[client])
        noise.append(view.run.num_params * (mechanism.noise_std(event.steps, rate) / (rate * event.steps)) ** 2)
    return np.array(noise)


def check_free_noise(schedule: RunSchedule, strategy: str, facts: Facts) -> None:
    """Raise UserError if noise multipliers are given, which no quota could change."""
    for client in range(len(schedule.clients)):
        event = schedule.noised(client, PURPOSE)
        if event.noise_multiplier:
            raise UserError(
                f"`privacy.noise_multiplier` must be null for strategy {strategy}, got {event.noise_multiplier} for "
                f"client {facts.name_of(client)}: quotas change the noise that is solved from a budget, but not noise "
                "that is given. Set only privacy.epsilon, or use uniform_selection."
            )


@dataclass
class BiasedSelection(QuotaSelection):
    """DPFL-BCS: quotas that balance the noise of the mean update against the bias of unequal participation.

    A client that takes part often divides its budget among more releases, each of which has more noise; one that rarely
    takes part biases the model away from its data. If the noise is small, the quotas become equal.

    Args:
        dissimilarity: assumed difference of the clients' gradients at the optimum, as a share of the squared clip norm.
            Larger values make quotas more equal; 0 gives the least noise (Proposition 1 with caps).

    **Guarantees** Quotas are whole numbers and, for full batches, exactly optimal for the noise that the run's
    accountant requires. For sampled batches the growth of noise is fitted, which costs 0.3 % at most in our tests.

    **Privacy** Post-processing of public facts: no loss is reported, and nothing is estimated. Claimed budgets and
    numbers of records are trusted. `privacy.noise_multiplier` must be null, because no quota could change it.

    Reference: Ma et al., "The Power of Bias", Proposition 1, with caps, whole quotas, and an anchor in place of the
    paper's bias term (`allocation.py`). Algorithms 1 and 2, with that term, are `two_stage_selection`.
    """

    dissimilarity: Annotated[float, Interval(ge=0, le=1e6)] = 0.1

    def _quotas(self, total: int, upper: Counts, schedule: RunSchedule, view: View) -> Counts:
        if total == 0:  # other strategies use all rounds
            self._noise = ParticipationNoise(np.zeros(len(upper)), np.ones(len(upper)))
            return np.zeros(len(upper), dtype=np.int64)
        check_free_noise(schedule, self.config_name, view.facts)
        claimed = view.facts.reported_epsilon
        claims = schedule.replan(lambda client, one: dataclasses.replace(one, target_epsilon=claimed[client]))
        in_l1 = schedule.noised(0, PURPOSE).clip_order == 1
        scale = float(np.median(view.clip_norm)) * (_L1_SCALE if in_l1 else 1.0)
        quota = np.full(len(upper), max(total // len(upper), 1))
        for _ in range(_FITS if exact_exponent(claims) is None else 1):
            self._noise = noise = participation_noise(claims, view, quota)
            noised = bool(noise.factor.any())  # if not, the clip norm may be infinite
            anchor = anchor_strength(len(upper), self._horizon, scale, self.dissimilarity) if noised else 0.0
            quota = allocate_int(noise.factor, total, noise.exponent, upper=upper, anchor=anchor)
        return quota

    def describe(self, view: View) -> tuple[str, ...]:
        noise = self._noise
        if not noise.factor.any():
            words = "No client adds noise: quotas are equal." if self._quota.any() else "No rounds are left to select."
            return (*super().describe(view), words)
        gain = noise_gain(self._quota, noise.factor, noise.exponent)
        return (
            *super().describe(view),
            f"The noise in a round's mean update has {1 / gain:.3g} times the variance that equal quotas would "
            f"give (a gain of {gain:.3g}); it grows with a client's participations to the power "
            f"{noise.exponent.mean():.3g}.",
        )
