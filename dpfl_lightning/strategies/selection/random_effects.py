"""Weights of a random-effects mean: the noise of updates against the bias of unequal weights."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.algorithms.random_effects import excess_spread, shares
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.mechanism import mechanism_of
from dpfl_lightning.strategies.selection.quotas import TRAINING


class RandomEffects(Strategy):
    """Shares that balance the noise of updates against the bias of unequal shares: `q_n ~ 1 / (v_n / T_n + G^2)`.

    q_n is the client's share in the mean gradient of the run, T_n the number of rounds in which it trains, v_n the
    known noise variance of its mean gradient in one of them, and G^2 the variance between the clients' mean gradients,
    which is estimated from the released updates of all rounds so far: their spread minus the known noise. These shares
    minimise the mean squared error of the run's mean gradient. They are equal where noise is small, and those of least
    noise where it dominates.

    An update is as long as learning rate times local steps times gradient, so q_n is divided by the first two, and the
    shares are scaled to the sum 1. In a round of a run of H rounds an update has the weight `q_n H / T_n`, so that the
    shares hold for any selection; the weights of a round have the sum 1 on average only (curve `sum_of_weights`). With
    Gaussian noise of full batches the noise then depends on the shares alone, so beside `uniform_selection` no quotas
    are better. The share of a client that is away is not used. With several models, shares are of each model's clients.
    Budgets, batch sizes and clip norms are trusted. G^2 contains how small sampled batches differ, and momentum, which
    makes updates of more steps longer, is not taken into account.

    **Privacy** Post-processing of public facts and released updates.

    Reference: DerSimonian and Laird (1986), whose studies are the clients here.
    """

    role = "base"
    needs_training = True
    needs_noise_std = True

    def __init__(self) -> None:
        self._spread, self._precision = 0.0, 0.0  # sums over rounds; G^2 is their ratio
        self._weight_sum = math.nan  # of the last round: 1 on average
        self._planned: tuple[RunSchedule, np.ndarray, np.ndarray, np.ndarray] | None = None  # T_n, v_n, size

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        self._compare(updates, view)
        share, rounds = self._shares(view)
        clients = list(updates.clients)
        return torch.from_numpy(share[clients] / rounds[clients])

    def scale(self, combined: Tensor, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        share, rounds = map(torch.from_numpy, self._shares(view))
        clients, (weight, row) = list(updates.clients), weights.cpu().max(dim=0)
        model_of = torch.tensor(view.state.model_of)
        model_of[clients] = torch.where(weight > 0, row, model_of[clients])
        whole = torch.zeros(len(weights), dtype=torch.float64).index_add(0, model_of, share)
        here = (weights.cpu() > 0).double() @ (share / rounds)[clients] * view.run.rounds
        self._weight_sum = float(here.sum())
        return combined * (here / whole.clamp_min(1e-300))[:, None].to(combined)

    def _compare(self, updates: ClientUpdates, view: View) -> None:
        """Add the spread of this round's updates, beyond that of their noise, to those of earlier rounds."""
        clients = list(updates.clients)
        size = torch.tensor([view.learning_rate[client] for client in clients]) * torch.tensor(updates.steps)
        gradients = view.module.sent(updates.released) / size.to(updates.released)[:, None]
        noise = gradients.shape[1] * (np.array(updates.noise_std) / size.double().numpy()) ** 2
        for rows in updates.rows_by_model:
            spread, precision = excess_spread(gradients[rows], noise[rows])
            self._spread, self._precision = self._spread + spread, self._precision + precision

    def _variance_between(self) -> float:
        return max(self._spread / self._precision, 0.0) if self._precision > 0 else 0.0

    def _shares(self, view: View) -> tuple[np.ndarray, np.ndarray]:
        """Return each client's share of updates `[N]`, 0 if it never trains, and T_n, at least 1, `[N]`."""
        if self._planned is None or self._planned[0] is not view.schedule:
            found = [self._rounds_noise_and_size(client, view) for client in range(view.facts.num_clients)]
            self._planned = (view.schedule, *np.array(found).T)
        _, rounds, noise, size = self._planned
        share = shares(noise, rounds, self._variance_between()) / size
        return share / max(share.sum(), 1e-300), np.maximum(rounds, 1)

    def _rounds_noise_and_size(self, client: int, view: View) -> tuple[int, float, float]:
        """Return T_n, v_n and length of update / length of gradient of a client; 0, 0 and 1 if it never trains."""
        schedule = view.schedule
        lines = [line for line in schedule.clients[client].planned if line.purpose in TRAINING and line.count]
        variances, steps = [], []
        for line in lines:
            event = schedule.noised(client, line.purpose)
            mechanism = mechanism_of(event, view.clip_norm[client], view.facts.num_records[client])
            independent = math.nan if view.optimizer is None else view.optimizer.independent_steps(event.steps)
            variances.append(view.module.num_sent * (mechanism.noise_std(independent, 1.0) / event.steps) ** 2)
            steps.append(event.steps)
        if not lines:
            return 0, 0.0, 1.0
        counts = [line.count for line in lines]
        size = view.learning_rate[client] * float(np.average(steps, weights=counts))
        return sum(counts) - schedule.reserve, float(np.average(variances, weights=counts)), size

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        return {"variance_between_clients": self._variance_between(), "sum_of_weights": self._weight_sum}

    def state_dict(self) -> dict[str, Any]:
        return {"spread": self._spread, "precision": self._precision}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._spread, self._precision = state["spread"], state["precision"]
