"""Robust-HDP: weights by how noisy each update is, judged by the updates themselves."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpfl_lightning.algorithms.noise_estimators import Estimate, EstimatorOptions, estimate
from dpfl_lightning.algorithms.noise_weights import weights
from dpfl_lightning.algorithms.robust_pca import PRESETS
from dpfl_lightning.errors import UserError, UserNotice, nearest, require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.mechanism import Mechanism

_KEY = "strategies.noise_aware"
_ENOUGH = 8  # clients of one model that can be judged among themselves
_FEW = 3.0  # clients that count, below which the user is told
_MOST_STEPS = 1.5  # of a sum, over those of its mean: beyond 2 it may swing to and fro where local training converges
_UNLIKE = ("dirichlet", "shards")  # partitions that give clients data of different kinds


def judged_groups(model_of: Sequence[int]) -> tuple[int, ...]:
    """Which clients are judged together, `[C]`: those of one model if every model has 8, else all.

    >>> judged_groups([0] * 8 + [1] * 7) == (0,) * 15, judged_groups([0] * 8 + [1] * 8) == (0,) * 8 + (1,) * 8
    (True, True)
    """
    return tuple(model_of) if min(Counter(model_of).values()) >= _ENOUGH else (0,) * len(model_of)


def estimate_by_group(
    deltas: Tensor, groups: Sequence[int], options: EstimatorOptions, truth: Tensor | None = None
) -> Estimate:
    """`estimate` of each group by itself; of the diagnostics the worst.

    Args:
        deltas: `[C, P]`, released.
        groups: `[C]`.
        options: see there.
        truth: `[C]`, for `oracle`.
    """
    noise_var, told = torch.zeros(len(groups), dtype=torch.float64), dict[str, list[float]]()
    for rows in _rows_of(groups):
        own = deltas if len(rows) == len(groups) else deltas[rows]
        found = estimate(own, options, None if truth is None else truth[rows])
        noise_var[rows] = found.noise_var
        for key, value in found.diagnostics.items():
            told.setdefault(key, []).append(value)
    return Estimate(noise_var, {key: (min if key == "converged" else max)(own) for key, own in told.items()})


def step_scale(share: Tensor, steps: Sequence[int], records: Sequence[int]) -> float:
    """What makes a sum of updates hold as many local steps as under weights by data size, 1.5 at most.

    More would carry the model so far beyond where clients went that it swings to and fro, as over-relaxed steps do
    beyond 2: at Dist5, which asks for 2.3, two runs of 30 rounds had 63.0 and 70.4 %, with this bound 75.9 %.

    Args:
        share: `[C]`, the weights of the sum.
        steps: length C, local steps behind each update.
        records: length C, training records of each client.

    >>> step_scale(torch.tensor([3.0, 1.0]), steps=[10, 30], records=[100, 100])
    1.3333333333333333
    >>> step_scale(torch.tensor([3.0, 1.0]), steps=[10, 10], records=[100, 100])
    1.0
    """
    counts, sizes = torch.tensor(steps, dtype=torch.float64), torch.tensor(records, dtype=torch.float64)
    if len(set(steps)) == 1 or not share.sum() > 0:
        return 1.0
    return min(_MOST_STEPS, float((sizes @ counts / sizes.sum()) / (share.double() @ counts / share.sum())))


@dataclass(frozen=True)
class _Known:
    """The last estimate: `[N]` each, `mechanism` `[N, 4]`.

    Args:
        round: it was made in.
        noise_var: float64, of one parameter; NaN: the client was not in it.
        steps: int64, behind the update; 0: the client was not in it.
        group: int64, that the client was judged in.
        mechanism: float64, the numbers of its steps' mechanism; 0: not known.
    """

    round: int
    noise_var: Tensor
    steps: Tensor
    group: Tensor
    mechanism: Tensor

    TENSORS: ClassVar = ("noise_var", "steps", "group", "mechanism")


class NoiseAware(Strategy):
    """Robust-HDP: `w_i ~ 1 / v_i`, or `w_i ~ steps_i / v_i`, with v the estimated noise variances of the updates.

    For clients whose budgets or batch sizes differ and whose data are alike. With equal noise size_weighted is as
    good; with data of different kinds beside different batch sizes the few quietest clients decide what is learned.

    Args:
        estimator: `rpca` (robust PCA, the paper's), `hetero_pca`, `raw_norm`, `mean_residual`, or `oracle`: the true
            variances, for simulations.
        objective: `max_snr`, the best ratio of signal to noise if every local step brings as much signal, scaled to as
            many steps as under weights by data size (by 1.5 at most), so that a learning rate serves both; or
            `min_variance`, the least noise, which starves clients of many small steps and moves the model less (the
            paper's).
        reestimate_every: rounds from one estimate to the next, >= 1; 0 or `first_round` keeps the first one.
        floor: a variance counts as at least this share of the median, >= 0.
        max_weight: no client weighs more, in (0, 1]; the only bound on a client that sends next to nothing, 0.5 is a
            safe one. Exact if no other strategy has a say.
        rows: `rpca`: parameters of one block; null takes all at once.
        blocks: `rpca`: blocks to average over; null takes all.
        row_choice: `rpca`: `random` (from a public seed) or `head` (the first ones, the paper's).
        preset: `rpca`: `fast`, `candes` or `release` (the paper's code).
        rank: `hetero_pca`: directions that clients share, >= 1.

    A round that lies between two estimates keeps no single update. It must hold only clients that were in the last
    one, after as many local steps of the same noise and batch (beside `clustered` those of round 1 are others) and
    judged together; else the whole round is estimated anew, for the scales of two estimates may differ. Clients of
    different models are judged apart where every model has 8 of them.

    Reads no claim about budgets, batches or noise, `oracle` apart, but for whether they changed; `max_snr` counts local
    steps, which follow from announced numbers of records. Robust to false claims, not to false updates.

    **Privacy** Post-processing of released updates: charges nothing.

    Raises:
        UserError: an unknown name, or a number out of range.

    Reference: Malekmohammadi et al. (2024), Algorithm 1: `objective: min_variance, row_choice: head`; its code has also
    `reestimate_every: first_round, preset: release`. `max_snr`, floor, cap and other estimators are not in the paper;
    what other strategies multiply onto the weights does not change the scale of `max_snr`.

    >>> updates = ClientUpdates((0, 1), (10, 10), noise_std=(), deltas=torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    >>> estimate_by_group(updates.released, judged_groups([0, 0]), EstimatorOptions()).noise_var
    tensor([1., 4.], dtype=torch.float64)
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
        must = f"be one of {', '.join(PRESETS)}"
        require(preset in PRESETS, f"{_KEY}.preset", must, preset, nearest(preset, PRESETS))
        self._every, self._rule = int(every), {"objective": objective, "floor": floor, "max_weight": max_weight}
        try:
            self._options = EstimatorOptions(estimator, PRESETS[preset], rows, blocks, row_choice, rank)
            weights(torch.ones(1), [1], **self._rule)  # type: ignore[arg-type]
        except UserError as error:  # their keys are those of this strategy
            raise UserError(str(error).replace("`", f"`{_KEY}.", 1)) from None
        if estimator == "oracle":
            self.caveats = (
                "a simulation: strategy noise_aware (oracle) weighs by true noise, which a server could only believe",
            )
        self._known: _Known | None = None
        self._scale = torch.ones(1, dtype=torch.float64)  # [K], of the round
        self._diagnostics: Mapping[str, float] = {}
        self._warned = False

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        partition = view.run.options.get("data", {}).get("partition", {}).get("name")
        if partition in _UNLIKE and len(set(view.facts.batch_size)) > 1:
            warnings.warn(
                f"strategy noise_aware: data differ between clients (partition {partition}) and so do batch sizes: the "
                "few clients with the largest batches will decide what is learned. Equal batch sizes are better here.",
                UserNotice,
                stacklevel=2,
            )
        return schedule

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        known = self._known
        if known is None or (self._every and view.round >= known.round + self._every):
            return True
        clients = list(plan.clients)
        if known.steps[clients].tolist() != list(plan.steps):
            return True
        if known.mechanism[clients].tolist() != [_numbers(own) for own in plan.mechanism_of]:
            return True
        groups = [known.group[[plan.clients[row] for row in rows]] for rows in _rows_of(plan.model_of)]
        return any(len(group.unique()) > 1 for group in groups)

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        model_of = updates.model_of or (0,) * len(updates.clients)
        if updates.deltas is not None or self._known is None:
            self._known = self._estimated(updates, model_of, view)
        noise_var = self._known.noise_var[list(updates.clients)]
        share, self._scale = torch.zeros_like(noise_var), torch.ones(len(view.state.models), dtype=torch.float64)
        for rows in _rows_of(model_of):
            steps = [updates.steps[row] for row in rows]
            share[rows] = weights(noise_var[rows], steps, **self._rule)  # type: ignore[arg-type]
            if self._rule["objective"] == "max_snr":
                records = [view.facts.num_records[updates.clients[row]] for row in rows]
                self._scale[model_of[rows[0]]] = step_scale(share[rows], steps, records)
            self._warn_of_few(share[rows], [updates.clients[row] for row in rows])
        return share

    def scale(self, combined: Tensor, view: View) -> Tensor:
        if bool((self._scale == 1).all()):
            return combined
        return self._scale.to(combined).view(-1, *[1] * (combined.ndim - 1)) * combined

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        if self._known is None:
            return {}
        age = view.state.round - self._known.round
        told = {f"{self._options.name}_{key}": value for key, value in self._diagnostics.items() if age == 0}
        return {"estimated_noise_std": self._known.noise_var.sqrt(), "rounds_since_estimate": age, **told}

    def state_dict(self) -> dict[str, Any]:
        return {} if self._known is None else vars(self._known).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known = _Known(state["round"], *(state[key].cpu() for key in _Known.TENSORS)) if state else None

    def _estimated(self, updates: ClientUpdates, model_of: Sequence[int], view: View) -> _Known:
        deltas, clients, count = updates.released.flatten(1), list(updates.clients), view.facts.num_clients
        width, groups, truth = deltas.shape[1], judged_groups(model_of), None
        if self._options.name == "oracle":
            truth = width * torch.tensor(updates.noise_std, dtype=torch.float64) ** 2
        found = estimate_by_group(deltas, groups, self._options, truth)
        noise_var = torch.full((count,), torch.nan, dtype=torch.float64)
        steps, group = torch.zeros(2, count, dtype=torch.long)
        noise_var[clients] = found.noise_var / width
        steps[clients], group[clients] = torch.tensor(updates.steps), torch.tensor(groups)
        mechanism = torch.zeros(count, len(dataclasses.fields(Mechanism)), dtype=torch.float64)
        if updates.mechanism_of:
            mechanism[clients] = torch.tensor([_numbers(own) for own in updates.mechanism_of], dtype=torch.float64)
        self._diagnostics = found.diagnostics
        return _Known(view.round, noise_var, steps, group, mechanism)

    def _warn_of_few(self, share: Tensor, clients: Sequence[int]) -> None:
        effective = float(share.sum() ** 2 / share.square().sum().clamp_min(1e-300))
        if self._warned or len(clients) <= _FEW or effective >= _FEW:
            return
        self._warned = True
        heaviest = int(share.argmax())
        warnings.warn(
            f"strategy noise_aware: {effective:.1f} of {len(clients)} clients count (client {clients[heaviest]} has "
            f"{float(share[heaviest]):.0%} of the weight), so they decide what is learned. max_weight bounds it.",
            UserNotice,
            stacklevel=2,
        )


def _numbers(mechanism: Mechanism) -> list[float]:
    """What two mechanisms of a run can differ in."""
    return [float(number) for number in dataclasses.astuple(mechanism)]


def _rows_of(groups: Sequence[int]) -> Iterator[list[int]]:
    """The rows of each group."""
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    yield from rows.values()
