"""Robust clustered DPFL: groups of clients are found by full-batch updates in round 1, then train separate models."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.algorithms.server_training import public_generator
from dpfl_lightning.algorithms.update_groups import GroupOptions
from dpfl_lightning.algorithms.update_mixture import Mixture, paper_mixture, robust_mixture, switch_round
from dpfl_lightning.errors import UserError, require, require_one_of, warn_user
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server import aggregate
from dpfl_lightning.federated.server.results import ClientEmbedding
from dpfl_lightning.federated.server.summary import of_all
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.strategies.clustering import first_round
from dpfl_lightning.strategies.clustering.cluster_metrics import GroupingStrategy
from dpfl_lightning.strategies.clustering.model_selection import SELECTIONS, ModelSelection, refuse_unused

_KEY = "strategies.clustered"
_SIMILARITY = "server_similarity"
_KEPT = ("responsibilities", "embedding", "separation", "overlap", "confident", "last_drawn_round", "diagnostics")


def drawn_groups(responsibilities: Tensor, clients: Sequence[int], round: int, seed: int) -> tuple[int, ...]:
    """Draw each client's group from its row of `responsibilities` `[N, M]`; depends only on (seed, round, client)."""
    drawn = []
    for client in clients:
        row = responsibilities[client].double().numpy()
        drawn.append(int(public_generator(seed, "stage2", round, client).choice(len(row), p=row / row.sum())))
    return tuple(drawn)


