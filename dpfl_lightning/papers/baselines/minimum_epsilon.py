"""DPFedAvg with the smallest budget for all clients."""

import dataclasses

from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted


class MinimumEpsilon(SizeWeighted):
    """Trains every client with the smallest budget, `min_j epsilon_j`, and weights clients by data size.

    **Privacy** Post-processing. The budgets are changed before the noise is solved.

    Reference: Malekmohammadi et al. (2024), section 4.
    """

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        smallest = min(client.target_epsilon for client in schedule.clients)
        return schedule.replan(lambda _, client: dataclasses.replace(client, target_epsilon=smallest))
