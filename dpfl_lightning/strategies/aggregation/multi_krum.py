"""Multi-Krum: leaves out the updates that lie far from their nearest neighbours."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.algorithms.update_geometry import double_columns, gram_of, squared_distances
from dpfl_lightning.federated.messages.jobs import TRAINING
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.aggregation.robust_mean import share_of, warn_if_none_is_left_out


@dataclass
class MultiKrum(Strategy):
    """Leaves out the `floor(share * C)` of the C updates of a model that lie farthest from their neighbours.

    The score of an update is the sum of squared distances to its `C - floor(share * C) - 2` nearest neighbours; the
    updates with the highest scores get weight 0. With fewer than one such neighbour, as among three clients, none is
    left out. The weights of the other strategies apply to the rest. Updates with more privacy noise lie farther away,
    so clients with small budgets are left out first.

    Args:
        share: share of the clients that is left out.

    **Privacy** Post-processing.

    Reference: Blanchard et al. (2017), Section 4.
    """

    share: Annotated[float, Interval(ge=0, lt=0.5)] = 0.2

    role = "mask"
    jobs = TRAINING

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        warn_if_none_is_left_out(self.config_name, self.share, view)
        return schedule

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        gram = gram_of(double_columns(updates.released.flatten(1))).numpy()
        kept = torch.zeros(len(gram), dtype=torch.float64)
        for rows in updates.rows_by_model:
            kept[rows] = torch.from_numpy(_kept(gram[np.ix_(rows, rows)], share_of(self.share, len(rows))))
        return kept


def _kept(gram: np.ndarray, left_out: int) -> np.ndarray:
    """Return 1 or 0 for each of C updates with this Gram matrix; all are kept if no two neighbours would be left."""
    count, neighbours = len(gram), len(gram) - left_out - 2
    if left_out == 0 or neighbours < 1:
        return np.ones(count)
    squared = np.sort(squared_distances(gram), axis=1)[:, 1:]  # without the distance to itself
    order = np.argsort(squared[:, :neighbours].sum(axis=1), kind="stable")
    kept = np.zeros(count)
    kept[order[: count - left_out]] = 1.0
    return kept
