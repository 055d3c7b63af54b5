"""Robust-HDP: weights by the noise variance of each update, estimated from the updates themselves."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.algorithms.noise_estimators import Estimate, EstimatorOptions, estimate
from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.algorithms.robust_pca import PRESETS
from dpfl_lightning.errors import UserError, require, require_one_of, warn_user
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.mechanism import Mechanism

_KEY = "strategies.noise_aware"
_ENOUGH = 8  # fewest clients of one model whose noise is estimated among themselves
_FEW = 3.0  # effective number of clients below which the user is warned
_MOST_STEPS = 1.5  # largest scale of an update: beyond 2 it may oscillate where local training converges


def judged_groups(model_of: Sequence[int]) -> tuple[int, ...]:
    """Return the group `[C]` within which each client's noise is estimated: its model if all have 8 clients or more."""
    return tuple(model_of) if min(Counter(model_of).values()) >= _ENOUGH else (0,) * len(model_of)


def estimate_by_group(
    deltas: Tensor, groups: Sequence[int], options: EstimatorOptions, truth: Tensor | None = None
) -> Estimate:
    """Return the `estimate` of each group `[C]` of updates `[C, P]` separately, with the worst of the diagnostics.

    `truth` `[C]` holds the true variances, for the estimator `oracle`.
    """
    noise_var, diagnostics = torch.zeros(len(groups), dtype=torch.float64), dict[str, list[float]]()
    for rows in _rows_of(groups):
        group_deltas = deltas if len(rows) == len(groups) else deltas[rows]
        group_estimate = estimate(group_deltas, options, None if truth is None else truth[rows])
        noise_var[rows] = group_estimate.noise_var
        for key, value in group_estimate.diagnostics.items():
            diagnostics.setdefault(key, []).append(value)
    return Estimate(
        noise_var, {key: (min if key == "converged" else max)(values) for key, values in diagnostics.items()}
    )


def step_scale(share: Tensor, steps: Sequence[int], records: Sequence[int]) -> float:
    """Return the factor that makes an aggregate represent as many local steps as weights by data size; at most 1.5.

    `share`, `steps` and `records` hold each client's weight, local steps and training records, `[C]`. A larger factor
    makes the model oscillate.
    """
    counts, sizes = torch.tensor(steps, dtype=torch.float64), torch.tensor(records, dtype=torch.float64)
    if len(set(steps)) == 1 or not share.sum() > 0:
        return 1.0
    return min(_MOST_STEPS, float((sizes @ counts / sizes.sum()) / (share.double() @ counts / share.sum())))


@dataclass(frozen=True)
class _Known:
    """The last estimate: its round, and tensors `[N]`; `mechanism` is `[N, 4]`."""

    round: int
    noise_var: Tensor  # of one parameter, float64; NaN for clients that were not in the round
    steps: Tensor  # int64; 0 for clients that were not in the round
    group: Tensor  # int64
    mechanism: Tensor  # the numbers of each mechanism, float64; 0 if unknown


