"""Biased selection whose weights take the bias out again: an ablation, which loses what selection gained."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.selection.biased_selection import BiasedSelection


class ReweightedSelection(BiasedSelection):
    """`sum_n delta_n H / (N T_n)` over a round's clients, T_n of H rounds: in expectation the mean over all clients.

    Of several models each has a sum and an N of its own: the clients that belong to it, by the model that they move now
    or started from last. Of Gaussian noise it has as much as any other quotas: what makes `biased_selection` quieter is
    its bias. Clients with quota 0 are missing in the mean; give `min_participation` 1 to have all of them in it.

    Args: those of `BiasedSelection`.

    **Privacy** As `BiasedSelection`.
    """

    key = "strategies.reweighted_selection"

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def combine(self, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        deltas = updates.released
        share = torch.from_numpy(self._quota[list(updates.clients)] / self._horizon)
        belonging = _clients_of(updates, weights, view).clamp_min(1)[:, None]
        factor = ((weights > 0) / (share * belonging)).to(deltas.device)
        return (factor @ deltas.double()).to(deltas.dtype)


def _clients_of(updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
    """How many of all clients belong to each model, `[K]`."""
    model_of, here = torch.tensor(view.state.model_of), list(updates.clients)
    weight, row = weights.cpu().max(dim=0)
    model_of[here] = torch.where(weight > 0, row, model_of[here])
    return model_of.bincount(minlength=len(weights))
