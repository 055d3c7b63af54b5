"""The random-effects mean: weights that balance the noise of updates against the bias of unequal weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.algorithms.mixed_effects import RandomEffects
from dpfl_lightning.algorithms.random_effects import (
    alignments,
    at_least,
    excess,
    lengths_of_signals,
    opposed,
    shares,
    spread_of_rounds,
)
from dpfl_lightning.algorithms.update_geometry import folded, gram_and_width
from dpfl_lightning.errors import warn_user
from dpfl_lightning.federated.messages.jobs import TRAINING
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.aggregation.client_differences import ClientDifferences

_KEPT = 1 << 22  # numbers of the clients' sums of updates that are kept, of all clients together


@dataclass
class NoiseAware(ClientDifferences):
    """Weights that balance noise against bias: with equal data, client i has a share `~ 1 / (v_i + T g^2)` of the mean.

    v_i is the noise variance of its update per step, g^2 the variance between the clients' mean gradients, estimated
    from products of updates of different rounds, and T the number of rounds in which a client trains on average: noise
    averages out over rounds, differences of data do not. Shares without noise are those of `size_weighted`. An update
    is divided by its steps times its rate, and their mean by these shares multiplied by the mean of steps times rate by
    the same shares: the model moves no further than the clients that count (FedNova, Wang et al., 2020).

    An update that is longer than noise and three times the median signal explain counts as noisier. Up to a third of
    the clients, whose updates clearly point away from most others, have no weight: attackers, or other data.

    Args:
        noise: `planned` takes v_i, steps and data sizes from the plan, which nodes enforce. `estimated` reads nothing
            that a client says: v_i is an update's squared length without its signal, whose length products with
            other updates show. Signals that noise hides count as equally long, and data sizes as equal.
        max_influence: bound on the share of one client, at least 1 / clients. null is 0.25, or 2 / clients where that
            is more, but at most 2 / 3; or the client's share of the records where that is more.

    **Privacy** Post-processing of released updates; nothing is charged.

    Reference: DerSimonian and Laird (1986), whose studies are the clients here. Algorithm 1 of the noise-aware paper
    (Malekmohammadi et al., 2024) is another rule, `robust_hdp`. Limits: `docs/noise_aware.md`.
    """

    noise: Literal["planned", "estimated"] = "planned"
    max_influence: Annotated[float, Interval(gt=0, le=1)] | None = None

    role = "base"
    jobs = TRAINING
    _advice = " The strategy mixed_effects, with a model for each client, may be more accurate."

    def __post_init__(self) -> None:
        super().__post_init__()
        self.needs_noise_std = self.noise == "planned"
        self._between = torch.zeros(2, dtype=torch.float64)  # spread and its weight, whose ratio is g^2
        self._aligned: Tensor | None = None  # sums over rounds of `alignments`, and rounds: [3, N]
        self._sums: Tensor | None = None  # of each client's updates per step so far, folded: [N, w]
        self._rounds: Tensor | None = None  # how many these are: [N]
        # what is of one round only: for `scale`, lengths of signals `[C]`; who is left out
        self._length = torch.ones(0, dtype=torch.float64)
        self._left_out: set[int] = set()
        self._warned: set[int] = set()

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        planned, count = self.noise == "planned", len(updates.clients)
        sent = view.module.sent(updates.released.flatten(1))
        clients, unit, target = np.array(updates.clients), np.ones(count), np.ones(count)
        if planned:
            unit = np.array(view.learning_rate)[clients] * np.array(updates.steps)
            target = np.array(view.facts.num_records, dtype=float)[clients]
        mean_gradient = folded(sent, max(1, _KEPT // view.facts.num_clients)).float().cpu()
        mean_gradient = mean_gradient / torch.from_numpy(unit).float()[:, None]
        rounds = view.schedule.rounds * count / view.facts.num_clients
        weight, lengths, left_out = np.zeros(count), np.ones(count), np.zeros(count, dtype=bool)
        for rows in updates.rows_by_model:
            gram, num_params = gram_and_width(sent[rows])
            gram /= np.outer(unit[rows], unit[rows])
            left_out[rows] = opposed(gram, num_params)
            counted = ~left_out[rows]
            if planned:
                length, noise = np.ones(len(rows)), num_params * (np.array(updates.noise_std)[rows] / unit[rows]) ** 2
            else:
                counted &= np.diag(gram) > 0  # an empty update would count as free of noise
                length, noise = self._estimated(gram, num_params, clients[rows], counted, view)
            squares = np.diag(gram) / length**2
            too_long = excess(squares, noise if planned else np.minimum(noise, np.median(noise)), num_params)
            cut = np.sqrt(1 - too_long / np.maximum(squares, 1e-300)) / length
            signals = mean_gradient[rows] * torch.from_numpy(cut).float()[:, None]
            self._learn(signals[counted], noise[counted], clients[rows][counted], view)
            if len(rows) == count and noise[counted].any():  # differences to report are those of one model
                gradient = torch.from_numpy(cut / unit)[counted].to(updates.released)[:, None]
                gradient = gradient * updates.released.flatten(1)[counted]
                noise_of = at_least(noise[counted]) / max(num_params, 1)
                self._products_of(view).add(gradient, noise_of, clients[counted])
            if counted.any():
                bias = rounds * self._variance_between()
                # a short signal is one that the others do not share, not one with less of its own
                error = noise + bias / np.minimum(length, 1) ** 2 + (rounds * too_long if planned else 0.0)
                without_noise = target[rows] * counted
                share = shares(error, bias, without_noise / without_noise.sum(), self.max_influence)
                weight[rows], lengths[rows] = share / (length * unit[rows]), length * unit[rows]
        self._length = torch.from_numpy(lengths)
        self._left_out = set(clients[left_out].tolist())
        self._warn(view)
        return torch.from_numpy(weight)

    def _learn(self, signals: Tensor, noise: np.ndarray, clients: np.ndarray, view: View) -> None:
        """Add what these updates and those of earlier rounds show of the variance between clients."""
        if self._sums is None or self._rounds is None:
            self._sums = signals.new_zeros(view.facts.num_clients, signals.shape[1])
            self._rounds = signals.new_zeros(view.facts.num_clients)
        known = np.flatnonzero((self._rounds[clients] > 0).numpy())
        if len(known) > 1:
            before = self._sums[clients[known]] / self._rounds[clients[known], None]
            self._between += torch.tensor(spread_of_rounds(signals[known], before, noise[known]))
        self._sums[clients] += signals
        self._rounds[clients] += 1

    def _warn(self, view: View) -> None:
        if new := sorted(self._left_out - self._warned):
            warn_user(
                f"round {view.round}: noise_aware gives no weight to {', '.join(map(view.facts.name_of, new))}, whose "
                "updates point away from most others. They are false, or from records that differ from those of most "
                "clients; size_weighted counts them."
            )
        self._warned |= self._left_out

    def scale(self, combined: Tensor, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        of_means = weights.cpu() @ torch.stack([self._length, self._length**2], dim=1)
        factor = of_means[:, 1] / of_means[:, 0].square().clamp_min(torch.finfo(torch.float64).tiny)
        return combined * factor.to(combined).view(-1, *[1] * (combined.ndim - 1))

    def _may_be_random(self, effects: RandomEffects, view: View) -> bool:
        if self.noise == "estimated":  # steps and rates are unknown
            return False
        most = np.array(view.clip_norm) ** 2 / np.array(view.facts.num_records)  # gradients are clipped
        return effects.variance <= float(np.average(most[effects.clients], weights=effects.scale**-2))

    def _estimated(
        self, gram: np.ndarray, num_params: int, clients: np.ndarray, counted: np.ndarray, view: View
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the relative lengths of the clients' signals by all rounds so far, and the noise beside them."""
        if self._aligned is None:
            self._aligned = torch.zeros(3, view.facts.num_clients, dtype=torch.float64)
        length, signal = np.ones(len(gram)), 0.0
        if counted.sum() >= 3:
            of, among, clients = np.ones(counted.sum()), gram[np.ix_(counted, counted)], clients[counted]
            for _ in range(4):  # a product shows a client's length if those of the others are known
                products, variance = alignments(among, num_params, of)
                of = lengths_of_signals(products, variance)
            self._aligned[:, clients] += torch.from_numpy(np.stack([products, variance, np.ones(len(clients))]))
            total, noise, rounds = self._aligned[:, clients].numpy()
            length[counted] = lengths_of_signals(total / rounds, noise / rounds**2)
            signal = max(float(np.median(total / rounds)), 0.0)
        squares = np.diag(gram) / length**2
        return length, np.maximum(squares - signal - self._variance_between(), 1e-3 * squares)

    def _variance_between(self) -> float:
        spread, weight = self._between.tolist()
        return max(spread / weight, 0.0) if weight > 0 else 0.0

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        left_out = float(len(self._left_out))
        return {"variance_between_clients": self._variance_between(), "clients_left_out": left_out}

    def state_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self, f"_{name}") for name in ("between", "aligned", "sums", "rounds")}
        kept = {name: None if one is None else one.clone() for name, one in kept.items()}
        return {**kept, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name in ("between", "aligned", "sums", "rounds"):
            one = state[name]
            setattr(self, f"_{name}", None if one is None else one.cpu().clone())
