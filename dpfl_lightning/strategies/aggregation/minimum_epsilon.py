"""The cautious rival: everybody trains with the smallest budget of all."""

from __future__ import annotations

import dataclasses

from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted


class MinimumEpsilon(SizeWeighted):
    """Every client uses `min_j epsilon_j`; weights by data size.

    **Guarantees** No client spends more than the smallest budget of the federation.

    **Privacy** Post-processing; changes the budgets before noise is solved.

    Reference: Malekmohammadi et al. (2024), section 4.
    """

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        smallest = min(client.target_epsilon for client in schedule.clients)
        return schedule.replan(lambda _, client: dataclasses.replace(client, target_epsilon=smallest))
