"""Base of strategies that replace the weighted mean of the updates by a centre that few clients cannot move far."""

import math

import torch
from torch import Tensor

from dpfl_lightning.errors import warn_user
from dpfl_lightning.federated.messages.jobs import TRAINING
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View


class RobustMean(Strategy):
    """Combines the updates of each model, those with a positive weight, by `_centre`, which subclasses define."""

    jobs = TRAINING

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def combine(self, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        deltas, nothing = updates.released, torch.zeros_like(updates.released[0])
        rows = weights.to(deltas.device)
        return torch.stack([self._centre(deltas[row > 0], row[row > 0]) if row.any() else nothing for row in rows])

    def _centre(self, deltas: Tensor, weights: Tensor) -> Tensor:
        """Return the centre `[...]` of `deltas` `[C, ...]`, C > 0, whose `weights` `[C]` have the sum 1."""
        raise NotImplementedError


def warn_if_none_is_left_out(name: str, share: float, view: View) -> None:
    """Warn the user if this share of all clients is less than one client."""
    if share > 0 and not share_of(share, view.facts.num_clients):
        warn_user(
            f"strategies.{name}.share {share:g} of {view.facts.num_clients} clients is less than one client: "
            "none is left out"
        )


def share_of(share: float, count: int) -> int:
    """Return the share of a number, rounded down.

    >>> share_of(0.29, 100), int(0.29 * 100)
    (29, 28)
    """
    return math.floor(round(share * count, 9))


def coordinate_median(values: Tensor) -> Tensor:
    """Return the median `[...]` of every coordinate of `values` `[C, ...]`, C > 0; of two middle values their mean."""
    ordered = values.sort(dim=0).values
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2


def coordinate_trimmed_mean(values: Tensor, share: float) -> Tensor:
    """Return the mean `[...]` of every coordinate of `values` `[C, ...]` without this share of C at each end."""
    dropped = share_of(share, len(values))
    kept = values.sort(dim=0).values[dropped : len(values) - dropped]
    return kept.mean(dim=0, dtype=torch.float64).to(values.dtype)
