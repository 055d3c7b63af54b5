"""WeiAvg: weights by budget."""

import torch
from torch import Tensor

from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View


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
