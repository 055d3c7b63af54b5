"""Biased selection whose weights remove the bias: an ablation."""

import torch
from torch import Tensor

from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.selection.biased_selection import BiasedSelection


class ReweightedSelection(BiasedSelection):
    """Ablation of biased_selection: weights that remove its bias, `sum_n delta_n H / (N T_n)` over a round's clients.

    The expectation is the mean over all clients. With several models N is the number of clients of each model, by the
    model that they train now or trained last. With Gaussian noise the result has as much noise as with any other
    quotas: `biased_selection` has less noise because of its bias. Client n trains in T_n of H rounds; clients with
    quota 0 are missing in the mean, and `min_participation: 1` includes all of them.

    **Privacy** As `biased_selection`: post-processing of public facts and released updates.
    """

    key = "strategies.reweighted_selection"

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def combine(self, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        deltas, clients = updates.released, list(updates.clients)
        weight, row = weights.cpu().max(dim=0)
        model_of = torch.tensor(view.state.model_of)
        model_of[clients] = torch.where(weight > 0, row, model_of[clients])
        clients_of_model = model_of.bincount(minlength=len(weights)).clamp_min(1)[:, None]
        share = torch.from_numpy(self._quota[clients] / self._horizon)
        factor = ((weights > 0) / (share * clients_of_model)).to(deltas.device)
        return (factor @ deltas.double()).to(deltas.dtype)