class NoiseAware(Strategy):
    """Robust-HDP: `w_i ~ 1 / v_i` or `w_i ~ steps_i / v_i`, where v_i is the estimated noise variance of update i.

    It suits clients whose budgets or batch sizes differ and whose data are alike. With equal noise `size_weighted` is
    as good. If both the kind of data and the batch sizes differ between clients, the few clients with the least noise
    decide what is learned.

    Args:
        estimator: `rpca` (robust PCA, as in the paper), `hetero_pca`, `raw_norm`, `mean_residual`, or `oracle` (the
            true variances, for simulations).
        objective: `max_snr` maximises the signal-to-noise ratio, assuming that every local step contributes the same
            signal; the update is scaled to as many steps as under weights by data size (by at most 1.5).
            `min_variance` (as in the paper) minimises the noise; clients with many small steps get little weight.
        reestimate_every: number of rounds between two estimates, >= 1; 0 or `first_round` keeps the first estimate.
        floor: lower bound on a variance, as a share of the median variance, >= 0.
        max_weight: upper bound on a client's weight, in (0, 1]. It is the only bound on the influence of a client that
            sends an update near zero; 0.5 is a safe value. The bound is exact if no other strategy changes the weights.
        rows: `rpca`: number of parameters in one block; null takes all at once.
        blocks: `rpca`: number of blocks to average over; null takes all.
        row_choice: `rpca`: `random` (from a public seed) or `head` (the first ones, as in the paper).
        preset: `rpca`: `fast`, `candes` or `release` (the paper's code).
        rank: `hetero_pca`: number of directions that clients share, >= 1.

    In a round without a new estimate the server keeps no single update. If a client of such a round was not in the last
    estimate, or has another number of local steps, noise, batch size or group, the whole round is estimated anew,
    because the scales of two estimates may differ.

    The weights are robust to false reports, but not to false updates: except for `oracle`, reported budgets, batch
    sizes and noise are used only to detect changes, and `max_snr` uses the number of local steps.

    **Privacy** Post-processing of released updates; nothing is charged.

    Reference: Malekmohammadi et al. (2024), Algorithm 1, which is `objective: min_variance, row_choice: head`; its code
    also uses `reestimate_every: first_round, preset: release`. `max_snr`, `floor`, `max_weight` and the other
    estimators are not in the paper.
    """

    role = "base"

    def __init__(
        self,
        estimator: str = "rpca",
        objective: str = "max_snr",
        reestimate_every: int | str = 1,
        floor: float = 1e-6,
        max_weight: float = 1.0,
        rows: int | None = 200_000,
        blocks: int | None = 1,
        row_choice: str = "random",
        preset: str = "fast",
        rank: int = 1,
    ) -> None:
        every = 0 if reestimate_every == "first_round" else reestimate_every
        number = isinstance(every, int) and not isinstance(every, bool) and every >= 0
        require(number, f"{_KEY}.reestimate_every", "be a number of rounds or `first_round`", reestimate_every)
        require_one_of(PRESETS, f"{_KEY}.preset", preset)
        self._every, self._rule = int(every), {"objective": objective, "floor": floor, "max_weight": max_weight}
        try:
            self._options = EstimatorOptions(estimator, PRESETS[preset], rows, blocks, row_choice, rank)
            weights(torch.ones(1), [1], **self._rule)  # type: ignore[arg-type]
        except UserError as error:  # add the prefix of this strategy to the key
            raise UserError(str(error).replace("`", f"`{_KEY}.", 1)) from None
        if estimator == "oracle":
            self.caveats = (
                "a simulation: strategy noise_aware (oracle) weighs by true noise, which a server could only believe",
            )
        self.needs_noise_std = estimator == "oracle"
        self._known: _Known | None = None
        self._scale = torch.ones(1, dtype=torch.float64)  # [K], of the round
        self._diagnostics: Mapping[str, float] = {}
        self._warned = False

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        partition = view.run.options.get("data", {}).get("partition", {}).get("name")
        if partition in ("dirichlet", "shards") and len(set(view.facts.batch_size)) > 1:
            warn_user(
                f"strategy noise_aware: data differ between clients (partition {partition}) and so do batch sizes, so "
                "the few clients with the largest batches will decide what is learned. Use equal batch sizes here."
            )
        return schedule

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        known, clients = self._known, list(plan.clients)
        return (
            known is None
            or (self._every > 0 and view.round >= known.round + self._every)
            or known.steps[clients].tolist() != list(plan.steps)
            or known.mechanism[clients].tolist() != [_numbers(mechanism) for mechanism in plan.mechanism_of]
            or any(len(known.group[clients][rows].unique()) > 1 for rows in _rows_of(plan.model_of))
        )

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        model_of = updates.model_of or (0,) * len(updates.clients)
        if updates.deltas is not None or self._known is None:
            self._known = self._estimated(updates, model_of, view)
        noise_var = self._known.noise_var[list(updates.clients)]
        share, self._scale = torch.zeros_like(noise_var), torch.ones(len(view.state.models), dtype=torch.float64)
        for rows in _rows_of(model_of):
            steps, clients = [updates.steps[row] for row in rows], [updates.clients[row] for row in rows]
            share[rows] = weights(noise_var[rows], steps, **self._rule)  # type: ignore[arg-type]
            if self._rule["objective"] == "max_snr":
                records = [view.facts.num_records[client] for client in clients]
                self._scale[model_of[rows[0]]] = step_scale(share[rows], steps, records)
            self._warn_of_few(share[rows], clients, view)
        return share

    def scale(self, combined: Tensor, view: View) -> Tensor:
        if bool((self._scale == 1).all()):
            return combined
        return self._scale.to(combined).view(-1, *[1] * (combined.ndim - 1)) * combined

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        if self._known is None:
            return {}
        age = view.state.round - self._known.round
        diagnostics = {f"{self._options.name}_{key}": value for key, value in self._diagnostics.items() if age == 0}
        return {"estimated_noise_std": self._known.noise_var.sqrt(), "rounds_since_estimate": age, **diagnostics}

    def state_dict(self) -> dict[str, Any]:
        return {} if self._known is None else vars(self._known).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        on_cpu: dict[str, Any] = {key: one.cpu() if isinstance(one, Tensor) else one for key, one in state.items()}
        self._known = _Known(**on_cpu) if state else None

    def _estimated(self, updates: ClientUpdates, model_of: Sequence[int], view: View) -> _Known:
        deltas, clients, count = updates.released.flatten(1), list(updates.clients), view.facts.num_clients
        width, groups, truth = deltas.shape[1], judged_groups(model_of), None
        if self._options.name == "oracle":
            truth = width * torch.tensor(updates.noise_std, dtype=torch.float64) ** 2
        estimated = estimate_by_group(deltas, groups, self._options, truth)
        noise_var = torch.full((count,), torch.nan, dtype=torch.float64)
        steps, group = torch.zeros(2, count, dtype=torch.long)
        noise_var[clients] = estimated.noise_var / width
        steps[clients], group[clients] = torch.tensor(updates.steps), torch.tensor(groups)
        mechanism = torch.zeros(count, len(dataclasses.fields(Mechanism)), dtype=torch.float64)
        if updates.mechanism_of:
            mechanism[clients] = torch.tensor([_numbers(one) for one in updates.mechanism_of], dtype=torch.float64)
        self._diagnostics = estimated.diagnostics
        return _Known(view.round, noise_var, steps, group, mechanism)

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


def _numbers(mechanism: Mechanism) -> list[float]:
    return [float(number) for number in dataclasses.astuple(mechanism)]


def _rows_of(groups: Sequence[int]) -> list[list[int]]:
    """Return the rows of each group."""
    return [[row for row, one in enumerate(groups) if one == group] for group in dict.fromkeys(groups)]
