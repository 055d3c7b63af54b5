"""Upper bound for clustering: the true groups are known, and each has a separate model from the first round on."""

from __future__ import annotations

import dataclasses

from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.group_metrics import true_groups
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.strategies.clustering.cluster_metrics import TellsGroups


class OracleClusters(TellsGroups):
    """O-CDPFL: applies the base rule (DPFedAvg) within each true group of a simulation.

    It shows what clustering could gain at best. It is combined with a base rule. All models start from the same
    parameters.

    **Guarantees** Every guarantee of such a run states that it is a simulation.

    **Privacy** Post-processing. True groups are known only in a simulation.

    Raises:
        UserError: the data have no true groups.

    Reference: Malekmohammadi, Taik and Farnadi (2024), "Oracle-CDPFL".
    """

    caveats = ("a simulation: strategy oracle_clusters is told the true groups of clients",)

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        _groups(view)
        return schedule

    def initialise(self, state: ServerState, view: View) -> ServerState:
        groups = _groups(view)
        return dataclasses.replace(state, models=state.models[:1].repeat(max(groups) + 1, 1), model_of=groups)

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        self._note(view, updates.clients, updates.model_of)
        return state


def _groups(view: View) -> tuple[int, ...]:
    """Return the true group of each client, length N."""
    groups = true_groups(view.facts)
    if groups is None:
        raise UserError(
            "`data.groups` must be given for strategy oracle_clusters, which uses the true groups, got none. "
            "For example {name: rotation, count: 4}. Use another strategy to find groups."
        )
    return groups
