"""Robust clustered DPFL: groups of clients are found by full-batch updates in round 1, then train separate models.

The papers (V1: Malekmohammadi, Taik and Farnadi 2024; V2: its revision) print one algorithm, RC-DPFL.
"""

# Line of RC-DPFL (V2; V1's switch is one round later)          Here
#   1     all models start at theta_init                        `initialise`: one model until the groups are known
#   3-4   round 1: b_i = N_i, z_i; DPSGD is equation (1)        `plan_round`, `first_round.with_full_batch`
#   5     M = argmax_m MSS                                      `paper_mixture`; `robust`: `find_groups`
#   6     pi_i, MPO = GMM(updates)                              `_divided`: `paper_mixture` or `robust_mixture`
#   7     E_c = E_c(MPO)                                        `switch_round`, kept as `last_drawn_round`
#   8     no aggregation in round 1                             `weigh`: zeros, with `reuse_first_round: false`
#   9-10  rounds 2..E_c: R(i) ~ pi_i                            `drawn_groups`
#   11-13 later rounds: R(i) = argmin_m f_i(theta_m)            `ModelSelection.models_of`
#   14-16 DPSGD from theta_R(i), average of each cluster        loop and aggregation rule, by `plan.model_of`
#
# Symbol                       Name
#   M, R(i), theta_m           `num_clusters`, `plan.model_of`, `state.models`
#   pi_{i,m}                   `responsibilities` [N, M]
#   SS(m, m'), MSS             `Separation`, its `least` (`separation`)
#   O_{m,m'}, MPO = 2 Q(MSS)   `overlap`
#   E_c = (1 - MPO) E / 2      `last_drawn_round`
#   z^1, z^{>1}                noise multipliers of the lines "first_round" and "train" of a schedule

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.algorithms.server_training import public_generator
from dpfl_lightning.algorithms.update_groups import MIN_SIZE
from dpfl_lightning.errors import UserError, require, warn_user
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server import aggregate
from dpfl_lightning.federated.server.results import ClientEmbedding
from dpfl_lightning.federated.server.summary import of_all
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.papers.clustered import first_round
from dpfl_lightning.papers.clustered.cluster_metrics import GroupingStrategy
from dpfl_lightning.papers.clustered.model_selection import (
    ModelSelection,
    Positive,
    Selection,
    refuse_unused,
)
from dpfl_lightning.papers.clustered.update_mixture import (
    CONFIDENT,
    Mixture,
    paper_mixture,
    robust_mixture,
    switch_round,
)
from dpfl_lightning.runtime.text import counted

_KEPT = (
    *("responsibilities", "embedding", "separation", "overlap", "confident", "probability"),
    *("last_drawn_round", "diagnostics"),
)


def drawn_groups(responsibilities: Tensor, clients: Sequence[int], round: int, seed: int) -> tuple[int, ...]:
    """Draw each client's group from its row of `responsibilities` `[N, M]`; depends only on (seed, round, client)."""
    drawn = []
    for client in clients:
        row = responsibilities[client].double().numpy()
        drawn.append(int(public_generator(seed, "stage2", round, client).choice(len(row), p=row / row.sum())))
    return tuple(drawn)


