"""Robust-HDP: weights by the noise variance of the updates, which the server estimates from the updates.

| Algorithm 1 of the paper                     | here                                                        |
| -------------------------------------------- | ----------------------------------------------------------- |
| lines 3 to 6: DPSGD of the clients           | the round of the server's loop                              |
| line 7: M `[p, n]`, a column for each client | `updates.released` `[C, P]`, transposed                     |
| line 8: L, S = RPCA(M), Algorithm 3          | `_estimated`; with `estimator: rpca` by `_rpca` of          |
|                                              | `noise_estimators.py` and `robust_pca.py`                   |
| lines 9, 10, equation 8: w_i ~ 1 / |S_i|^2   | `Split.noise_var`, and `_share` by `noise_weights.py`       |
| line 11: theta + sum_i w_i update_i          | the loop's weighted sum                                     |

| symbol           | here                                                                      |
| ---------------- | ------------------------------------------------------------------------- |
| S^e, n, E        | `updates.clients`, `view.facts.num_clients`, `view.run.rounds`            |
| b_i, N_i, z_i, c | of each client's `Mechanism`: batch, records, noise multiplier, clip norm |
| K_i              | `updates.steps`                                                           |
| L, S             | `Split.low_rank`, `Split.sparse`, of each of `blocks_of`                  |
| p', Q            | `rows`, and how many `blocks` of them there are: `num_params // rows`     |
| lambda, mu       | in `robust_pca`: 1 / sqrt(max(n, p)), and by `PcpSettings.mu_scale`       |
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.papers.robust_hdp.noise_estimators import EstimatorOptions, estimate_by_group, judged_groups
from dpfl_lightning.papers.robust_hdp.noise_weights import weights
from dpfl_lightning.privacy.mechanism import Mechanism

_OF_RPCA = ("rows", "blocks", "row_choice")
_FEW = 3.0  # effective number of clients below which the user is warned


@dataclass(frozen=True)
class _Known:
    """The last estimate: its round, and tensors `[N]`; `mechanism` is `[N, 4]`."""

    round: int
    noise_var: Tensor  # for each parameter, float64, NaN for clients that were not in the round
    steps: Tensor  # int64; 0 for clients that were not in the round
    group: Tensor  # int64
    mechanism: Tensor  # the numbers of each mechanism, float64; 0 if unknown


@dataclass
class RobustHdp(Strategy):
    """Robust-HDP: weights by 1 / noise variance, which is estimated from the updates; no reported budget is read.

    It suits clients with different budgets, and with equal batch sizes and IID data. Otherwise the few clients with the
    least noise decide what is learned; `noise_aware` balances noise against bias. In a round without a new estimate the
    server keeps no single update. If a client of such a round was not in the last estimate, or has another number of
    local steps, noise, batch size or group, the whole round is estimated anew.

    Args:
        estimator: `hetero_pca`, `rpca` (robust PCA, as in the paper: ten times as slow, and not more accurate),
            `raw_norm`, `mean_residual`, or `oracle` (the true variances, for simulations).
        reestimate_every: number of rounds between two estimates; 0 or `first_round` keeps the first estimate.
        floor: lower bound on a variance, as a share of the median variance.
        max_weight: upper bound on a client's weight, at least 1 / clients. It is the only bound on the influence of a
            client that sends an update near zero; 0.5 is a safe value. It is exact if no other strategy changes the
            weights.
        rows: number of parameters that `rpca` reads together (p' of the paper); null takes all, as does the default if
            there are fewer.
        blocks: number of such blocks over which variances are averaged (Q of the paper); null takes all that there are.
        row_choice: `rpca` reads parameters at `random` (from a public seed), or from the `head` on, as in the paper.

    **Privacy** Post-processing of released updates; nothing is charged.

    Reference: Malekmohammadi et al. (2024), Algorithm 1, is `estimator: rpca, row_choice: head`; its code also uses
    `reestimate_every: first_round`. Bounds and other estimators are not in the paper.
    """

    estimator: Literal["hetero_pca", "rpca", "raw_norm", "mean_residual", "oracle"] = "hetero_pca"
    reestimate_every: Annotated[int, Interval(ge=0)] | Literal["first_round"] = 1
    floor: Annotated[float, Interval(ge=0, lt=math.inf)] = 1e-6
    max_weight: Annotated[float, Interval(gt=0, le=1)] = 1.0
    rows: Annotated[int, Interval(ge=1)] | None = 200_000
    blocks: Annotated[int, Interval(ge=1)] | None = 1
    row_choice: Literal["random", "head"] = "random"

    role = "base"

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in dataclasses.fields(self):
            if option.name in _OF_RPCA:
                value, must = getattr(self, option.name), f"be left out with estimator {self.estimator}"
                unused = self.estimator == "rpca" or value == option.default
                require(unused, self._key(option.name), must, value, "It is an option of rpca; others read all.")
        self._options = EstimatorOptions(self.estimator, self.rows, self.blocks, self.row_choice)
        self.needs_noise_std = self.estimator == "oracle"
        if self.estimator == "oracle":
            self.caveats = (
                "a simulation: strategy robust_hdp (oracle) weighs by true noise, which a server could only believe",
            )
        self._known: _Known | None = None
        self._diagnostics: Mapping[str, float] = {}
        self._warned = False

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        clients = view.facts.num_clients
        must, advice = f"be at least 1 / {clients}, the number of clients", "Use uniform for equal weights."
        require(self.max_weight * clients >= 1, self._key("max_weight"), must, self.max_weight, advice)
        self._check_blocks(sum(tensor.numel() for tensor in view.module.trainable))
        data = view.run.options.get("data", {})
        partition = (data.get("partition") or {}).get("name")
        differ = "groups" if data.get("groups") else partition if partition in ("dirichlet", "shards") else ""
        if differ and len(set(view.facts.batch_size)) > 1:
            warn_user(
                f"strategy robust_hdp: data differ between clients ({differ}) and so do batch sizes, so the few "
                "clients with the largest batches will decide what is learned. Use noise_aware, or equal batch sizes."
            )
        return schedule

    def _check_blocks(self, num_params: int) -> None:
        """Raise UserError for more rows or blocks than there are; the default of `rows` may be above a small model."""
        rows, blocks, advice = self.rows or num_params, self.blocks or 1, "null takes all that there are."
        must = f"be at most the {num_params:,} parameters of the model"
        require(rows <= num_params or rows == type(self).rows, self._key("rows"), must, rows, advice)
        rows = min(rows, num_params)
        most = num_params // rows
        must = f"be at most {most:,}, as {num_params:,} parameters have so many of {rows:,} rows"
        require(blocks <= most, self._key("blocks"), must, blocks, advice)

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        known, clients = self._known, list(plan.clients)
        every = 0 if self.reestimate_every == "first_round" else self.reestimate_every
        return (
            known is None
            or (every > 0 and view.round >= known.round + every)
            or known.steps[clients].tolist() != list(plan.steps)
            or known.mechanism[clients].tolist() != [_numbers(mechanism) for mechanism in plan.mechanism_of]
            or len({*zip(plan.model_of, known.group[clients].tolist(), strict=True)}) > len({*plan.model_of})
        )

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        models, clients = updates.rows_by_model, list(updates.clients)
        if updates.deltas is not None or self._known is None:
            self._known = self._estimated(updates, models, view)
        share = torch.zeros(len(clients), dtype=torch.float64)
        for rows in models:
            share[rows] = self._share(self._known.noise_var, [clients[row] for row in rows], view)
        return share

    def _estimated(self, updates: ClientUpdates, models: Sequence[list[int]], view: View) -> _Known:
        clients, count = list(updates.clients), view.facts.num_clients
        deltas, truth = updates.released.flatten(1), None
        width = deltas.shape[1]
        if self.estimator == "oracle":
            truth = width * torch.tensor(updates.noise_std, dtype=torch.float64) ** 2
        estimated = estimate_by_group(deltas, models, self._options, truth)
        self._diagnostics = estimated.diagnostics
        noise_var = torch.full((count,), torch.nan, dtype=torch.float64)
        noise_var[clients] = estimated.noise_var / width
        steps, group = torch.zeros(2, count, dtype=torch.long)
        steps[clients] = torch.tensor(updates.steps)
        for number, rows in enumerate(judged_groups(models, len(deltas))):
            group[[clients[row] for row in rows]] = number
        mechanism = torch.zeros(count, len(dataclasses.fields(Mechanism)), dtype=torch.float64)
        if updates.mechanism_of:
            mechanism[clients] = torch.tensor([_numbers(one) for one in updates.mechanism_of], dtype=torch.float64)
        return _Known(view.round, noise_var, steps, group, mechanism)

    def _share(self, noise_var: Tensor, clients: list[int], view: View) -> Tensor:
        """Return the weights `[C]` of the clients of one model."""
        share = weights(noise_var[clients], self.floor, self.max_weight)
        effective = float(share.sum() ** 2 / share.square().sum().clamp_min(1e-300))
        if not self._warned and len(clients) > _FEW > effective:
            self._warned, heaviest = True, int(share.argmax())
            warn_user(
                f"strategy robust_hdp: {effective:.1f} of {len(clients)} clients count (client "
                f"{view.facts.name_of(clients[heaviest])} has {float(share[heaviest]):.0%} of the weight), so they "
                "decide what is learned. Set max_weight to bound it."
            )
        return share

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        if self._known is None:
            return {}
        age = view.state.round - self._known.round
        diagnostics = {} if age else {f"{self.estimator}_{key}": value for key, value in self._diagnostics.items()}
        return {"estimated_noise_std": self._known.noise_var.sqrt(), "rounds_since_estimate": age, **diagnostics}

    def state_dict(self) -> dict[str, Any]:
        return {"known": None if self._known is None else vars(self._known).copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known = state["known"] or {}
        tensors = {name: value.cpu() for name, value in known.items() if name != "round"}
        self._known = _Known(known["round"], **tensors) if known else None


def _numbers(mechanism: Mechanism) -> list[float]:
    return [float(number) for number in dataclasses.astuple(mechanism)]
