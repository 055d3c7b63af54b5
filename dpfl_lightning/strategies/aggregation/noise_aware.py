"""Weights by the signal and noise of the updates, which the cosines between them show."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.algorithms.signal_weights import (
    contributions,
    estimate_signals,
    limited_shares,
    most_influence,
)
from dpfl_lightning.algorithms.update_geometry import folded, gram_and_width
from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.aggregation.estimated_weights import EstimatedWeights

_KEY = "strategies.noise_aware"
MEMORY = 0.8  # weight of a round's cosines beside those of the next round: signals change while models learn
_MOST_REMEMBERED = 1000  # most clients of a run whose cosines are remembered over rounds, `[N, N]`
_KEPT = 1 << 22  # numbers of the clients' last updates that are kept, of all clients together


class NoiseAware(EstimatedWeights):
    """Weights by signal and noise, estimated from the updates alone: no reported budget, size, batch or step is read.

    (With `reestimate_every` other than 1, changes of these decide in which rounds the estimates are renewed.)

    It suits clients whose budgets or batch sizes differ. With equal noise `size_weighted` is as good.

    The cosines between the updates of a model, as a mean over recent rounds, show how much of each update is signal
    that others share, and those between a client's own updates in different rounds how much it has alone
    (`estimate_signals`). The weights give the sum the most signal per noise. If clients disagree visibly, because their
    kinds of data differ, the weights trade noise against bias, where no signal counts for more than twice the median
    one. Updates of up to a third of the clients that clearly are the opposite of the others' count as nothing in these
    estimates. The sum is scaled by the length of the median client's signal / the weighted mean length: where signals
    are equally long, weights have the sum 1, and one short update does not shorten the step. The sum is not scaled
    beside strategies that combine updates themselves, such as `norm_bound` or `median`.

    One client's influence is bounded: its weighted update is at most `max_influence` of the summed lengths of all, in
    which an update counts at least as half the second shortest one, or a 30th of the median one. So a very short update
    has a small part, and a very long one that of a usual one. A model's only client decides alone. The bound holds
    before strategies that multiply further factors, and not in rounds without a new estimate, in which the server sees
    no single update.

    **Limits**

    - Cosines say little with fewer than about 1,000 parameters: weights may then be far from the best. Signals that
      noise hides are taken as equally long.
    - Where noise hides the differences between clients, weights follow the noise, and can do so more than inverse noise
      does: a client whose signal is not seen beside the others' gets less still. They serve the kinds of data that
      the quietest clients have, and longer runs do not help: with unlike clients and noise as long as in runs of small
      budgets use `random_effects`, which trusts reports, or `size_weighted`; or `clustered` for groups.
    - An honest client with far less noise than all others has less weight than is best, and so have up to half of them
      with updates more than 30 times as short as the median one.
    - What a client has alone, and lasts, counts as signal of the mean, the more the longer the run. With little noise
      this can cost a third of the ratio of signal to noise in a run of 200 rounds.
    - One client can make the error several times as large: among fewer than about ten, if it is against the others,
      but not clearly their opposite; among more, if it knows their updates of the round and sends a short one along
      what they share, which has the whole bound. With two clients, one can stop the training by short updates.
    - With little noise an honest minority, up to a third, with other kinds of data can count as the opposite of the
      others, whose gradients its own mirror once the model fits the mean: use `size_weighted` or groups there.
    - Several clients that send one false update look like another kind of data. Where what the others share is lost in
      noise, two of 20 can take most of the weight, and several very short updates without signal nearly all.
    - Where the plan changes noise or steps, the mean over rounds mixes both for some rounds.

    Args:
        max_influence: bound on the share of one client in the summed lengths of weighted updates, in (0, 1]. null is
            0.25, or 2 / clients where that is more, but at most 0.5. Fewer clients than 1 / max_influence have equal
            parts.
        reestimate_every: number of rounds between two estimates, >= 1; 0 or `first_round` keeps the first estimate.

    In a round without a new estimate the server keeps no single update. If a client of such a round was not in the last
    estimate, or has another number of local steps, noise, batch size or group, the whole round is estimated anew.
    In runs of more than 1,000 clients, cosines of earlier rounds are not remembered. A sketch of each client's last
    update is kept, of all clients together about four million numbers.

    **Privacy** Post-processing of released updates; nothing is charged.

    Reference: the problem is that of Malekmohammadi et al. (2024), whose method is `robust_hdp`; this one is not in the
    paper.
    """

    def __init__(self, max_influence: float | None = None, reestimate_every: int | str = 1) -> None:
        super().__init__(_KEY, reestimate_every)
        in_range = max_influence is None or (not isinstance(max_influence, bool) and 0 < max_influence <= 1)
        require(in_range, f"{_KEY}.max_influence", "be in (0, 1] or null", max_influence)
        self._max_influence = max_influence
        self._cosines: Tensor | None = None  # fading sums of cosines, weights, squared weights: [3, N, N]
        self._lasting: Tensor | None = None  # the same of cosines between a client's updates in two rounds: [3, N]
        self._last: Tensor | None = None  # last updates of length 1, folded, 0 before the first: [N, w]

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        if super().needs_updates(plan, view) or self._known is None:
            return True
        return not bool(self._known.estimates["length"][list(plan.clients)].all())  # an empty update shows nothing

    def _estimated(
        self, updates: ClientUpdates, models: Sequence[list[int]], view: View
    ) -> tuple[Mapping[str, Tensor], Sequence[Sequence[int]]]:
        """Estimates: noise variance; share in the aggregate; length, as far as it counts; length of shared signal."""
        deltas = view.module.sent(updates.released.flatten(1))
        gram, num_params = gram_and_width(deltas)
        lengths = np.sqrt(np.diag(gram))
        seen = [kept for rows in models if (kept := [row for row in rows if lengths[row] > 0])]
        clients = list(updates.clients)
        cosines, rounds = self._remembered(gram, lengths, clients, seen, view)
        lasting = self._lasting_cosines(folded(deltas, _KEPT // view.facts.num_clients), num_params, clients, view)
        noise_var, influence, length, amplitude = np.zeros((4, len(lengths)))
        estimates = estimate_signals(cosines, lengths, seen, num_params * rounds, lasting)
        for rows, signals in zip(seen, estimates, strict=True):
            noise_var[rows] = lengths[rows] ** 2 * signals.noise_share / max(num_params, 1)
            influence[rows] = contributions(signals, view.schedule.rounds, self._bound(len(rows)))
            length[rows] = np.maximum(lengths[rows], signals.length)  # short updates are not made longer
            amplitude[rows] = np.hypot(signals.shared, signals.private) * np.minimum(lengths[rows], signals.length)
        found = {"noise_var": noise_var, "influence": influence, "length": length, "amplitude": amplitude}
        return {name: torch.from_numpy(values) for name, values in found.items()}, models

    def _share(self, estimates: Mapping[str, Tensor], clients: list[int], view: View) -> Tensor:
        """Return the weights with which updates of these lengths have their influence; 0 without length."""
        length = estimates["length"]
        counted, weight = length > 0, torch.zeros_like(length)
        if bool(counted.any()):
            limited = limited_shares(estimates["influence"][counted].numpy(), self._bound(int(counted.sum())))
            weight[counted] = torch.from_numpy(limited) / length[counted]
        return weight

    def _bound(self, num_clients: int) -> float:
        return self._max_influence or most_influence(num_clients)

    def scale(self, combined: Tensor, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        if self._known is None:
            return combined
        amplitude = self._known.estimates["amplitude"][list(updates.clients)].nan_to_num(0.0).numpy()
        factors = [_length_factor(row, amplitude) for row in weights.double().cpu().numpy()]
        return combined * torch.tensor(factors).to(combined).view(-1, *[1] * (combined.ndim - 1))

    def _remembered(
        self, gram: np.ndarray, lengths: np.ndarray, clients: list[int], models: Sequence[list[int]], view: View
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean cosines of recent rounds, and how many rounds they are worth: two arrays `[C, C]`."""
        seen = np.zeros((len(clients), len(clients)))
        for rows in models:
            seen[np.ix_(rows, rows)] = 1.0
        product = np.outer(lengths, lengths)
        latest = np.stack([seen * gram / np.where(product > 0, product, 1.0), seen, seen])
        count = view.facts.num_clients
        if count <= _MOST_REMEMBERED:
            if self._cosines is None:
                self._cosines = torch.zeros(3, count, count, dtype=torch.float64)
            self._cosines *= torch.tensor([MEMORY, MEMORY, MEMORY**2]).double().view(3, 1, 1)
            pairs = np.ix_(range(3), clients, clients)
            self._cosines[pairs] += torch.from_numpy(latest)
            latest = self._cosines[pairs].numpy() * seen
        total, weight, squares = latest
        return total / np.where(weight > 0, weight, 1.0), weight**2 / np.where(squares > 0, squares, 1.0)

    def _lasting_cosines(
        self, latest: Tensor, num_params: int, clients: list[int], view: View
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean cosine between each client's updates in two rounds, and its standard error: two `[C]`."""
        latest = latest.float().cpu()
        largest = latest.abs().amax(dim=1, keepdim=True)  # so that no square is too large or small for float32
        latest = torch.nn.functional.normalize(latest / torch.where(largest > 0, largest, 1.0), dim=1)
        if self._last is None or self._lasting is None:
            self._last = torch.zeros(view.facts.num_clients, latest.shape[1])
            self._lasting = torch.zeros(3, view.facts.num_clients, dtype=torch.float64)
        before = self._last[clients]
        known = (before.any(dim=1) & latest.any(dim=1)).double()
        self._lasting *= torch.tensor([[MEMORY], [MEMORY], [MEMORY**2]], dtype=torch.float64)
        self._lasting[:, clients] += torch.stack([(before.double() * latest.double()).sum(dim=1), known, known])
        self._last[clients] = latest
        total, weight, squares = self._lasting[:, clients].numpy()
        seen = weight > 0
        error = np.sqrt(squares / max(min(num_params, latest.shape[1]), 1)) / np.where(seen, weight, 1.0)
        return total / np.where(seen, weight, 1.0), np.where(seen, error, np.inf)

    def state_dict(self) -> dict[str, Any]:
        kept = {"cosines": self._cosines, "lasting": self._lasting, "last": self._last}
        return {**super().state_dict(), **{name: None if one is None else one.clone() for name, one in kept.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        kept = (state[name] for name in ("cosines", "lasting", "last"))
        self._cosines, self._lasting, self._last = (None if one is None else one.cpu().clone() for one in kept)


def _length_factor(share: np.ndarray, amplitude: np.ndarray) -> float:
    """Return the median length of the signals of clients with a share / that of the sum; both arguments are `[C]`.

    No signal counts for more than twice the median one, so that a minority does not shorten the step to less than half.
    """
    share, amplitude = share[share > 0], amplitude[share > 0]
    usual = float(np.quantile(amplitude, 0.5, method="lower")) if len(amplitude) else 0.0
    return usual / float(share @ np.minimum(amplitude, 2 * usual)) if usual > 0 else 1.0
