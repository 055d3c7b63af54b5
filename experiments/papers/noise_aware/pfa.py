"""PFA as in the code of the noise-aware paper: the whole update is projected, in standardised coordinates."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.papers.baselines.pfa import Pfa, projected


@dataclass
class WholeUpdatePfa(Pfa):
    """PFA whose projection is of the whole update, divided by the standard deviations over the public updates.

    Reference: Malekmohammadi et al. (2024), whose printed numbers were computed with it.
    """

    def combine(self, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        deltas = updates.released
        public = self._public[list(updates.clients)].to(deltas.device)
        return torch.stack([self._mean(deltas, row, public) for row in weights.to(deltas.device)])

    def _image(self, x: Tensor, public: Tensor) -> Tensor:
        std = public.std(dim=0, correction=0)
        return projected(x, public, public.mean(dim=0), torch.where(std > 0, std, 1.0), self.components)
