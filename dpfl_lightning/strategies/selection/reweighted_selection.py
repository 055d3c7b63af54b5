"""Biased selection whose weights remove the bias: an ablation."""

import torch
from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.aggregation.uniform import Uniform
from dpfl_lightning.strategies.selection.biased_selection import BiasedSelection


class ReweightedSelection(BiasedSelection):
    """Ablation of biased_selection: weights that remove its bias, `sum_n delta_n H / (N T_n)` over a round's clients.

    The expectation is the mean over all clients, so every client takes part, and cohorts are drawn by
    `quota_systematic`. With several models N is the number of clients of each model, by the model that they train now
    or trained last. With Gaussian noise the result has as much noise as with any other quotas: `biased_selection` has
    less noise because of its bias. Client n trains in T_n of H rounds. Beside it, `uniform` is the only possible
    aggregation rule, because weights of others would be ignored.

    Args:
        dissimilarity, max_effective_epsilon: as in `biased_selection`.
        min_participation: minimum number of rounds in which every client takes part, >= 1.

    **Privacy** As `biased_selection`: post-processing of public facts and released updates.
    """

    only_base = Uniform
    key = "strategies.reweighted_selection"

    def __init__(
        self,
        clients_per_round: int | None = None,
        dissimilarity: float = 0.1,
        min_participation: int = 1,
        max_effective_epsilon: float | None = None,
    ) -> None:
        require(min_participation >= 1, f"{self.key}.min_participation", "be >= 1", min_participation)
        most = max_effective_epsilon
        super().__init__(
            clients_per_round,
            dissimilarity=dissimilarity,
            min_participation=min_participation,
            max_effective_epsilon=most,
        )

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