@dataclass
class Clustered(GroupingStrategy):
    """R-DPCFL: groups of clients are found by their updates from full batches, and then train separate models.

    It suits clients of a few kinds with enough records for a full batch to be nearly free of noise. Name it before
    selections (`uniform_selection`) and before proximal terms. A client that missed round 1 waits until it chooses a
    model. Method and limits: page "Clustered clients" of the docs.

    Args:
        num_clusters: number M of groups, or `auto`, which estimates it. 1 is the aggregation rule alone.
        mixture: `robust` finds groups that neither noise nor gradual differences explain; `paper` is never uncertain.
        first_round_noise_multiplier: of the full batch; `same`: of all rounds, as in the papers; null: solved.
        reuse_first_round: whether the new models start with the mean of their groups' first updates.
        switch_round: last round E_c in which models are drawn, or `auto`: half of the run or less, by the overlap.
        selection: later choices by loss: `exponential_frozen` (with noise, in a tenth of the rounds), `exponential`
            (in every round), `paper_argmin` (without noise), or `server_similarity` (no choice: the likeliest group).
        selection_epsilon: bounded range of one choice with noise; null is 0.03 of each client's budget.

    **Privacy** One solution covers the full batch, later rounds and choices; the rest is post-processing.
    `selection: paper_argmin` has no noise and makes every epsilon infinite.

    Reference: Malekmohammadi, Taik and Farnadi (2024), "Mitigating Disparate Impact of Differential Privacy in
    Federated Learning through Robust Clustering". The papers' form: `conf/clustered_paper.yaml`.
    """

    num_clusters: Annotated[int, Interval(ge=1)] | Literal["auto"] = "auto"
    mixture: Literal["robust", "paper"] = "robust"
    first_round_noise_multiplier: Positive | Literal["same"] | None = None
    reuse_first_round: bool = True
    switch_round: Annotated[int, Interval(ge=1)] | Literal["auto"] = "auto"
    selection: Selection | Literal["server_similarity"] = "exponential_frozen"
    selection_epsilon: Positive | None = None

    role = "mask"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.needs_noise_std = self.mixture == "robust"
        self._num_groups = None if isinstance(self.num_clusters, str) else self.num_clusters
        self._last_drawn = None if isinstance(self.switch_round, str) else self.switch_round
        key = f"strategies.{self.config_name}"
        self._by_similarity = self.selection == "server_similarity"
        if self._by_similarity:
            beside = "selection server_similarity, which does not ask clients"
            refuse_unused(key, beside, selection_epsilon=self.selection_epsilon)
            self._choice = ModelSelection(key=key)
        else:
            self._choice = ModelSelection(self.selection, self.selection_epsilon, key=key)
        # results of the full batch; absent clients have equal memberships, and NaN in `embedding`
        self.responsibilities: Tensor | None = None  # [N, M]
        self.embedding = torch.empty(0, 2)  # [N, 2]
        self.separation, self.overlap, self.confident, self.probability = 0.0, 1.0, False, 0.0
        self.last_drawn_round = 1
        self.diagnostics: dict[str, float] = {}

    @property
    def _alone(self) -> bool:
        return self._num_groups == 1

    def _full_batch(self, view: View) -> bool:
        """Whether this round is the full batch of all clients, after which the server groups them."""
        return not self._alone and view.round == 1

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        if self._alone:
            return schedule
        self._check(schedule, view)
        schedule = first_round.with_full_batch(schedule, view, self.first_round_noise_multiplier)
        first_round.warn_if_blind(schedule, view)
        if self._by_similarity:
            return schedule
        unbounded = view.facts.num_classes <= 1 and any(one.adds_noise for one in schedule.clients)
        must = "be server_similarity for a regression, whose losses have no bound"
        require(not unbounded or self.selection == "paper_argmin", self._key("selection"), must, self.selection)
        # if groups overlap, clients may choose from round 2 on, so these choices must be in the plan
        return self._choice.plan_run(schedule, view, max(0, schedule.rounds - (self._last_drawn or 1)))

    def initialise(self, state: ServerState, view: View) -> ServerState:
        """Start from one model; as this hook is exclusive, no other strategy can create models."""
        return state

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        if self._full_batch(view):
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
        late = set(self.embedding.isnan().any(dim=1).nonzero().flatten().tolist())
        waiting = late - self._choice.answered
        return dataclasses.replace(plan, model_of=model_of).only(lambda client: client not in waiting)

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return self._full_batch(view)

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor | None:
        """Leave the model as it is in round 1."""
        return torch.zeros(len(updates.clients), dtype=torch.float64) if self._full_batch(view) else None

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        state = super().after_step(state, updates, view)
        return self._divided(state, updates, view) if self._full_batch(view) else state

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        metrics = dict(super().metrics(view))
        if (memberships := self.responsibilities) is None:
            return metrics
        metrics |= {
            "num_clusters": memberships.shape[1],
            "confident": self.confident,
            "probability": self.probability,
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
        key, number, count = self._key("num_clusters"), self._num_groups, view.facts.num_clients
        robust = self.mixture == "robust"
        if robust and number is None:
            advice = f"Groups have at least {MIN_SIZE} clients. Set 1 for one model."
            require(count >= 2 * MIN_SIZE, key, f"be a number with fewer than {2 * MIN_SIZE} clients", "auto", advice)
        elif number is not None:
            most = count // MIN_SIZE if robust else count
            must = f"be at most {most}, as groups have at least {MIN_SIZE} of the {count} clients"
            require(number <= most, key, must if robust else f"be at most the {count} clients", number)
        blind = number is None and robust and math.inf in view.clip_norm
        advice = "The number of groups is estimated from noise and clipping, and there is neither."
        require(not blind, key, "be a number without privacy", "auto", advice)
        for client, client_schedule in enumerate(schedule.clients):
            for line in client_schedule.planned:
                if line.purpose == "train" and line.count != schedule.rounds + schedule.reserve:
                    quota = max(0, line.count - schedule.reserve)
                    raise UserError(
                        f"`strategies.{self.config_name}` must be named before strategies that limit how often clients "
                        f"train (uniform_selection, biased_selection), got it after one: client "
                        f"{view.facts.name_of(client)} trains in {quota} of {schedule.rounds} rounds."
                    )

    def _divided(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        """Return the state with M models instead of one."""
        sent = view.module.sent(updates.released)
        if self.mixture == "paper":
            mixture = paper_mixture(sent, self._num_groups, view.seed)
        else:
            distance = first_round.distance_of_updates(updates.clients, updates.steps, view)
            mixture = robust_mixture(sent, updates.noise_std, self._num_groups, distance)
        memberships = self._keep(mixture, updates.clients, view)
        models = state.models.repeat(mixture.num_groups, 1)
        if self.reuse_first_round:
            models = models + aggregate.combine(mixture.responsibilities.T, first_round.limited(updates))
        return dataclasses.replace(state, models=models, model_of=tuple(memberships.argmax(dim=1).tolist()))

    def _keep(self, mixture: Mixture, clients: Sequence[int], view: View) -> Tensor:
        """Store the fitted mixture, and return the memberships of all clients, `[N, M]`."""
        count, groups = view.facts.num_clients, mixture.num_groups
        self.responsibilities = torch.full((count, groups), 1 / groups, dtype=torch.float64)
        self.responsibilities[list(clients)] = mixture.responsibilities
        self.embedding = torch.stack([of_all(clients, coordinate, count) for coordinate in mixture.embedding.T], dim=1)
        self.separation, self.overlap = mixture.separation, mixture.overlap
        self.confident, self.probability = mixture.confident, mixture.probability
        self.last_drawn_round = self._last_drawn or switch_round(mixture.overlap, view.schedule.rounds)
        self.diagnostics = dict(mixture.diagnostics)
        if groups < (wanted := self._num_groups or 1):
            arrived = counted(len(clients), "client")
            warn_user(f"strategy clustered: {groups} of {wanted} groups, as {arrived} sent an update of a full batch")
        if not mixture.confident:
            then = "all clients share one model" if groups == 1 else "models begin with groups that may be wrong"
            found = "the clients are one group" if groups == 1 else f"these {groups} groups of clients are right"
            why = ", as a group is a single client or not found again when noise is drawn again"
            why = why if groups > 1 and mixture.probability == 0 else ""
            warn_user(
                f"strategy clustered: the probability that {found} is {mixture.probability:.2g}{why}, below "
                f"{CONFIDENT:g} (separation {mixture.separation:.3g}): {then}."
            )
        return self.responsibilities
