"""Weights from the updates alone: by their signal and noise (default), or Robust-HDP, by their noise variance."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.algorithms.noise_estimators import Estimate, EstimatorOptions, estimate
from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.algorithms.robust_pca import PRESETS
from dpfl_lightning.algorithms.signal_weights import (
    contributions,
    estimate_signals,
    limited_shares,
    most_influence,
)
from dpfl_lightning.algorithms.update_geometry import gram_and_width
from dpfl_lightning.errors import UserError, require, require_one_of, warn_user
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.mechanism import Mechanism

_KEY = "strategies.noise_aware"
_ENOUGH = 8  # fewest clients of one model whose noise variances are estimated among themselves
_FEW = 3.0  # effective number of clients below which the user is warned
MEMORY = 0.8  # weight of a round's cosines beside those of the next round: signals change while models learn
_MOST_REMEMBERED = 1000  # most clients of a run whose cosines are remembered over rounds, `[N, N]`


def judged_groups(models: Sequence[Sequence[int]], num_clients: int) -> list[list[int]]:
    """Return the rows within which noise variances are estimated: those of each model if all have 8 clients or more."""
    return list(map(list, models)) if min(map(len, models)) >= _ENOUGH else [list(range(num_clients))]


def estimate_by_group(
    deltas: Tensor, models: Sequence[Sequence[int]], options: EstimatorOptions, truth: Tensor | None = None
) -> Estimate:
    """Return the `estimate` of each group of updates `[C, P]` separately, with the worst of the diagnostics.

    `models` are the rows of each model. Models that are judged together show at least one direction each. `truth`
    `[C]` holds the true variances, for the estimator `oracle`.
    """
    noise_var, diagnostics = torch.zeros(len(deltas), dtype=torch.float64), dict[str, list[float]]()
    groups = judged_groups(models, len(deltas))
    together = len(models) if len(groups) == 1 else 1
    options = dataclasses.replace(options, rank=max(options.rank, together))
    for rows in groups:
        group_deltas = deltas if len(rows) == len(deltas) else deltas[rows]
        group_estimate = estimate(group_deltas, options, None if truth is None else truth[rows])
        noise_var[rows] = group_estimate.noise_var
        for key, value in group_estimate.diagnostics.items():
            diagnostics.setdefault(key, []).append(value)
    return Estimate(
        noise_var, {key: (min if key == "converged" else max)(values) for key, values in diagnostics.items()}
    )


@dataclass(frozen=True)
class _Known:
    """The last estimate: its round, and tensors `[N]`, NaN for clients that were not in it; `mechanism` is `[N, 4]`."""

    round: int
    noise_var: Tensor  # of one parameter, float64
    influence: Tensor  # share of a client in the aggregate of its model, float64; `max_snr` only, as the next two
    length: Tensor  # of an update, as far as it counts, float64
    amplitude: Tensor  # length of an update's signal that others share, float64
    steps: Tensor  # int64; 0 for clients that were not in the round
    group: Tensor  # int64
    mechanism: Tensor  # the numbers of each mechanism, float64; 0 if unknown


class NoiseAware(Strategy):
    """Weights by signal and noise, estimated from the updates alone: no reported budget, size, batch or step is read.

    It suits clients whose budgets or batch sizes differ. With equal noise `size_weighted` is as good.

    `objective: max_snr` (default) reads the cosines between the updates of a model, as a mean over recent rounds. They
    show how much of each update is signal that others share (`estimate_signals`). The weights give the sum the most
    signal per noise. If clients disagree visibly, because their kinds of data differ, the weights trade noise against
    bias. The sum goes as far along the common signal as the median client's update.

    One client's influence is bounded: its weighted update is at most `max_influence` of the summed lengths of all. A
    very short update has a small part, and a very long one that of a usual one. The bound holds before strategies that
    multiply further factors, and not in rounds without a new estimate, in which the server sees no single update.

    `objective: min_variance` is Robust-HDP: `w_i ~ 1 / v_i`, v_i being the estimated noise variance. Where both data
    and noise differ, the few clients with the least noise then decide what is learned.

    Args:
        objective: `max_snr`, or `min_variance` (as in the paper).
        max_influence: `max_snr`: bound on the share of one client in the summed lengths of weighted updates, in (0, 1].
            null is 0.25, or 2 / clients where that is more, but at most 0.5. Fewer clients than 1 / max_influence have
            equal parts.
        estimator: `min_variance`: `rpca` (robust PCA, as in the paper), `hetero_pca`, `raw_norm`, `mean_residual`, or
            `oracle` (the true variances, for simulations).
        reestimate_every: number of rounds between two estimates, >= 1; 0 or `first_round` keeps the first estimate.
        floor: `min_variance`: lower bound on a variance, as a share of the median variance, >= 0.
        max_weight: `min_variance`: upper bound on a client's weight, in (0, 1]. It is the only bound on the influence
            of a client that sends an update near zero; 0.5 is a safe value. The bound is exact if no other strategy
            changes the weights.
        rows: `rpca`: number of parameters in one block; null takes all at once.
        blocks: `rpca`: number of blocks to average over; null takes all.
        row_choice: `rpca`: `random` (from a public seed) or `head` (the first ones, as in the paper).
        preset: `rpca`: `fast`, `candes` or `release` (the paper's code).
        rank: `hetero_pca`: number of directions that clients share, >= 1; at least the number of models that are judged
            together.

    In a round without a new estimate the server keeps no single update. If a client of such a round was not in the last
    estimate, or has another number of local steps, noise, batch size or group, the whole round is estimated anew.
    In runs of more than 1,000 clients, cosines of earlier rounds are not remembered.

    **Privacy** Post-processing of released updates; nothing is charged.

    Reference: Malekmohammadi et al. (2024), Algorithm 1, is `objective: min_variance, row_choice: head`; its code also
    uses `reestimate_every: first_round, preset: release`. `max_snr`, bounds and other estimators are not in the paper.
    """

    role = "base"

    def __init__(
        self,
        objective: str = "max_snr",
        max_influence: float | None = None,
        estimator: str = "rpca",
        reestimate_every: int | str = 1,
        floor: float = 1e-6,
        max_weight: float = 1.0,
        rows: int | None = 200_000,
        blocks: int | None = 1,
        row_choice: str = "random",
        preset: str = "fast",
        rank: int = 1,
    ) -> None:
        require_one_of(("max_snr", "min_variance"), f"{_KEY}.objective", objective)
        every = 0 if reestimate_every == "first_round" else reestimate_every
        number = isinstance(every, int) and not isinstance(every, bool) and every >= 0
        require(number, f"{_KEY}.reestimate_every", "be a number of rounds or `first_round`", reestimate_every)
        in_range = max_influence is None or (not isinstance(max_influence, bool) and 0 < max_influence <= 1)
        require(in_range, f"{_KEY}.max_influence", "be in (0, 1] or null", max_influence)
        require_one_of(PRESETS, f"{_KEY}.preset", preset)
        self._objective, self._max_influence, self._every = objective, max_influence, int(every)
        self._rule = {"floor": floor, "max_weight": max_weight}
        try:
            self._options = EstimatorOptions(estimator, PRESETS[preset], rows, blocks, row_choice, rank)
            weights(torch.ones(1), **self._rule)
        except UserError as error:  # add the prefix of this strategy to the key
            raise UserError(str(error).replace("`", f"`{_KEY}.", 1)) from None
        if objective == "max_snr":
            unused = dict(estimator=estimator, floor=floor, max_weight=max_weight, rows=rows, blocks=blocks)
            _refuse_changed("objective max_snr", **unused, row_choice=row_choice, preset=preset, rank=rank)
        else:
            _refuse_changed("objective min_variance", max_influence=max_influence)
        if estimator == "oracle":
            self.caveats = (
                "a simulation: strategy noise_aware (oracle) weighs by true noise, which a server could only believe",
            )
        self.needs_noise_std = estimator == "oracle"
        self._known: _Known | None = None
        self._cosines: Tensor | None = None  # fading sums of cosines, weights, squared weights: [3, N, N]
        self._diagnostics: Mapping[str, float] = {}
        self._warned = False

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        data = view.run.options.get("data", {})
        partition = (data.get("partition") or {}).get("name")
        differ = "groups" if data.get("groups") else partition if partition in ("dirichlet", "shards") else ""
        if self._objective == "min_variance" and differ and len(set(view.facts.batch_size)) > 1:
            warn_user(
                f"strategy noise_aware: data differ between clients ({differ}) and so do batch sizes, so the few "
                "clients with the largest batches will decide what is learned. Use objective max_snr, or equal batch "
                "sizes."
            )
        return schedule

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        known, clients = self._known, list(plan.clients)
        return (
            known is None
            or (self._every > 0 and view.round >= known.round + self._every)
            or known.steps[clients].tolist() != list(plan.steps)
            or known.mechanism[clients].tolist() != [_numbers(mechanism) for mechanism in plan.mechanism_of]
            or len({*zip(plan.model_of, known.group[clients].tolist(), strict=True)}) > len({*plan.model_of})
        )

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        models, clients = updates.rows_by_model, list(updates.clients)
        if updates.deltas is not None or self._known is None:
            self._known = self._estimated(updates, models, view)
        share, known = torch.zeros(len(clients), dtype=torch.float64), self._known
        for rows in models:
            members = [clients[row] for row in rows]
            if self._objective == "min_variance":
                share[rows] = weights(known.noise_var[members], **self._rule)
                self._warn_of_few(share[rows], members, view)
            else:
                share[rows] = self._by_influence(known.influence[members], known.length[members])
        return share

    def _by_influence(self, influence: Tensor, length: Tensor) -> Tensor:
        """Return the weights `[C]` with which updates of these lengths have their influence; 0 without length."""
        counted, weight = length > 0, torch.zeros_like(length)
        if bool(counted.any()):
            limited = limited_shares(influence[counted].numpy(), self._bound(int(counted.sum())))
            weight[counted] = torch.from_numpy(limited) / length[counted]
        return weight

    def _bound(self, num_clients: int) -> float:
        return self._max_influence or most_influence(num_clients)

    def scale(self, combined: Tensor, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        if self._objective != "max_snr" or self._known is None:
            return combined
        amplitude = self._known.amplitude[list(updates.clients)].nan_to_num(0.0).numpy()
        factors = [_length_factor(row, amplitude) for row in weights.double().cpu().numpy()]
        return combined * torch.tensor(factors).to(combined).view(-1, *[1] * (combined.ndim - 1))

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        if self._known is None:
            return {}
        age = view.state.round - self._known.round
        diagnostics = {f"{self._options.name}_{key}": value for key, value in self._diagnostics.items() if age == 0}
        return {"estimated_noise_std": self._known.noise_var.sqrt(), "rounds_since_estimate": age, **diagnostics}

    def state_dict(self) -> dict[str, Any]:
        return {"known": None if self._known is None else vars(self._known).copy(), "cosines": self._cosines}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known: dict[str, Any] = {
            key: one.cpu() if isinstance(one, Tensor) else one for key, one in (state["known"] or {}).items()
        }
        self._known = _Known(**known) if known else None
        self._cosines = None if state["cosines"] is None else state["cosines"].cpu()

    def _estimated(self, updates: ClientUpdates, models: Sequence[list[int]], view: View) -> _Known:
        deltas, clients, count = updates.released.flatten(1), list(updates.clients), view.facts.num_clients
        noise_var, influence, length, amplitude = torch.full((4, count), torch.nan, dtype=torch.float64)
        steps, group = torch.zeros(2, count, dtype=torch.long)
        steps[clients] = torch.tensor(updates.steps)
        if self._objective == "max_snr":
            by_signal = self._by_signal(deltas, clients, models, view)
            noise_var[clients], influence[clients], length[clients], amplitude[clients] = by_signal
            for number, rows in enumerate(models):
                group[[clients[row] for row in rows]] = number
        else:
            truth, width = None, deltas.shape[1]
            if self._options.name == "oracle":
                truth = width * torch.tensor(updates.noise_std, dtype=torch.float64) ** 2
            estimated = estimate_by_group(deltas, models, self._options, truth)
            noise_var[clients], self._diagnostics = estimated.noise_var / width, estimated.diagnostics
            for number, rows in enumerate(judged_groups(models, len(clients))):
                group[[clients[row] for row in rows]] = number
        mechanism = torch.zeros(count, len(dataclasses.fields(Mechanism)), dtype=torch.float64)
        if updates.mechanism_of:
            mechanism[clients] = torch.tensor([_numbers(one) for one in updates.mechanism_of], dtype=torch.float64)
        return _Known(view.round, noise_var, influence, length, amplitude, steps, group, mechanism)

    def _by_signal(self, deltas: Tensor, clients: list[int], models: Sequence[list[int]], view: View) -> Tensor:
        """Return the noise variance, influence, length and amplitude of each update `[C, P]`: `[4, C]`."""
        gram, num_params = gram_and_width(deltas)
        lengths = np.sqrt(np.diag(gram))
        models = [[row for row in rows if lengths[row] > 0] for rows in models]
        cosines, rounds = self._remembered(gram, lengths, clients, models, view)
        by_signal = np.zeros((4, len(clients)))
        kept = [rows for rows in models if rows]
        for rows, signals in zip(kept, estimate_signals(cosines, lengths, kept, num_params * rounds), strict=True):
            by_signal[0, rows] = lengths[rows] ** 2 * signals.noise_share / max(num_params, 1)
            by_signal[1, rows] = contributions(signals, view.schedule.rounds, self._bound(len(rows)))
            by_signal[2, rows] = np.maximum(lengths[rows], signals.length)  # short updates are not made longer
            by_signal[3, rows] = signals.shared * np.minimum(lengths[rows], signals.length)
        return torch.from_numpy(by_signal)

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

    def _warn_of_few(self, share: Tensor, clients: Sequence[int], view: View) -> None:
        effective = float(share.sum() ** 2 / share.square().sum().clamp_min(1e-300))
        if self._warned or len(clients) <= _FEW or effective >= _FEW:
            return
        self._warned = True
        heaviest = int(share.argmax())
        heaviest_name = view.facts.name_of(clients[heaviest])
        warn_user(
            f"strategy noise_aware: {effective:.1f} of {len(clients)} clients count (client {heaviest_name} has "
            f"{float(share[heaviest]):.0%} of the weight), so they decide what is learned. Set max_weight to bound it."
        )


def _length_factor(share: np.ndarray, amplitude: np.ndarray) -> float:
    """Return the median length of the signals of clients with a share / that of the sum; both arguments are `[C]`."""
    length = float(share @ amplitude)
    return float(np.median(amplitude[share > 0])) / length if length > 0 else 1.0


def _refuse_changed(beside: str, **options: Any) -> None:
    """Raise UserError if an option that has no effect with `beside` was set."""
    for name, value in options.items():
        usual = inspect.signature(NoiseAware).parameters[name].default
        require(value == usual, f"{_KEY}.{name}", f"not be set with {beside}", value)


def _numbers(mechanism: Mechanism) -> list[float]:
    return [float(number) for number in dataclasses.astuple(mechanism)]
