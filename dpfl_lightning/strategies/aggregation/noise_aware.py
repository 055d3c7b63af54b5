"""The random-effects mean: weights that balance the noise of updates against the bias of unequal weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.algorithms.random_effects import (
    alignments,
    excess,
    false_updates,
    lengths_of_signals,
    shares,
    spread_of_rounds,
)
from dpfl_lightning.algorithms.update_geometry import folded, gram_and_width
from dpfl_lightning.config.typed import Interval
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View

_KEPT = 1 << 22  # numbers of the clients' sums of updates that are kept, of all clients together


@dataclass
class NoiseAware(Strategy):
    """Weights that balance noise against bias: client i has the share `~ 1 / (v_i + T g^2)` of the mean gradient.

    v_i is the noise variance of its update per step, g^2 the variance between the clients' mean gradients, estimated
    from products of updates of different rounds, and T the number of rounds in which a client trains on average: noise
    averages out over rounds, differences of data do not. Shares without noise are those of `size_weighted`. An update
    is divided by its steps times its rate, and the mean is multiplied by the mean of these over the clients, so that
    weights do not change the length of a step.

    An update that is longer than noise and three times the median signal explain counts as noisier. Up to a third of
    the clients whose updates are shorter than their noise, or clearly point away from most others, have no weight.

    Args:
        noise: `planned` takes v_i, steps and data sizes from the plan, which nodes enforce. `estimated` reads nothing
            that a client says: v_i is what is left of an update's length beside its signal, whose length products with
            other updates show. Signals that noise hides count as equally long, and data sizes as equal.
        max_influence: bound on the share of one client. null is 0.25, or 2 / clients where that is more, but
            at most 0.5; or the client's share of the records where that is more.

    **Privacy** Post-processing of released updates; nothing is charged.

    Reference: DerSimonian and Laird (1986), whose studies are the clients here. Limits: `docs/noise_aware.md`.
    """

    noise: Literal["planned", "estimated"] = "planned"
    max_influence: Annotated[float, Interval(gt=0, le=1)] | None = None

    role = "base"
    needs_training = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.needs_noise_std = self.noise == "planned"
        self._between = torch.zeros(2, dtype=torch.float64)  # spread and its weight, whose ratio is g^2
        self._aligned: Tensor | None = None  # sums over rounds of `alignments`, and rounds: [3, N]
        self._sums: Tensor | None = None  # of each client's updates per step so far, folded: [N, w]
        self._rounds: Tensor | None = None  # how many these are: [N]
        self._step: Tensor | None = None  # length of each update's signal, `[C]`
        self._target = np.ones(0)  # shares without noise, up to a factor, `[C]`

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        sent = view.module.sent(updates.released.flatten(1))
        units = self._planned_steps(updates, view)
        latest = folded(sent, max(1, _KEPT // view.facts.num_clients)).float().cpu()
        latest = latest / torch.from_numpy(units).float()[:, None]
        weight, self._step = torch.zeros(2, len(units), dtype=torch.float64)
        records = np.array(view.facts.num_records, dtype=float)[list(updates.clients)]
        self._target = records if self.needs_noise_std else np.ones(len(units))
        for rows in updates.rows_by_model:
            gram, num_params = gram_and_width(sent[rows])
            gram /= np.outer(units[rows], units[rows])
            share, length = self._judged(gram, num_params, latest[rows], rows, updates, view)
            weight[rows] = torch.from_numpy(share / (length * units[rows]))
            self._step[rows] = torch.from_numpy(length * units[rows])
        self._keep(latest, updates, view)
        return weight

    def _judged(
        self, gram: np.ndarray, num_params: int, latest: Tensor, rows: list[int], updates: ClientUpdates, view: View
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the shares of the clients of one model, and the lengths of their signals in units of their steps."""
        clients, count = np.array([updates.clients[row] for row in rows]), len(rows)
        length, signal, planned = np.ones(count), 0.0, None
        if self.needs_noise_std:
            units = self._planned_steps(updates, view)[rows]
            planned = num_params * (np.array(updates.noise_std)[rows] / units) ** 2
        honest = ~false_updates(gram, planned, num_params)
        if planned is None:
            length[honest], signal = self._estimated(gram[np.ix_(honest, honest)], num_params, clients[honest], view)
        squares = np.diag(gram) / length**2
        noise = np.maximum(squares - signal - self._variance_between(), 1e-3 * squares) if planned is None else planned
        self._compare(latest / torch.from_numpy(length).float()[:, None], noise, length, clients, honest)
        rounds = view.schedule.rounds * len(updates.clients) / view.facts.num_clients
        bias = rounds * self._variance_between()
        # a short signal is one that the others do not share, not one with less of its own
        error = noise + bias / np.minimum(length, 1) ** 2 + rounds * excess(squares, noise, num_params)
        target = np.where(honest, self._target[rows], 0.0)
        return shares(error, bias, target / target.sum(), self.max_influence), length

    def _compare(
        self, latest: Tensor, noise: np.ndarray, length: np.ndarray, clients: np.ndarray, honest: np.ndarray
    ) -> None:
        """Add what updates of this round and of earlier ones show of the variance between clients."""
        if self._sums is None or self._rounds is None:
            return
        known = np.flatnonzero(honest & (self._rounds[clients] > 0).numpy())
        if len(known) > 1:
            before = self._sums[clients[known]] / self._rounds[clients[known], None]
            before /= torch.from_numpy(length[known]).float()[:, None]
            self._between += torch.tensor(spread_of_rounds(latest[known], before, noise[known]))

    def scale(self, combined: Tensor, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        if self._step is None:
            return combined
        weights = weights.cpu()
        counted = (weights > 0).double() * torch.from_numpy(self._target)
        mean = counted @ self._step / counted.sum(dim=1).clamp_min(1)
        factor = mean / (weights @ self._step).clamp_min(torch.finfo(torch.float64).tiny)
        return combined * factor.to(combined).view(-1, *[1] * (combined.ndim - 1))

    def _planned_steps(self, updates: ClientUpdates, view: View) -> np.ndarray:
        """Return learning rate times steps of each update, `[C]`; 1 where nothing that clients say is read."""
        if not self.needs_noise_std:
            return np.ones(len(updates.clients))
        return np.array([view.learning_rate[client] for client in updates.clients]) * np.array(updates.steps)

    def _estimated(
        self, gram: np.ndarray, num_params: int, clients: np.ndarray, view: View
    ) -> tuple[np.ndarray, float]:
        """Return the relative lengths of signals of these clients by all rounds so far, and the squared mean signal."""
        if self._aligned is None:
            self._aligned = torch.zeros(3, view.facts.num_clients, dtype=torch.float64)
        length = np.ones(len(gram))
        if len(gram) < 3:
            return length, 0.0
        for _ in range(4):  # a product shows a client's length if those of the others are known
            products, variance = alignments(gram, num_params, length)
            length = lengths_of_signals(products, variance)
        self._aligned[:, clients] += torch.from_numpy(np.stack([products, variance, np.ones(len(clients))]))
        total, noise, rounds = self._aligned[:, clients].numpy()
        return lengths_of_signals(total / rounds, noise / rounds**2), max(float(np.mean(total / rounds)), 0.0)

    def _variance_between(self) -> float:
        spread, weight = self._between.tolist()
        return max(spread / weight, 0.0) if weight > 0 else 0.0

    def _keep(self, latest: Tensor, updates: ClientUpdates, view: View) -> None:
        if self._sums is None or self._rounds is None:
            self._sums = latest.new_zeros(view.facts.num_clients, latest.shape[1])
            self._rounds = latest.new_zeros(view.facts.num_clients)
        self._sums[list(updates.clients)] += latest
        self._rounds[list(updates.clients)] += 1

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        return {"variance_between_clients": self._variance_between()}

    def state_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self, f"_{name}") for name in ("between", "aligned", "sums", "rounds")}
        return {name: None if one is None else one.clone() for name, one in kept.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, one in state.items():
            setattr(self, f"_{name}", None if one is None else one.cpu().clone())
