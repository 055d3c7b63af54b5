"""Upper bound for clustering: the true groups are known, and each has a separate model from the first round on."""

import dataclasses

from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.summary import true_groups
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.papers.clustered.cluster_metrics import GroupingStrategy


class OracleClusters(GroupingStrategy):
    """O-CDPFL: applies the aggregation rule (DPFedAvg) within each true group of a simulation.

    It shows what clustering could gain at best. All models start from the same parameters. Every guarantee of such a
    run states that it is a simulation, because only there true groups are known.

    **Privacy** Post-processing.

    Reference: Malekmohammadi, Taik and Farnadi (2024), "Oracle-CDPFL".
    """

    caveats = ("a simulation: strategy oracle_clusters is told the true groups of clients",)

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        groups = true_groups(view.facts)
        if groups is None:
            raise UserError(
                "`data.groups` must be given for strategy oracle_clusters, which uses the true groups, got none. "
                "For example {name: rotation, count: 4}. Use another strategy to find groups."
            )
        self._groups = groups
        return schedule

    def initialise(self, state: ServerState, view: View) -> ServerState:
        groups = self._groups
        return dataclasses.replace(state, models=state.models[:1].repeat(max(groups) + 1, 1), model_of=groups)
