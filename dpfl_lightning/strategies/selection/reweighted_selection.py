"""Biased selection whose weights remove the bias: an ablation, which loses the gain of the selection."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.selection.biased_selection import BiasedSelection


class ReweightedSelection(BiasedSelection):
    """Ablation of biased_selection: weights that remove its bias, `sum_n delta_n H / (N T_n)` over a round's clients.

    Client n trains in T_n of H rounds, so the expectation is the mean over all clients. With several models each model
    has a separate sum and its own N: the clients that belong to it, by the model that they train now or trained last.
    With Gaussian noise the result has as much noise as with any other quotas: `biased_selection` has less noise because
    of its bias. Clients with quota 0 are missing in the mean; `min_participation: 1` includes all of them.

    Args:
        clients_per_round, sampler, top_fraction, dissimilarity, min_participation, max_effective_epsilon: as in
            `biased_selection`.

    **Privacy** As `biased_selection`: post-processing of public facts and released updates.
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
    """Return how many of all clients belong to each model, `[K]`."""
    model_of, here = torch.tensor(view.state.model_of), list(updates.clients)
    weight, row = weights.cpu().max(dim=0)
    model_of[here] = torch.where(weight > 0, row, model_of[here])
    return model_of.bincount(minlength=len(weights))
