"""Coordinate-wise trimmed mean and median of the clients' updates."""

import torch
from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View


class TrimmedMean(Strategy):
    """Replaces the weighted mean by the mean of each coordinate without its smallest and largest values.

    Of the C clients that train a model, the `floor(share * C)` smallest and as many largest values are dropped, so
    `floor(share * C)` clients cannot move the model arbitrarily far. All clients with a positive weight count equally.

    Args:
        share: share of the clients that is dropped at each end, in [0, 0.5); 0 is the plain mean.

    **Privacy** Post-processing.

    Reference: Yin et al. (2018), Algorithm 1.
    """

    needs_training = True

    def __init__(self, share: float = 0.1) -> None:
        require(0 <= share < 0.5, "strategies.trimmed_mean.share", "be in [0, 0.5)", share)
        self._share = share

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def combine(self, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        deltas, nothing = updates.released, torch.zeros_like(updates.released[0])
        clients_of = (weights > 0).to(deltas.device)
        return torch.stack([self._centre(deltas[row]) if row.any() else nothing for row in clients_of])

    def _centre(self, deltas: Tensor) -> Tensor:
        """Return the centre `[...]` of the rows of `deltas` `[C, ...]`, C > 0."""
        dropped = int(self._share * len(deltas))
        kept = deltas.sort(dim=0).values[dropped : len(deltas) - dropped]
        return kept.mean(dim=0, dtype=torch.float64).to(deltas.dtype)