class Clustered(GroupingStrategy):
    """R-DPCFL: groups of clients are found by their updates from one full batch, and then train separate models.

    It suits clients of a few very different kinds, some of which may be rare, that have enough records for a full batch
    to be nearly free of noise. In round 1 all clients compute a full-batch update of one model, and the server fits a
    mixture to the updates. Up to `switch_round` each client's model is drawn from its memberships. After that each
    client chooses a model by its loss.

    The aggregation rule works within each group. Name this strategy before selections (`uniform_selection`), whose
    quotas are for the later rounds, and before strategies that pull towards the round's model. In later rounds, clients
    that do not take part are asked to choose, too.

    Args:
        num_clusters: number M of groups, or `auto`, which estimates it. 1 is the aggregation rule alone.
        mixture: `robust` finds only groups that noise does not explain; `paper` works in two dimensions and never
            reports that it is uncertain.
        choose_m: `robust` with `auto`: `split` finds groups within groups, `mss` finds only the coarsest level.
        min_cluster_size: `robust`: smallest number of clients of a group, >= 1.
        data_floor: `robust`: lower bound on the distance of groups, as a share of the largest distance that the
            sampling of records explains, >= 0.
        first_round_noise_multiplier: noise multiplier of the full batch, > 0. null is 5, or 3 above a million
            parameters. `same` uses one multiplier for all rounds (as in the papers): later rounds pay for the first.
        reuse_first_round: true applies the first updates to the new models; false starts all models from the initial
            parameters of the run.
        switch_round: last round in which models are drawn, or `auto`: half of the run, or less the more the groups
            overlap. `auto` is known only after round 1, so choices are planned for all rounds after it. With
            `selection: exponential` clearly separated groups use half of them, and the budget of the others is lost:
            set a number in that case.
        selection: how clients choose after `switch_round`: `exponential_frozen` (the exponential mechanism in the first
            `selection_rounds` rounds, then the last choice is kept), `exponential` (in every round), `paper_argmin`
            (without noise) or `server_similarity` (clients are not asked; each keeps its most likely group).
        selection_epsilon: bounded range of one choice with noise, > 0; null is 0.03 of each client's budget.
        selection_rounds: number of rounds with choices for `exponential_frozen`, >= 1; null is a tenth of the run's.
        loss_bound: losses of choices with noise are clipped to [0, loss_bound], > 0; null is 2 log(classes).

    While all models are the same, clients are not asked to choose; the models of such a round are drawn. Models that no
    client trains are not changed. A client that missed round 1 has equal memberships in all groups. If `auto`
    finds M = 1, training continues as under the aggregation rule, and the budget planned for choices is not spent.

    **Guarantees** The whole run fits each budget: the full batch, later rounds and choices are solved together.

    **Privacy** Mixture, draws and models are post-processing of released updates; noise levels are public.
    `selection: paper_argmin` has no noise and makes every epsilon infinite.

    Reference: Malekmohammadi, Taik and Farnadi (2024), "Mitigating Disparate Impact of Differential Privacy in
    Federated Learning through Robust Clustering", and its revision with an unknown M. The papers' form is `mixture:
    paper, first_round_noise_multiplier: same, selection: paper_argmin, reuse_first_round: false`.
    """

    role = "mask"

    def __init__(
        self,
        num_clusters: int | str = "auto",
        mixture: str = "robust",
        choose_m: str = "split",
        min_cluster_size: int = 2,
        data_floor: float = 0.6,
        first_round_noise_multiplier: float | str | None = None,
        reuse_first_round: bool = True,
        switch_round: int | str = "auto",
        selection: str = "exponential_frozen",
        selection_epsilon: float | None = None,
        selection_rounds: int | None = None,
        loss_bound: float | None = None,
    ) -> None:
        require_one_of(("robust", "paper"), f"{_KEY}.mixture", mixture)
        known = _count(num_clusters, f"{_KEY}.num_clusters")
        try:
            self._options = GroupOptions(known, choose_m, min_cluster_size, data_floor)
        except UserError as error:  # add the prefix of this strategy to the key
            raise UserError(str(error).replace("`", f"`{_KEY}.", 1)) from None
        if mixture == "paper":
            usual = GroupOptions()
            refuse_unused(
                _KEY,
                "mixture paper, which finds groups by another method",
                choose_m=(choose_m, usual.choose),
                min_cluster_size=(min_cluster_size, usual.min_size),
                data_floor=(data_floor, usual.data_floor),
            )
        noise, must = first_round_noise_multiplier, "be a number above 0, `same` or null"
        number = isinstance(noise, int | float) and not isinstance(noise, bool) and 0 < noise < math.inf
        require(noise in (None, "same") or number, f"{_KEY}.first_round_noise_multiplier", must, noise)
        require(isinstance(reuse_first_round, bool), f"{_KEY}.reuse_first_round", "be true or false", reuse_first_round)
        self._mixture, self._first_noise, self._reuse = mixture, noise, reuse_first_round
        self.needs_noise_std = mixture == "robust"
        self._last_drawn = _count(switch_round, f"{_KEY}.switch_round")
        require_one_of((*SELECTIONS, _SIMILARITY), f"{_KEY}.selection", selection)
        self._by_similarity = selection == _SIMILARITY
        if self._by_similarity:
            refuse_unused(
                _KEY,
                f"selection {_SIMILARITY}, which does not ask clients",
                selection_epsilon=(selection_epsilon, None),
                selection_rounds=(selection_rounds, None),
                loss_bound=(loss_bound, None),
            )
        by_loss = SELECTIONS[0] if self._by_similarity else selection
        self._choice = ModelSelection(by_loss, selection_epsilon, selection_rounds, loss_bound, _KEY)
        # results of round 1; absent clients have equal memberships, and NaN in `embedding`
        self.responsibilities: Tensor | None = None  # [N, M]
        self.embedding = torch.empty(0, 2)  # [N, 2]
        self.separation, self.overlap, self.confident = 0.0, 1.0, False
        self.last_drawn_round = 1
        self.diagnostics: dict[str, float] = {}

    @property
    def _alone(self) -> bool:
        return self._options.num_groups == 1

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        if self._alone:
            return schedule
        self._check(schedule, view)
        schedule = first_round.with_full_batch(schedule, view, self._first_noise)
        first_round.warn_if_blind(schedule, view)
        if self._by_similarity:
            return schedule
        # if groups overlap, clients may choose from round 2 on, so these choices must be in the plan
        return self._choice.plan_run(schedule, view, max(0, schedule.rounds - (self._last_drawn or 1)))

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        if self._alone:
            return plan
        if plan.anchors is not None:
            raise UserError(
                f"`{_KEY}` must be named before strategies that pull towards the round's model, got it after one."
            )
        if view.round == 1:
            one = len(view.state.models) == 1
            require(one, _KEY, "be the only strategy that creates models", len(view.state.models))
            return view.plan(first_round.PURPOSE, plan.clients)
        models, memberships = view.state.models, self.responsibilities
        if memberships is None or len(models) == 1:
            return plan
        if view.round <= self.last_drawn_round:
            model_of = drawn_groups(memberships, plan.clients, view.round, view.seed)
        elif self._by_similarity:
            model_of = tuple(memberships[list(plan.clients)].argmax(dim=1).tolist())
        elif not bool((models[1:] != models[:1]).any()):  # choices would assign all clients to one model for good
            even = memberships if self.confident else torch.ones_like(memberships)
            model_of = drawn_groups(even, plan.clients, view.round, view.seed)
        else:
            model_of = self._choice.models_of(plan, view, models)
        return dataclasses.replace(plan, model_of=model_of)

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return not self._alone and view.round == 1

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor | None:
        if self._alone or view.round > 1:
            return None
        return torch.zeros(len(updates.clients), dtype=torch.float64)  # the model is not changed

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        state = super().after_step(state, updates, view)
        return self._divided(state, updates, view) if view.round == 1 and not self._alone else state

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        metrics = dict(super().metrics(view))
        if (memberships := self.responsibilities) is None:
            return metrics
        metrics |= {
            "num_clusters": memberships.shape[1],
            "confident": self.confident,
            "separation": self.separation,
            "overlap": self.overlap,
            "switch_round": self.last_drawn_round,
            "membership_entropy": float(-(memberships * memberships.clamp_min(1e-300).log()).sum(dim=1).mean()),
        }
        return metrics | (self.diagnostics if view.state.round == 1 else {})

    def client_embedding(self, view: View) -> ClientEmbedding | None:
        if self.responsibilities is None:
            return None
        clients = self.embedding.isfinite().all(dim=1).nonzero().flatten()
        membership, cluster = self.responsibilities[clients].max(dim=1)
        return ClientEmbedding(
            title="Updates of round 1 along the two directions in which they differ most",
            clients=tuple(clients.tolist()),
            points=tuple((x, y) for x, y in self.embedding[clients].tolist()),
            cluster=tuple(cluster.tolist()),
            membership=tuple(membership.tolist()),
            num_clusters=self.responsibilities.shape[1],
            separation=self.separation if math.isfinite(self.separation) else None,
            confident=self.confident,
        )

    def state_dict(self) -> dict[str, Any]:
        kept = () if self.responsibilities is None else _KEPT
        return {"choice": self._choice.state_dict(), **{name: getattr(self, name) for name in kept}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._choice.load_state_dict(state["choice"])
        for name in _KEPT if "responsibilities" in state else ():
            value = state[name]
            setattr(self, name, value.cpu() if isinstance(value, Tensor) else value)

    def _check(self, schedule: RunSchedule, view: View) -> None:
        """Check the number of groups, and that no quotas were planned before, which round 1 would spend."""
        key, number, count = f"{_KEY}.num_clusters", self._options.num_groups, view.facts.num_clients
        require(number is None or number <= count, key, f"be at most the {count} clients", number)
        blind = number is None and self._mixture == "robust" and math.inf in view.clip_norm
        advice = "The number of groups is estimated from noise and clipping, and there is neither."
        require(not blind, key, "be a number without privacy", "auto", advice)
        for client, client_schedule in enumerate(schedule.clients):
            for line in client_schedule.planned:
                if line.purpose == "train" and line.count != schedule.rounds + schedule.reserve:
                    quota = max(0, line.count - schedule.reserve)
                    raise UserError(
                        f"`{_KEY}` must be named before strategies that limit how often clients train "
                        f"(uniform_selection, biased_selection), got it after one: client "
                        f"{view.facts.name_of(client)} trains in {quota} of {schedule.rounds} rounds."
                    )

    def _divided(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        """Return the state with M models instead of one, by the mixture of the first updates."""
        if self._mixture == "paper":
            mixture = paper_mixture(updates.released, self._options.num_groups, view.seed)
        else:
            rows = zip(updates.clients, updates.steps, strict=True)
            sampling_std = [first_round.sampling_std(client, steps, view) for client, steps in rows]
            mixture = robust_mixture(updates.released, updates.noise_std, sampling_std, self._options)
        memberships = self._keep(mixture, updates.clients, view)
        models = state.models.repeat(mixture.num_groups, 1)
        if self._reuse:
            records = torch.tensor([view.facts.num_records[client] for client in updates.clients])
            models = models + aggregate.combine(mixture.responsibilities.T * records, updates)
        return dataclasses.replace(state, models=models, model_of=tuple(memberships.argmax(dim=1).tolist()))

    def _keep(self, mixture: Mixture, clients: Sequence[int], view: View) -> Tensor:
        """Store the fitted mixture, and return the memberships of all clients, `[N, M]`."""
        count, groups = view.facts.num_clients, mixture.num_groups
        self.responsibilities = torch.full((count, groups), 1 / groups, dtype=torch.float64)
        self.responsibilities[list(clients)] = mixture.responsibilities
        self.embedding = torch.stack([of_all(clients, coordinate, count) for coordinate in mixture.embedding.T], dim=1)
        self.separation, self.overlap, self.confident = mixture.separation, mixture.overlap, mixture.confident
        self.last_drawn_round = self._last_drawn or switch_round(mixture.overlap, view.schedule.rounds)
        self.diagnostics = dict(mixture.diagnostics)
        if not mixture.confident:
            then = "all clients share one model" if groups == 1 else "models begin with groups that may be noise"
            threshold, size = self.diagnostics.get("separation_threshold", math.nan), self._options.min_size
            alone = f" of a split with a group of fewer than {size}" if mixture.separation > threshold else ""
            warn_user(
                f"strategy clustered: noise and sampling of records explain the updates of round 1 as well as groups "
                f"of {size} or more clients do (separation {mixture.separation:.3g}{alone}, threshold "
                f"{threshold:.3g}): {then}."
            )
        return self.responsibilities


def _count(value: int | str, key: str) -> int | None:
    """Return the whole number, or None for `auto`."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(whole or value == "auto", key, "be `auto` or a whole number of at least 1", value)
    return None if isinstance(value, str) else value
