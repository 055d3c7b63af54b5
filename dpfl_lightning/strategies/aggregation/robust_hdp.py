"""Robust-HDP: weights by the noise variance of the updates, which robust PCA estimates."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dpfl_lightning.algorithms.noise_estimators import EstimatorOptions, estimate_by_group, judged_groups
from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.algorithms.robust_pca import PRESETS
from dpfl_lightning.errors import UserError, require, require_one_of, warn_user
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.strategies.aggregation.estimated_weights import EstimatedWeights

_KEY = "strategies.robust_hdp"
_FEW = 3.0  # effective number of clients below which the user is warned


class RobustHdp(EstimatedWeights):
    """Robust-HDP: weights by 1 / noise variance, which is estimated from the updates; no reported budget is read.

    It suits clients whose budgets differ, and whose batch sizes and data are alike. Where batch sizes differ,
    `noise_aware` also reads the signal: large batches have the least noise because they make the fewest steps. Where
    both data and noise differ, the few clients with the least noise decide what is learned.

    Args:
        estimator: `rpca` (robust PCA, as in the paper), `hetero_pca`, `raw_norm`, `mean_residual`, or `oracle` (the
            true variances, for simulations).
        reestimate_every: number of rounds between two estimates, >= 1; 0 or `first_round` keeps the first estimate.
        floor: lower bound on a variance, as a share of the median variance, >= 0.
        max_weight: upper bound on a client's weight, in [1 / clients, 1]. It is the only bound on the influence of a
            client that sends an update near zero; 0.5 is a safe value. It is exact if no other strategy changes the
            weights.
        rows: `rpca`: number of parameters in one block; null takes all at once.
        blocks: `rpca`: number of blocks to average over; null takes all.
        row_choice: `rpca`: `random` (from a public seed) or `head` (the first ones, as in the paper).
        preset: `rpca`: `fast`, `candes` or `release` (the paper's code).
        rank: `hetero_pca`: number of directions that clients share, >= 1; at least the number of models that are judged
            together.

    In a round without a new estimate the server keeps no single update. If a client of such a round was not in the last
    estimate, or has another number of local steps, noise, batch size or group, the whole round is estimated anew.

    **Privacy** Post-processing of released updates; nothing is charged.

    Reference: Malekmohammadi et al. (2024), Algorithm 1, is `row_choice: head`; its code also uses `reestimate_every:
    first_round, preset: release`. Bounds and other estimators are not in the paper.
    """

    def __init__(
        self,
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
        super().__init__(_KEY, reestimate_every)
        require_one_of(PRESETS, f"{_KEY}.preset", preset)
        self._rule = {"floor": floor, "max_weight": max_weight}
        must = "be 1 unless the estimator is hetero_pca, which alone uses it"
        require(rank == 1 or estimator == "hetero_pca", f"{_KEY}.rank", must, rank)
        try:
            self._options = EstimatorOptions(estimator, PRESETS[preset], rows, blocks, row_choice, rank)
            weights(torch.ones(1), **self._rule)
        except UserError as error:  # add the prefix of this strategy to the key
            raise UserError(str(error).replace("`", f"`{_KEY}.", 1)) from None
        if estimator == "oracle":
            self.caveats = (
                "a simulation: strategy robust_hdp (oracle) weighs by true noise, which a server could only believe",
            )
        self.needs_noise_std = estimator == "oracle"
        self._diagnostics: Mapping[str, float] = {}
        self._warned = False

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        clients, most = view.facts.num_clients, self._rule["max_weight"]
        must, advice = (
            f"be at least 1 / {clients}, the number of clients",
            "Use the strategy uniform for equal weights.",
        )
        require(most * clients >= 1, f"{_KEY}.max_weight", must, most, advice)
        data = view.run.options.get("data", {})
        partition = (data.get("partition") or {}).get("name")
        differ = "groups" if data.get("groups") else partition if partition in ("dirichlet", "shards") else ""
        if differ and len(set(view.facts.batch_size)) > 1:
            warn_user(
                f"strategy robust_hdp: data differ between clients ({differ}) and so do batch sizes, so the few "
                "clients with the largest batches will decide what is learned. Use noise_aware, or equal batch sizes."
            )
        return schedule

    def _estimated(
        self, updates: ClientUpdates, models: Sequence[list[int]], view: View
    ) -> tuple[Mapping[str, Tensor], Sequence[Sequence[int]]]:
        deltas, truth = updates.released.flatten(1), None
        width = deltas.shape[1]
        if self._options.name == "oracle":
            truth = width * torch.tensor(updates.noise_std, dtype=torch.float64) ** 2
        estimated = estimate_by_group(deltas, models, self._options, truth)
        self._diagnostics = estimated.diagnostics
        return {"noise_var": estimated.noise_var / width}, judged_groups(models, len(deltas))

    def _share(self, estimates: Mapping[str, Tensor], clients: list[int], view: View) -> Tensor:
        share = weights(estimates["noise_var"], **self._rule)
        self._warn_of_few(share, clients, view)
        return share

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        metrics = super().metrics(view)
        if metrics.get("rounds_since_estimate") != 0:
            return metrics
        return {**metrics, **{f"{self._options.name}_{key}": value for key, value in self._diagnostics.items()}}

    def _warn_of_few(self, share: Tensor, clients: Sequence[int], view: View) -> None:
        effective = float(share.sum() ** 2 / share.square().sum().clamp_min(1e-300))
        if self._warned or len(clients) <= _FEW or effective >= _FEW:
            return
        self._warned = True
        heaviest = int(share.argmax())
        heaviest_name = view.facts.name_of(clients[heaviest])
        warn_user(
            f"strategy robust_hdp: {effective:.1f} of {len(clients)} clients count (client {heaviest_name} has "
            f"{float(share[heaviest]):.0%} of the weight), so they decide what is learned. Set max_weight to bound it."
        )
