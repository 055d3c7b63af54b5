"""Base rules: weights of the clients by public facts."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View


class SizeWeighted(Strategy):
    """DPFedAvg: weights are proportional to data size, `w_i = N_i / sum_j N_j`.

    With `privacy: null` this is plain FedAvg. If budgets or batch sizes differ, a noise-aware rule is better.

    **Privacy** Post-processing. The data sizes are trusted, and they are treated as public: under add-or-remove
    adjacency the guarantee does not cover an exact count.

    Reference: Noble et al. (2021), with the weights that Malekmohammadi et al. (2024) use; McMahan et al. (2017).
    """

    role = "base"

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        return torch.tensor([view.facts.num_records[client] for client in updates.clients], dtype=torch.float64)


class MinimumEpsilon(SizeWeighted):
    """Trains every client with the smallest budget, `min_j epsilon_j`, and weights clients by data size.

    **Privacy** Post-processing. The budgets are changed before the noise is solved.

    Reference: Malekmohammadi et al. (2024), section 4.
    """

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        smallest = min(client.target_epsilon for client in schedule.clients)
        return schedule.replan(lambda _, client: dataclasses.replace(client, target_epsilon=smallest))


class EpsilonWeighted(Strategy):
    """WeiAvg: weights are proportional to budgets, `w_i = epsilon_i / sum_j epsilon_j` over the participants.

    The claimed epsilon is trusted: a client that overstates its budget gains weight. All budgets must be finite.

    **Privacy** Post-processing. The clients' budgets themselves are disclosed to the server.

    Reference: Liu et al. (2021), Algorithm 2.
    """

    role = "base"

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        unbounded = [i for i, epsilon in enumerate(view.facts.reported_epsilon) if not epsilon < float("inf")]
        if unbounded:
            raise UserError(
                "`privacy.epsilon` must be finite for strategy epsilon_weighted, got no budget for client "
                f"{unbounded[0]}. Use size_weighted in a non-private run."
            )
        return schedule

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        return torch.tensor([view.facts.reported_epsilon[client] for client in updates.clients], dtype=torch.float64)


class InverseNoise(Strategy):
    """Inverse-variance weights: `w_i ~ 1 / v_i`, where v_i is the variance of the noise in client i's update.

    Among all weights of the mean these give the least noise. Without noise all clients have the same weight. The
    reported budgets, batch sizes and clip norms are trusted; `noise_aware` estimates the variances from the updates.

    **Privacy** Post-processing. Budgets and batch sizes are disclosed to the server.
    """

    role = "base"

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        return weights(torch.tensor(updates.noise_std, dtype=torch.float64) ** 2)
